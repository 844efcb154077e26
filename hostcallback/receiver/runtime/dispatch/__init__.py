"""Delivers messages in order within a scope, and runs the host functions of calls.

The code runs on the receiver thread of its device or, for a call, on the thread that took the call. A batch is
decoded into copies and released before its first message is delivered, so a slow sink occupies no memory of the ring.
`gil_share` yields the interpreter lock to other threads (docs/design/gil-share.md), `calls` runs host functions
(docs/design/calls.md), `scope` puts recorders, forwarders and the sinks of the scope before the tap's own sink.
"""
