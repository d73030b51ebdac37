"""torchgpipe's ablation: a U-Net over four devices without and with fences, copy streams and portals.

    python tools/bench/published/unet_ablation.py                 four GPUs; without any, small, on CPU workers

C. Kim et al., torchgpipe, arXiv 2004.09910, section 5, "effects of optimization components": U-Net (5, 64) on 192 x 192
images, mini-batches of 128 in 8 micro-batches, four Tesla P40. What the switches mean there, and here:

- *fences* force the order of backward. Without them torchgpipe's autograd recomputes all micro-batches of a stage
  before it takes the first one back, hence the 52 GiB. fxpipe has the order in its schedule; without fences it gets a
  schedule of one's own, in which all R of a device stand before its first B.
- *copy streams*: without them copies run on the streams that compute, on both ends (`ComputeStreamBackend`). On CPUs
  there are no streams, and the switch does nothing.
- *portals*: without them a value that skips stages goes from each stage to the next one, and so does its gradient
  (`RelayingExchange`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from experiment import Setting, StepFigures, TrainingStep, Workload, main, measure, over, plan_for, simulate
from paper_hardware import P40
from paper_models import UNet
from tables import Cell, Plot, Table

from fxpipe._torch.autograd import takes_gradient
from fxpipe.planning.plans import Plan
from fxpipe.rewriting.program import PIPE_INPUT
from fxpipe.runtime.exchange import BoundaryValue, Exchange
from fxpipe.runtime.transport import Transport
from fxpipe.runtime.wiring import ValueLink
from fxpipe.scheduling import ActionKind, Schedule, ScheduleLike, make_schedule
from fxpipe.utils import accelerator
from fxpipe.utils.polynomial import ZERO

STAGES = 4


@dataclass(frozen=True)
class Switches:
    """A row of the table, with the paper's figures: samples in a second, utilisation, GiB of all devices."""

    name: str
    fences: bool
    streams: bool
    portals: bool
    throughput: float
    utilisation: float
    gib: float


ROWS = (
    Switches("none", False, False, False, 30.662, 0.44, 52.2),
    Switches("fences", True, False, False, 41.306, 0.59, 19.1),
    Switches("fences, copy streams", True, True, False, 55.191, 0.71, 30.0),
    Switches("fences, copy streams, portals", True, True, True, 58.477, 0.75, 23.5),
)


# ---- the switches ----


def recompute_all_first(micro_batches: int, stages: int) -> Schedule:
    """GPipe's schedule, in which each device recomputes all micro-batches before it takes one back."""
    schedule = make_schedule("gpipe", stages, micro_batches, "except_last")
    order = {ActionKind.FORWARD: 0, ActionKind.RECOMPUTE: 1, ActionKind.BACKWARD: 2}
    rows = tuple(tuple(sorted(row, key=lambda action: order[action.kind])) for row in schedule.rows)
    return Schedule("recompute_all_first", stages, micro_batches, rows)


def compute_streams(source: torch.device, target: torch.device) -> tuple[torch.Stream, ...]:
    """Copies on the streams that compute: they wait for all that was queued there, and hold up what comes next."""
    ends = dict.fromkeys(device for device in (source, target) if device.type != "cpu")
    return tuple(map(accelerator.current_stream, ends))


class RelayingExchange(Exchange):
    """No portals: values and gradients that skip stages go by way of the devices of the stages between."""

    def send(self, maker: int, name: str, i: int, value: Any) -> None:
        wants = isinstance(value, torch.Tensor) and takes_gradient(value)
        value = value.detach() if isinstance(value, torch.Tensor) else value
        users = self.bounds[i].wiring.users[maker, name]
        for stage in range(maker + 1, max(users) + 1):
            sent = self.transport.start_copy(value, self._devices[i][stage])
            if stage in users:
                self._values[stage, maker, name, i] = BoundaryValue(sent, wants)
            if stage < max(users):
                value = self.transport.open(sent, self._devices[i][stage])

    def send_gradient(self, link: ValueLink, i: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and link.gradient_target != PIPE_INPUT:
            users = self.bounds[i].wiring.users[link.value.source, link.value.name]
            user = min(user for user in users if user > link.gradient_target)
            for stage in range(user - 1, link.gradient_target, -1):
                device = self._devices[i][stage]
                gradient = self.transport.open(self.transport.start_copy(gradient, device), device)
        super().send_gradient(link, i, gradient)


def in_effect(switches: Switches) -> AbstractContextManager[ExitStack]:
    """A block in which steps run with these switches; copies are made also where stages are on one device, a CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Transport, "copies_on_one_device", True))
        if not switches.streams:
            stack.enter_context(patch("fxpipe.runtime.transport.copy_streams", compute_streams))
        if not switches.portals:
            stack.enter_context(patch("fxpipe.runtime.mini_batch.Exchange", RelayingExchange))
        return stack.pop_all()


def schedule_of(switches: Switches) -> ScheduleLike:
    return "gpipe" if switches.fences else recompute_all_first


def without_portals(plan: Plan) -> Plan:
    """The plan with all that skips stages added to what goes between neighbours, and kept by the stages between."""
    ways = {(way.source, way.target): way for way in plan.sendings if abs(way.target - way.source) == 1}
    stages = list(plan.stages)
    for way in plan.sendings:
        step = 1 if way.target > way.source else -1
        hops = range(way.source, way.target, step)
        for hop in hops if len(hops) > 1 else ():
            beside = ways.get(
                (hop, hop + step), replace(way, source=hop, target=hop + step, bytes=0, seconds=0.0, size=ZERO)
            )
            ways[hop, hop + step] = replace(
                beside,
                bytes=beside.bytes + way.bytes,
                seconds=beside.seconds + way.seconds,
                size=beside.size + way.size,
            )
            if step == 1 and hop != way.source:
                held = stages[hop].bytes
                stages[hop] = replace(stages[hop], bytes=replace(held, received=held.received + way.size))
    return replace(plan, sendings=tuple(ways.values()), stages=tuple(stages), portals=())


# ---- measured ----


class SwitchedStep(TrainingStep):
    """A training step with switches."""

    def __init__(
        self, switches: Switches, workload: Workload, devices: Sequence[str], chunks: int, balance: Any = "auto"
    ):
        self.switches = switches
        options = {"chunks": chunks, "balance": balance, "schedule": schedule_of(switches), "checkpoint": "except_last"}
        super().__init__(workload, devices, options)

    def __call__(self) -> float:
        with in_effect(self.switches):
            return super().__call__()


def make_workload(setting: Setting) -> tuple[Workload, int]:
    """The mini-batch, and how many micro-batches it is cut into."""
    model, batch, size, chunks = (UNet(2, 8, 4), 8, 64, 4) if setting.is_small else (UNet(5, 64), 128, 192, 8)
    images, mask = torch.rand(batch, 3, size, size), torch.ones(batch, 1, size, size)
    return Workload(model, images, mask, F.binary_cross_entropy_with_logits), chunks


def measured(setting: Setting) -> dict[str, StepFigures | None]:
    workload, chunks = make_workload(setting)
    devices = ["cpu"] * STAGES if setting.devices[0] == "cpu" else setting.first(STAGES)
    if devices is None:
        return {}
    steps = {switches.name: partial(SwitchedStep, switches, workload, devices, chunks) for switches in ROWS}
    return measure(steps, setting, "unet ablation")


# ---- simulated ----


def simulated() -> dict[str, StepFigures | None]:
    plan = plan_for(UNet, (128, 3, 192, 192), STAGES, P40, chunks=8)
    return {
        switches.name: simulate(
            plan if switches.portals else without_portals(plan),
            schedule=schedule_of(switches),
            overlaps=switches.streams,
        )
        for switches in ROWS
    }


# ---- tables ----


def row(switches: Switches, samples: int, figures: StepFigures | None) -> dict[str, Cell]:
    throughput = samples / figures.seconds if figures else None
    return {
        "switched on": switches.name,
        "samples/s": throughput,
        "published samples/s": switches.throughput,
        "utilisation": figures.utilisation if figures else None,
        "published utilisation": switches.utilisation,
        "GiB": figures.gib if figures else None,
        "published GiB": switches.gib,
    }


def tables(setting: Setting) -> Iterator[Table]:
    samples = len(make_workload(setting)[0].inputs)
    figures = measured(setting)
    on_cpu = (
        "On CPUs there are no streams, workers share cores, and a copy is one within memory: no gain is to be expected"
    )
    yield Table(
        f"U-Net ablation, {setting.where}",
        tuple(row(switches, samples, figures.get(switches.name)) for switches in ROWS),
        (f"{on_cpu}; shown is that each switch runs.",) if setting.devices[0] == "cpu" else (),
    )
    figures = simulated()
    rows = [row(switches, 128, figures[switches.name]) for switches in ROWS]
    for one, switches in zip(rows, ROWS, strict=True):
        one["over published"] = over(one["samples/s"], switches.throughput)
    yield Table(
        "U-Net ablation, simulated for four Tesla P40",
        tuple(rows),
        (
            "With all of it on, ours is 7 % lower: the simulator counts convolutions in full, where cuDNN saves work; "
            "the cut is fxpipe's own, and better balanced than torchgpipe's by hand.",
            "Without fences the published step loses a quarter, and the simulated one nothing: it knows that R comes "
            "first, which fills time that would be idle; in which order autograd then took the micro-batches, and how "
            "the allocator did at the edge of 22 GiB a GPU, is not published. The memory is that of all R first.",
            "Without copy streams a copy takes time of the device that receives; on a GPU also of the one that sends.",
            "Published memory is what torch's allocator had reserved, ours what tensors take.",
        ),
        Plot("switched on", ("samples/s", "published samples/s"), "samples in a second"),
    )


if __name__ == "__main__":
    main(tables, __doc__)
