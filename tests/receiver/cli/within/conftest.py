"""This process answers the commands that tests give it."""

from __future__ import annotations

from served import served

__all__ = ["served"]
