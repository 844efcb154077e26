"""The primitives, and how JAX's transformations treat them."""
