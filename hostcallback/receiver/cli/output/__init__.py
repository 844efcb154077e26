"""The output of commands: messages, tables, live screens."""
