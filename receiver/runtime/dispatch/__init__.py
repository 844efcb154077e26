"""Delivers messages: one after the other, in a scope, with the host functions of calls."""
