"""The receivers of this process."""
