"""Assembles the shards of a value, over the devices of a process and over processes.

Several receiver threads bring shards; the one that brings the last shard of a value delivers it, in program order. A
device that is ahead by more than a bound waits. Values that cannot become complete are discarded and counted.
docs/design/sharded-taps.md states which shards belong together and why.
"""
