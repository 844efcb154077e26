"""Which messages of which taps are sent: the rules, and what they decide."""
