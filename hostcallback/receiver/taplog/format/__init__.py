"""The files of a tap log, byte by byte, as docs/tap-log.md specifies them."""
