"""Rewriting: stage numbers become stages, skips become portals.

    program = split_into_stages(traced, starts=(0, 12), devices=(cpu, cpu))
    print(program.stages[1].code)

`forbidden_cuts` returns where cuts are not allowed. The runtime reads only `program`.
"""

from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.rewriting.program import PIPE_INPUT, ConstantOutput, Program, ReceivedValue, Skip, Stage, sent_bytes

__all__ = [
    "PIPE_INPUT",
    "ConstantOutput",
    "Program",
    "ReceivedValue",
    "Skip",
    "Stage",
    "forbidden_cuts",
    "sent_bytes",
    "split_into_stages",
]
