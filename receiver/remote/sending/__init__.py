"""Sends streams to where they are stored, over one link after another."""
