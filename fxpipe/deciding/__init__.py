"""Deciding: what was traced and profiled becomes a cut, and the plan that describes it.

`chains.py` and `sites.py` put graph and devices into plain numbers, `cases.py` what is asked for into conditions;
`cuts.py` chooses (in which order nodes run, where stages begin and run, which of them recompute), `sharing.py` what
each gets of a memory that they share; `outcomes.py` simulates what a cut comes to, `remedies.py` looks for what would
fit where none does; `describing.py`, `formulas.py` and `remarks.py` write it down.
"""

from fxpipe.deciding.cases import is_by_hand
from fxpipe.deciding.cuts import decide
from fxpipe.deciding.describing import copies_of, describe
from fxpipe.deciding.outcomes import Cut

__all__ = ["Cut", "copies_of", "decide", "describe", "is_by_hand"]
