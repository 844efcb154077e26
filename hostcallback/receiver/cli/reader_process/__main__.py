"""The reader process, as `hostcallback.receiver.runtime.isolated.reader_process` starts it."""

import sys

from hostcallback.receiver.cli.reader_process.reader import main

main(int(sys.argv[1]))
