"""NATS JetStream between processes and collectors.

JetStream stores publications by subject; a publication has the messages of one tap from one batch of a device. A
collector stores a publication before it acknowledges it, and recognizes repeated ones by their sequence numbers.
"""
