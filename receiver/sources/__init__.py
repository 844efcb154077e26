"""Where the frames of a device come from: the native ring, or a queue."""
