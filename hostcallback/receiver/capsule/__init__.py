"""Failure capsules: one file with the program, the inputs and the report of a step that failed. Works without JAX.

`file_format` has the names and the limits, `writing` and `reading` the two sides. docs/capsules.md describes the file.
"""
