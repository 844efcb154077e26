"""The commands that run programs of JAX; the others work without it."""
