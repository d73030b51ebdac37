"""From a model to a plan, and to what runs it: the passes in order. Trace, profile, decide, rewrite.

The first two look at the model and take seconds (`studying`), the others look at what was found and take little
(`preparing`): so one study serves many plans, for other numbers of devices and micro-batches, other schedules,
checkpoint modes and balances.
"""

from fxpipe.planning.beside import prepare_beside
from fxpipe.planning.entry import plan, prepare
from fxpipe.planning.preparing import Prepared, planned, prepared
from fxpipe.planning.studying import Studied, is_the_model, studied_again, study

__all__ = [
    "Prepared",
    "Studied",
    "is_the_model",
    "plan",
    "planned",
    "prepare",
    "prepare_beside",
    "prepared",
    "studied_again",
    "study",
]
