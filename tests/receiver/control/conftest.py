"""Each test of live control begins and ends without rules."""

from __future__ import annotations

from without_rules import no_rules

__all__ = ["no_rules"]
