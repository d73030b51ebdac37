"""Utilities independent of pipelines: pytrees of any object, polynomials, files, units, progress."""
