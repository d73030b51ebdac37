"""Pytrees of any object, polynomials, files, units, progress: what knows nothing of pipelines."""
