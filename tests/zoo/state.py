"""Own models whose difficulty is what a call leaves behind and reads again, what it decides by, and what it loses."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import Tensor, nn

from zoo.entry import BATCH, Entry, call, linears, own, padding, tokens, vectors

STATE: list[Entry] = []


def _halves(factor: float = 9.0) -> Tensor:
    """Samples of which the second half is larger than the first."""
    return vectors() * torch.tensor([0.1, 0.1, factor, factor])[:, None]


# -- autograd Functions, whatever they are called through ------------------------------------------------------------


class _Sharp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class _SharpWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, width: float) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.width = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.width), None


sharp = _Sharp.apply
sharp_within = _SharpWithSetup.apply


@own(STATE, lambda: call(vectors()))
class FunctionAliases(
    Layered, layers=linears, function=lambda: _Sharp.apply, partial=lambda: functools.partial(_Sharp.apply)
):
    """Functions through a name of the Python module, an attribute, a partial, and with `setup_context`."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + sharp(self.layers[0](x))
        x = x + self.function(self.layers[1](x))
        x = x + self.partial(self.layers[2](x))
        return x + sharp_within(self.layers[3](x), 1.0)


# -- memory banks and codebooks --------------------------------------------------------------------------------------


class _Bank(Layered, bank=lambda: torch.zeros(3, 8), place=lambda: torch.zeros(1, dtype=torch.long)):
    """The last few means of what went by; the place of the next one is read as a whole number."""

    def forward(self, x: Tensor) -> Tensor:
        place = int(self.place)
        if self.training:
            self.bank[place] = x.detach().mean(0)
            self.place[0] = (place + 1) % len(self.bank)
        return x - self.bank.mean(0)


@own(STATE, lambda: call(vectors()), out_dims=0)
class MemoryBank(Layered, layers=linears, bank=_Bank):
    """In a module of its own, which is kept whole: whether samples meet in it but by its state cannot be told."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = self.bank(x) if number == 1 else x
        return x


@own(STATE, lambda: call(vectors()), out_dims=0)
class MemoryBankOfTheModel(_Bank, layers=linears):
    """The model itself holds it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        x = super().forward(x)
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x


class _Quantizer(nn.Module):
    """A codebook of running means; codes that nobody uses start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x.detach(), self.codes).argmin(-1)
        if self.training:
            hot = F.one_hot(chosen, 4).to(x.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hot.T @ x.detach(), alpha=0.1)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        code = F.embedding(chosen, self.codes)
        return x + (code - x).detach(), (x - code.detach()).square().mean(-1)


@own(STATE, lambda: call(vectors()))
class VectorQuantizer(Layered, encoder=lambda: linears(2), quantizer=_Quantizer, decoder=lambda: linears(2)):
    """Straight-through estimates, and a distance to the code for each sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        x, commitment = self.quantizer(x)
        for layer in self.decoder:
            x = torch.tanh(layer(x))
        return x, commitment


# -- reads of hidden values ------------------------------------------------------------------------------------------


class _Clamped(Layered, layer=8):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x)
        if (x.abs() > 5).sum().item() > 0:
            x = x.clamp(-1, 1)
        return x


@own(STATE, lambda: call(_halves()))
class ClampedWhenLarge(Layered, blocks=lambda: nn.ModuleList(_Clamped() for _ in range(3))):
    """A hidden value decides in a module, otherwise for each micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Routed(nn.Module):
    """Experts that take the rows routed to them, found in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.route, self.experts = way, nn.Linear(8, 3), linears(3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        weights, chosen = self.route(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if self.way == "where":
                index = torch.where(chosen == number)[0]
                if len(index) == 0:
                    continue
            elif self.way == "nonzero":
                index = (chosen == number).nonzero().flatten()
            else:
                index = chosen == number
                if not index.any():
                    continue
            out[index] = expert(rows[index]) * weights[index, None]
        return x + out.view_as(x)


@own(STATE, lambda: call(tokens(2)))
class RoutedExperts(
    Layered, embed=lambda: nn.Embedding(50, 8), blocks=lambda: nn.ModuleList(map(_Routed, ("where", "nonzero", "mask")))
):
    """Few rows for many experts: some of them have none in a micro-batch."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


# -- inputs ----------------------------------------------------------------------------------------------------------


@own(STATE, lambda: call(vectors(), torch.zeros(BATCH, 6, 8), torch.zeros(BATCH, 8)))
class WrittenInputs(Layered, layers=linears):
    """A cache and a state that the caller keeps are written to."""

    def forward(self, x: Tensor, cache: Tensor, state: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + state
            cache[:, place] = x.detach()
            x = x + cache.mean(1)
        state.copy_(x.detach())
        return x


@own(STATE, lambda: call(vectors(), tokens(1)[:, 0]), leaf_modules=["head"])
class UnusedMixture(
    Layered, layers=linears, embed=lambda: nn.Embedding(50, 8), head=lambda: nn.Sequential(*linears(2))
):
    """What nobody uses mixes the inputs; the head is to be kept whole."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        unused = x + self.embed(ids)  # noqa: F841
        return self.head(x)


# -- losses ----------------------------------------------------------------------------------------------------------


def _padded_labels() -> Tensor:
    """Of which the first half of the batch has fewer that count than the second."""
    labels = tokens()
    labels[0, 2:] = labels[1, 3:] = -100
    return labels


class _Language(Layered, embed=lambda: nn.Embedding(50, 8), layers=linears, head=(8, 50)):
    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@own(STATE, lambda: call(tokens(), _padded_labels()))
class PaddedLoss(_Language):
    """A mean over the labels that are no padding, which the model takes itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@own(STATE, lambda: call(tokens(), _padded_labels(), torch.tensor(21)))
class CountedLoss(_Language):
    """A sum over the number of items in the batch, which comes as an input."""

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> dict[str, Tensor]:
        logits = self.logits(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return {"loss": loss / num_items_in_batch, "logits": logits}


@own(STATE, lambda: call(tokens(), padding()))
class MaskedLoss(_Language):
    """A sum over those that a mask keeps, divided by how many they are."""

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(ids)
        return (logits.square().mean(-1) * mask).sum() / mask.sum(), logits


# -- made in the first forward, or in each ---------------------------------------------------------------------------


@own(STATE, lambda: call(vectors(5, 8)))
class KeptAttention(Layered, layers=linears):
    """Attributes that forward makes: attention weights to look at later, statistics to undo a normalisation with."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(1, keepdim=True).detach()
        x = x - self.mean
        for layer in self.layers:
            weights = (layer(x) @ x.mT).softmax(-1)
            self.attention = weights.detach()
            x = x + weights @ x
        return x + self.mean


@own(STATE, lambda: call(vectors(5, 8)))
class LazyState(Layered, layers=linears, table=lambda: None, width=lambda: None):
    """A table that is made when it is first needed, and a number that is set once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.width is None:
            self.width = x.shape[-1]
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1])[:, None].cos()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.table[: x.shape[1]] / self.width**0.5
        return x


@own(STATE, lambda: call(vectors()))
class LeafInForward(Layered, layers=linears):
    """A tensor made in forward requires gradients, and nobody asks for them."""

    def forward(self, x: Tensor) -> Tensor:
        offset = torch.ones(8).requires_grad_()
        for layer in self.layers:
            x = torch.tanh(layer(x)) + offset
        return x


@own(STATE, lambda: call(vectors()))
class CompiledBlock(Layered, layers=linears, block=lambda: torch.compile(nn.Sequential(*linears(2)), backend="eager")):
    """A part of the model is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.block(x)
