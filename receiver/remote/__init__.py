"""Messages of many processes in one place: each process's spool, what sends it, and the collector that stores it."""
