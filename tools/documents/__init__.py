"""Writes the parts of the documents that are made from the code: `python tools/documents/NAME.py`."""
