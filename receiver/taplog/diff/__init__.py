"""Compares two tap logs: which messages belong together, and where their values differ first."""
