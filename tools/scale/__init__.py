"""Measures at scale: many messages in one process, many processes on one collector, and a model of more of them."""
