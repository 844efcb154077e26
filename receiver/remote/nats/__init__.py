"""NATS JetStream between processes and collectors."""
