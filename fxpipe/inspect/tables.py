"""The text of a plan: a table of its stages, a table of its portals, the totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from fxpipe.inspect.figures import PlanFigures, StageFigures, plan_figures
from fxpipe.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from fxpipe.plans import Plan, Portal, StagePlan

MOST_PORTALS = 20  # rows; a dense network has hundreds, and its largest are what one looks for
MOST_LINES = 10  # of a list
MOST_NAME = 48  # characters

STAGE_HEADERS = (
    "stage", "device", "nodes", "parameters", "forward", "backward", "in\nflight", "memory", "sends", "portals\nin",
    "portals\nout",
)  # fmt: skip
PORTAL_HEADERS = ("portal", "from", "to", "bytes")
NOTHING = "-"


def plan_table(plan: Plan) -> str:
    """The plan as it prints. Seconds and bytes are those of one micro-batch; memory is a step's (`Plan.memory`)."""
    figures = plan_figures(plan)
    blocks = [_head(plan), _stage_table(plan, figures)]
    if plan.portals:
        blocks.append(_portal_table(plan.portals))
    return "\n\n".join([*blocks, *_lists(plan), _totals(plan, figures)])


def shortened(name: str, length: int = MOST_NAME) -> str:
    """At most `length` characters; the middle goes, since names begin with a module path and end with a number."""
    if len(name) <= length:
        return name
    tail = (length - 3) // 2
    return f"{name[: length - 3 - tail]}...{name[-tail:]}"


def _head(plan: Plan) -> str:
    samples = f"{plan.micro_batch} sample{'' if plan.micro_batch == 1 else 's'}"
    most = "" if plan.micro_batches == 1 else "at most "
    workers = f" on {_count(len(plan.workers), 'worker')}" if len(plan.workers) < len(plan.stages) else ""
    name = plan.schedule.partition(":")[0]  # in front of a table of the user's own
    micro_batches = f"{_count(plan.micro_batches, 'micro-batch', 'es')} of {most}{samples}"
    return (
        f"{_count(len(plan.stages), 'stage')}{workers}, {micro_batches}\n"
        f"schedule {name}, checkpoint {_checkpoint(plan)}, balance {plan.balance}, tracer {plan.tracer}, "
        f"graph {plan.fingerprint[:12]}"
        + (f"\nseconds are estimates for {plan.estimated_for}" if plan.estimated_for else "")
        + (f"\nslowest stage {_bottlenecks(plan)}" if plan.bottlenecks else "")
    )


def _bottlenecks(plan: Plan) -> str:
    """What a step waits for, by the ways of cutting that were compared."""
    return ", ".join(
        f"{human_seconds(found.seconds)} by {found.balance}" + ("" if found.fits else ", which does not fit")
        for found in plan.bottlenecks
    )


def _checkpoint(plan: Plan) -> str:
    """One mode, or those of the stages in a row."""
    return plan.checkpoint if isinstance(plan.checkpoint, str) else ",".join(plan.checkpoint)


def _stage_table(plan: Plan, figures: PlanFigures) -> str:
    rows = [_stage_row(plan, stage, found) for stage, found in zip(plan.stages, figures.stages, strict=True)]
    return _table(rows, STAGE_HEADERS, left=("device",))


def _stage_row(plan: Plan, stage: StagePlan, figures: StageFigures) -> tuple[str, ...]:
    return (
        str(stage.index),
        stage.device,
        str(len(stage.nodes)),
        human_bytes(stage.parameter_bytes),
        human_seconds(stage.forward_seconds),
        human_seconds(stage.backward_seconds),
        str(plan.in_flight(stage.index)),
        _memory_cell(stage, figures),
        human_bytes(stage.sent_bytes) if stage.sent_bytes else NOTHING,
        _portal_cell(figures.portals_in),
        _portal_cell(figures.portals_out),
    )


def _memory_cell(stage: StagePlan, figures: StageFigures) -> str:
    of = f" of {human_bytes(stage.memory_limit)}" if stage.memory_limit is not None else ""
    return human_bytes(figures.memory_bytes) + of


def _portal_cell(portals: tuple[Portal, ...]) -> str:
    return f"{len(portals)} ({human_bytes(sum(portal.bytes for portal in portals))})" if portals else NOTHING


def _portal_table(portals: tuple[Portal, ...]) -> str:
    """All portals as the plan has them or, where they are many, the largest of them and the sum of the others."""
    shown, rest = portals, ""
    if len(portals) > MOST_PORTALS:
        by_size = sorted(portals, key=lambda portal: -portal.bytes)
        shown, others = tuple(by_size[:MOST_PORTALS]), by_size[MOST_PORTALS:]
        total = human_bytes(sum(portal.bytes for portal in others))
        rest = f"\nand {_count(len(others), 'smaller portal')}, {total} together"
    rows = [(shortened(p.name), str(p.source), str(p.target), human_bytes(p.bytes)) for p in shown]
    return _table(rows, PORTAL_HEADERS, left=("portal",)) + rest


def _lists(plan: Plan) -> list[str]:
    """Formulas; how the graph came to be, where that is not plain recording; the values of inputs that it holds for."""
    memory = tuple(f"stage {stage.index}: {plan.memory(stage.index)}" for stage in plan.stages)
    lists = (
        ("memory in bytes, with micro-batches of b samples", memory),
        ("how it was traced", plan.why),
        ("holds where (asked once for each mini-batch)", plan.guards),
    )
    return ["\n".join([head, *_items(lines)]) for head, lines in lists if lines]


def _items(lines: Sequence[str]) -> list[str]:
    items = [f"- {line}" for line in lines[:MOST_LINES]]
    return items + ([f"- and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else [])


def _totals(plan: Plan, figures: PlanFigures) -> str:
    parameters = human_bytes(sum(stage.parameter_bytes for stage in plan.stages))
    return (
        f"balance {figures.slowest_to_mean:.2f} (slowest stage / mean), bubble {100 * figures.mean_bubble:.1f} % "
        f"of device time, step {human_seconds(figures.step_seconds)}, parameters {parameters}"
    )


def _table(rows: Sequence[tuple[str, ...]], headers: tuple[str, ...], left: tuple[str, ...]) -> str:
    alignment = ["left" if header in left else "right" for header in headers]
    # Cells are text already: left to itself, tabulate would read a node named `1e5` as a number.
    return tabulate(rows, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
