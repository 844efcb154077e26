"""What a program sends to be kept: metrics and their forms."""
