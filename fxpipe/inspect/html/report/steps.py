"""The part of a report that hangs on the number of micro-batches: figures, timeline and memory of a step, for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe import units
from fxpipe.drawing.colours import MEMORY
from fxpipe.drawing.markup import Cell, Table, missing, number, percent, seconds, size, text
from fxpipe.drawing.svg import escaped, svg_of
from fxpipe.inspect.html.bars import memory_bars
from fxpipe.inspect.html.report.sections import OUTCOME, aside, least_step, outcome, sortable
from fxpipe.inspect.html.report.variants import Chunked
from fxpipe.inspect.tables.comparing import run_of
from fxpipe.timelines.gantt import gantt
from fxpipe.timelines.pages import timeline_figure
from fxpipe.units import counted, human_bytes, human_seconds, three_digits

if TYPE_CHECKING:
    from fxpipe.plans import Plan
    from fxpipe.simulation import Simulation
    from fxpipe.timelines import Parts

MOST_SHARES, LEAST_SHARE = 6, 0.03  # of the critical path that are named


def figures(plan: Plan, simulation: Simulation, memory: Sequence[Parts]) -> str:
    """What one asks first. `memory`: of each device at its peak."""
    peaks = [parts.total for parts in memory]
    lacks = [0.0 if limit is None else peak - limit for peak, limit in zip(peaks, simulation.limits, strict=True)]
    over = max(lacks) > 0
    fullest = max(range(len(peaks)), key=(lacks if over else peaks).__getitem__)
    limit = simulation.limits[fullest]
    of = f"of {human_bytes(limit)}, " if limit is not None else ""
    step, samples = simulation.step_seconds, simulation.samples
    rate = f"{three_digits(samples / step)} samples a second" if samples and step else ""
    parameters = sum(stage.parameter_bytes for stage in plan.stages)
    update = f"{human_seconds(simulation.update_seconds)} of updates after it" if simulation.update_seconds else ""
    found = [
        ("Step", human_seconds(step), ", ".join(filter(None, (rate, update))), False),
        ("Bubble", units.percent(simulation.mean_bubble), "of device time", False),
        ("Most memory", human_bytes(peaks[fullest]), f"{of}device {fullest}", over),
        ("Parameters", human_bytes(parameters), f"in {counted(len(plan.stages), 'stage')}", False),
    ]
    if plan.portals:
        found.append(("Portals", str(len(plan.portals)), "values that skip stages", False))
    return '<dl class="facts">\n' + "\n".join(_figure(*one) for one in found) + "\n</dl>"


def _figure(name: str, value: str, note: str, is_over: bool) -> str:
    warned = ' class="warn"' if is_over else ""
    return f"<div><dt>{escaped(name)}</dt><dd{warned}>{escaped(value)}<small>{escaped(note)}</small></dd></div>"


def steps(plan: Plan, chunked: Sequence[Chunked], own: int) -> str:
    """A part for each number of micro-batches, the plan's own to be seen, and the slider, which needs a script."""
    slider = (
        '<div class="chunks" hidden>\n<label for="chunks">Micro-batches</label>\n'
        f'<input id="chunks" type="range" min="0" max="{len(chunked) - 1}" step="1" value="{own}" autocomplete="off">\n'
        f'<output for="chunks">{escaped(_label(chunked[own]))}</output>\n</div>'
    )
    parts = [_part(plan, found, is_own=k == own) for k, found in enumerate(chunked)]
    return "\n".join([*([slider] if len(chunked) > 1 else []), *parts, _overview(plan, chunked, own)])


def _label(found: Chunked) -> str:
    most = "" if found.chunks == 1 else "at most "
    return f"{counted(found.chunks, 'micro-batch', 'es')} of {most}{counted(found.samples, 'sample')}"


def _part(plan: Plan, found: Chunked, is_own: bool) -> str:
    simulation = found.simulation
    names = device_names(simulation)
    memory = [found.at_peak for found in simulation.memory]
    bars = memory_bars(names, memory, simulation.limits)
    step = simulation.as_step()
    parts = (
        figures(plan, simulation, memory),
        f'<div class="wide">\n{timeline_figure(step, gantt(step))}\n</div>',
        aside(_critical(simulation)),
        "<h3>Memory at its peak</h3>",
        f'<figure class="wide" tabindex="0" aria-label="memory">\n{svg_of(bars)}</figure>',
        "<h3>Devices</h3>",
        _devices(plan, simulation, memory, names),
        _links(simulation, names),
    )
    hidden = "" if is_own else " hidden"
    label = escaped(_label(found))
    return f'<div data-chunks="{found.chunks}" data-label="{label}"{hidden}>\n' + "\n".join(parts) + "\n</div>"


def device_names(simulation: Simulation) -> list[str]:
    return [f"{d}: {name}" if name else str(d) for d, name in enumerate(simulation.devices)]


def _critical(simulation: Simulation) -> str:
    """What would have to be faster for the step to be."""
    spent: defaultdict[str, float] = defaultdict(float)
    for leg in simulation.legs:
        what = leg.kind if leg.kind in ("sending", "waiting") else f"in stage {leg.span.action.stage}"
        spent[what] += leg.seconds
    total = simulation.step_seconds or 1.0
    named = [what for what in sorted(spent, key=lambda what: -spent[what]) if spent[what] > LEAST_SHARE * total]
    shares = [f"{100 * spent[what] / total:.0f} % {what}" for what in named[:MOST_SHARES]]
    others = 1 - sum(spent[what] for what in named[:MOST_SHARES]) / total
    rest = [f"{100 * others:.0f} % others"] if others > 0.005 else []
    return f"Of the critical path, which decides how long the step is: {', '.join([*shares, *rest])}."


def _devices(plan: Plan, simulation: Simulation, memory: Sequence[Parts], names: Sequence[str]) -> str:
    has_limits = any(limit is not None for limit in simulation.limits)
    headers = ("device", "stages", "busy", "bubble", "memory", *["limit"] * has_limits, *MEMORY)
    rows = []
    busy, bubble = simulation.busy, simulation.bubble
    for d, (parts, limit) in enumerate(zip(memory, simulation.limits, strict=True)):
        stages = ", ".join(str(stage.index) for stage in plan.stages if plan.placement[stage.index] == d)
        limits = [missing() if limit is None else size(limit)] * has_limits
        rows.append(
            (
                Cell(names[d], d),
                text(stages),
                seconds(busy[d]),
                percent(bubble[d]),
                size(parts.total),
                *limits,
                *(size(getattr(parts, part)) for part in MEMORY),
            )
        )
    return sortable(Table(headers, tuple(rows)), "devices")


def _links(simulation: Simulation, names: Sequence[str]) -> str:
    rows = tuple(
        (Cell(names[source], source), Cell(names[target], target), size(sent))
        for (source, target), sent in simulation.sent.items()
        if sent
    )
    return "<h3>Sent in a step</h3>\n" + sortable(Table(("from", "to", "bytes"), rows), "links") if rows else ""


def _overview(plan: Plan, chunked: Sequence[Chunked], own: int) -> str:
    if len(chunked) == 1:
        return ""
    runs = [run_of(found.simulation, plan) for found in chunked]
    least = least_step(runs)
    rows = tuple(
        (number(found.chunks, "the plan's" if k == own else ""), number(found.samples), *outcome(runs[k], least))
        for k, found in enumerate(chunked)
    )
    table = sortable(Table(("micro-batches", "samples in one", *OUTCOME), rows), "micro-batches")
    return "<h3>Numbers of micro-batches compared</h3>\n" + table
