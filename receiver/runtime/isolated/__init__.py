"""Receivers in a process of their own: taps that need nothing of their program's process are delivered beside it."""
