"""Graphs that a function of the user's makes."""
