"""The child process that drains its parent's rings: `python -m hostcallback.receiver.cli.reader_process DESCRIPTOR`."""
