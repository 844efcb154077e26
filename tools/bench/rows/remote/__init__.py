"""Rows that send messages to other processes: collectors, NATS, OTLP."""
