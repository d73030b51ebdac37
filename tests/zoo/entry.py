"""What an entry of the zoo is: a model and its inputs, made from a seed; and the inputs that many of them take."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
TOKENS = 50
SEED = 0

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of forward


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo."""

    name: str
    family: str  # the package it comes from
    make: Callable[[], tuple[nn.Module, Call]]
    options: dict[str, Any] = field(default_factory=dict)  # for fxpipe.pipeline
    has_one_size: bool = False  # at other sizes it draws numbers of numpy's, in a way that no reference can repeat

    def build(self, seed: int = SEED) -> tuple[nn.Module, Call]:
        """The model and its inputs, the same in each call."""
        torch.manual_seed(seed)
        return self.make()


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def name_of(kind: type) -> str:
    """`MaskAll` is called `mask_all`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def own(
    entries: list[Entry], inputs: Callable[[], Call], name: str = "", **options: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A decorator that puts a model, made without arguments, among `entries`; by default by the name of its class."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        entries.append(Entry(name or name_of(kind), "own", lambda: (kind(), inputs()), options))
        return kind

    return add


# -- inputs: B samples each ------------------------------------------------------------------------------------------


def vectors(*shape: int) -> Tensor:
    return torch.randn(BATCH, *(shape or (8,)))


def tokens(length: int = 8) -> Tensor:
    return torch.randint(3, TOKENS, (BATCH, length))


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def padding(length: int = 8) -> Tensor:
    """An attention mask; the padding of the second half is that of the first, so micro-batches are alike."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[::2, length - 2 :] = 0
    return mask


# -- layers of the own models ----------------------------------------------------------------------------------------


def linears(count: int = 4, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))
