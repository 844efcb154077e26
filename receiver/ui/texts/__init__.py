"""The stream of printed texts, log records and failures: `stream` reads it, `text_filter` chooses from it."""
