"""`watch_nonfinite`: finds the operation that made a NaN or an infinite value out of finite ones."""
