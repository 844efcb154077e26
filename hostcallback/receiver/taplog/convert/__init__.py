"""Tap logs in the formats of other tools: a module per format, and their common parts."""
