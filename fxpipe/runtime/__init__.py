"""The runtime: runs a program of stages on devices, a step at a time. It never looks at a graph node.

From the bottom: `wiring` (who waits for whom), `assembly` (a program on devices), `fences` and `exchange` (what stands
between actions, and what goes between stages), `opened` (a stage in a step) and `loss_stage`, `step` (what each action
does), `drivers` (who drives the rows), `engine` (whole steps). `microbatches`, `losses` and `commit` are the two ends;
`tracking` ends what batch norm has put off.
"""

from fxpipe.runtime.assembly import Assembly
from fxpipe.runtime.drivers import Driver, Interleaved, Workers
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.record import ActionRecord, StepRecord
from fxpipe.runtime.wiring import wire

__all__ = ["ActionRecord", "Assembly", "Driver", "Engine", "Interleaved", "StepRecord", "Workers", "wire"]
