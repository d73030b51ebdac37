"""Numbers and orders of replicas to try, and plans for each: pipeline x data on the devices of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.cluster import MESHES, parse_mesh
from fxpipe.errors import ArgumentError, MemoryLimitError
from fxpipe.hardware import planned_devices
from fxpipe.planning.cost_model import planned_workers
from fxpipe.planning.options.parse import Devices, parse_devices, parse_hardware_option
from fxpipe.planning.options.pipeline_options import Settings, make_settings
from fxpipe.planning.passes import ProfiledModel, batch_of_replica
from fxpipe.planning.tuning.candidate_plans import ModelPlans
from fxpipe.tracing.tensors import tensor_bytes
from fxpipe.utils.units import count_text, human_bytes, parse_count

# No cut of a large model is perfectly even, so a candidate must gain at least this share with perfect stages.
LEAST_GAIN_OF_REPLICATION = 0.1
FORWARDS_OF_REPLICA = 2**12  # maximum to simulate if several numbers of replicas are tried; takes a tenth of a second


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The numbers and orders of replicas to try, and their common options."""

    options: Mapping[str, Any]
    counts: tuple[int, ...]  # ascending: from long pipelines to short ones
    mesh: tuple[str, str] | None  # None: both
    is_auto: bool

    @classmethod
    def of(cls, options: Mapping[str, Any], devices: Devices | None, data_parallel: Any, mesh: Any) -> ReplicaOptions:
        """Parses the arguments of `tune`."""
        hardware = parse_hardware_option(options.get("hardware"))
        if devices is None or isinstance(devices, int):
            count = None if devices is None else parse_count("devices", devices)
            devices = planned_devices(count, hardware)
        is_auto = isinstance(data_parallel, str) and data_parallel == "auto"
        if not is_auto:
            counts = [parse_count("data_parallel", data_parallel, "'auto' or a whole number of replicas")]
        elif hardware is None:
            raise ArgumentError(
                "data_parallel='auto' without hardware: the links between replicas are not known; give hardware, as in "
                "hardware='h100'"
            )
        else:
            workers = len(parse_devices(devices, anywhere=True))
            counts = [count for count in range(1, workers + 1) if workers % count == 0]
        orders = None if mesh is None else parse_mesh(mesh)
        return cls({**options, "devices": devices}, tuple(counts), orders, is_auto)

    def settings_for(self, data: int, mesh: tuple[str, str] = MESHES[0], **others: Any) -> Settings:
        """Returns the settings of one of `data` replicas; `others` replace options."""
        options = {**self.options, "data_parallel": data, "mesh": mesh, **others}
        return make_settings(options, anywhere=options.get("hardware") is not None)

    def plans_of(
        self, profiled: ProfiledModel, memory_at_hand: Mapping[torch.device, int | None]
    ) -> dict[tuple[int, tuple[str, str]], ModelPlans]:
        """Returns the plans of a replica for each number of replicas and each mesh to try.

        Raises:
            ArgumentError: no number of replicas divides the mini-batch; a `MemoryLimitError` if none has enough memory
                for parameters, gradients and optimizer state.
        """
        plans, lacking = dict[tuple[int, tuple[str, str]], ModelPlans](), list[str]()
        for data in self.counts:
            if self.is_auto and (profiled.batch % data or not profiled.traced.holds_at(profiled.batch // data)):
                continue
            batch = batch_of_replica(profiled.traced, profiled.batch, data)
            for mesh in self._meshes(data):
                settings = self.settings_for(data, mesh, chunks=1)  # each candidate sets its chunks
                settings = replace(settings, left=frozenset(), memory_at_hand=memory_at_hand)
                lack = _lasting_shortage(profiled, settings) if self.is_auto else ""
                if lack:
                    lacking.append(lack)
                else:
                    plans[data, mesh] = ModelPlans(replace(profiled, batch=batch), settings, self.is_auto)
        if not plans and lacking:
            raise MemoryLimitError(f"no number of replicas fits into memory: {lacking[0]}")
        if not plans:
            raise ArgumentError(
                f"data_parallel='auto': a mini-batch of {profiled.batch} samples does not divide over any of "
                f"{', '.join(map(str, self.counts))} replicas"
            )
        return plans

    def _meshes(self, data: int) -> tuple[tuple[str, str], ...]:
        """Returns the orders that differ."""
        if self.mesh is not None:
            return (self.mesh,)
        hardware, devices = parse_hardware_option(self.options.get("hardware")), self.options["devices"]
        if hardware is None or devices is None or isinstance(devices, int) or data in (1, len(devices)):
            return MESHES[:1]
        return MESHES if len(devices) > hardware.devices_per_node else MESHES[:1]


def _lasting_shortage(profiled: ProfiledModel, settings: Settings) -> str:
    """Describes a replica's shortage of memory for parameters, gradients and optimizer state; empty if they fit."""
    limits = [worker.memory for worker in planned_workers(settings)]
    if None in limits:
        return ""
    lasting = sum(
        tensor_bytes(parameter) * (2 + settings.optimizer_state if parameter.requires_grad else 1)
        for parameter in profiled.traced.model.parameters()
    )
    together = sum(limit for limit in limits if limit is not None)
    if lasting <= together:
        return ""
    return (
        f"parameters, gradients and optimizer state take {human_bytes(lasting)}, and the "
        f"{count_text(len(limits), 'device')} of a replica have {human_bytes(together)}"
    )
