"""The document: what the tables show and what they leave out, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fxpipe.inspect.step_summary import StepSummary
from fxpipe.planning.plans.figures import StageFigures, plan_figures, size_figures

if TYPE_CHECKING:
    from fxpipe.inspect.run import Findings
    from fxpipe.planning.plans import Plan
    from fxpipe.simulation import Simulation


def findings_document(findings: Findings) -> dict[str, Any]:
    """Makes JSON-able data of all findings. Keys stay; new ones may come. Units are seconds and bytes.

    The keys of `plan_document`, where there is a plan, and
        inputs               list of texts, as for --input: inputs that were drawn, as none were given
        simulation           of a step: see `simulation_document`
        schedules            list of the same stages in several schedules, the simulated one first: each
            schedule, micro_batches, checkpoint, step_seconds, bubble
            device           the number of the device that comes closest to its limit, or is furthest over it
            peak_bytes, limit_bytes, over_bytes                   of that device; the limit is null if none is known
        sweep                with --sweep, list of numbers of devices and schedules: each
            devices, schedule
            run              as in `schedules`; null where there is no such plan
            speedup          over one device; null where one device cannot do it
            fits, over_bytes into memory, and by how much not
            problem          text: why there is no plan, where memory is not the reason; else empty
        tuning               with --tune, list of what was tried; the plan is then the best of them: each
            schedule, chunks, stages_per_device, checkpoint
            data_parallel    replicas
            mesh             list of dimensions, as in `simulation_document`
            step_seconds     simulated; of one that was not cut, what it takes at least
            measured_seconds null if it was not run
            peak_bytes       on the device that holds most
            fits, over_bytes
            problem          text: why it was not cut; else empty
    """
    document: dict[str, Any] = {} if findings.plan is None else plan_document(findings.plan)
    document["inputs"] = list(map(str, findings.drawn))
    if findings.plan is not None and findings.simulation is not None:
        document["simulation"] = simulation_document(findings.simulation)
        document["schedules"] = list(map(_summary_values, findings.schedules))
    if findings.sweep:
        document["sweep"] = [
            _values(row, "devices schedule speedup fits problem")
            | {"run": row.run and _summary_values(row.run), "over_bytes": round(row.over_bytes)}
            for row in findings.sweep
        ]
    if findings.tuning is not None:
        names = "schedule chunks stages_per_device data_parallel mesh checkpoint step_seconds measured_seconds fits"
        document["tuning"] = [
            _values(row, names)
            | {"peak_bytes": round(row.peak), "over_bytes": round(max(0.0, row.lacks)), "problem": row.why}
            for row in findings.tuning.rows
        ]
    return document


def _values(source: object, names: str) -> dict[str, Any]:
    """The attributes of these names; tuples are lists, as in JSON."""
    values = {name: getattr(source, name) for name in names.split()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _summary_values(run: StepSummary) -> dict[str, Any]:
    return asdict(run) | {"over_bytes": run.over_bytes}


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able data. Keys stay; new ones may come. Units are seconds and bytes.

    Of the plan:
        chunks               micro-batches of a step, as asked for
        micro_batches        those that there are: fewer where the mini-batch has fewer samples
        micro_batch          samples in the largest of them, for which the seconds and bytes of a stage are given
        estimated_for        the hardware for which the seconds were estimated; empty where they were measured
        schedule, balance, tracer, fingerprint                    as in `fxpipe.Plan`
        checkpoint           a mode, or a list with the mode of each stage
        why                  list of texts: how the tracer came to this graph, where that is not plain recording
        guards               list of texts: values that forward read; with other ones another graph runs
        sizes                list of {name, size, least, most, largest, dims}: sizes besides the batch that may differ
                             from batch to batch; seconds and bytes are given for `size`, the graph holds from `least`
                             to `most` (null: any), memory limits are asked at `largest`, `dims` are texts
        sizes_compared       list of the same stages at several of these sizes: each
            sizes            by name
            step_seconds, slowest_to_mean
            slowest          the slowest stage
            shares           list: of each stage in the seconds of all
            memory_bytes     of the stage that needs most
            fullest          that stage
            over_bytes       over its limit, of the stage that is furthest; null if no limit is known
        devices              list of names, one for each entry of `devices`: its place is the number of the device
        placement            list: for each stage the number of its device, of several replicas in turn of the first
        replicas             list: for each stage the devices that have it. Equal numbers are replicas of the pipeline;
                             those of unequal ones take micro-batches in turn
        stages               list, in order, of
            index, device
            nodes            list of node names in the order in which they run
            code             text, for people
            forward_seconds, backward_seconds, flops              of one micro-batch
            loss_seconds                                          of the loss, in each F of the last stage
            parameter_bytes  of the stage
            gradient_bytes   of the parameters' gradients
            state_bytes      of gradients and of the optimizer's state
            activation_bytes kept for backward of one micro-batch
            checkpoint       its mode
            copies           list of nodes that it computes for itself, though another stage does so too
            sent_bytes       to the next stage for one micro-batch, portals not counted
            in_flight        micro-batches that have gone forward and not yet back, at most
            memory_bytes     at most at one time, of all that
            memory_limit     bytes that it may take; null where none is known
            memory_formula   text: `memory_bytes` in the samples `b` of a micro-batch, and the sizes
        portals              list of {name, source, target, bytes, formula, line}: two stages, bytes of one micro-batch,
                             the same as text in `b` and the sizes, and the user's line; empty where not known
        sendings             list of {source, target, bytes, seconds}: all that goes from one stage to another for one
                             micro-batch; to a later one values, to an earlier one gradients
        processes            true where each device has a process of its own
        packets              list of {source, target, bytes, relayed_bytes, seconds}: over processes, all that crosses a
                             cut for one micro-batch, and what of it only passes through; null if not known
        tied                 list of {names, stages, bytes}: parameters with several names, or in several stages
        whole                list of {name, why, line}: modules that are one node
        heaviest             {name, stage, seconds, line}: the node that no cut can divide; null if not known
        bottlenecks          list of {balance, seconds, fits}: of the slowest stage, by each way of cutting compared
        totals
            slowest_to_mean  forward and backward seconds of the slowest device over those of the mean device
            bubble           share of the device time of a step that is idle
            device_bubbles   the same for each device
            step_seconds     as simulated: all micro-batches forward and backward, and what is sent
            parameter_bytes  of all stages
    """
    figures = plan_figures(plan)
    names = "chunks micro_batches micro_batch estimated_for schedule checkpoint balance tracer fingerprint why guards"
    sizes = map(size_figures, plan.at_sizes() if plan.sizes else ())
    return {
        **_values(plan, names),
        "sizes": [asdict(one) | {"dims": list(one.dims)} for one in plan.sizes],
        "sizes_compared": [asdict(row) | {"shares": list(row.shares)} for row in sizes],
        "devices": list(plan.row_devices),
        "placement": [stage.rows[0] for stage in figures.stages],
        "replicas": list(plan.replicas),
        "stages": [_stage_values(plan, stage) for stage in figures.stages],
        "portals": [
            _values(portal, "name source target bytes line") | {"formula": str(portal.size) if portal.size else ""}
            for portal in plan.portals
        ],
        "sendings": [_values(one, "source target bytes seconds") for one in plan.sendings],
        "processes": plan.is_over_processes,
        "packets": None
        if plan.packets is None
        else [
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
            "bubble": figures.mean_bubble,
            "device_bubbles": list(figures.bubble),
            "step_seconds": figures.step_seconds,
            "parameter_bytes": sum(stage.parameter_bytes for stage in plan.stages),
        },
    }


def _stage_values(plan: Plan, figures: StageFigures) -> dict[str, Any]:
    stage = figures.stage
    names = (
        "index device nodes code forward_seconds backward_seconds loss_seconds parameter_bytes gradient_bytes "
        "state_bytes activation_bytes copies sent_bytes memory_limit"
    )
    return _values(stage, names) | {
        "flops": stage.flops.at(plan.here),
        "checkpoint": figures.mode,
        "in_flight": figures.in_flight,
        "memory_bytes": figures.memory_bytes,
        "memory_formula": str(plan.memory(stage.index)),
    }


def simulation_document(simulation: Simulation) -> dict[str, Any]:
    """A simulated step.

    schedule, micro_batches
    step_seconds         of a stream: of a mini-batch in the steady state, with its update, as bubble, devices and sent
    stream               of what was simulated to that end; null for a step
        mini_batches     from an empty pipe to an empty one
        first, last      from the update of one to that of the other is measured
        warm_up_seconds  until all devices are at work
        drain_seconds    since the first of them has nothing to do any more
    samples              of the mini-batch; null if not known
    update_seconds       of the optimizer, after the step; 0 if not known
    bubble               share of the device time of the step that is idle
    devices              list, in order, of
        device           its name
        busy_seconds, bubble
        peak_bytes       at most at one time
        peak             what they are: {parameters, gradients, optimizer, activations, portals, working}
        limit_bytes      null where none is known
    sent                 list of {source, target, bytes}: from device to device, in the whole step
    host_seconds         in which the interpreter's lock is held: no step is shorter
    cluster              where the devices stand; null where no hardware was given
        nodes, devices_per_node
        pipe             devices of a replica
        data             replicas
        mesh             list of these dimensions, the outer one first
    traffic              bytes of a step of all replicas; null where no hardware was given
        within_nodes     {pipeline, reduction}: values and gradients between stages; gradients between replicas
        between_nodes    the same
    reduction_seconds    of gradients over the replicas, on the device where it takes longest
    exposed_reduction_seconds                                     of the step, after its last action
    reductions           list of {stage, device, bytes, seconds, start, end}
    critical_shares      what the step depends on: of F, R, B, W, U, "sending", "waiting" (for a link), "host" (Python
                         of the workers) and "reducing" the share of the step, as a map
    critical_path        list of texts: these actions in order, as in `1F0`, stage 1, forward, micro-batch 0
    """
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
