"""`python -m receiver.cli` is `hcb`."""

from receiver.cli import script

script()
