"""Reads tap logs, also while they are written.

Reading is lazy: headers of chunks decide which chunks are decoded, and memory does not grow with the log.
"""
