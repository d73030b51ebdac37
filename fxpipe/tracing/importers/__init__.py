"""Graphs that a function of the user creates."""
