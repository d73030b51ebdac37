"""Schedules: the order of actions on each device, as plain data.

Three devices hold one stage each, and four micro-batches go through. A device can start its forward after it has
received the output of its predecessor, so each starts one clock later:

    clock       0   1   2   3   4   5
    device 0   0F0 0F1 0F2 0F3
    device 1       1F0 1F1 1F2 1F3
    device 2           2F0 2F1 2F2 2F3

`0F1` is the forward of micro-batch 1 on stage 0. The empty corners are the bubble. A schedule contains no times, only
the order: for each device a *row* of *actions*, each of which waits for its inputs.

>>> print(make_schedule("inference", stages=3, micro_batches=4))
inference: 3 stages, 4 micro-batches
device 0: 0F0 0F1 0F2 0F3
device 1: 1F0 1F1 1F2 1F3
device 2: 2F0 2F1 2F2 2F3

In training, the gradients go the same way back. GPipe runs all backwards in reverse order (last in, first out):

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

Recomputation trades time for memory: activations are dropped and recomputed (`R`) before backward. R waits for no other
stage, so it runs while the gradient is on its way and fills a part of the bubble:

>>> print(make_schedule("gpipe", stages=2, micro_batches=2, checkpoint="except_last"))
gpipe: 2 stages, 2 micro-batches
device 0: 0F0 0F1 0B1 0R0 0B0
device 1: 1F0 1F1 1B1 1R0 1B0

Nothing waits for the gradients of weights until the step ends. Computed separately (`W`) from the gradients of inputs
(`B`), they fill bubbles:

>>> print(make_schedule("zero_bubble", stages=2, micro_batches=3))
zero_bubble: 2 stages, 3 micro-batches
device 0: 0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2
device 1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2

A device may have several stages. Each is shorter then, and so is the time until the last device starts. The stages are
placed round-robin, or there and back:

>>> print(make_schedule("interleaved_1f1b", stages=4, micro_batches=2))
interleaved_1f1b: 4 stages, 2 micro-batches
device 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
device 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
>>> print(make_schedule("zbv", stages=4, micro_batches=3))
zbv: 4 stages, 3 micro-batches
device 0: 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
device 1: 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2

Some micro-batches of a stage may have no W. Their B is the full backward:

>>> print(make_schedule("dualpipev", stages=4, micro_batches=4))
dualpipev: 4 stages, 4 micro-batches
device 0: 0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0W2 0B3 0W3
device 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2B3 1B3 2W3 1W3

`fxpipe.scheduling.registry` compares the schedules. Those without a fixed placement accept any; stages take turns:

>>> print(make_schedule("1f1b", stages=3, micro_batches=2, placement=(0, 1, 0)))
1f1b: 3 stages, 2 micro-batches
device 0: 0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1
device 1: 1F0 1F1 1B0 1B1

You can also pass a table. One that cannot run is refused when it is made:

>>> parse_schedule('''
...     0F0 0F1 0B0 0B1
...     1B0 1F0 1F1 1B1
... ''')
Traceback (most recent call last):
    ...
fxpipe.errors.ScheduleError: schedule 'custom' (2 stages, 2 micro-batches) would not run:
  - 1B0 stands before 1F0, which it needs
device 0: 0F0 0F1 0B0 0B1
device 1: >1B0< 1F0 1F1 1B1

`fxpipe.simulation` computes how long a schedule takes, and how much of that is bubble.
"""

from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule, split_backwards
from fxpipe.scheduling.builtin import (
    clock_cycles,
    gpipe,
    inference,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zero_bubble,
    zero_bubble_2p,
)
from fxpipe.scheduling.custom import ScheduleLike, as_schedule_like, parse_schedule, placement_of
from fxpipe.scheduling.factory import check_placement, make_schedule, schedule_text
from fxpipe.scheduling.registry import SCHEDULES
from fxpipe.scheduling.row_transforms import (
    CHECKPOINTS,
    Checkpoint,
    backward_part,
    forward_part,
    round_robin,
    there_and_back,
    with_updates,
)
from fxpipe.scheduling.streams import (
    STREAM_POLICIES,
    SteadyWindow,
    StreamSchedule,
    WeightPolicy,
    is_stream,
    steady_micro_batches,
    stream_schedule,
    weight_versions,
)
from fxpipe.scheduling.v_schedules import dualpipev, v_half, v_min, zbv
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
    "SteadyWindow",
    "StreamSchedule",
    "WeightPolicy",
    "activations_in_flight",
    "as_schedule_like",
    "backward_part",
    "check_placement",
    "clock_cycles",
    "dependencies",
    "dualpipev",
    "forward_part",
    "gpipe",
    "inference",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "is_stream",
    "make_schedule",
    "micro_batches_in_flight",
    "one_f_one_b",
    "parse_schedule",
    "placement_of",
    "round_robin",
    "schedule_text",
    "split_backwards",
    "steady_micro_batches",
    "stream_schedule",
    "there_and_back",
    "v_half",
    "v_min",
    "validate",
    "weight_versions",
    "with_updates",
    "zbv",
    "zero_bubble",
    "zero_bubble_2p",
]
