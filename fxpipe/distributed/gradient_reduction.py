"""Sums of gradients over the replicas of a pipe, in buckets that are sent while the last backward runs.

    last B of a stage ──▶ give("weight", stage) ──▶ bucket ──▶ all-reduce, concurrent with the rest of the step

A bucket has parameters of one dtype, in the order in which a backward completes their gradients. It is all-reduced when
it is full and the previous buckets are sent, so the order of buckets is the same on all replicas.

Buckets are on the device if the replicas have a backend that sums there (`DeviceSums`), else on the CPU with gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxpipe._torch.process_groups import ProcessGroupGloo
from fxpipe.distributed.connection import lost_connection
from fxpipe.distributed.device_transfers import WAITED_FOR, DeviceSums
from fxpipe.errors import InternalError

StageParameter = tuple[str, int]  # parameter name, stage that uses it
BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


def buckets_of(parameters: Mapping[StageParameter, torch.Tensor]) -> list[list[StageParameter]]:
    """Returns the parameters of each bucket, in the order in which buckets are full. `parameters`: last stage first."""
    stages = dict.fromkeys(j for _, j in parameters)
    order = [key for stage in stages for key in reversed([*parameters]) if key[1] == stage]
    filling: dict[torch.dtype, list[StageParameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    full = []
    for key in order:
        tensor = parameters[key]
        if tensor.dtype in filling and sizes[tensor.dtype] + tensor.nbytes > BUCKET_BYTES:
            full.append(filling.pop(tensor.dtype))
        if tensor.dtype not in filling:
            filling[tensor.dtype], sizes[tensor.dtype] = [], 0
        filling[tensor.dtype].append(key)
        sizes[tensor.dtype] += tensor.nbytes
    places = {key: place for place, key in enumerate(order)}
    return sorted([*full, *filling.values()], key=lambda bucket: places[bucket[-1]])


class GradientReduction:
    """Sums the gradients of these parameters over replicas, once per call of `begin`."""

    def __init__(
        self,
        group: ProcessGroupGloo,
        parameters: Mapping[StageParameter, torch.Tensor],
        sums: DeviceSums | None = None,
    ):
        """`group`: of the replicas, used only here. `parameters`: in the same order on all. `sums`: None for gloo."""
        self._like = {key: (tensor.shape, tensor.dtype, tensor.device) for key, tensor in parameters.items()}
        self._completed: set[StageParameter] = set()
        self.missing: frozenset[StageParameter] = frozenset()  # gradients for which `give_rest` has added zeros
        self._group: Any = group
        self._sums, self._device = sums, torch.device("cpu") if sums is None else sums.device
        self._buckets = buckets_of(parameters)
        self._bucket_of = {key: number for number, bucket in enumerate(self._buckets) for key in bucket}
        self._gradients: dict[StageParameter, torch.Tensor] = {}  # waiting for their bucket
        self._missing: list[int] = []  # by bucket, number of gradients
        self._begun: list[tuple[Any, torch.Tensor]] = []  # by bucket, the operation and its memory
        if sums is not None:
            sums.connect()

    def has(self, key: StageParameter) -> bool:
        return key in self._like

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._sums is None else self._sums.on_stream()

    def begin(self) -> None:
        """Begins a sum on all replicas."""
        self._completed = set()
        self._missing = [len(bucket) for bucket in self._buckets]
        self._gradients.clear()
        self._begun.clear()

    def close(self) -> None:
        """Closes the connections despite references to this object: replicas that wait for this one fail."""
        self._group = None
        self._gradients.clear()
        self._begun.clear()

    def give(self, key: StageParameter, gradient: torch.Tensor) -> None:
        """Adds the gradient of one parameter in one stage, in the dtype of the parameter; sends its bucket if full."""
        self._completed.add(key)
        shape, dtype, _ = self._like[key]
        if gradient.shape != shape:
            raise InternalError(f"the gradient of {key} has shape {(*gradient.shape,)} and not shape {(*shape,)}")
        gradient = gradient.to(self._device, dtype)
        if self._sums is not None:
            self._sums.take(gradient)
        self._gradients[key] = gradient
        self._missing[self._bucket_of[key]] -= 1
        while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
            self._send_next()

    def _send_next(self) -> None:
        with self._on_stream():
            memory = torch.cat([self._gradients.pop(key).reshape(-1) for key in self._buckets[len(self._begun)]])
            self._begun.append((_or_lost(lambda: self._all_reduce(memory)), memory))

    def _all_reduce(self, memory: torch.Tensor) -> Any:
        return self._group.allreduce([memory]) if self._sums is None else self._sums.sum(memory)

    def give_rest(self, gradients: Mapping[StageParameter, torch.Tensor]) -> None:
        """Adds the remaining gradients, and zeros for the missing ones."""
        self.missing = frozenset(self._like.keys() - self._completed - gradients.keys())
        for key, (shape, dtype, _) in self._like.items():
            if key in self.missing:
                self.give(key, torch.zeros(shape, dtype=dtype, device=self._device))
            elif key not in self._completed:
                self.give(key, gradients[key])

    def finish(self) -> dict[StageParameter, torch.Tensor]:
        """Waits for the sums over replicas; returns them on the devices of the parameters."""
        gradients: dict[StageParameter, torch.Tensor] = {}
        with self._on_stream():
            for bucket in self._buckets:
                work, memory = self._begun.pop(0)
                _or_lost(work.wait)
                parts = memory.split([self._like[key][0].numel() for key in bucket])
                for key, part in zip(bucket, parts, strict=True):
                    shape, _, device = self._like[key]
                    gradients[key] = part.view(shape).to(device, copy=True)
        if self._sums is not None:
            self._sums.settle(gradients.values())
        return {key: gradients[key] for key in self._like}


def _or_lost(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        failure = lost_connection(WAITED_FOR, error)
    raise failure  # out here: with torch's error as its context it would keep the connections open
