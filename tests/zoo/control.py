"""Own models whose Python looks at what it computes: values, modes, dtypes, blocks, functions of functions."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.entry import BATCH, Entry, call, linears, own, tokens, vectors

CONTROL: list[Entry] = []


def _ragged(*lengths: int) -> Tensor:
    """Which of 6 positions hold something."""
    return torch.arange(6) < torch.tensor(lengths)[:, None]


# -- values read in forward ------------------------------------------------------------------------------------------


@own(CONTROL, lambda: call(vectors(6, 8), torch.ones(BATCH, 6, dtype=torch.bool)), "mask_of_all")
@own(CONTROL, lambda: call(vectors(6, 8), _ragged(6, 3, 5, 6)), "mask_of_some")
@own(CONTROL, lambda: call(vectors(6, 8), _ragged(6, 6, 3, 5)), "mask_of_one_half")
class _Masked(Layered, layers=linears):
    """A mask that hides nothing is left out, as libraries do to get a faster kernel."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            scores = layer(x) @ x.transpose(1, 2)
            if not mask.all():
                scores = scores.masked_fill(~mask[:, None], -1e4)
            x = x + scores.softmax(-1) @ x
        return x


@own(CONTROL, lambda: call(vectors(6, 8), _ragged(5, 3, 5, 2)))
class LongestLength(Layered, layers=linears):
    """Cut to the longest sample of the batch."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        longest = int(mask.sum(1).max())
        x, mask = x[:, :longest], mask[:, :longest]
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask[..., None]
        return x.sum(1) / longest


@own(CONTROL, lambda: call(vectors(), torch.tensor(0.5)))
class ItemOfScalar(Layered, layers=linears):
    """A strength given as a 0-dim tensor."""

    def forward(self, x: Tensor, strength: Tensor) -> Tensor:
        scale = strength.item()
        for layer in self.layers:
            x = x + scale * torch.tanh(layer(x))
        return x if scale < 1 else x / scale


@own(CONTROL, lambda: call(vectors()))
class OverflowGuard(Layered, layers=linears):
    """Clamps hidden values that are not finite, as T5 and BART do."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
            if not torch.isfinite(x).all():
                x = torch.clamp(x.nan_to_num(), -100, 100)
        return x


@own(CONTROL, lambda: call(vectors() * torch.tensor([1.0, 9.0, 9.0, 1.0])[:, None]))
class RescaledWhenLarge(Layered, layers=linears):
    """A branch on a hidden value that takes the same way in each half of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.abs().max() > 1:
                x = x / 2
        return x


class Mixture(Layered, route=(8, 3), experts=lambda: linears(3)):
    """Each expert runs on the tokens that were routed to it, however many they are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        weights, chosen = self.route(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel():
                out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + out.view_as(x)


@own(CONTROL, lambda: call(tokens(6)))
class Experts(
    Layered, embed=lambda: nn.Embedding(50, 8), blocks=lambda: nn.ModuleList([Mixture() for _ in range(3)]), head=(8, 5)
):
    """Blocks with mixtures of experts."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@own(CONTROL, lambda: call(vectors()))
class StepsByValue(Layered, layer=8, out=(8, 3), steps=lambda: torch.tensor(4)):
    """A loop whose end is read from a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        step = 0
        while step < self.steps:
            x = torch.tanh(self.layer(x)) + x
            step += 1
        return self.out(x)


# -- training and evaluation -----------------------------------------------------------------------------------------


@own(CONTROL, lambda: call(vectors(6, 8)))
class FunctionalDropout(Layered, layers=lambda: linears(3)):
    """Dropout as a function, of attention too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(x)
            x = x + F.scaled_dot_product_attention(q, x, x, dropout_p=0.2 if self.training else 0.0)
            x = F.dropout(x, 0.1, self.training)
            x = F.dropout(x * 2, training=self.training, inplace=True)
        return x


@own(CONTROL, lambda: call(vectors()))
class DropPath(Layered, layers=lambda: linears(5)):
    """Stochastic depth, a draw for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            branch = torch.tanh(layer(x))
            if self.training and number:
                kept = 1 - 0.1 * number
                mask = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(kept)
                branch = branch * mask / kept
            x = x + branch
        return x


@own(CONTROL, lambda: call(vectors()))
class LayerDrop(Layered, layers=lambda: linears(5)):
    """Whole layers left out by a draw. Probabilities of 0 and 1, so that each draw has one outcome."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.training and torch.rand([]) < float(number == 2):
                continue
            x = x + torch.tanh(layer(x))
        return x


@own(CONTROL, lambda: call(vectors(3, 8, 8)))
class AuxiliaryHead(nn.Module):
    """A second output that exists in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head, self.auxiliary = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        y = torch.relu(self.second(x))
        out = self.head(y.mean((2, 3)))
        return {"out": out, "aux": self.auxiliary(x.mean((2, 3)))} if self.training else {"out": out}


@own(CONTROL, lambda: call(vectors(3, 8, 8)))
class FrozenBatchNorm(nn.Module):
    """One batch norm stays in evaluation mode while the model trains; another has no momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 4, 3, padding=1) for c in (3, 4, 4))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)])

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(mode)
        self.norms[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x


@own(CONTROL, lambda: call(vectors()))
class MovingAverage(nn.Module):
    """Buffers that training changes: in place, assigned, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
                self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().amax(0)
                self.count += 1
            x = (x - self.mean) * self.scale
        return x


# -- control flow on what is no value --------------------------------------------------------------------------------


@own(CONTROL, lambda: call(vectors(8)))
class ByRankAndDtype(Layered, layers=linears):
    """Asks for ndim, shape, dtype, and whether gradients are on."""

    def forward(self, x: Tensor) -> Tensor:
        is_flat = x.ndim == 2
        x = x[:, None] if is_flat else x
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        if x.shape[-1] % 4:
            x = F.pad(x, (0, 4 - x.shape[-1] % 4))
        for layer in self.layers:
            x = layer(x) + (x if torch.is_grad_enabled() else x.clone())
        return x.squeeze(1) if is_flat else x


def _checked(function: Any) -> Any:
    """Decorators of libraries take anything and hand it on."""

    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        return function(self, *args, **kwargs)

    return wrapper


@own(CONTROL, lambda: call(vectors(5, 8), mask=None, scale=2.0))
class DecoratedForward(Layered, layers=lambda: linears(3)):
    """Arguments through a decorator, some left out; a tensor walked through row by row."""

    @_checked
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, return_steps: bool = False) -> Any:
        state, steps = torch.zeros_like(x[:, 0]), []
        for row in x.transpose(0, 1):
            for layer in self.layers:
                state = torch.tanh(layer(state) + row * scale)
            steps.append(state)
        return steps if return_steps else torch.stack(steps, 1)


@own(CONTROL, lambda: call(vectors(5, 8)))
class LengthAndInt(Layered, layers=linears):
    """`len`, `int` and shapes of the batch dimension."""

    def forward(self, x: Tensor) -> Tensor:
        batch, steps = int(x.shape[0]), len(x[0])
        x = x.reshape(batch * steps, 8)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.view(batch, -1).reshape(len(x) // steps, steps, 8)


@functools.lru_cache(maxsize=8)
def _positions(length: int, width: int) -> Tensor:
    angles = torch.arange(length)[:, None] / 100 ** (torch.arange(width) / width)
    return torch.sin(angles)


@own(CONTROL, lambda: call(vectors(5, 8)))
class CachedPositions(Layered, layers=linears):
    """Positions are made once for each length, by a cached function."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + _positions(x.shape[1], x.shape[2])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# -- blocks, and functions of functions ------------------------------------------------------------------------------


@own(CONTROL, lambda: call(vectors(6, 8)))
class Blocks(Layered, layers=linears):
    """autocast, no_grad, enable_grad and a default device inside of forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layers[0](x)
            with torch.autocast("cpu", enabled=False):
                y = self.layers[1](y.float())
        with torch.no_grad():
            target = self.layers[2](x).softmax(-1)
        with torch.device("cpu"):
            y = y + torch.linspace(0, 1, 8)
        return self.layers[3](y) * target


class _Reversed(torch.autograd.Function):
    """The identity whose gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return -ctx.strength * gradient * torch.cos(x), None


@own(CONTROL, lambda: call(vectors()))
class CustomFunction(Layered, layers=linears):
    """An autograd.Function with a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + _Reversed.apply(torch.tanh(layer(x)), 0.5)
        return x


class _Checkpointed(nn.Module):
    is_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.blocks[0][0].bias.mean()  # what is checkpointed in the old way needs an input with a gradient
        for block in self.blocks:
            x = F.dropout(x + checkpoint(block, x, use_reentrant=self.is_reentrant), 0.1, self.training)
        return x


@own(CONTROL, lambda: call(vectors()))
class CheckpointNew(_Checkpointed):
    pass


@own(CONTROL, lambda: call(vectors()))
class CheckpointReentrant(_Checkpointed):
    is_reentrant = True


@own(CONTROL, lambda: call(vectors(5, 8)))
class VmapInside(Layered, layers=lambda: linears(3), out=(8, 3)):
    """A function of one sample, mapped over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        gram = torch.vmap(lambda sample: sample.T @ sample)(x)
        return self.out(gram / x.shape[1])


@own(CONTROL, lambda: call(vectors()))
class ForwardHooks(nn.Module):
    """Hooks that look at, and change, what modules get and give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        seen: list[torch.Size] = []
        self.layers[0].register_forward_hook(lambda module, args, output: output * 2)
        self.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.layers[2].register_forward_hook(lambda module, args, output: seen.append(output.shape))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@own(CONTROL, lambda: call(vectors()))
class Parametrized(nn.Module):
    """Weights that are computed: weight norm of both kinds, spectral norm of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        new, old = torch.nn.utils.parametrizations, torch.nn.utils
        self.layers = nn.ModuleList(
            [
                new.weight_norm(nn.Linear(8, 8)),
                new.spectral_norm(nn.Linear(8, 8)),
                new.orthogonal(nn.Linear(8, 8)),
                old.spectral_norm(nn.Linear(8, 8)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


@own(CONTROL, lambda: call(vectors()))
class OldWeightNorm(nn.Module):
    """Weight norm as a hook, deprecated and in many checkpoints (wav2vec 2, vocoders)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        for layer in self.layers:
            torch.nn.utils.weight_norm(layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@own(CONTROL, lambda: call(vectors()))
class ScriptedFunction(Layered, layers=linears, activation=lambda: torch.jit.script(_gelu)):
    """A function of TorchScript, as older research code has for its activations."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x))
        return x
