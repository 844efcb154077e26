"""Live control of the taps of many processes through their collector.

Each process keeps a stream to its collector open and answers requests that come on it, so it needs no listening port.
The collector stores rules in a file before it sends them, and sends them again to processes that connect later.
"""
