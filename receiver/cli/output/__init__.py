"""What commands print: messages, tables, a screen that stays up to date."""
