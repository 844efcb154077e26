"""Tap logs as columns: `read` gives the taps of a log, each as batches of columns, pandas, xarray or Arrow.

`column_batches` reads columns from blocks of frames without decoding message by message. `tap_data` has them by tap,
and `tables` converts them for other libraries.
"""
