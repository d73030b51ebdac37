"""From a model to a plan, and to what runs it: the passes in order. Trace, profile, decide, rewrite.

The first two look at the model and take seconds (`passes`), the others look at what was found and take little
(`passes`): so one study serves many plans, for other numbers of devices and micro-batches, other schedules,
checkpoint modes and balances.
"""

from fxpipe.planning.entry import plan, prepare, prepare_with_choices
from fxpipe.planning.passes import (
    PreparedGraph,
    ProfiledModel,
    holds_for_chunks,
    prepare_additional_graph,
    prepare_cut,
    prepare_profiled,
    profile_again,
    trace_and_profile,
    with_replicas,
)

__all__ = [
    "PreparedGraph",
    "ProfiledModel",
    "holds_for_chunks",
    "plan",
    "prepare",
    "prepare_additional_graph",
    "prepare_cut",
    "prepare_profiled",
    "prepare_with_choices",
    "profile_again",
    "trace_and_profile",
    "with_replicas",
]


# -- Planning: from a traced and profiled model to a cut, and the plan that describes it -----------------------------
