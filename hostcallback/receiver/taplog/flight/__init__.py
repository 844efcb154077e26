"""The flight recorder: rings in files, and the recovery of their messages after the process was killed.

A write to a mapped file survives the process, so nothing runs at its death. The ring moves into its file while
programs emit (`Ring::MoveInto`, docs/design/ring.md).
"""
