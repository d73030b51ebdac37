"""Sizes of all values, as formulas in the batch size."""
