"""Compares two tap logs: pairs their messages, and finds the first difference."""
