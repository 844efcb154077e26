"""The data of a tap at trace time: its call site, its leaves, its ids, and the objects that it retains.

Programs live in JAX's caches for as long as the process does, so a tap must not retain more than it needs:
`retention` decides which of the user's objects are kept and which are referred to weakly. Ids are equal in all
processes that trace the same program (`fingerprint`).
"""
