"""Plots while a program runs: bounded curves, their drawing with matplotlib, and the display in a notebook."""
