"""The private parts of PyTorch that fxpipe uses, behind functions named for what they mean."""
