"""Tap logs in the formats of other tools: a module for each, and what they have in common."""
