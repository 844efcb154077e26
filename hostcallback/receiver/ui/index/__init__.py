"""What the page shows of logs: an index that one thread fills and others ask.

`log_index` owns all of it. Memory is bounded: values are summarized, and details are read from the log again.
"""
