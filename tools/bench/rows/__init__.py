"""The measurements: one function for each row of docs/benchmarks.md, or for a few related rows."""
