"""Schedules: the order of actions on each device, as plain data.

Three devices hold one stage each. A device starts its forward after the output of its predecessor, one clock later:

    clock       0   1   2   3   4   5
    device 0   0F0 0F1 0F2 0F3
    device 1       1F0 1F1 1F2 1F3
    device 2           2F0 2F1 2F2 2F3

`0F1` is the forward of micro-batch 1 on stage 0. The empty corners are the bubble. A schedule contains no times, only
the order: for each device a *row* of *actions*, each of which waits for its inputs. In training, the gradients go the
same way back. GPipe runs all backwards in reverse order (last in, first out):

>>> print(make_schedule("gpipe", stages=3, micro_batches=4))
gpipe: 3 stages, 4 micro-batches
device 0: 0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
device 1: 1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0
device 2: 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0

Each device then keeps the activations of all four micro-batches at the same time. 1F1B starts a backward as soon as
possible, here on device 2 after its first forward, and starts a new micro-batch only after one has left. So stage j of
n keeps n - j of them, for any number of micro-batches, and the bubble is no larger:

>>> print(make_schedule("1f1b", stages=3, micro_batches=4))
1f1b: 3 stages, 4 micro-batches
device 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
device 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
device 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

`R` recomputes activations before backward, instead of keeping them. It waits for no other stage, so it fills a part of
the bubble. `W` computes the gradients of weights, if `B` computes only the gradients of inputs; nothing waits for `W`:

>>> print(make_schedule("zero_bubble", stages=2, micro_batches=2, checkpoint="except_last"))
zero_bubble: 2 stages, 2 micro-batches
device 0: 0F0 0F1 0R0 0B0 0W0 0B1 0W1
device 1: 1F0 1R0 1B0 1F1 1B1 1W0 1W1

A device may have several stages (`builtin`, `v_schedules`). `registry` compares the schedules. You can also pass a
table (`parse_schedule`). One that cannot run is refused when it is made, with the place.

`fxpipe.simulation` computes how long a schedule takes, and how much of that is bubble.
"""

from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule, split_backwards
from fxpipe.scheduling.factory import ScheduleLike, make_schedule, parse_schedule
from fxpipe.scheduling.registry import SCHEDULES
from fxpipe.scheduling.row_transforms import CHECKPOINTS, Checkpoint, round_robin
from fxpipe.scheduling.streams import STREAM_POLICIES, StreamSchedule, WeightPolicy
from fxpipe.scheduling.validation import activations_in_flight, dependencies, micro_batches_in_flight, validate

__all__ = [
    "CHECKPOINTS",
    "SCHEDULES",
    "STREAM_POLICIES",
    "Action",
    "ActionKind",
    "Checkpoint",
    "Rows",
    "Schedule",
    "ScheduleLike",
    "StreamSchedule",
    "WeightPolicy",
    "activations_in_flight",
    "dependencies",
    "make_schedule",
    "micro_batches_in_flight",
    "parse_schedule",
    "round_robin",
    "split_backwards",
    "validate",
]
