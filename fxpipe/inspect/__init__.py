"""What a plan looks like and what comes of it, before it runs: `python -m fxpipe.inspect`, a thin face over it all.

The files here are the command, from its options to what it shows. What is shown is made in `tables` (figures, text and
the document for programs), `timeline` and `lanes` (pictures of a step and of a plan, drawn by `drawing`) and `html`
(notebooks and reports).
"""
