"""Verification that a graph is the model; what its nodes share and change."""
