"""Failure capsules: one file with the program, the inputs and the report of a step that failed. Works without JAX.

`file_format` has the names, the limits and the writer, `reading` the reader. docs/capsules.md describes the file.
"""
