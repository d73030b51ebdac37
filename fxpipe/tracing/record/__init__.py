"""Recording: runs a model once and turns it into a graph."""
