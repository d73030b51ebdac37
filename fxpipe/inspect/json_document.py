"""All findings of the command, as data and as a JSON document for programs."""

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
class Findings:
    """The findings of the command; None or empty if not requested."""

    name: str  # the target
    plan: Plan | None = None  # None: it does not fit, but a sweep was requested
    simulation: Simulation | None = None  # a step of the plan
    schedules: tuple[StepSummary, ...] = ()  # the plan's schedule first
    drawn: tuple[InputOption, ...] = ()  # random inputs, if none were given
    sweep: tuple[Outcome, ...] = ()
    tuning: Tuning | None = None  # its best candidate is the plan


def findings_document(findings: Findings) -> dict[str, Any]:
    """Returns all findings as JSON-able data. Keys are stable; new keys may be added. Units are seconds and bytes.

    The keys of `plan_document`, if there is a plan, and
        inputs               list of texts, as for --input: inputs drawn at random, if none were given
        simulation           a step: see `simulation_document`
        schedules            list: the same stages in several schedules, the plan's schedule first
            schedule, micro_batches, checkpoint, step_seconds, bubble
            device           the number of the device closest to its limit, or furthest over it
            peak_bytes, limit_bytes, over_bytes                   for that device; the limit is null if not known
        sweep                with --sweep, list over numbers of devices and schedules
            devices, schedule
            run              as in `schedules`; null if there is no such plan
            speedup          over one device; null if the model does not run on one device
            fits             true if the plan fits into memory
            over_bytes       bytes over the limit
            problem          text: why there is no plan, if memory is not the reason; else empty
        tuning               with --tune, list of candidates; the plan is the best candidate
            schedule, chunks, stages_per_device, checkpoint
            data_parallel    replicas
            mesh             list of dimensions, as in `simulation_document`
            step_seconds     simulated; a lower bound if the candidate was not cut
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
        names = "schedule chunks stages_per_device data_parallel mesh checkpoint step_seconds fits"
        document["tuning"] = [
            _values(row, names)
            | {"peak_bytes": round(row.peak), "over_bytes": round(max(0.0, row.lacks)), "problem": row.why}
            for row in findings.tuning.rows
        ]
    return document


def _values(source: object, names: str) -> dict[str, Any]:
    """Returns the attributes of these names, with tuples as lists."""
    values = {name: getattr(source, name) for name in names.split()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _summary_values(run: StepSummary) -> dict[str, Any]:
    return asdict(run) | {"over_bytes": run.over_bytes}


def plan_document(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON-able data. Keys are stable; new keys may be added. Units are seconds and bytes.

    The keys are:
        chunks               requested number of micro-batches
        micro_batches        actual number: fewer if the mini-batch has fewer samples
        micro_batch          samples in the largest micro-batch, for which the seconds and bytes of a stage are given
        estimated_for        the hardware for which the seconds were estimated; empty if measured
        schedule, balance, fingerprint                            as in `fxpipe.Plan`
        checkpoint           a mode, or a list with the mode of each stage
        why                  list of texts: how the model was traced, if not by plain recording
        guards               list of texts: values that forward read; with other values another graph runs
        sizes                list of {name, size, least, most, largest, dims}: sizes besides the batch that may differ
                             from batch to batch; seconds and bytes are given for `size`, the graph is valid from
                             `least` to `most` (null: any), memory limits apply at `largest`, `dims` are texts
        sizes_compared       list: the same stages at several of these sizes
            sizes            sizes by name
            step_seconds, slowest_to_mean
            slowest          the slowest stage
            shares           list: the share of each stage in the total seconds
            memory_bytes     memory of the stage that needs most
            fullest          that stage
            over_bytes       bytes over the limit, for the stage furthest over; null if no limit is known
        devices              list of names; the index is the number of the device
        placement            list: the device number of each stage; with replicas in turn, of the first replica
        replicas             list: the number of devices of each stage. Equal numbers are replicas of the pipeline;
                             with unequal numbers, replicas take micro-batches in turn
        stages               list, in order
            index, device
            nodes            list of node names in execution order
            code             text, for people
            forward_seconds, backward_seconds, flops              for one micro-batch
            loss_seconds                                          the loss, in each F of the last stage
            parameter_bytes  parameters of the stage
            gradient_bytes   gradients of the parameters
            state_bytes      gradients and optimizer state
            activation_bytes saved for backward of one micro-batch
            checkpoint       its mode
            sent_bytes       to the next stage for one micro-batch, without portals
            in_flight        most micro-batches whose forward has run and whose backward has not
            memory_bytes     peak memory of the stage
            memory_limit     bytes; null if not known
            memory_formula   text: `memory_bytes` in the samples `b` of a micro-batch, and the sizes
        portals              list of {name, source, target, bytes, formula, line}: two stages, bytes of one micro-batch,
                             their formula in `b` and the sizes, and the user's line; empty if not known
        sendings             list of {source, target, bytes, seconds}: transfers between two stages for one micro-batch:
                             values to a later stage, gradients to an earlier stage
        processes            true if each device has a separate process
        packets              list of {source, target, bytes, relayed_bytes, seconds}: over processes, the transfers
                             across a cut for one micro-batch, and the relayed part
        tied                 list of {names, stages, bytes}: parameters with several names, or in several stages
        whole                list of {name, why, line}: opaque modules, each one node
        heaviest             {name, stage, seconds, line}: the node that no cut can divide; null if not known
        bottlenecks          list of {balance, seconds, fits}: the slowest stage of each compared cut
        totals
            slowest_to_mean  forward and backward seconds of the slowest device, divided by the mean over devices
            bubble           idle share of the device time of a step
            device_bubbles   idle share of each device
            step_seconds     simulated: forward and backward of all micro-batches, with transfers
            parameter_bytes  for all stages
    """
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
    """Returns a simulated step as JSON-able data.

    schedule, micro_batches
    step_seconds         for a stream, as bubble, devices and sent: a mini-batch in the steady state, with its update
    stream               the simulated stream; null for a step
        mini_batches     number, from an empty pipeline to an empty pipeline
        first, last      the mini-batches between whose updates the time is measured
        warm_up_seconds  until all devices are busy
        drain_seconds    from when the first device has no more work
    samples              in the mini-batch; null if not known
    update_seconds       the optimizer, after the step; 0 if not known
    bubble               idle share of the device time of the step
    devices              list, in order
        device           its name
        busy_seconds, bubble
        peak_bytes       peak memory
        peak             its parts: {parameters, gradients, optimizer, activations, portals, working}
        limit_bytes      null if not known
    sent                 list of {source, target, bytes}: from device to device, in the full step
    host_seconds         in which the interpreter's lock is held: no step is shorter
    cluster              the cluster of the devices; null if no hardware was given
        nodes, devices_per_node
        pipe             devices of a replica
        data             replicas
        mesh             list of these dimensions, the outer dimension first
    traffic              bytes of a step of all replicas; null if no hardware was given
        within_nodes     {pipeline, reduction}: values and gradients between stages; gradients between replicas
        between_nodes    likewise
    reduction_seconds    reduction of gradients over replicas, on the device that takes longest
    exposed_reduction_seconds                                     the part after the last action of the step
    reductions           list of {stage, device, bytes, seconds, start, end}
    critical_shares      map: the shares of F, R, B, W, U, "sending", "waiting" (for a link), "host" (Python of the
                         workers) and "reducing" in the critical path
    critical_path        list of texts: its actions in order, such as `1F0`: stage 1, forward, micro-batch 0
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
