"""Progress bars: the sink of their messages, the bars that are open, and the libraries that show them.

Sinks of many taps share the bars: a loop's first, later and last messages are different taps. The bars are in the
process that shows them, protected by one lock; receiver threads of all devices move them.
"""
