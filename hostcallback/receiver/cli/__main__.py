"""Runs the `hcb` command as `python -m hostcallback.receiver.cli`."""

from hostcallback.receiver.cli import script

script()
