"""The tap log: what was emitted, in files that need nothing else to be read. The format is in docs/tap-log.md."""
