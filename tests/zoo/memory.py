"""Own models whose difficulty is memory: made in forward, changed in place, seen through views, shared, tied."""

import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import Tensor, nn

from zoo.entry import Entry, call, images, linears, own, tokens, vectors

MEMORY: list[Entry] = []

# -- made in forward -------------------------------------------------------------------------------------------------

MEAN = torch.tensor([0.48, 0.45, 0.40]).view(3, 1, 1)
DEVIATION = torch.tensor([0.22, 0.22, 0.22]).view(3, 1, 1)


@own(MEMORY, lambda: call(images(8)))
class GlobalConstants(Layered, convs=lambda: nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))):
    """Tensors of the Python module, not of the model."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x - MEAN) / DEVIATION
        for conv in self.convs:
            x = torch.relu(conv(x))
        return x * DEVIATION + MEAN


@own(MEMORY, lambda: call(tokens(5)))
class MadeInForward(
    Layered, embed=lambda: nn.Embedding(50, 8), places=lambda: nn.Embedding(16, 8), layers=lambda: linears(3)
):
    """Positions, a causal mask, a state and a table of numpy are made anew in each forward."""

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.embed(ids) + self.places(torch.arange(length, device=ids.device))[None]
        state = torch.zeros(batch, 1, 8, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
            scores = layer(x) @ x.transpose(1, 2) + mask
            x = x + scores.softmax(-1) @ x + state
            state = state + x.new_tensor([0.5]) + torch.ones_like(state).cumsum(0).clamp(max=1)
        return x


@own(MEMORY, lambda: call(vectors(6, 8)))
class RandomMasking(
    Layered, encoder=lambda: linears(2), decoder=lambda: linears(2), hidden=lambda: nn.Parameter(torch.zeros(1, 1, 8))
):
    """A masked autoencoder: which patches are seen is drawn anew in each forward, in evaluation too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        order = torch.rand(batch, length, device=x.device).argsort(1)
        back = order.argsort(1)
        seen = x.gather(1, order[:, :3, None].expand(-1, -1, width))
        for layer in self.encoder:
            seen = seen + torch.tanh(layer(seen))
        y = torch.cat([seen, self.hidden.expand(batch, length - 3, -1)], 1)
        y = y.gather(1, back[..., None].expand(-1, -1, width))
        for layer in self.decoder:
            y = y + torch.tanh(layer(y) + 0.1 * torch.randn_like(y))
        return y, back >= 3


# -- in place, and views ---------------------------------------------------------------------------------------------


@own(MEMORY, lambda: call(images(8)))
class InplaceResidual(nn.Module):
    """`+=` on skips and in-place activations behind batch norms, as in every ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            y += x
            x = self.relu(y)
        return x


@own(MEMORY, lambda: call(vectors(6, 8)))
class WritesThroughViews(Layered, layers=lambda: linears(6)):
    """Slices, chunks and transposed views of a value are written to, and the value is used later."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        skip = x.transpose(1, 2)
        first, second = x[..., :4], x[..., 4:]
        y = self.layers[1](x * 2)
        y[:, 0] = 0
        y[:, 1:3] += first[:, 1:3].repeat(1, 1, 2)
        second.mul_(0.5)
        for layer in self.layers[2:5]:
            y = torch.tanh(layer(y))
        y = y + skip.transpose(1, 2)
        y.view(-1, 48)[:, :8].zero_()
        return self.layers[5](y)


@own(MEMORY, lambda: call(vectors(3, 3, 8, 8)))
class ConvolutionalLstm(Layered, gates=lambda: nn.Conv2d(7, 16, 3, padding=1), out=lambda: nn.Conv2d(4, 1, 1)):
    """Writes each step into a tensor made empty."""

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 4, 8, 8)
        cell, out = torch.zeros_like(state), torch.empty(x.shape[0], x.shape[1], 1, 8, 8)
        for t in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, t], state], 1)).chunk(4, 1)
            cell = cell * f.sigmoid() + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            out[:, t] = self.out(state)
        return out


@own(MEMORY, lambda: call(vectors()))
class ChangedSkip(Layered, layers=linears):
    """A skip is changed in place after it was kept for later."""

    def forward(self, x: Tensor) -> Tensor:
        skip = x = x * 3
        y = self.layers[0](x * 2)
        x.add_(1)
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y))
        return y + skip


# -- tied and shared -------------------------------------------------------------------------------------------------


@own(MEMORY, lambda: call(tokens()))
class TiedEmbedding(nn.Module):
    """The embedding is the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 8), linears(4)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


@own(MEMORY, lambda: call(vectors()))
class OneLayerManyTimes(
    Layered, block=lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(8))
):
    """The same block is called six times, as in ALBERT."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + self.block(x)
        return x


@own(MEMORY, lambda: call(images(16), images(16)))
class Siamese(nn.Module):
    """Two inputs run through one encoder, whose batch norm sees both; a submodule has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 8, 3, 2), nn.Flatten(2)
        )
        self.left = nn.Linear(8, 8)
        self.right = self.left

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.encoder(a).mean(-1), self.encoder(b).mean(-1)
        return self.left(a), F.cosine_similarity(self.right(a), self.right(b))


# -- the rest of torch -----------------------------------------------------------------------------------------------


@own(MEMORY, lambda: call(vectors(16)))
class Spectral(nn.Module):
    """Complex values and complex parameters, from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(9, dtype=torch.complex64) for _ in range(3))
        self.layers = linears(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            spectrum = torch.fft.rfft(x)
            x = x + torch.tanh(layer(torch.fft.irfft(spectrum * weight, n=16)))
        return x


@own(MEMORY, lambda: call(vectors(), torch.randint(0, 20, (4, 3))))
class ManyLayers(nn.Module):
    """Layers that are rarer than others."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.bag = nn.Bilinear(8, 8, 8), nn.EmbeddingBag(20, 8, mode="mean")
        self.norm, self.prelu, self.layer = nn.BatchNorm1d(8), nn.PReLU(), nn.LayerNorm(8)
        self.conv, self.grow = nn.Conv1d(1, 2, 3, padding=1), nn.ConvTranspose1d(2, 1, 3, padding=1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.prelu(self.norm(x))
        y = self.layer(y + self.bilinear(y, x)) * self.bag(ids)
        y = self.grow(F.glu(torch.cat([self.conv(y[:, None])] * 2, 1), 1)).squeeze(1)
        return torch.einsum("bi,bj->bij", y, x).logsumexp(-1)
