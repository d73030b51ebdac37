"""The host time to queue the actions of a stage, and whether the workers share one interpreter.

All workers of a process run in one interpreter. An accelerator computes what its worker has queued, so a step is never
shorter than the Python time of all stages. On a CPU the Python time of a node is a part of its measured time; only
the Python part is exclusive.

Estimates use the numbers of calls and operations, and times of torch 2.13 on one core at 2.5 GHz: 1 to 7 microseconds
for a call on small tensors, including recording for autograd (a view 0.9, a sum 1.4, a linear layer 2.9, GELU 6.1), and
3 to 6 for an operation of backward. Two threads in forward take 2.1 times as long as one: torch releases the lock
within each call, but passing it to another thread takes as long as the call. Two threads in backward take 1.2 times as
long: autograd queues it in C++. Hence F holds the lock, and backward does not.
"""

from __future__ import annotations

import sys

from fxpipe.cluster import Link
from fxpipe.planning.plans.data import PlanData, StageWork
from fxpipe.simulation.costs import HostCost

CALL_SECONDS = 2e-6  # a call of a torch function from Python, for example a view
OPERATION_SECONDS = 4e-6  # additional time of an operation: choose the kernel, allocate outputs, launch
# Overhead of one action of a stage with one small operation: `make bench`, tools/bench/overhead.py.
ACTION_SECONDS = 1e-4

# Overhead of a packet between processes at each end, without the transfer: the sender gathers values, the receiver
# waits and splits the packet. One small tensor takes 0.08 ms, four take 0.13 ms: gloo of torch 2.13, one core.
MESSAGE_SECONDS = 1e-4
# The link between two processes of one machine: gloo over the loopback device, packets of 10 MB, on two cores. Within
# one process no copy is needed.
LOOPBACK = Link(2e9, 5e-5)


def interpreter_has_lock() -> bool:
    """Returns True if this interpreter runs one thread at a time: all but free-threaded ones do (3.13t, 3.14t)."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def shares_interpreter(plan: PlanData) -> bool:
    """Returns True if all workers of a plan take turns: in one process whose interpreter has a lock."""
    return not plan.is_over_processes and interpreter_has_lock()


def reckon_host(device: str, calls: int, work: StageWork, forward_seconds: float) -> HostCost:
    """Estimates the host time of a stage with this number of calls; the loss belongs to the last stage.

    Args:
        work: its operations; if unknown, each call counts as one operation in forward and two in backward.
        forward_seconds: of F on the device; on a CPU it includes the Python time.
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
