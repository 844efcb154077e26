"""The rest of `jax.experimental.host_callback` for the drop-in: flags, and errors for the names of its internals."""
