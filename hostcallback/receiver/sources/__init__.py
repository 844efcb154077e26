"""Sources of a device's frames: the native ring, or a queue."""
