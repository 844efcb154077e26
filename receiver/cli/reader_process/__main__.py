"""The reader process, as `receiver.runtime.isolated.reader_process` starts it."""

import sys

from receiver.cli.reader_process.reader import main

main(int(sys.argv[1]))
