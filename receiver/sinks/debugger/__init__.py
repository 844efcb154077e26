"""Breakpoints: the sessions, what they are asked, and where they are held."""
