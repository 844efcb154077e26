"""Breakpoints: debugger sessions, their commands, and their consoles.

A session runs on the thread that took the breakpoint's call, and the program waits for it. One session is open at a
time: the breakpoints of other threads and devices wait for their turn.
"""
