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


# -- rows of the table: what one way made of one model, as plain data --------------------------------------------------

WAYS = ("fxpipe", "symbolic_trace", "pipelining")
AT_SIZES = "sizes"
IN_ONE = "chunks=1"
HANDED_OVER = "micro-batches"
MODES = ("train", "eval")

Task = tuple[str, str, int]  # way, mode, number of stages


@dataclass(frozen=True, slots=True)
class Row:
    """What one way made of one entry. Only fxpipe fills in what is below the message.

    "sizes", "chunks=1" and "micro-batches" are fxpipe as well, with a batch of each of several sizes, with one
    micro-batch, and with micro-batches that the caller hands over.
    """

    model: str
    family: str
    way: str
    mode: str  # "train" or "eval"
    stages: int
    verdict: str  # "right", "refused", "wrong outputs", "wrong gradients", "wrong buffers", "fails", "hangs", "crashes"
    message: str = ""
    remarks: str = ""  # what is special about the way
    nodes: int = 0
    largest_leaf: float = 0.0  # its share of the parameters
    plan_seconds: float = 0.0
    graphs: int = 0  # made for inputs of several sizes, where these may vary
    sizes: str = ""  # of these inputs

    @property
    def is_wrong(self) -> bool:
        return self.verdict.startswith("wrong")
