"""Parts of the drop-in for `jax.experimental.host_callback`: its flags, and errors for the names of its internals."""
