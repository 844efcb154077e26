"""Forwarding: each process's spool, the transports that send it, and the collector that stores the streams of all."""
