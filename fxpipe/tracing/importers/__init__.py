"""Graphs that others make of a model: `torch.export`, `torch.fx`, the user."""
