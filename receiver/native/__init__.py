"""The native library: its C++ sources, what is built of them, and its functions in Python."""
