"""Delivers the messages of a tap log again, through the dispatcher that receivers use."""
