"""The text of a difference between two plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpipe.drawing.columns import MOST_LINES, NOTHING, shortened, table, wrapped
from fxpipe.inspect.tables.diff import Change, Difference, Moved, StageChange
from fxpipe.units import counted, human_bytes, human_seconds, percent

STAGE_HEADERS = ("stage", "nodes", "forward", "backward", "parameters", "memory", "sends")
TOTAL_HEADERS = ("", "before", "after", "change")
NAMES = {
    "micro_batch": "samples of a micro-batch",
    "estimated_for": "seconds estimated for",
    "step_seconds": "step",
    "bubble": "bubble",
    "peak_bytes": "peak memory",
    "parameter_bytes": "parameters",
    "portal_bytes": "through portals",
}


def difference_text(found: Difference, before: str, after: str) -> str:
    """What changes from one plan to the other; `before` and `after` are what they are called."""
    head = f"from {before} to {after}"
    if found.is_nothing:
        return f"{head}: the same plan"
    graph = "" if found.is_one_graph else "\nthe graphs differ (model, mode or inputs): nodes are compared by name"
    blocks = [head + graph, _choices(found.choices), _moves(found), _totals(found.totals), _stages(found.stages)]
    return "\n\n".join(block for block in blocks if block)


def _choices(changes: Sequence[Change]) -> str:
    return "\n".join(wrapped(f"{NAMES.get(c.name, c.name)}: {_word(c.before)} -> {_word(c.after)}") for c in changes)


def _word(value: object) -> str:
    return "measured here" if value == "" else str(value)


def _moves(found: Difference) -> str:
    lines = [_moved(moved) for moved in sorted(found.moved, key=lambda moved: -len(moved.nodes))]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more such moves"]
    for what, names in (("gone", found.gone), ("new", found.new)):
        if names:
            lines.append(f"{what}: {counted(len(names), 'node')}, {_ends(names)}")
    return "\n".join(["moved", *(wrapped(f"- {line}") for line in lines)]) if lines else "no node moved"


def _moved(moved: Moved) -> str:
    return f"{counted(len(moved.nodes), 'node')} from stage {moved.source} to {moved.target}: {_ends(moved.nodes)}"


def _ends(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{shortened(names[0])} ... {shortened(names[-1])}"


def _totals(totals: Sequence[Change]) -> str:
    rows = [
        (NAMES[c.name], _figure(c.name, c.before), _figure(c.name, c.after), "same" if c.is_same else _share(c))
        for c in totals
    ]
    return table(rows, TOTAL_HEADERS, left=("",))


def _stages(stages: Sequence[StageChange]) -> str:
    """Only stages in which something changes."""
    rows = [(str(s.stage), *map(_cell, s.figures)) for s in stages if not all(figure.is_same for figure in s.figures)]
    if not rows:
        return ""
    same = len(stages) - len(rows)
    rest = f"\nand {counted(same, 'stage')} as before" if same else ""
    return table(rows, STAGE_HEADERS, left=()) + rest


def _cell(change: Change) -> str:
    after = NOTHING if change.after is None else _figure(change.name, change.after)
    if change.is_same:
        return after
    return f"{after} ({'new' if change.before is None else 'gone' if change.after is None else _share(change)})"


def _share(change: Change) -> str:
    """`+3.1 %`, or how many more where the parts are counted or there were none."""
    assert isinstance(change.before, (int, float)) and isinstance(change.after, (int, float))  # noqa: PT018
    if change.name == "nodes":
        return f"{change.after - change.before:+}"
    if change.name == "bubble":
        return f"{100 * (change.after - change.before):+.1f} points"
    return f"{100 * (change.after / change.before - 1):+.1f} %" if change.before else "was none"


def _figure(name: str, value: object) -> str:
    shown: Callable[[float], str] = str
    if name.endswith("_seconds"):
        shown = human_seconds
    elif name.endswith("_bytes"):
        shown = human_bytes
    elif name == "bubble":
        shown = percent
    assert isinstance(value, (int, float))
    return shown(value)
