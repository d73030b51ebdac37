"""Own models whose difficulty is what goes in, what comes out, and where the batch is."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.entry import BATCH, Entry, call, linears, own, tokens, vectors

STRUCTURE: list[Entry] = []

# -- outputs ---------------------------------------------------------------------------------------------------------


class Detection(NamedTuple):
    logits: Tensor
    boxes: Tensor


@own(STRUCTURE, lambda: call(vectors()))
class NamedTupleOut(Layered, layers=linears):
    def forward(self, x: Tensor) -> Detection:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Detection(x[:, :4], x[:, 4:].sigmoid())


@dataclass
class Prediction:
    sample: Tensor
    hidden: list[Tensor]
    note: str = "none"


@own(STRUCTURE, lambda: call(vectors()))
class DataclassOut(Layered, layers=linears):
    """A dataclass that torch has not been told of."""

    def forward(self, x: Tensor) -> Prediction:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return Prediction(x, hidden)


@own(STRUCTURE, lambda: call({"x": vectors(), "extra": [vectors(2), None, 3]}, flag=True))
class NestedTrees(Layered, layers=lambda: linears(3), small=(2, 8)):
    """A dict in; a dict with None, a number, a flag and a size out."""

    def forward(self, batch: dict[str, Any], *, flag: bool = False, missing: Tensor | None = None) -> Any:
        x, (extra, nothing, times) = batch["x"], batch["extra"]
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) + (self.small(extra) if nothing is None else 0)
        out: dict[str, Any] = {"x": x * times, "missing": missing, "width": x.shape[1], "flag": flag}
        out["pair"] = (x.detach().argmax(-1), {"gradient": x.requires_grad})
        return out


@own(STRUCTURE, lambda: call(tokens(6), labels=tokens(6)))
class LossInside(Layered, embed=lambda: nn.Embedding(50, 8), layers=lambda: linears(3), head=(8, 50)):
    """The model returns its own mean loss beside its logits."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        logits = self.head(x)
        return None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@own(STRUCTURE, lambda: call(vectors(1, 16, 16)))
class DeepSupervision(nn.Module):
    """A U-Net with an output on each level."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, d, 3, padding=1) for c, d in ((1, 4), (4, 8), (8, 8)))
        self.up = nn.ModuleList(nn.Conv2d(c, d, 3, padding=1) for c, d in ((16, 8), (12, 4)))
        self.heads = nn.ModuleList(nn.Conv2d(c, 2, 1) for c in (8, 4))

    def forward(self, x: Tensor) -> list[Tensor]:
        skips = []
        for conv in self.down:
            x = torch.relu(conv(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x, outputs = skips.pop(), []
        for conv, head in zip(self.up, self.heads, strict=True):
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = torch.relu(conv(torch.cat([x, skips.pop()], 1)))
            outputs.append(head(x))
        return outputs[::-1]


# -- where the batch is ----------------------------------------------------------------------------------------------


@own(STRUCTURE, lambda: call(torch.randn(6, BATCH, 8)), in_dims=1)
class BatchSecond(
    Layered, encoder=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
):
    """Time first, as torch's transformer has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


@own(STRUCTURE, lambda: call(vectors(3, 1, 8, 8)))
class FlattenedFrames(nn.Module):
    """Frames of videos are samples of a convolution, and go back into their videos."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 4, 3, padding=1) for c in (1, 4, 4))
        self.time = nn.GRU(4, 8, batch_first=True)

    def forward(self, video: Tensor) -> Tensor:
        batch, frames = video.shape[:2]
        x = video.flatten(0, 1)
        for conv in self.convs:
            x = torch.relu(conv(x))
        return self.time(x.mean((2, 3)).view(batch, frames, -1))[0]


def _causal(length: int) -> Tensor:
    return torch.ones(length, length).tril().log()


@own(
    STRUCTURE,
    lambda: call(vectors(BATCH, 8), _causal(BATCH), torch.arange(BATCH)),
    in_dims={"x": 0, "mask": None, "positions": None},
)
class SquareMask(Layered, layers=linears, places=lambda: nn.Embedding(10, 8)):
    """As many positions as samples: a mask [T, T] and positions [T] that are no batch."""

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        x = x + self.places(positions)
        for layer in self.layers:
            x = x + F.scaled_dot_product_attention(layer(x), x, x, attn_mask=mask)
        return x


@own(STRUCTURE, lambda: call(torch.randn(BATCH, BATCH, BATCH)))
class EqualSizes(Layered, layers=lambda: linears(3, BATCH)):
    """Batch, length and width are the same number, and are used as such."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        for layer in self.layers:
            x = x + layer(x.transpose(1, 2)).reshape(batch, length, width)
        steps = torch.arange(length, device=x.device).expand(batch, length)
        return (x * steps[..., None]).view(batch, length * width) + torch.zeros(batch, width).repeat(1, length)


# -- values that are no tensors, across stages -----------------------------------------------------------------------


@own(STRUCTURE, lambda: call(vectors(5, 8), torch.tensor([1, 0, 2, 1])))
class ThingsAcrossStages(Layered, layers=lambda: linears(6), kinds=lambda: nn.Embedding(3, 8)):
    """Sizes, flags, dtypes, None and masks are made at the start and used at the end."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        batch, length, width = x.size()
        dtype, device, is_long, missing = x.dtype, x.device, length > 3, None
        positive, order, count = x > 0, x.argsort(1), (x > 0).sum((1, 2))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = torch.where(positive, x, -x).gather(1, order) / count.view(-1, 1, 1).clamp(min=1)
        x = x + self.kinds(kind)[:, None] + torch.ones(batch, length, width, dtype=dtype, device=device)
        return x if missing is None and is_long else x.view(batch, -1)


# -- recurrent models ------------------------------------------------------------------------------------------------


class PackedEncoder(Layered, lstm=lambda: nn.LSTM(8, 8, batch_first=True)):
    """Sequences of several lengths, packed for the LSTM."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


@own(STRUCTURE, lambda: call(vectors(5, 8), torch.tensor([5, 4, 5, 3])))
class PackedSequence(Layered, into=8, first=PackedEncoder, second=PackedEncoder, out=(8, 4)):
    """Packed sequences inside, of one length outside."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.into(x), lengths), lengths))


@own(STRUCTURE, lambda: call(tokens()), out_dims=(0, (1, 1)))
class LstmStates(nn.Module):
    """The states of an LSTM hold the batch in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(16, 5)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1, bidirectional=True)

    def forward(self, ids: Tensor) -> Any:
        y, states = self.lstm(self.embed(ids))
        return self.out(y), states


@own(STRUCTURE, lambda: call(tokens()))
class GruCells(nn.Module):
    """A GRU over time first, then a cell in a loop of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 5)
        self.gru, self.cell = nn.GRU(8, 8, 2, dropout=0.1), nn.GRUCell(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        y, last = self.gru(self.embed(ids).transpose(0, 1))
        state = last[-1]
        for t in range(y.shape[0]):
            state = self.cell(y[t], state)
        return self.out(state)


# -- attention of torch ----------------------------------------------------------------------------------------------


@own(STRUCTURE, lambda: call(vectors(6, 16), vectors(5, 16)))
class Translator(Layered, transformer=lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True)):
    """torch's Transformer, with its causal mask."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)


@own(STRUCTURE, lambda: call(vectors(6, 16), (torch.arange(6) >= 4).expand(BATCH, 6)))
class PaddedEncoder(
    Layered, encoder=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
):
    """torch's encoder with padding: evaluation takes its fast path, with nested tensors."""

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=is_padding)


@own(STRUCTURE, lambda: call(vectors(6, 16)))
class Attentions(nn.Module):
    """nn.MultiheadAttention of self and of others, with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.other = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, add_bias_kv=True, batch_first=True)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, weights = self.own(x, x, x)
        key = self.narrow(y)
        z, others = self.other(y, key, key, need_weights=True)
        return z, weights, others
