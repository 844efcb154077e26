"""Logged messages as text and as JSON."""
