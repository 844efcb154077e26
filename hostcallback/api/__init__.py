"""The public functions: taps, prints, checks, receivers, barriers; a module each.

They check arguments, find the user's line, and bind primitives. What a program compiles to is in
`hostcallback.lowering`, and what happens to a message after it left the device is in `receiver`.
"""
