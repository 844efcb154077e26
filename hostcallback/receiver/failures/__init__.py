"""Failures of tap functions and checks: their reports, what is logged of them at once, and when they are raised.

A sink may raise: its error must not stop the stream. `deferred_errors` keeps it until a barrier, or acts at once.
"""
