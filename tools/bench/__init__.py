"""The benchmarks: `python tools/bench.py`, or `make bench`."""
