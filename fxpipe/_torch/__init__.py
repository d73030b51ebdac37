"""Wrappers of the private parts of PyTorch that fxpipe uses."""
