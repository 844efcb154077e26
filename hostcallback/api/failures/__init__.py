"""What is written of failures: reports, the process and the last messages. Receivers and `capsule` use it."""
