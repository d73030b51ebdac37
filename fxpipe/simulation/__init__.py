"""How long a schedule takes, how much of that the devices idle, and what they hold: discrete events over its rows.

Every action starts as soon as its device has ended the one before and all that it needs has ended and, if that was on
another device, has arrived. Nothing is decided in between, for a schedule is an order; so one walk from event to event
gives every start and end, exactly.

>>> from fxpipe.scheduling import make_schedule
>>> print(simulate_schedule(make_schedule("1f1b", stages=3, micro_batches=4), [StageCost(forward=1, backward=2)] * 3))
1f1b: 3 stages, 4 micro-batches
device 0 |F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== |  busy 12.0 s, bubble 33.3 %
device 1 |...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......|  busy 12.0 s, bubble 33.3 %
device 2 |......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............|  busy 12.0 s, bubble 33.3 %
step 18.0 s, mean bubble 33.3 %
critical path: B 66.7 %, F 33.3 %

F and B of a stage need those of its neighbours, as every schedule has it, and beside that whatever `transfers` bring
them. What goes from one device to another takes a link, one for each direction of each pair of devices, and beside it
what several links share (`Transfer.over`: the network adapter of a node). Each carries one transfer at a time, in the
order in which they are handed over: so a link can be what a pipeline waits for.

Simpler than the real thing: a stage takes as long for every micro-batch; copying disturbs no computation; starting an
action takes as long as any other; the loss, which no plan knows, takes no time; a value on its way takes no memory, nor
do the gradients of values; the gradient of an output that the loss takes from an earlier stage leaves with the last
stage's B.

`events.py` walks, by what `needs.py` has found that actions need; `results.py` holds what comes of it; `critical.py`
says what the end of the step hangs on. `fxpipe.plans.simulating` is `fxpipe.simulate`: the same for a plan, also on
hardware, with schedules and micro-batches that it was not made for.
"""

from fxpipe.simulation.critical import Leg
from fxpipe.simulation.of_schedules import simulate_schedule
from fxpipe.simulation.results import Simulation
from fxpipe.stage_costs import StageCost, Transfer, transfers_of
from fxpipe.timelines import Memory, Parts, Span

__all__ = ["Leg", "Memory", "Parts", "Simulation", "Span", "StageCost", "Transfer", "simulate_schedule", "transfers_of"]
