"""The host side of hostcallback: everything after a message has left the device. Runs without JAX."""
