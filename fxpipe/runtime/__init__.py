"""The runtime: runs a program of stages on devices, a step at a time. It never looks at a graph node.

From the bottom: `wiring` (who waits for whom), `assembly` (a program on devices), `fences` (what stands between
actions), `packing` and `transport` (tensors on their way between devices), `exchange` (what goes between stages),
`entering` and `opened` (a stage in a step), `loss_stage`, `ambient` (what the caller has around it), `resting` (the
state of a thread between actions), `step` (what each action does), `drivers` and `alone` (who drives the rows),
`engine` (whole steps). `microbatches`, `losses` and `commit` are the two
ends; `tracking` ends what batch norm has put off. `log` is what a step notes of itself, `record` and `traces` what is
made of that, `ranges` what a profiler sees.
"""

from fxpipe.runtime.alone import Alone, driver_for
from fxpipe.runtime.assembly import Assembly
from fxpipe.runtime.drivers import Driver, Interleaved, Workers
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.record import ActionRecord, DeviceRecord, StepRecord, TransferRecord
from fxpipe.runtime.wiring import wire

__all__ = [
    "ActionRecord",
    "Alone",
    "Assembly",
    "DeviceRecord",
    "Driver",
    "Engine",
    "Interleaved",
    "StepRecord",
    "TransferRecord",
    "Workers",
    "driver_for",
    "wire",
]
