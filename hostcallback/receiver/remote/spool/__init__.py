"""The spool: a bounded tap log that a sender reads while it is written, and the spools of dead processes.

The folder of a stream is locked by the process that writes it. If the lock is free, the process is dead, and another
process of the same run sends the rest.
"""
