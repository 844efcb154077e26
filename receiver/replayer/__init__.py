"""Delivers the messages of a tap log once more."""
