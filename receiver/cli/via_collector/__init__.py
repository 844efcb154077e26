"""The commands that reach running processes through a collector (`--via`)."""
