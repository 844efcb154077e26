"""`observe`: taps at places of programs that a selection names, without a change of the code.

`places` describes equations and selects them, `plan` decides which values are tapped, `parameters` finds gradients and
updates, `observe` evaluates the program and carries what was measured out of its loops, `report` measures and sends.
"""
