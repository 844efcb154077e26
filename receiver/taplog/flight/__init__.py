"""The flight recorder: rings in files, which a process that is killed leaves behind, and what reads them."""
