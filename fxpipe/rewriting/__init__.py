"""Rewriting: stage numbers become stages, skips become portals.

    traced = reorder_nodes(traced)
    program = split_into_stages(traced, starts=(0, 12), devices=(cpu, cpu))
    print(program.stages[1].code)

`reorder_nodes` puts the nodes in an order in which few bytes cross a cut; `forbidden_cuts` says where no cut may stand;
`choose_rematerialization`, which values a stage had better compute for itself than receive; `split_into_stages` does
the work, with what is put into stages for skips (`portals`), random numbers (`rng`), batch norm (`deferred_batch_norm`)
and the state of the thread (`stage_functions`). `program` is all that the runtime reads. A stage brings what is called
of it (`stage_callables`): plain, compiled, its backward split.
"""

from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.rewriting.program import PIPE_INPUT, ConstantOutput, Program, ReceivedValue, Skip, Stage, sent_bytes
from fxpipe.rewriting.rematerialize import choose_rematerialization
from fxpipe.rewriting.reorder import reorder_nodes

__all__ = [
    "PIPE_INPUT",
    "ConstantOutput",
    "Program",
    "ReceivedValue",
    "Skip",
    "Stage",
    "choose_rematerialization",
    "forbidden_cuts",
    "reorder_nodes",
    "sent_bytes",
    "split_into_stages",
]
