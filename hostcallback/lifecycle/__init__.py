"""What belongs to the process and its devices: receivers, forwarding, monitoring."""
