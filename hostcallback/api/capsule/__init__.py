"""`capsule`: writes the program, the inputs and the report of a step that failed into one file; runs such a file."""
