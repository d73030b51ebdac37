"""The stages of a cut run for real, one after the other, and hooks see what autograd keeps: for tests of bytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxpipe._torch.tensor_data import storages_of
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.program import PIPE_INPUT, ReceivedValue
from fxpipe.tracing import Traced
from fxpipe.tracing.traced import attribute_tensor
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils.pytree import flatten
from helpers.every_cut import CPU


class Stages:
    """The stages of a cut, run one after the other as a pipe does, on CPU or on one GPU.

    `copied`: what a stage receives is copied, as between two devices; else it is handed over.
    """

    def __init__(self, traced: Traced, starts: tuple[int, ...], device: torch.device = CPU, copied: bool = False):
        self.traced, self.starts, self.copied = traced, starts, copied
        self.program = split_into_stages(traced, starts, [device] * len(starts))
        self.attributes = {str(n.target): attribute_tensor(traced, n) for n in traced.graph.nodes if n.op == "get_attr"}

    def run(self, leaves: list[Any], around: Callable[..., tuple[Any, Any]]) -> list[Any]:
        """Of `around(run the stage, the model's tensors, what it received)`, which gives for each stage what the stage
        returns and an answer, the answers."""
        values: dict[tuple[int, str | None], Any] = {
            (PIPE_INPUT, name): leaf for name, leaf in zip(self.program.inputs, leaves, strict=True)
        }
        answers = []
        for index, stage in enumerate(self.program.stages):
            own = [self._attribute(stage, name) for name in stage.attributes]
            received = [self._received(values, r) for r in stage.receives]
            with set_thread_state(self.traced.state):
                made, answer = around(lambda s=stage, o=own, r=received: s.run.forward(*o, *r), own, received)
            answers.append(answer)
            values |= {(index, name): value for name, value in zip(stage.sends, made, strict=False)}
        return answers

    def _attribute(self, stage: Any, name: str) -> torch.Tensor:
        tensor = self.attributes[name]
        bare = tensor.detach()
        return bare.clone() if name in stage.changed_buffers else bare.requires_grad_(tensor.requires_grad)

    def _received(self, values: dict[tuple[int, str | None], Any], received: ReceivedValue) -> Any:
        value = values[received.source, received.name]
        if not isinstance(value, torch.Tensor):
            return value
        bare = value.detach().clone() if self.copied and received.source != PIPE_INPUT else value.detach()
        return bare.requires_grad_(value.requires_grad)


def saved_by(run: Callable[[], Any], own: list[torch.Tensor], _: list[Any]) -> tuple[Any, int]:
    """What a stage returns, and the bytes of all storages that it saves and that are not the model's."""
    saved: dict[int, torch.UntypedStorage] = {}  # held: no address comes again
    skipped = {s._cdata for tensor in own for s in storages_of(tensor)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        for storage in storages_of(tensor):
            if storage._cdata not in skipped:
                saved.setdefault(storage._cdata, storage)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        made = run()
    return made, sum(storage.nbytes() for storage in saved.values())


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> list[Any]:
    return flatten((args, kwargs or {}))[0]


def sample(traced: Traced, leaves: list[Any], size: int) -> list[Any]:
    return [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in take_samples(traced, leaves, 0, size)
    ]
