"""`python -m receiver.apart DESCRIPTOR`: the process that reads, as `receiver.apart.process` starts it."""

import sys

from receiver.apart.reader import main

main(int(sys.argv[1]))
