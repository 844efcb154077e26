"""Renders logged messages as text and as JSON."""
