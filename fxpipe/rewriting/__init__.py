"""Rewriting: stage numbers become stages, skips become portals.

    program = split(traced, starts=(0, 12), devices=(cpu, cpu))
    print(program.stages[1].code)

`forbidden_cuts` says where no cut may stand; `split` does the work; `program` is the data that the runtime reads.
"""

from fxpipe.rewriting.cuts import forbidden_cuts
from fxpipe.rewriting.program import INPUT, Constant, Program, Received, Skip, Stage
from fxpipe.rewriting.stages import split

__all__ = ["INPUT", "Constant", "Program", "Received", "Skip", "Stage", "forbidden_cuts", "split"]
