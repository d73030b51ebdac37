"""What a plan looks like and what comes of it, before it runs: `python -m fxpipe.inspect`, a thin face over it all.

The files here are the command, from its options to what it shows. What is shown is made in `tables` (comparisons as
data, as text and in the document for programs), `lanes` (a picture of a plan) and `html` (reports). How a plan and a
step print is not here: they do so themselves, by `fxpipe.plans` and `fxpipe.simulation.timeline`, and `fxpipe.viz`
below.
"""
