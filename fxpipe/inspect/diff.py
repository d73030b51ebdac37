"""Two plans compared: what moved between stages, and what that does to seconds, bytes, memory and the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fxpipe.utils.text_table import EMPTY_CELL, MAX_LIST_LINES, shorten_name, text_table, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.plans import Plan


ChangeValue: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Change:
    """A figure or a choice, before and after."""

    name: str
    before: ChangeValue
    after: ChangeValue

    @property
    def is_same(self) -> bool:
        return self.before == self.after


@dataclass(frozen=True, slots=True)
class MovedNodes:
    """Nodes that one plan has in one stage and the other in another, in the order in which they run."""

    source: int
    target: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageChange:
    """The changes of one stage; the figures of a plan that has no such stage are None."""

    stage: int
    figures: tuple[Change, ...]  # nodes, forward_seconds, backward_seconds, parameter_bytes, memory_bytes, sent_bytes


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The difference from a plan to another."""

    choices: tuple[Change, ...]  # that differ: schedule, chunks, checkpoint ...
    has_same_graph: bool
    moved: tuple[MovedNodes, ...]
    gone: tuple[str, ...]  # nodes that only the first plan has
    new: tuple[str, ...]  # nodes that only the second one has
    stages: tuple[StageChange, ...]
    totals: tuple[Change, ...]  # step_seconds, bubble, peak_bytes, parameter_bytes, portal_bytes

    @property
    def is_empty(self) -> bool:
        changes = [*self.totals, *(figure for stage in self.stages for figure in stage.figures)]
        is_still = not (self.choices or self.moved or self.gone or self.new)
        return is_still and self.has_same_graph and all(change.is_same for change in changes)


def compare_plans(before: Plan, after: Plan) -> PlanDifference:
    """Compares two plans: all that changes from one to the other."""
    home, now = _stage_of_nodes(before), _stage_of_nodes(after)
    return PlanDifference(
        choices=tuple(change for change in _choice_changes(before, after) if not change.is_same),
        has_same_graph=before.fingerprint == after.fingerprint,
        moved=tuple(_moved_nodes(home, now)),
        gone=tuple(name for name in home if name not in now),
        new=tuple(name for name in now if name not in home),
        stages=tuple(_stage_change(before, after, j) for j in range(max(len(before.stages), len(after.stages)))),
        totals=_total_changes(before, after),
    )


def _stage_of_nodes(plan: Plan) -> dict[str, int]:
    """Maps each node to its stage."""
    return {name: stage.index for stage in plan.stages for name in stage.nodes}


def _moved_nodes(home: dict[str, int], now: dict[str, int]) -> Iterator[MovedNodes]:
    both = [(home[name], now[name], name) for name in now if name in home and home[name] != now[name]]
    for source, target in Counter((source, target) for source, target, _ in both):
        yield MovedNodes(source, target, tuple(name for a, b, name in both if (a, b) == (source, target)))


def _choice_changes(before: Plan, after: Plan) -> Iterator[Change]:
    for name in ("schedule", "chunks", "micro_batch", "balance", "tracer", "estimated_for"):
        yield Change(name, getattr(before, name), getattr(after, name))
    yield Change("sizes", *(",".join(f"{one.name}={one.size}" for one in plan.sizes) for plan in (before, after)))
    yield Change("checkpoint", ",".join(_checkpoint_modes(before)), ",".join(_checkpoint_modes(after)))
    yield Change("stages", len(before.stages), len(after.stages))
    yield Change("devices", ",".join(before.row_devices), ",".join(after.row_devices))
    yield Change("placement", ",".join(map(str, before.placement)), ",".join(map(str, after.placement)))


def _checkpoint_modes(plan: Plan) -> tuple[str, ...]:
    """One mode, or one for each stage where they differ."""
    return plan.modes[:1] if len({*plan.modes}) == 1 else plan.modes


def _stage_change(before: Plan, after: Plan, j: int) -> StageChange:
    one, other = _stage_figures(before, j), _stage_figures(after, j)
    return StageChange(j, tuple(Change(name, one.get(name), other.get(name)) for name in one or other))


def _stage_figures(plan: Plan, j: int) -> dict[str, ChangeValue]:
    if j >= len(plan.stages):
        return {}
    stage = plan.stages[j]
    return {
        "nodes": len(stage.nodes),
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "parameter_bytes": stage.parameter_bytes,
        "memory_bytes": int(plan.memory(j, b=plan.micro_batch)),
        "sent_bytes": stage.sent_bytes,
    }


def _total_changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    one, other = _plan_totals(before), _plan_totals(after)
    return tuple(Change(name, one[name], other[name]) for name in one)


def _plan_totals(plan: Plan) -> dict[str, ChangeValue]:
    import fxpipe
    from fxpipe.inspect.step_summary import summarize_step

    run = summarize_step(fxpipe.simulate(plan), plan)
    return {
        "step_seconds": run.step_seconds,
        "bubble": run.bubble,
        "peak_bytes": run.peak_bytes,
        "parameter_bytes": sum(stage.parameter_bytes for stage in plan.stages),
        "portal_bytes": sum(portal.bytes for portal in plan.portals),
    }


# -- The text of a difference between two plans ----------------------------------------------------------------------

DIFF_STAGE_HEADERS = ("stage", "nodes", "forward", "backward", "parameters", "memory", "sends")
DIFF_TOTAL_HEADERS = ("", "before", "after", "change")
FIGURE_NAMES = {
    "micro_batch": "samples of a micro-batch",
    "estimated_for": "seconds estimated for",
    "step_seconds": "step",
    "bubble": "bubble",
    "peak_bytes": "peak memory",
    "parameter_bytes": "parameters",
    "portal_bytes": "through portals",
}


def difference_text(difference: PlanDifference, before: str, after: str) -> str:
    """Formats what changes from one plan to the other; `before` and `after` are their names."""
    head = f"from {before} to {after}"
    if difference.is_empty:
        return f"{head}: the same plan"
    graph = (
        "" if difference.has_same_graph else "\nthe graphs differ (model, mode or inputs): nodes are compared by name"
    )
    blocks = [
        head + graph,
        _choices_text(difference.choices),
        _moves_text(difference),
        _totals_table(difference.totals),
        _stages_table(difference.stages),
    ]
    return "\n\n".join(block for block in blocks if block)


def _choices_text(changes: Sequence[Change]) -> str:
    return "\n".join(
        wrap_text(f"{FIGURE_NAMES.get(c.name, c.name)}: {_choice_word(c.before)} -> {_choice_word(c.after)}")
        for c in changes
    )


def _choice_word(value: object) -> str:
    return "measured here" if value == "" else str(value)


def _moves_text(difference: PlanDifference) -> str:
    lines = [_move_line(moved) for moved in sorted(difference.moved, key=lambda moved: -len(moved.nodes))]
    if len(lines) > MAX_LIST_LINES:
        lines[MAX_LIST_LINES:] = [f"and {len(lines) - MAX_LIST_LINES} more such moves"]
    for what, names in (("gone", difference.gone), ("new", difference.new)):
        if names:
            lines.append(f"{what}: {count_text(len(names), 'node')}, {_ends_text(names)}")
    return "\n".join(["moved", *(wrap_text(f"- {line}") for line in lines)]) if lines else "no node moved"


def _move_line(moved: MovedNodes) -> str:
    return (
        f"{count_text(len(moved.nodes), 'node')} from stage {moved.source} to {moved.target}: {_ends_text(moved.nodes)}"
    )


def _ends_text(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{shorten_name(names[0])} ... {shorten_name(names[-1])}"


def _totals_table(totals: Sequence[Change]) -> str:
    rows = [
        (
            FIGURE_NAMES[c.name],
            _figure_text(c.name, c.before),
            _figure_text(c.name, c.after),
            "same" if c.is_same else _share_text(c),
        )
        for c in totals
    ]
    return text_table(rows, DIFF_TOTAL_HEADERS, left=("",))


def _stages_table(stages: Sequence[StageChange]) -> str:
    """Formats the table of the stages in which something changes."""
    rows = [
        (str(s.stage), *map(_change_cell, s.figures)) for s in stages if not all(figure.is_same for figure in s.figures)
    ]
    if not rows:
        return ""
    same = len(stages) - len(rows)
    rest = f"\nand {count_text(same, 'stage')} as before" if same else ""
    return text_table(rows, DIFF_STAGE_HEADERS, left=()) + rest


def _change_cell(change: Change) -> str:
    after = EMPTY_CELL if change.after is None else _figure_text(change.name, change.after)
    if change.is_same:
        return after
    return f"{after} ({'new' if change.before is None else 'gone' if change.after is None else _share_text(change)})"


def _share_text(change: Change) -> str:
    """`+3.1 %`, or how many more where the parts are counted or there were none."""
    assert isinstance(change.before, (int, float)) and isinstance(change.after, (int, float))  # noqa: PT018
    if change.name == "nodes":
        return f"{change.after - change.before:+}"
    if change.name == "bubble":
        return f"{100 * (change.after - change.before):+.1f} points"
    return f"{100 * (change.after / change.before - 1):+.1f} %" if change.before else "was none"


def _figure_text(name: str, value: object) -> str:
    shown: Callable[[float], str] = str
    if name.endswith("_seconds"):
        shown = human_seconds
    elif name.endswith("_bytes"):
        shown = human_bytes
    elif name == "bubble":
        shown = percent
    assert isinstance(value, (int, float))
    return shown(value)
