"""The files of a tap log, byte for byte: docs/tap-log.md."""
