"""`capsule`: writes the program, the inputs and the report of a step that failed into one file; runs such a file.

`held_program` brings failures and inputs together, `programs` writes and loads programs, `reproduce` runs them.
"""
