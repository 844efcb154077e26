"""The tap log: files that contain every emitted message and need nothing else to be read.

`format` specifies the bytes (docs/tap-log.md); `writing` and `reading` implement it; `render`, `diff` and `convert`
use `reading`. `flight` keeps rings in files, and turns the rings of killed processes into logs. How a recorder copies
batches, and how readers merge logs lazily: docs/design/wire-format.md.
"""
