"""Sinks: callables that consume messages.

The receiver thread of the message's device calls the sink, in order. A sink may raise: the error is deferred and
reported at the barrier. To add a new kind of tap, write a new sink, not a new primitive.
"""
