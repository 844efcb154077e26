"""Metrics of `hostcallback.metrics`: their reduction to records, and the writers of the records.

`MetricsSink` takes the messages of a receiver, reduces them to records (`reduction`), and hands these to one
`WriterThread` per writer. A writer is an object of the user, which `adapters` makes out of its methods, or one of
`files` and `tensorboard`, which the sink opens and closes.
"""
