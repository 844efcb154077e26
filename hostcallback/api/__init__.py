"""What users call: taps, prints, checks, receivers, barriers."""
