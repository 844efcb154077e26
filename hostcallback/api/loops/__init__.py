"""JAX's loops with a progress bar, and loops that end early on request."""
