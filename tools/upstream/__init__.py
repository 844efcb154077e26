"""Runs the tests of JAX and of its libraries without and with this package: `python -m tools.upstream`."""
