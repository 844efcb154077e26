"""Puts the shards of a value together, over the devices of a process and over processes."""
