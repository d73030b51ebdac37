"""The seconds that the host takes to queue the actions of a stage, and whether its workers share one interpreter.

All workers of a process run in one interpreter. An accelerator computes what its worker has queued, so a step is never
shorter than the Python of all stages. On a CPU the Python of a node is a part of its measured time, and only that part
is exclusive.

The seconds are estimated from the numbers of calls and operations, and the times of torch 2.13 on one core at 2.5 GHz:
1 to 7 microseconds for a call on tensors of a few numbers, recording it for autograd (a view 0.9, a sum 1.4, a linear
layer 2.9, GELU 6.1), and 3 to 6 for an operation of backward. Two threads that go forward take 2.1 times as long as
one: torch releases the lock within each call, but to hand it over takes as long as the call. Two threads in backward
take 1.2 times as long: autograd queues it in C++. Hence F holds the lock, and backward does not.
"""

from __future__ import annotations

import sys

from fxpipe.cluster import Link
from fxpipe.planning.plans.data import PlanData, StageWork
from fxpipe.simulation.costs import HostCost

CALL_SECONDS = 2e-6  # of a function of torch called from Python, a view for example
OPERATION_SECONDS = 4e-6  # of an operation beside that: to choose the kernel, make its outputs, and launch it
# Seconds of one action of a stage of one small operation, beyond that operation: `make bench`, tools/bench/overhead.py.
ACTION_SECONDS = 1e-4

# Seconds of a packet between processes at each of its ends, beside its way: to gather its values and begin to send
# them, to wait and take them apart. Of one small tensor 0.08 ms, of four 0.13 ms: gloo of torch 2.13, one core.
MESSAGE_SECONDS = 1e-4
# The way between two processes of one machine, where a value would be handed over in one process: gloo over the
# loopback device, packets of 10 MB, on two cores.
LOOPBACK = Link(2e9, 5e-5)


def interpreter_has_lock() -> bool:
    """Returns whether this interpreter runs one thread at a time: all but free-threaded ones do (3.13t, 3.14t)."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def shares_interpreter(plan: PlanData) -> bool:
    """Returns whether all workers of a plan take turns: in one process, if its interpreter has a lock as this one."""
    return not plan.is_over_processes and interpreter_has_lock()


def reckon_host(device: str, calls: int, work: StageWork, forward_seconds: float) -> HostCost:
    """Reckons the host's seconds of a stage that calls so many functions; the loss is the last stage's.

    Args:
        work: its operations; where none are known, each call is one, forward, and two back.
        forward_seconds: of its F on the device: what a CPU takes for F has that of Python in it.
    """
    ahead, back, to_inputs = (sum(times for _, times in one) for one in (work.forward, work.backward, work.to_inputs))
    if not ahead:
        ahead, back, to_inputs = calls, 2 * calls, calls
    loss = sum(times for _, times in work.loss)
    forward = calls * CALL_SECONDS + (ahead + loss) * OPERATION_SECONDS
    if device.partition(":")[0] == "cpu":
        return HostCost(forward=min(forward, forward_seconds), action=ACTION_SECONDS)
    return HostCost(
        forward,
        back * OPERATION_SECONDS,
        max(0, back - to_inputs) * OPERATION_SECONDS,
        ACTION_SECONDS,
        runs_ahead=True,
    )
