"""Writes tap logs."""
