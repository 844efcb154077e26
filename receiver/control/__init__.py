"""Live control of taps: the rules, what they decide, and the ways in: a file, and a socket for other processes."""
