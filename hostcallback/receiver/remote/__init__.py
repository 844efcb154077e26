"""Forwarding: each process's spool, the transports that send it, and the collector that stores the streams of all.

A process writes its messages to a spool, which is a tap log; a thread sends the spool to a collector, byte by byte. A
message is safe once it is in the spool; the collector's files are its only state about a stream. No other room
imports grpc, nats-py or OpenTelemetry. docs/forwarding.md has the guarantees and the protocol,
docs/design/forwarding.md the reasons.
"""
