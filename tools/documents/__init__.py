"""Writes the parts of the documents that are made from the code; each module is a script."""
