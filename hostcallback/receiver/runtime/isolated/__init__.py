"""Isolated receivers: a reader process drains the rings of its parent.

Taps that need no object of the parent process are routed to a second ring, in a file in shared memory, which the
child process maps. It releases memory after delivery, so if it dies, the parent takes the ring back and delivers the
rest. If the parent dies, the child drains what was committed and exits. docs/isolated-receivers.md has the
guarantees.
"""
