"""Rewriting: stage numbers become stages, skips become portals.

    traced = reorder_nodes(traced)
    program = split_into_stages(traced, starts=(0, 12), devices=(cpu, cpu))
    print(program.stages[1].code)

`reorder_nodes` orders the nodes so that few bytes cross a cut, `forbidden_cuts` returns where cuts are not allowed,
`choose_rematerialization` the values that a stage should recompute. The runtime reads only `program`.
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
