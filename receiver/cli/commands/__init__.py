"""The commands of `hcb`, a module each."""
