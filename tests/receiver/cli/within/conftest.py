"""This process answers the commands that tests give it."""

from __future__ import annotations

from own_server import served

__all__ = ["served"]
