"""The commands of `hcb`, a module each; the package above lists them and imports a command when it is called."""
