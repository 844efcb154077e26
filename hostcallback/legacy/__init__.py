"""What is left of `jax.experimental.host_callback` beside its functions: flags, and the names of its internals."""
