"""Live control of taps in all processes, by way of their collector."""
