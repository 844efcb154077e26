"""Sinks: callables that consume messages."""
