"""Lowering rules: what programs with taps compile to."""
