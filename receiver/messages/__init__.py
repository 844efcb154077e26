"""Messages, the consumers they are for, and the errors that must not stop the stream.

Consumer ids are the keys of the registry. A consumer stays registered while a compiled program can emit to it:
programs hold leases, and after the last lease ends it is retired, until a barrier has proved that no program of it
runs. Dispatchers look consumers up on receiver threads; lowering registers them on the user's threads.
"""
