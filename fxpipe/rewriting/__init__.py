"""Rewriting: stage numbers become stages, skips become portals.

    traced = ordered(traced)
    program = split(traced, starts=(0, 12), devices=(cpu, cpu))
    print(program.stages[1].code)

`ordered` puts the nodes in an order in which few bytes cross a cut; `forbidden_cuts` says where no cut may stand;
`choose_copies`, which values a stage had better compute for itself than receive; `split` does the work, with what is
put into stages for random numbers (`functions`), batch norm (`deferring`) and recomputing (`forgetting`); `program` is
the data that the runtime reads.
"""

from fxpipe.rewriting.copies import choose_copies
from fxpipe.rewriting.cuts import forbidden_cuts
from fxpipe.rewriting.ordering import ordered
from fxpipe.rewriting.program import INPUT, Constant, Program, Received, Skip, Stage, sent_bytes
from fxpipe.rewriting.stages import split

__all__ = [
    "INPUT", "Constant", "Program", "Received", "Skip", "Stage", "choose_copies", "forbidden_cuts", "ordered",
    "sent_bytes", "split",
]  # fmt: skip
