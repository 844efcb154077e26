"""Delivers a collector's stored messages to its consumers."""
