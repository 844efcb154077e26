"""Waiting for dispatched programs, whichever thread dispatched them."""
