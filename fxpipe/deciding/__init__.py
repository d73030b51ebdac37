"""Deciding: what was traced and profiled becomes a cut, and the plan that describes it.

`chains.py` and `sites.py` put graph and devices into plain numbers; `cuts.py` chooses (in which order nodes run, where
stages begin and run, which of them recompute), `sharing.py` what each gets of a memory that they share;
`describing.py`, `formulas.py` and `remarks.py` write down what it comes to.
"""

from fxpipe.deciding.cuts import Cut, decide, is_by_hand
from fxpipe.deciding.describing import copies_of, describe

__all__ = ["Cut", "copies_of", "decide", "describe", "is_by_hand"]
