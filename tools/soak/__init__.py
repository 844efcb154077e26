"""A long test: processes emit, record and forward, and are killed at random moments; every message is accounted for."""
