"""Sends streams to a collector, over one connection after another.

A sender reads slices of the spool up to a window of unacknowledged bytes ahead, and starts again at the collector's
position after each reconnection. Transports (gRPC, NATS) implement `sender.Transport`.
"""
