"""The schedules by name. A new schedule is a function and a line in `SCHEDULES`.

The table assumes equal stages, and F, B and W of equal length if backward is split; an unsplit B is as long as B and W.
p devices have n stages, v = n / p each. *Kept* is the maximum over devices of the micro-batches kept in all stages of
the device together. The *bubble* is the idle time of a device in a step, in units of F + B + W of one micro-batch on a
device.

| name                      | backward                  | stages on a device  | kept          | bubble            |
|---------------------------|---------------------------|---------------------|---------------|-------------------|
| `gpipe`                   | after all, in reverse     | 1, or any placement | m             | p - 1             |
| `1f1b`                    | immediately, in order     | 1, or any placement | p             | p - 1             |
| `interleaved_1f1b`        | the same, stage by stage  | v = 2, 3, ...       | p + (p-1) / v | (p - 1) / v       |
| `zero_bubble`             | B early, W in the gaps    | 1, or any placement | p             | (p - 1) / 3       |
| `zero_bubble_2p`          | the same, more in flight  | 1, or any placement | 2 p - 1       | (p - 1) / 3       |
| `interleaved_zero_bubble` | B by stage, W in the gaps | v = 2, 3, ...       | p             | (p - 1) / (3 v)   |
| `zbv`                     | as `zero_bubble`          | 2, V                | p             | (p - 1) / 6       |
| `dualpipev`               | full, W only in bubbles   | 2, V                | p + 1 / 2     | (p - 1) / 6       |
| `v_half`                  | as `zbv`, fewer           | 2, V                | (p + 2) / 2   | 7 (p - 1) / 12    |
| `v_min`                   | as `zbv`, fewest          | 2, V                | (p + 4) / 3   | (4 p - 5) / 6     |
| `pipedream`               | immediately, no flush     | 1                   | p             | 0, as a stream    |
| `pipedream_2bw`           | the same, two versions    | 1                   | p             | 0, as a stream    |
| `inference`               | none                      | 1, or any placement | 0             | p - 1, of F alone |

V means placement (0, 1, 1, 0): the loss is on the first device. Round down for `v_half` and `v_min`, whose bubble is a
little less for some p. If p does not divide m, interleaved schedules have larger groups of micro-batches, and keep
more. The figures need enough micro-batches to fill the pipeline. *Kept* counts micro-batches that only W still needs as
full ones. Chimera and DualPipe need each stage on two devices, so they are not supported.

With v stages on each device, round-robin, a schedule for one stage per device keeps more: `1f1b` up to (v + 1) p / 2,
`zero_bubble` up to v p, `zero_bubble_2p` up to 2 v p - 1. (Neighbours on one device count as one stage.)

In seconds the bubble is (p - 1) (F + B - W) in `zero_bubble` and (p - 1) max(F, F + B - 2 W) in `zero_bubble_2p`, if W
is no longer than F and B. So the memory of `zero_bubble_2p` pays off if W is shorter than B (attention).

`pipedream` and `pipedream_2bw` have no bubble, but stale weights: `train_stream` runs them, in the order of `streams`.
A single step (`forward_backward`) runs as `1f1b`, and so do the rows here.

If in doubt, use `1f1b`. With few micro-batches per device, use `zero_bubble`, or `zbv` if twice as many transfers do
not matter. If memory is short, use `v_half` or `v_min`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from fxpipe.scheduling import builtin, row_transforms, v_schedules
from fxpipe.scheduling.actions import Rows

Placement: TypeAlias = tuple[int, ...]  # the device of each stage


@dataclass(frozen=True, slots=True)
class ScheduleRecipe:
    """The function that makes a schedule, and the placements that it allows."""

    rows: Callable[[int, Placement], Rows]  # (micro-batches, placement) -> a row for each device
    placement: Callable[[int, int], Placement] = row_transforms.round_robin  # (devices, stages on each) -> placement
    stages_per_device: int = 1  # default number of stages on a device
    has_fixed_placement: bool = False  # requires `placement`, with at least `stages_per_device`
    most: int | None = None  # limit of stages on a device

    def takes(self, each: int) -> bool:
        return not self.has_fixed_placement or self.stages_per_device <= each <= (self.most or each)


def _any_placement(by_stage: Callable[[int, int], Rows]) -> ScheduleRecipe:
    def rows(m: int, placement: Placement) -> Rows:
        groups = row_transforms.neighbour_groups(placement)
        if len(groups) > max(placement) + 1:  # a device has stages in several places
            return row_transforms.merge_stage_rows(by_stage(m, len(placement)), placement)
        devices = tuple(placement[group[0]] for group in groups)
        return row_transforms.expand_groups(row_transforms.merge_stage_rows(by_stage(m, len(groups)), devices), groups)

    return ScheduleRecipe(rows)


def _in_loops(by_device: Callable[[int, int, int], Rows]) -> ScheduleRecipe:
    def rows(m: int, placement: Placement) -> Rows:
        devices = max(placement) + 1
        return by_device(m, devices, len(placement) // devices)

    return ScheduleRecipe(rows, stages_per_device=2, has_fixed_placement=True)


def _in_a_v(by_device: Callable[[int, int], Rows]) -> ScheduleRecipe:
    return ScheduleRecipe(
        lambda m, placement: by_device(m, max(placement) + 1),
        row_transforms.there_and_back,
        stages_per_device=2,
        has_fixed_placement=True,
        most=2,
    )


# A single step of a stream ends with a flush, and runs as 1F1B.
_STREAM = ScheduleRecipe(lambda m, placement: builtin.one_f_one_b(m, len(placement)), has_fixed_placement=True, most=1)

# Schedules that need each stage, with its weights, on two devices, and the schedule to use instead.
BIDIRECTIONAL: Mapping[str, str] = MappingProxyType({"chimera": "dualpipev", "dualpipe": "dualpipev"})

SCHEDULES: Mapping[str, ScheduleRecipe] = MappingProxyType(
    {
        "gpipe": _any_placement(builtin.gpipe),
        "1f1b": _any_placement(builtin.one_f_one_b),
        "interleaved_1f1b": _in_loops(builtin.interleaved_1f1b),
        "zero_bubble": _any_placement(builtin.zero_bubble),
        "zero_bubble_2p": _any_placement(builtin.zero_bubble_2p),
        "interleaved_zero_bubble": _in_loops(builtin.interleaved_zero_bubble),
        "zbv": _in_a_v(v_schedules.zbv),
        "dualpipev": _in_a_v(v_schedules.dualpipev),
        "v_half": _in_a_v(v_schedules.v_half),
        "v_min": _in_a_v(v_schedules.v_min),
        "pipedream": _STREAM,
        "pipedream_2bw": _STREAM,
        "inference": _any_placement(builtin.inference),
    }
)

ONE_F_ONE_B = ("1f1b", "pipedream", "pipedream_2bw")  # a single step of these has the rows of 1F1B
