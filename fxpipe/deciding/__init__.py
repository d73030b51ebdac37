"""Deciding: what was traced and profiled becomes a cut, and the plan that describes it."""
