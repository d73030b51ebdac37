"""The runtime: runs a program of stages on devices, a step at a time.

Of the compiler it knows `fxpipe.rewriting.program`, and nothing else: stages are callables, values go by name, and it
never looks at a graph.

From the bottom: `wiring` (dependencies of actions), `bound_program` (a program on devices), `transport` (tensors on
their way between devices), `exchange` (what goes between stages), `stage_instance` (a stage in a step), `loss_stage`,
`caller_context` (what the caller has around it, and the state of a thread between actions), `action_performer` (what
stands around each action), `step` (what each does), `stage_updates` (what U does behind a step), `executors` (that run
the rows), `engine` (whole steps), `stream` (mini-batches without a flush between them). `microbatches`, `losses` and
`commit` are the two ends; `running_statistics` ends what deferred batch norm has put off. `step_record` is what a step
notes of itself.
"""

from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.executors import Executor, InlineExecutor, ThreadedExecutor, executor_for
from fxpipe.runtime.step_record import ActionRecord, DeviceRecord, StepRecord
from fxpipe.runtime.wiring import wire_program
from fxpipe.simulation.timeline import TransferRecord

__all__ = [
    "ActionRecord",
    "BoundProgram",
    "DeviceRecord",
    "Engine",
    "Executor",
    "InlineExecutor",
    "StepRecord",
    "ThreadedExecutor",
    "TransferRecord",
    "executor_for",
    "wire_program",
]
