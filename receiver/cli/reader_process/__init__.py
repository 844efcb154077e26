"""The child process that drains its parent's rings: `python -m receiver.cli.reader_process DESCRIPTOR`."""
