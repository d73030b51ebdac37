"""The oracle: the plain model in plain torch, over the same micro-batches, backward in the order of the schedule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.tracing.model_state import seeded_python_rng
from fxpipe.utils.accelerator import mix_seed
from helpers.devices import on_cpu


class Seeded(TorchFunctionMode):
    """Gives each random function of a plain model the seed that the pipeline gives it, and knows no list of them."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.ordinal, self.is_inside = seed, 0, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.is_inside:
            return func(*args, **(kwargs or {}))
        with self.one():
            return func(*args, **(kwargs or {}))

    @contextmanager
    def one(self) -> Iterator[None]:
        """A block that is one random node: a function, or a module that is kept whole."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(mix_seed(self.seed, self.ordinal))
        seeded, self.is_inside = generator.get_state(), True
        try:
            yield
        finally:
            self.is_inside = False
            self.ordinal += not torch.equal(seeded, generator.get_state())
            generator.set_state(before)


def parts_of(tree: Any, count: int, batch: int) -> list[Any]:
    """A tree of tensors cut into micro-batches."""
    leaves, spec = pytree.tree_flatten(tree)

    def part(leaf: Any, i: int) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf.tensor_split(count)[i] if is_batched else leaf

    return [pytree.tree_unflatten([part(leaf, i) for leaf in leaves], spec) for i in range(count)]


def draw_seed(model_is_random: bool) -> int:
    """The seed that a step draws from torch's generator."""
    return int(torch.randint(2**62, ()).item()) if model_is_random else 0


@contextmanager
def seeded_opaque_call(seed: int, micro_batch: int, ordinal: int = 0) -> Iterator[None]:
    """Random states as a module that is kept whole has them in a step: torch's, Python's and numpy's."""
    own = mix_seed(mix_seed(seed, micro_batch), ordinal)
    with torch.random.fork_rng(), seeded_python_rng(own):
        torch.manual_seed(own)
        yield


def train_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss_fn: Callable[..., torch.Tensor],
    *,
    chunks: int,
    order: str,
    seed: int,
    batch: int,
) -> torch.Tensor:
    """Adds the gradients of a mini-batch to the model; returns its loss. `order`: of backward, "1f1b" or "gpipe"."""
    m = min(chunks, batch)
    inputs, targets = parts_of((args, kwargs), m, batch), parts_of(target, m, batch)
    losses = []
    for i, (a, k) in enumerate(inputs):
        with Seeded(mix_seed(seed, i)):
            output = model(*a, **k)
        size = batch // m + (i < batch % m)
        losses.append(loss_fn(output, targets[i]) * (size / batch))
    for loss in losses if order == "1f1b" else reversed(losses):
        loss.backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[tuple[Any, Any]],
    loss_fn: Callable[..., Any],
    *,
    seed: int = 0,
    reduction: str = "mean",
    scale: float = 1.0,
) -> tuple[torch.Tensor, list[Any]]:
    """Adds the gradients of a loop over (input, target) to the model; returns the loss, and the outputs of each."""
    total, losses, outputs = sum(len(x) for x, _ in micro_batches), [], []
    for i, (x, target) in enumerate(micro_batches):
        with Seeded(mix_seed(seed, i)):
            outputs.append(model(x))
        loss = loss_fn(outputs[-1], target)
        losses.append(loss * (len(x) / total) if reduction == "mean" else loss)
        (losses[-1] * scale).backward()
    return torch.stack([loss.detach() for loss in losses]).sum(), [output.detach() for output in outputs]


def assert_same_gradients(ours: nn.Module, plain: nn.Module, loose: Sequence[str] = (), *, exact: bool = True) -> None:
    """Every gradient by name: bit for bit; those of `loose`, or all if not `exact`, within a tolerance."""
    want, have = (
        {name: p.grad if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}
        for model in (plain, ours)
    )
    assert list(have) == list(want)
    for name, gradient in want.items():
        if gradient is None:
            assert have[name] is None, f"{name} has a gradient, the plain model's has none"
            continue
        assert have[name] is not None, f"{name} has no gradient"
        if name in loose or not exact:
            torch.testing.assert_close(have[name], gradient, msg=lambda m, name=name: f"gradient of {name}: {m}")
        else:
            difference = (have[name] - gradient).abs().max()
            assert torch.equal(have[name], gradient), f"gradient of {name} differs by {difference}"


def assert_same_state(ours: nn.Module, plain: nn.Module, *, exact: bool = True) -> None:
    """Every parameter and buffer by name."""
    want, have = ({name: value.cpu() for name, value in model.state_dict().items()} for model in (plain, ours))
    assert list(have) == list(want)
    for name, value in want.items():
        if exact:
            assert torch.equal(have[name], value), (
                f"{name} differs by {(have[name].double() - value.double()).abs().max()}"
            )
        else:
            torch.testing.assert_close(have[name], value, msg=lambda m, name=name: f"{name}: {m}")


def assert_step(ours: Any, plain: nn.Module, *args: torch.Tensor, one_pass: bool = False) -> None:
    """A step of a pipe is that of the plain model on the whole mini-batch: output, loss, gradients, to a tolerance.

    `one_pass`: by `forward_backward`.
    """
    for model in (ours, plain):
        model.zero_grad()
    want = plain(*(a.clone() for a in args))
    target = torch.ones_like(want)
    loss = F.mse_loss(want, target)
    loss.backward()
    if one_pass:
        have_loss = ours.forward_backward(*(a.clone() for a in args), target=target, loss_fn=F.mse_loss)
    else:
        have = on_cpu(ours(*(a.clone() for a in args)))
        torch.testing.assert_close(have, want)
        have_loss = F.mse_loss(have, target)
        have_loss.backward()
    torch.testing.assert_close(on_cpu(have_loss), loss)
    assert_same_gradients(ours, plain, loose=[name for name, _ in plain.named_parameters()])


@contextmanager
def closing(pipe: Any) -> Iterator[Any]:
    """A pipe that is closed at the end of the test, also where it fails."""
    try:
        yield pipe
    finally:
        pipe.close()
