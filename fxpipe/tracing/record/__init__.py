"""Recording: a model runs once and becomes a graph."""
