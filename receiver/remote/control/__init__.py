"""Live control of the taps of many processes through their collector."""
