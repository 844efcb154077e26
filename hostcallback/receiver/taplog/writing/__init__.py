"""Writes tap logs.

Any thread may call a writer. It raises nothing into the stream: messages that it cannot write are counted, and noted
in the log as lost.
"""
