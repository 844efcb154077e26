"""`observe`: taps at places of a function that a selection names, without a change of its code.

`places` describes equations, `where` selects them, `plan` decides which values are tapped, `collect` evaluates the
program and carries what was measured out of its loops and calls, `statistics` measures, `report` sends one message.
"""
