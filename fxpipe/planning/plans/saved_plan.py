"""`fxpipe.Plan`: a plan that can be printed, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fxpipe.errors import ArgumentError, FxpipeError
from fxpipe.planning.plans.data import PlanData
from fxpipe.planning.plans.figures import simulate_step
from fxpipe.planning.plans.retarget import resize_plan
from fxpipe.scheduling import CHECKPOINTS
from fxpipe.scheduling.factory import as_schedule_like
from fxpipe.simulation import MemoryFit
from fxpipe.simulation.costs import check_costs
from fxpipe.utils.files import dataclass_from_json, dataclass_to_json, write_atomically
from fxpipe.utils.text_table import show_as_printed
from fxpipe.utils.units import parse_count


@dataclass(frozen=True, slots=True)
class Plan(PlanData):
    """All decisions about a pipeline, as plain data that is saved as JSON. `print` shows it as a table."""

    @property
    def fits(self) -> MemoryFit:
        """Compares the memory that a step needs with the memory of the devices.

            if not plan.fits:
                print(plan.fits)  # does not fit: device 1 lacks 12.0 GiB, it needs 86.0 of 74.0 GiB

        By device it is True, False, or None if no limit is known; `needs` and `limits` are the bytes.
        """
        return simulate_step(self).fits

    def at(self, b: int | None = None, **sizes: int) -> Plan:
        """Returns the same stages with figures for other sizes.

            print(plan.at(s=512))
            plan.at(b=4, s=512).stages[1].forward_seconds

        Args:
            b: samples of a micro-batch. Default: as planned.
            sizes: dynamic sizes, by name; others are as planned.

        Raises:
            ArgumentError: the plan has no such size, or the graph is not valid for it.
        """
        samples = self.micro_batch if b is None else parse_count("b", b, "a whole number of samples")
        batch = self.batch if b is None else samples * self.micro_batches
        return replace(resize_plan(self, samples, sizes=self.check_sizes(sizes)), batch=batch)

    def compare_sizes(self, **sizes: Sequence[int]) -> str:
        """Formats a table of the balance of the stages, the step and its memory at other sizes.

            print(plan.compare_sizes())                     # smaller, as planned, larger, the largest
            print(plan.compare_sizes(s=(128, 512, 2048)))

        Args:
            sizes: for dynamic sizes the values to compare, by name; several sizes are combined value by value.

        Raises:
            ArgumentError: an unknown size, one that is invalid for the graph, or unequal numbers of values.
        """
        from fxpipe.inspect.plan_text import sizes_text

        return sizes_text(self.at_sizes(**sizes))

    def at_sizes(self, **sizes: Sequence[int]) -> tuple[Plan, ...]:
        """Returns the same stages at each of several sizes; see `compare_sizes`."""
        for name, values in sizes.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise ArgumentError(f"{name}={values!r}: expected the sizes to compare, as in {name}=(128, 512)")
        if len({len(values) for values in sizes.values()}) > 1:
            counts = ", ".join(f"{name} {len(values)}" for name, values in sizes.items())
            raise ArgumentError(f"sizes are compared together, so each has as many values as the others ({counts})")
        if not sizes:
            by_name = {one.name: one.usual_sizes for one in self.sizes}
            rows = list(dict.fromkeys(zip(*by_name.values(), strict=True))) or [()]
            return tuple(self.at(**dict(zip(by_name, row, strict=True))) for row in rows)
        return tuple(self.at(**dict(zip(sizes, row, strict=True))) for row in zip(*sizes.values(), strict=True))

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Raises:
            FileError: the file cannot be written.
        """
        text = json.dumps(dataclass_to_json(self), indent=1, allow_nan=False) + "\n"
        write_atomically(path, text.encode(), "a plan")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a file written by `save`.

        Raises:
            ArgumentError: the file is not a valid plan; names the problem.
            OSError: the file cannot be read.
        """
        try:
            plan = dataclass_from_json(cls, json.loads(Path(path).read_bytes().decode()), "the plan")
            plan._check()
            return plan
        except (ValueError, RecursionError, OverflowError) as error:  # includes ArgumentError
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ArgumentError(f"{path} is no plan of fxpipe: {why}; write one with plan.save(path)") from None

    def _check(self) -> None:
        n, named = len(self.stages), [one.name for one in self.sizes]
        works = [stage.work for stage in self.stages]
        work = [pair for w in works for part in (w.forward, w.backward, w.to_inputs, w.loss) for pair in part]
        has_schedule = True
        try:
            as_schedule_like(self.schedule)
        except FxpipeError:
            has_schedule = False
        ways = [*((p.source, p.target) for p in self.portals), *((s.source, s.target) for s in self.sendings)]
        wrong = {
            "stages": n == 0 or [stage.index for stage in self.stages] != list(range(n)),
            "devices": len(self.devices) != n,
            "modules or shares": any({len(s.modules), len(s.shares)} - {0, len(s.nodes)} for s in self.stages),
            "placement": len(self.placement) != n or sorted({*self.placement}) != [*range(len({*self.placement}))],
            "checkpoint": len(self.modes) != n or not {*self.modes} <= {*CHECKPOINTS},
            "schedule": not has_schedule,
            "chunks": self.chunks < 1,
            "micro_batch": self.micro_batch < 1,
            "batch": self.batch is not None and self.batch < 1,
            "portals or sendings": not all(0 <= j < n for way in ways for j in way),
            "tied": not all(0 <= j < n for tied in self.tied for j in tied.stages),
            "work": not all(0 <= k < len(self.operations) and times > 0 for k, times in work),
            "operations": any(c < 0 for one in self.operations for p in (one.flops, one.moved) for _, c in p.terms),
            "heaviest": self.heaviest is not None and not 0 <= self.heaviest.stage < n,
            "sizes": len({*named}) < len(named)
            or not all(name.isidentifier() and name != "b" for name in named)
            or not all(1 <= one.least <= one.size <= one.largest for one in self.sizes),
            "cluster": self.cluster is not None and self.cluster.pipe != len({*self.placement}),
            "replica_devices": bool(self.replica_devices)
            and (
                len(self.replica_devices) != len({*self.placement})
                or not all(self.replica_devices)
                or (self.cluster is not None and self.cluster.replicas != self.turns)
            ),
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise ArgumentError(f"the plan's {name} cannot be: they do not go with its {n} stages, or are unknown")
        check_costs(*self.costs(), n)

    def __str__(self) -> str:
        from fxpipe.inspect.plan_text import plan_text

        return plan_text(self)

    _repr_pretty_ = show_as_printed

    def _repr_html_(self) -> str:
        from fxpipe.inspect.plan_text import plan_html

        return plan_html(self)
