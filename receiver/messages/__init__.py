"""What a message is, which tap it is of, and what went wrong with it."""
