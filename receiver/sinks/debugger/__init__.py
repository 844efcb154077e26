"""Breakpoints: debugger sessions, their commands, and their consoles.

A session runs on the thread that took the breakpoint's call, and the program waits for it. Breakpoints of several
threads and devices open one session at a time.
"""
