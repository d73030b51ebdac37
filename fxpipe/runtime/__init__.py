"""The runtime: runs a program of stages on devices, a step at a time.

It depends on the compiler by `fxpipe.rewriting.program` only: stages are callables, values have names. From the bottom:
`wiring` (dependencies of actions), `bound_program`, `transport` (copies between devices), `exchange` (values and
gradients between stages), `stage_instance` (a stage in a step), `loss_stage`, `caller_context` (thread-local state),
`action_performer`, `step` (the actions), `stage_updates` (U after a step), `executors`, `engine` (complete steps),
`stream`. `step_inputs`, `losses`, `loss_audit` and `commit` are the two ends; `step_record` has the notes of a step.
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
