"""Rows about files that a failed step leaves."""
