"""The document of a plan: what the tables show and what they leave out, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fxpipe.inspect.figures import StageFigures, plan_figures

if TYPE_CHECKING:
    from fxpipe.plans import Plan, StagePlan


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
        devices              list of names, one for each worker
        placement            list: for each stage the number of its worker
        stages               list, in order, of
            index, device
            nodes            list of node names in the order in which they run
            code             text, for people
            forward_seconds, backward_seconds, flops              of one micro-batch
            parameter_bytes  of the stage
            state_bytes      of gradients and of the optimizer's state
            activation_bytes kept for backward of one micro-batch
            checkpoint       its mode
            copies           list of nodes that it computes for itself, though another stage does so too
            sent_bytes       to the next stage for one micro-batch, portals not counted
            in_flight        micro-batches that have gone forward and not yet back, at most
            memory_bytes     at most at one time, of all that
            memory_limit     bytes that it may take; null where none is known
            memory_formula   text: `memory_bytes` in the samples `b` of a micro-batch
        portals              list of {name, source, target, bytes}: two stages, and bytes of one micro-batch
        sendings             list of {source, target, bytes, seconds}: all that goes from one stage to another for one
                             micro-batch; to a later one values, to an earlier one gradients
        bottlenecks          list of {balance, seconds, fits}: of the slowest stage, by each way of cutting compared
        totals
            slowest_to_mean  forward and backward seconds of the slowest stage over those of the mean stage
            bubble           share of the device time of a step that is idle
            device_bubbles   the same for each device
            step_seconds     as simulated: all micro-batches forward and backward, and what is sent
            parameter_bytes  of all stages
    """
    figures = plan_figures(plan)
    return {
        "chunks": plan.chunks,
        "micro_batches": plan.micro_batches,
        "micro_batch": plan.micro_batch,
        "estimated_for": plan.estimated_for,
        "schedule": plan.schedule,
        "checkpoint": plan.checkpoint if isinstance(plan.checkpoint, str) else list(plan.checkpoint),
        "balance": plan.balance,
        "tracer": plan.tracer,
        "fingerprint": plan.fingerprint,
        "why": list(plan.why),
        "guards": list(plan.guards),
        "devices": list(plan.workers),
        "placement": list(plan.placement),
        "stages": [_stage(plan, stage, found) for stage, found in zip(plan.stages, figures.stages, strict=True)],
        "portals": [
            {"name": portal.name, "source": portal.source, "target": portal.target, "bytes": portal.bytes}
            for portal in plan.portals
        ],
        "sendings": list(map(asdict, plan.sendings)),
        "bottlenecks": list(map(asdict, plan.bottlenecks)),
        "totals": {
            "slowest_to_mean": figures.slowest_to_mean,
            "bubble": figures.mean_bubble,
            "device_bubbles": list(figures.bubble),
            "step_seconds": figures.step_seconds,
            "parameter_bytes": sum(stage.parameter_bytes for stage in plan.stages),
        },
    }


def _stage(plan: Plan, stage: StagePlan, figures: StageFigures) -> dict[str, Any]:
    return {
        "index": stage.index,
        "device": stage.device,
        "nodes": list(stage.nodes),
        "code": stage.code,
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "flops": stage.flops(plan.micro_batch),
        "parameter_bytes": stage.parameter_bytes,
        "state_bytes": stage.state_bytes,
        "activation_bytes": stage.activation_bytes,
        "checkpoint": plan.modes[stage.index],
        "copies": list(stage.copies),
        "sent_bytes": stage.sent_bytes,
        "in_flight": plan.in_flight(stage.index),
        "memory_bytes": figures.memory_bytes,
        "memory_limit": stage.memory_limit,
        "memory_formula": str(plan.memory(stage.index)),
    }
