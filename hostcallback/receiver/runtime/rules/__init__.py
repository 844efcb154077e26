"""Rules: which messages of which taps are sent.

The native handler applies the rules, by a lock-free table of consumer ids (`receiver/native/rules/`). `admission` is
the Python reference, which serves platforms without a handler. The predicate of `when` runs on the receiver thread.
"""
