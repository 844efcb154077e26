"""Delivers a collector's stored messages to its consumers.

One thread reads the stored files, so a slow consumer delays no acknowledgement. It writes its position after
delivery; after a crash consumers get the messages since the last position again.
"""
