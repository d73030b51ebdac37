"""The parameters and buffers that each rank holds; tensors that several ranks hold are kept equal.

A rank holds the tensors that its stages use in the first graph. A tied weight can be on several ranks: in each step all
its holders get the gradients of all stages, and sum them in the order of stages, as one process does. The first holder
is a tensor's *home*. In a later graph (for evaluation, say) a rank may use a tensor that it does not hold: then the
rank *borrows* it from its home for each step, and sends gradients or a changed buffer to the holders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.tensor_data import replace_data
from fxpipe.distributed.packets import FIRST_FREE_TAG, Mailbox, PacketValue
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.errors import StateError
from fxpipe.rewriting.program import Program
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors, different_programs
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.tracing.tensors import has_values, storage_of


class GivenMemory:
    """Memory for tensors of a model on the meta device, which stay the same objects; can be taken back unused."""

    def __init__(self, tensors: Iterable[torch.Tensor], device_of: Callable[[torch.Tensor], torch.device]):
        self.tensors = list({id(tensor): tensor for tensor in tensors if not has_values(tensor)}.values())
        self._before = [tensor.detach() for tensor in self.tensors]
        places = [(storage_of(tensor), device_of(tensor)) for tensor in self.tensors]
        sharing, storages = Counter(places), dict[Any, torch.UntypedStorage]()  # views of one memory stay such
        for tensor, like, key in zip(self.tensors, self._before, places, strict=True):
            device = key[1]
            if like.layout != torch.strided or sharing[key] < 2:
                memory = torch.empty_like(like, device=device)
            else:
                if key not in storages:
                    size = like.untyped_storage().nbytes()
                    storages[key] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
                memory = torch.empty(0, dtype=like.dtype, device=device)
                memory.set_(storages[key], like.storage_offset(), like.shape, like.stride())
            replace_data(tensor, memory)

    def take_back(self, keep: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        """Takes the memory back, except from tensors for which `keep` returns True."""
        for tensor, before in zip(self.tensors, self._before, strict=True):
            if tensor.numel() and not keep(tensor):
                replace_data(tensor, before)


StageSum = tuple[str, int]  # a parameter, and the stage that has a sum of its gradients
Peers = dict[tuple[int, int], list[Any]]  # by source and target rank


@dataclass(frozen=True, slots=True)
class TensorTransfers:
    """The tensors that move between ranks in each step of a graph, by source and target, in one order on all ranks."""

    borrowed: Mapping[tuple[int, int], Sequence[str]]
    gradients: Mapping[tuple[int, int], Sequence[StageSum]]
    changed: Mapping[tuple[int, int], Sequence[str]]
    stages_of: Mapping[str, Sequence[int]]  # by name, the stages that use it


class HeldTensors:
    """The ranks that hold each tensor of a model."""

    def __init__(self, first: Program, routes: RelayRoutes, names: Iterable[str]):
        """`names`: of all tensors of the model. The rank of the first stage holds tensors that no stage uses."""
        holders: dict[str, dict[int, None]] = {}
        for j, stage in enumerate(first.stages):
            for name in stage.attributes:
                holders.setdefault(name, {})[routes.rank(j)] = None
        self.stages = tuple((j, routes.rank(j), tuple(stage.attributes)) for j, stage in enumerate(first.stages))
        self._rest = (routes.rank(0),)
        self._holders = {name: tuple(ranks) for name, ranks in holders.items()}
        self.names = tuple(dict.fromkeys((*holders, *names)))

    def holders(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that hold a tensor, its home first."""
        return self._holders.get(name, self._rest)

    @property
    def shared(self) -> tuple[str, ...]:
        """The names of tensors that several ranks hold."""
        return tuple(name for name in self.names if len(self.holders(name)) > 1)

    def transfers(self, programs: Sequence[Program], routes: RelayRoutes) -> TensorTransfers:
        """Computes the transfers in a step of these programs; each micro-batch runs one of them."""
        # A tied weight has gradients of its stages in the first graph, too, from replicas that run that graph.
        tied, stages_of = {*self.shared}, dict[str, list[int]]()
        changed: Peers = {}
        for j, stages in enumerate(zip(*(program.stages for program in programs), strict=True)):
            of_first = (name for k, _, names in self.stages for name in names if k == j and name in tied)
            for name in dict.fromkeys((*(name for stage in stages for name in stage.attributes), *of_first)):
                stages_of.setdefault(name, []).append(j)
            for name in sorted({name for stage in stages for name in stage.changes}):
                for rank in self.holders(name):
                    if rank != routes.rank(j):
                        changed.setdefault((routes.rank(j), rank), []).append(name)
        borrowed: Peers = {}
        gradients: Peers = {}
        for name, users in sorted(stages_of.items()):
            holders = self.holders(name)
            for rank in sorted({routes.rank(j) for j in users} - {*holders}):
                borrowed.setdefault((holders[0], rank), []).append(name)
            for j in users:
                for rank in holders:
                    if rank != routes.rank(j):
                        gradients.setdefault((routes.rank(j), rank), []).append((name, j))
        borrowed, gradients, changed = (dict(sorted(peers.items())) for peers in (borrowed, gradients, changed))
        return TensorTransfers(borrowed, gradients, changed, stages_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram(BoundProgram):
    """A program with everything that a rank needs to run it."""

    number: Any  # the same on all ranks; a tuple for several programs in one step
    routes: RelayRoutes
    held: HeldTensors
    transfers: TensorTransfers

    @property
    def last(self) -> int:
        return self.routes.rank(len(self.devices))

    @staticmethod
    def union(programs: Sequence[RankProgram]) -> RankProgram:
        """Returns one program for a step over micro-batches of these programs, with the transfers of all."""
        first, different = programs[0], [one.program for one in different_programs(programs)]
        if len(different) == 1:
            return first
        transfers = first.held.transfers(different, first.routes)
        return replace(first, number=tuple(one.number for one in programs), transfers=transfers)


class TensorExchange:
    """The transfers of tensors of the model in one step, on one rank."""

    def __init__(self, mailbox: Mailbox, rank: int, tensors: ModelTensors, program: RankProgram):
        self.tensors, self._mailbox, self._rank = tensors, mailbox, rank
        self._number, self._transfers = program.number, program.transfers

    def _swap(
        self, kind: int, what: str, pairs: Mapping[tuple[int, int], Sequence[Any]], value_of: Any
    ) -> dict[Any, Any]:
        """Sends the values of this rank and returns the values of other ranks, by key."""
        received: dict[Any, Any] = {}
        tag = FIRST_FREE_TAG + kind
        for (source, target), keys in pairs.items():
            if source == self._rank:
                values = [PacketValue(value_of(key)) for key in keys]
                self._mailbox.send((self._number, "tensors", kind, source, target, 0), tag, target, values)
        for (source, target), keys in pairs.items():
            if target == self._rank:
                address = (self._number, "tensors", kind, source, target, 0), tag, source
                self._mailbox.expect(*address)
                received |= zip(keys, (one.value for one in self._mailbox.receive(*address, what)), strict=True)
        return received

    def borrow(self) -> None:
        """Sends values of tensors to ranks that use them and do not hold them."""
        self._move(0, "the parameters that it holds", self._transfers.borrowed)

    def sum_gradients(self, one: MiniBatch) -> None:
        """Adds to a mini-batch the gradient sums of stages on other ranks, for tensors that this rank holds."""
        pairs = self._transfers.gradients
        received = self._swap(
            1, "the gradients of tied weights", pairs, lambda key: one.totals[key[1]].sums.get(key[0])
        )
        for (name, j), value in received.items():
            if value is not None:
                one.totals[j].sums[name] = value

    def spread_changes(self) -> None:
        """Sends changed buffers to their holders."""
        self._move(2, "the buffers that it has changed", self._transfers.changed)

    def _move(self, kind: int, what: str, pairs: Mapping[tuple[int, int], Sequence[str]]) -> None:
        for name, value in self._swap(kind, what, pairs, lambda name: self.tensors.get(name).detach()).items():
            write_tensor(self.tensors, name, value)


def share_buffers(group: RankGroup, tensors: ModelTensors, names: Iterable[str]) -> None:
    """Writes the buffers that forward has changed on the first replica into the models of all replicas."""
    own = {name: tensors.get(name).detach().cpu() for name in names} if group.replica == 0 else {}
    values = group.replicas.broadcast(own, 0, "the buffers that forward has changed")
    if group.replica != 0:
        for name, value in values.items():
            write_tensor(tensors, name, value.to(group.device))


@torch.no_grad()
def write_tensor(tensors: ModelTensors, name: str, value: torch.Tensor) -> None:
    target = tensors.get(name)
    if target.shape == value.shape and target.dtype == value.dtype:
        if has_values(target) and target.device == value.device:
            target.detach().copy_(value)
        else:  # it had values on other ranks only
            replace_data(target, value.detach().clone())
    elif isinstance(target, nn.Parameter):
        raise StateError(
            f"{name!r} has the shape {tuple(target.shape)} here and {tuple(value.shape)} on the rank that holds it"
        )
    else:
        tensors.set(name, value)
