"""The cost of the loss, which `forward_backward` computes for each micro-batch after the forward of the last stage.

    outputs, detached ──▶ loss_fn(output, target) ──▶ loss
            ▲                                          │
            └────────────── gradients ◀────────────────┘

It is measured or estimated like a node, under the graph's output node. Both directions are part of F of the last stage.
If outputs need the whole mini-batch (a joint tail), it is computed once, of the values of all micro-batches. Of its
seconds each micro-batch has a share, by its samples; its bytes are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.profiling.backward_timing import Clock
from fxpipe.profiling.flops import NodeOperations, OperationCounts
from fxpipe.profiling.node_kinds import as_leaf
from fxpipe.profiling.probe import OperationCounter
from fxpipe.runtime.losses import check_loss_function, checked_loss
from fxpipe.runtime.step_inputs import combine, target_dims
from fxpipe.tracing.fake_tensors import fake_if_active
from fxpipe.tracing.tensors import slice_samples, tensors_in
from fxpipe.tracing.traced import Traced
from fxpipe.utils.batch_split import rows_of_inputs
from fxpipe.utils.output_combination import OutputCombination, needing_all
from fxpipe.utils.pytree import flatten, map_tensor_leaves

LossOf = Callable[[Mapping[fx.Node, Any], int], "MicroBatchLoss | None"]  # (values of the graph, samples) -> their loss
LOSS_NAME = "loss"  # in the list of node names
LOSS_NOTE = "fxpipe: loss_fn raised this when it was called to find out what it costs"


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """The loss that steps will compute."""

    function: Callable[..., Any]  # (the model's output, the target) -> loss
    target: tuple[Any, ...] = ()  # () or (target,), for all samples of the example

    def arguments(self) -> dict[str, Any]:
        return {"loss_fn": self.function, "target": self.target[0] if self.target else None}


def parse_loss(loss_fn: Any, target: Any) -> PlannedLoss | None:
    """Checks a loss to plan with; returns None if there is none."""
    check_loss_function(loss_fn, target)
    return None if loss_fn is None else PlannedLoss(loss_fn, () if target is None else (target,))


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """The loss of one micro-batch, or of a mini-batch with a joint tail."""

    traced: Traced
    function: Callable[..., Any] | None  # None: the sum of the outputs of the tail
    tail: tuple[OutputCombination, ...]  # on the device of the outputs
    outputs: tuple[Any, ...]  # what micro-batches hand out; these require grad if their gradients are needed
    target: tuple[Any, ...]
    micro_batches: float = 1.0  # that it is of, by samples

    @classmethod
    def if_it_runs(cls, traced: Traced, loss: PlannedLoss | None, *of: Any) -> MicroBatchLoss | None:
        """As `of`; None if there is only a tail, and it fails on few samples, repeated (a singular matrix)."""
        try:
            one = cls.of(traced, loss, *of)
            return one if loss is not None or one() else None
        except Exception:
            if loss is not None:
                raise
            return None

    @classmethod
    def of(
        cls, traced: Traced, loss: PlannedLoss | None, batch: int, values: Mapping[fx.Node, Any], samples: int
    ) -> MicroBatchLoss:
        """Returns the loss of this number of samples of an example with `batch`, for these values of the graph."""
        outputs = [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in traced.handed_out]
        total = samples if needing_all(traced.combinations) is None else batch
        if total != samples:
            count = -(-total // samples)

            def of_all(value: Any, how: int | str | None) -> Any:  # repeated, then cut to the samples of the mini-batch
                whole = combine([value] * count, how, [1 / count] * count, "the output")
                if isinstance(how, int):
                    return whole.narrow(how, 0, whole.shape[how] * total // (count * samples)).contiguous()
                return whole * total // (count * samples) if how == "sum" and isinstance(whole, int) else whole

            outputs = list(map(of_all, outputs, traced.handed_out_dims))
        device = next((tensor.device for tensor in tensors_in(outputs)), None)
        tail = tuple(one if device is None else one.on(device) for one in traced.combinations)

        def beside_outputs(tensor: torch.Tensor) -> torch.Tensor:
            return fake_if_active(tensor.detach()).to(tensor.device if device is None else device)

        targets, spec = flatten(map_tensor_leaves(beside_outputs, () if loss is None else loss.target))
        part = slice_samples(targets, target_dims(targets, batch, rows_of_inputs(traced.in_dims)), 0, total)
        function, target = None if loss is None else loss.function, pytree.tree_unflatten(part, spec)
        return cls(traced, function, tail, tuple(outputs), target, total / samples)

    def __call__(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the loss, and the outputs that its gradient goes to. Raises errors of `loss_fn` with a note."""
        own = [as_leaf(value) if isinstance(value, torch.Tensor) else value for value in self.outputs]
        target = map_tensor_leaves(torch.clone, self.target)  # `loss_fn` may write to it
        outputs, computed = list(own), dict[str, Any]()
        with set_thread_state(self.traced.state), torch.enable_grad():
            for one in self.tail:
                outputs[one.output] = one.of(own, computed)
            try:
                if self.function is None:
                    value = sum(outputs[one.output].float().sum() for one in self.tail if one.requires_grad)
                else:
                    result = pytree.tree_unflatten(outputs[: len(self.traced.outputs)], self.traced.out_spec)
                    value = self.function(result, *target)
            except Exception as error:
                error.add_note(LOSS_NOTE)
                raise
        loss, _ = checked_loss(value, "the example inputs")
        return loss, [leaf for leaf in own if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    def seconds(self, clock: Clock, repeats: int) -> tuple[float, float]:
        """Measures the seconds of forward, and of backward to the outputs, for one micro-batch."""
        forward, backward = [], []
        for _ in range(repeats + 1):
            seconds, (loss, starts) = clock.seconds(self)
            ends = [loss] if loss.requires_grad else []
            forward.append(seconds)
            backward.append(clock.backward_seconds(ends, starts, list(map(torch.ones_like, ends)), ()))
        ahead, back = median(forward[1:]), max(0.0, median(backward[1:]))  # the first is a warm-up
        return ahead / self.micro_batches, back / self.micro_batches

    def probe(self) -> tuple[int, NodeOperations]:
        """Counts the peak bytes in addition to the outputs, with their gradients; records the operations."""
        counter = OperationCounter()
        with counter, torch.autograd.set_multithreading_enabled(False):
            counter.begin((*tensors_in(self.outputs), *tensors_in(self.target)))
            loss, starts = self()
            forward, ones = self._share(counter.take()), torch.ones_like(loss)
            counter.take()
            gradients: Any = ()
            if loss.requires_grad and starts:
                gradients = torch.autograd.grad(loss, starts, ones, allow_unused=True)
            backward = self._share(counter.take())
        del gradients  # not earlier: they count
        return counter.most, NodeOperations(forward, backward, backward)

    def _share(self, operations: tuple[OperationCounts, ...]) -> tuple[OperationCounts, ...]:
        return tuple(
            (kind, int(flops / self.micro_batches), int(moved / self.micro_batches))
            for kind, flops, moved in operations
        )
