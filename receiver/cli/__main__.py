"""Runs the `hcb` command as `python -m receiver.cli`."""

from receiver.cli import script

script()
