"""Ways in which a model, a loss or a training loop could get wrong numbers from a pipe.

One file for each cause, with a table of ways to meet it. Each way gives the plain model's numbers or a clear error.
"""
