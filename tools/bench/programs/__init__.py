"""Programs that rows start in separate processes."""
