"""Sinks: callables that consume messages.

A sink is called on the receiver thread of the message's device, in order, and may raise: the error is deferred and
reported at the barrier. New behaviour of taps is a new sink, not a new primitive.
"""
