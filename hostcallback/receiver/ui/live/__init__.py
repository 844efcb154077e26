"""Running processes: their metrics and rules, by the control socket of a process or through a collector."""
