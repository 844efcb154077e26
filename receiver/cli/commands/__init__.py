"""The commands of `hcb`, a module each; `receiver.cli` lists them and imports a command when it is called."""
