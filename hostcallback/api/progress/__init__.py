"""Progress bars: `progress` for any loop, and JAX's loops with a bar of their own."""
