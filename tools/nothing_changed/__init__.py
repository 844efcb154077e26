"""Runs real programs bare and under each feature, and finds what is not the same."""
