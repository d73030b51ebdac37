"""Binds the program of a graph to the devices of a pipe."""

from __future__ import annotations

from torch import fx

from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.passes import PreparedGraph
from fxpipe.runtime import BoundProgram, wire_program
from fxpipe.runtime.bound_program import StageReplica
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.input_values import InputValues
from fxpipe.tracing.traced import Traced


def bind_program(prepared: PreparedGraph, settings: Settings) -> BoundProgram:
    traced, devices = prepared.traced, settings.devices
    return BoundProgram(
        prepared.program,
        wire_program(prepared.program),
        devices,
        traced.in_dims,
        traced.handed_out_dims,
        traced.out_spec,
        traced.state,
        traced.constants,
        left_attribute_dims=traced.left_attribute_dims,
        told=traced.told,
        combinations=tuple(one.on(devices[-1]) for one in traced.combinations),
        known_pieces=InputValues.of_pieces(traced, devices[-1]) if traced.combinations else None,
        head=traced.head.on(devices[0]) if isinstance(traced.head, InputValues) else None,
        used_outputs=_used_outputs(traced),
        moving_buffers=_moving_buffers(prepared),
        is_whole=traced.is_whole,
        replicas=_replicas_of(prepared, settings),
    )


def _replicas_of(prepared: PreparedGraph, settings: Settings) -> tuple[tuple[StageReplica, ...], ...]:
    """Returns the replicas of each stage, with code for their own devices; () if no stage has several."""
    if not settings.replica_workers:
        return ()
    by_stage = settings.stage_devices
    every = [tuple(own[turn % len(own)] for own in by_stage) for turn in range(max(map(len, by_stage)))]
    programs = [prepared.program]
    for turn, devices in enumerate(every[1:], 1):
        is_known = settings.compile is None and devices in every[:turn]  # compiled code belongs to one worker
        programs.append(programs[every.index(devices)] if is_known else prepared.on_devices(devices))
    return tuple(
        tuple(StageReplica(device, programs[turn].stages[j]) for turn, device in enumerate(own))
        for j, own in enumerate(by_stage)
    )


def _used_outputs(traced: Traced) -> frozenset[int]:
    """Returns the places of the outputs from which the model itself computes values that require grad."""
    requires_grad = {} if traced.effects is None else traced.effects.requires_grad
    nodes = ((place, node) for place, node in enumerate(traced.outputs) if isinstance(node, fx.Node))
    pieces = {*traced.pieces}
    return frozenset(p for p, node in nodes if node in pieces or any(requires_grad.get(user) for user in node.users))


def _moving_buffers(prepared: PreparedGraph) -> tuple[str, ...]:
    """Returns the buffers that forward changes in evaluation, by samples or values, except batch norm's."""
    traced, stages = prepared.traced, prepared.program.stages
    carried, is_training = traced.carried_state, traced.flags[0][1]
    if is_training:
        return ()
    moving: set[fx.Node] = set()
    for node in traced.graph.nodes:
        is_source = node.op == "placeholder" or (node.op == "get_attr" and node.target in carried)
        if is_source or (info(node).recorded_size is None and not moving.isdisjoint(node.all_input_nodes)):
            moving.add(node)
    known = {name for stage in stages for name in (*stage.tracked_statistics, *stage.counters)}
    written = (name for stage in stages for name in stage.changed_buffers if name not in {*carried, *known})
    return (*written, *(name for name, node in carried.items() if node in moving and name not in known))
