"""The reference codec of the wire format that docs/wire-format.md specifies."""
