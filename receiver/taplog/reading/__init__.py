"""Reads tap logs, also while they are written."""
