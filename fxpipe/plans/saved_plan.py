"""`fxpipe.Plan`: a plan that prints, and that is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import ArgumentError, FxpipeError
from fxpipe.plans.data import PlanData
from fxpipe.scheduling import CHECKPOINTS
from fxpipe.simulation.costs import check_costs
from fxpipe.utils.files import dataclass_from_json, dataclass_to_json, write_atomically


@dataclass(frozen=True, slots=True)
class Plan(PlanData):
    """All that is decided about a pipeline: JSON and nothing else. `print` shows it as a table."""

    # -- Files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Raises:
            FileError: the file cannot be written.
        """
        text = json.dumps(dataclass_to_json(self), indent=1, allow_nan=False) + "\n"
        write_atomically(path, text.encode(), "a plan")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what `save` wrote.

        Raises:
            ArgumentError: the file is no plan, or a damaged one; says where.
            OSError: the file cannot be read.
        """
        try:
            plan = dataclass_from_json(cls, json.loads(Path(path).read_bytes().decode()), "the plan")
            plan._check()
            return plan
        except (ValueError, RecursionError, OverflowError) as error:  # an ArgumentError among them
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ArgumentError(f"{path} is no plan of fxpipe: {why}; write one with plan.save(path)") from None

    def _check(self) -> None:
        """Raises `ArgumentError` unless the parts of the plan go together."""
        n = len(self.stages)
        ways = [*((p.source, p.target) for p in self.portals), *((s.source, s.target) for s in self.sendings)]
        wrong = {
            "stages": n == 0 or [stage.index for stage in self.stages] != list(range(n)),
            "devices": len(self.devices) != n,
            "modules or shares": any({len(s.modules), len(s.shares)} - {0, len(s.nodes)} for s in self.stages),
            "placement": len(self.placement) != n or sorted({*self.placement}) != [*range(len({*self.placement}))],
            "checkpoint": len(self.modes) != n or not {*self.modes} <= {*CHECKPOINTS},
            "schedule": not self._has_a_schedule(),
            "chunks": self.chunks < 1,
            "micro_batch": self.micro_batch < 1,
            "batch": self.batch is not None and self.batch < 1,
            "portals or sendings": not all(0 <= j < n for way in ways for j in way),
            "tied": not all(0 <= j < n for tied in self.tied for j in tied.stages),
            "work": not all(0 <= k < len(self.operations) and times > 0 for k, times in self._all_work()),
            "operations": any(c < 0 for one in self.operations for p in (one.flops, one.moved) for _, c in p.terms),
            "heaviest": self.heaviest is not None and not 0 <= self.heaviest.stage < n,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise ArgumentError(f"the plan's {name} cannot be: they do not go with its {n} stages, or are unknown")
        check_costs(*self.costs(), n)

    def _all_work(self) -> Iterator[tuple[int, int]]:
        for stage in self.stages:
            yield from (*stage.work.forward, *stage.work.backward, *stage.work.to_inputs, *stage.work.loss)

    def _has_a_schedule(self) -> bool:
        from fxpipe.scheduling import as_schedule_like

        try:
            as_schedule_like(self.schedule)
        except FxpipeError:
            return False
        return True

    def __str__(self) -> str:
        from fxpipe.plans.display import plan_table

        return plan_table(self)

    def _repr_html_(self) -> str:
        from fxpipe.plans.display import plan_html

        return plan_html(self)
