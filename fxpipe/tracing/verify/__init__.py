"""Verification that a graph equals its model; effects of its nodes."""
