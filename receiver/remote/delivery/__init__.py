"""Delivers what a collector has stored to its consumers."""
