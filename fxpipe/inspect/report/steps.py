"""The part of a report that hangs on the number of micro-batches: figures, timeline and memory of a step, for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe.inspect.bars import memory_bars
from fxpipe.inspect.gantt import gantt
from fxpipe.inspect.markup import Cell, Table, escaped, missing, number, percent, seconds, size, text
from fxpipe.inspect.report.sections import aside, sortable
from fxpipe.inspect.report.variants import Chunked
from fxpipe.inspect.svg import svg_of
from fxpipe.units import counted, human_bytes, human_seconds

if TYPE_CHECKING:
    from fxpipe.plans import Plan
    from fxpipe.simulation import Simulation

MOST_STAGES = 6  # of which one says how much of the critical path they are


def figures(plan: Plan, simulation: Simulation) -> str:
    """What one asks first."""
    peaks = [memory.peak for memory in simulation.memory]
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    limit = limits(plan)[fullest]
    over = limit is not None and peaks[fullest] > limit
    of = f"of {human_bytes(limit)}, " if limit is not None else ""
    step, samples = simulation.step_seconds, simulation.samples
    rate = f"{samples / step:,.4g} samples a second" if samples and step else ""
    parameters = sum(stage.parameter_bytes for stage in plan.stages)
    found = (
        ("Step", human_seconds(step), rate, False),
        ("Bubble", f"{100 * simulation.mean_bubble:.1f} %", "of device time", False),
        ("Most memory", human_bytes(peaks[fullest]), f"{of}device {fullest}", over),
        ("Parameters", human_bytes(parameters), f"in {counted(len(plan.stages), 'stage')}", False),
        ("Portals", str(len(plan.portals)), human_bytes(sum(portal.bytes for portal in plan.portals)), False),
    )
    return '<dl class="facts">\n' + "\n".join(_figure(*one) for one in found) + "\n</dl>"


def _figure(name: str, value: str, note: str, is_over: bool) -> str:
    warned = ' class="warn"' if is_over else ""
    return f"<div><dt>{escaped(name)}</dt><dd{warned}>{escaped(value)}<small>{escaped(note)}</small></dd></div>"


def limits(plan: Plan) -> list[int | None]:
    """For each device what its stages may take together; None where that is not known of all of them."""
    found: list[int | None] = []
    for worker in range(len(plan.workers)):
        own = [stage.memory_limit for stage in plan.stages if plan.placement[stage.index] == worker]
        known = [limit for limit in own if limit is not None]
        found.append(sum(known) if len(known) == len(own) else None)
    return found


def steps(plan: Plan, chunked: Sequence[Chunked], own: int) -> str:
    """A part for each number of micro-batches, the plan's own to be seen, and the slider, which needs a script."""
    slider = (
        '<div class="chunks" hidden>\n<label for="chunks">Micro-batches</label>\n'
        f'<input id="chunks" type="range" min="0" max="{len(chunked) - 1}" step="1" value="{own}" autocomplete="off">\n'
        f'<output for="chunks">{escaped(_label(chunked[own]))}</output>\n</div>'
    )
    parts = [_part(plan, found, is_own=k == own) for k, found in enumerate(chunked)]
    return "\n".join([*([slider] if len(chunked) > 1 else []), *parts, _overview(chunked, own)])


def _label(found: Chunked) -> str:
    most = "" if found.chunks == 1 else "at most "
    return f"{counted(found.chunks, 'micro-batch', 'es')} of {most}{counted(found.samples, 'sample')}"


def _part(plan: Plan, found: Chunked, is_own: bool) -> str:
    simulation = found.simulation
    names = device_names(simulation)
    bars = memory_bars(names, [memory.at_peak for memory in simulation.memory], limits(plan))
    timeline = gantt_of(simulation)
    parts = (
        figures(plan, simulation),
        f'<figure class="wide" tabindex="0" aria-label="timeline">\n{timeline}</figure>',
        aside(_critical(simulation)),
        "<h3>Memory at its peak</h3>",
        f'<figure class="wide" tabindex="0" aria-label="memory">\n{svg_of(bars)}</figure>',
        "<h3>Devices</h3>",
        _devices(plan, simulation, names),
        _links(simulation, names),
    )
    hidden = "" if is_own else " hidden"
    label = escaped(_label(found))
    return f'<div data-chunks="{found.chunks}" data-label="{label}"{hidden}>\n' + "\n".join(parts) + "\n</div>"


def gantt_of(simulation: Simulation) -> str:
    from fxpipe.steps import step_of

    return svg_of(gantt(step_of(simulation)).scene)


def device_names(simulation: Simulation) -> list[str]:
    return [f"{d}: {name}" if name else str(d) for d, name in enumerate(simulation.devices)]


def _critical(simulation: Simulation) -> str:
    """What would have to be faster for the step to be."""
    path = simulation.critical_path
    spent: Counter[int] = Counter()
    for span in path:
        spent[span.action.stage] += span.seconds  # type: ignore[assignment]
    total = simulation.step_seconds or 1.0
    shares = [f"{100 * time / total:.0f} % in stage {stage}" for stage, time in spent.most_common(MOST_STAGES)]
    others = f", and {len(spent) - MOST_STAGES} more stages" if len(spent) > MOST_STAGES else ""
    return f"The critical path, which decides how long the step is: {', '.join(shares)}{others}."


def _devices(plan: Plan, simulation: Simulation, names: Sequence[str]) -> str:
    headers = (
        "device", "stages", "busy", "bubble", "memory", "limit", "parameters", "gradients", "optimizer", "activations",
        "portals", "working",
    )  # fmt: skip
    rows = []
    for d, (memory, limit) in enumerate(zip(simulation.memory, limits(plan), strict=True)):
        parts = memory.at_peak
        stages = ", ".join(str(stage.index) for stage in plan.stages if plan.placement[stage.index] == d)
        held = (parts.parameters, parts.gradients, parts.optimizer, parts.activations, parts.portals, parts.working)
        rows.append(
            (
                Cell(names[d], d),
                text(stages),
                seconds(simulation.busy[d]),
                percent(simulation.bubble[d]),
                size(memory.peak),
                missing() if limit is None else size(limit),
                *map(size, held),
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


def _overview(chunked: Sequence[Chunked], own: int) -> str:
    if len(chunked) == 1:
        return ""
    best = min(found.simulation.step_seconds for found in chunked)
    rows = tuple(
        (
            number(found.chunks, "the plan's" if k == own else ""),
            number(found.samples),
            Cell(
                human_seconds(found.simulation.step_seconds),
                found.simulation.step_seconds,
                is_marked=found.simulation.step_seconds == best,
            ),
            percent(found.simulation.mean_bubble),
            size(max(memory.peak for memory in found.simulation.memory)),
        )
        for k, found in enumerate(chunked)
    )
    headers = ("micro-batches", "samples in one", "step", "bubble", "most memory")
    return "<h3>Numbers of micro-batches compared</h3>\n" + sortable(Table(headers, rows), "micro-batches")
