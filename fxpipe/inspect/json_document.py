"""The results of the command, as data and as a JSON document for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxpipe.inspect.step_summary import Outcome, StepSummary
from fxpipe.inspect.targets import InputOption
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.figures import plan_figures
from fxpipe.planning.tuning.candidates import Tuning
from fxpipe.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Inspection:
    """The results of the command; None or empty if not requested."""

    name: str  # the target
    plan: Plan | None = None  # None: it does not fit, but a sweep was requested
    simulation: Simulation | None = None  # a step of the plan
    schedules: tuple[StepSummary, ...] = ()  # the plan's schedule first
    drawn: tuple[InputOption, ...] = ()  # random inputs, if none were given
    sweep: tuple[Outcome, ...] = ()
    tuning: Tuning | None = None  # its best candidate is the plan


def inspection_document(inspection: Inspection) -> dict[str, Any]:
    """Returns an inspection as JSON-able data, with the keys of docs/inspect.md."""
    document: dict[str, Any] = {} if inspection.plan is None else plan_document(inspection.plan)
    document["inputs"] = list(map(str, inspection.drawn))
    if inspection.plan is not None and inspection.simulation is not None:
        document["simulation"] = simulation_document(inspection.simulation)
        document["schedules"] = list(map(_summary_values, inspection.schedules))
    if inspection.sweep:
        document["sweep"] = [
            _values(row, "devices schedule speedup fits problem")
            | {"run": row.run and _summary_values(row.run), "over_bytes": round(row.over_bytes)}
            for row in inspection.sweep
        ]
    if inspection.tuning is not None:
        names = "schedule chunks stages_per_device data_parallel mesh checkpoint step_seconds fits"
        document["tuning"] = [
            _values(row, names)
            | {"peak_bytes": round(row.peak), "over_bytes": round(max(0.0, row.lacks)), "problem": row.why}
            for row in inspection.tuning.rows
        ]
    return document


def _values(source: object, names: str) -> dict[str, Any]:
    """Returns the attributes of these names, with tuples as lists."""
    values = {name: getattr(source, name) for name in names.split()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _summary_values(run: StepSummary) -> dict[str, Any]:
    return asdict(run) | {"over_bytes": run.over_bytes}


def plan_document(plan: Plan) -> dict[str, Any]:
    """Returns a plan as JSON-able data, with the keys of docs/inspect.md."""
    figures = plan_figures(plan)
    names = "chunks micro_batches micro_batch estimated_for schedule checkpoint balance fingerprint why guards"
    stage_names = (
        "index device nodes code forward_seconds backward_seconds loss_seconds parameter_bytes gradient_bytes "
        "state_bytes activation_bytes sent_bytes memory_limit"
    )
    size_names = "sizes step_seconds slowest_to_mean slowest shares memory_bytes fullest over_bytes"
    return {
        **_values(plan, names),
        "sizes": [asdict(one) | {"dims": list(one.dims)} for one in plan.sizes],
        "sizes_compared": [_values(plan_figures(one), size_names) for one in (plan.at_sizes() if plan.sizes else ())],
        "devices": list(plan.row_devices),
        "placement": [stage.rows[0] for stage in figures.stages],
        "replicas": list(plan.replicas),
        "stages": [
            {
                **_values(own.stage, stage_names),
                "flops": own.stage.flops.at(plan.here),
                "checkpoint": own.mode,
                "in_flight": own.in_flight,
                "memory_bytes": own.memory_bytes,
                "memory_formula": str(plan.memory(own.stage.index)),
            }
            for own in figures.stages
        ],
        "portals": [
            _values(portal, "name source target bytes line") | {"formula": str(portal.size) if portal.size else ""}
            for portal in plan.portals
        ],
        "sendings": [_values(one, "source target bytes seconds") for one in plan.sendings],
        "processes": plan.is_over_processes,
        "packets": [
            _values(packet, "source target bytes")
            | {"relayed_bytes": packet.relayed.at(plan.here), "seconds": packet.seconds + 2 * packet.handling}
            for packet in plan.packets
        ],
        "tied": [_values(one, "names stages bytes") for one in plan.tied],
        "whole": [_values(one, "name why line") for one in plan.whole],
        "heaviest": plan.heaviest and _values(plan.heaviest, "name stage seconds line"),
        "bottlenecks": list(map(asdict, plan.bottlenecks)),
        "totals": {
            "slowest_to_mean": figures.slowest_to_mean,
            "bubble": figures.simulation.mean_bubble,
            "device_bubbles": list(figures.simulation.bubble),
            "step_seconds": figures.simulation.step_seconds,
            "parameter_bytes": sum(stage.parameter_bytes for stage in plan.stages),
        },
    }


def simulation_document(simulation: Simulation) -> dict[str, Any]:
    """Returns a simulated step as JSON-able data, with the keys of docs/inspect.md."""
    steady, cluster, traffic = simulation.steady, simulation.cluster, simulation.traffic
    names = "step_seconds micro_batches samples update_seconds host_seconds reduction_seconds exposed_reduction_seconds"
    devices = zip(
        simulation.devices, simulation.busy, simulation.bubble, simulation.memory, simulation.limits, strict=True
    )
    return {
        **_values(simulation, names),
        "schedule": simulation.schedule.name,
        "stream": steady
        and _values(steady, "mini_batches first last")
        | {"warm_up_seconds": steady.warm_up, "drain_seconds": steady.drain},
        "bubble": simulation.mean_bubble,
        "devices": [
            {
                "device": name,
                "busy_seconds": busy,
                "bubble": bubble,
                "peak_bytes": round(memory.peak),
                "peak": _rounded(asdict(memory.at_peak)),
                "limit_bytes": limit,
            }
            for name, busy, bubble, memory, limit in devices
        ],
        "sent": [
            {"source": source, "target": target, "bytes": round(size)}
            for (source, target), size in simulation.sent.items()
        ],
        "cluster": cluster and _values(cluster, "nodes devices_per_node pipe data mesh"),
        "traffic": traffic
        and {
            name: _rounded(asdict(link)) for name, link in zip(("within_nodes", "between_nodes"), traffic, strict=True)
        },
        "reductions": [_values(one, "stage device bytes seconds start end") for one in simulation.reductions],
        "critical_shares": simulation.critical_shares,
        "critical_path": [str(span.action) for span in simulation.critical_path],
    }


def _rounded(sizes: dict[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}
