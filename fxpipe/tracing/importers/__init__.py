"""Graphs that are made without recording: by a function of the user's, and symbolically, to be printed."""
