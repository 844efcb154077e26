"""Live control of taps: the commands of a process, and its two endpoints, a rule file and a control socket."""
