"""What is right: a step of the plain model, and how much another step may differ from it.

A step is forward, a loss that looks at every number of every output, and backward. Steps are equal where outputs
(values, types and tree), gradients (every one by name; none where the plain model has none) and buffers are. A number
may differ by 1e-4 of the largest in its tensor; in a tensor that is small beside the others of its kind (a gradient
that is zero but for rounding), by 1e-6 of the largest of all.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.entry import BATCH, Call, Entry

CHUNKS = 2
TOLERANCE = 1e-4
SMALL = 1e-2  # a tensor whose numbers are all below this part of the largest of all is small
STEP_SEED = 7  # the random state before a step

Leaves = list[tuple[str, Any]]  # of an output: where it stands, with the types of what holds it, and what it is


@dataclass(frozen=True, slots=True)
class Step:
    """What a step leaves behind."""

    outputs: Leaves
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)  # as the step leaves them; empty: not looked at


@dataclass(frozen=True, slots=True)
class Comparison:
    """For each part of a step: empty where it is right, else the first difference."""

    outputs: str
    gradients: str
    buffers: str

    @property
    def verdict(self) -> str:
        wrong = [name for name in ("outputs", "gradients", "buffers") if getattr(self, name)]
        return f"wrong {wrong[0]}" if wrong else "right"

    @property
    def message(self) -> str:
        return self.outputs or self.gradients or self.buffers


# -- steps -----------------------------------------------------------------------------------------------------------


def direct_step(model: nn.Module, run: Callable[..., Any], inputs: Call) -> Step:
    """A step in which `run` stands for `model` on all of the inputs; torch's generator starts from the same state."""
    torch.manual_seed(STEP_SEED)
    outputs = flat(run(*inputs[0], **inputs[1]))
    if torch.is_grad_enabled():
        back(outputs)
    return step_of(model, outputs, inputs)


def step_of(model: nn.Module, outputs: Leaves, inputs: Call) -> Step:
    return Step(
        [(path, leaf.detach().clone() if isinstance(leaf, Tensor) else leaf) for path, leaf in outputs],
        {name: p.grad for name, p in model.named_parameters()},
        {name: b.detach().clone() for name, b in model.named_buffers()},
        {f"input {name}": leaf.detach() for name, leaf in flat(inputs) if isinstance(leaf, Tensor)},
    )


def micro_batches(entry: Entry, inputs: Call, count: int = CHUNKS) -> list[Call]:
    """The inputs cut as the entry's `in_dims` says; else where dimension 0 holds as many as the batch."""
    paths, spec = pytree.tree_flatten_with_path(inputs)
    given = entry.options.get("in_dims", 0)
    names = list(given) if isinstance(given, dict) else []
    parts: list[list[Any]] = [[] for _ in range(count)]
    for path, leaf in paths:
        dim = given[names[path[1].idx]] if names else given
        is_cut = isinstance(leaf, Tensor) and dim is not None and leaf.ndim > dim and leaf.shape[dim] == BATCH
        for part, piece in zip(parts, leaf.tensor_split(count, dim) if is_cut else [leaf] * count, strict=True):
            part.append(piece)
    return [pytree.tree_unflatten(part, spec) for part in parts]


def back(outputs: Leaves) -> None:
    loss = weighted(outputs)
    if loss.requires_grad:
        loss.backward()


def weighted(outputs: Leaves) -> Tensor:
    """A loss in which every number of the outputs has its own weight."""
    losses = []
    for _, leaf in outputs:
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
            numbers = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.cos(torch.arange(numbers.numel(), dtype=torch.float32)).view(numbers.shape)
            losses.append((numbers.float() * weights.to(numbers.device)).mean())
    return torch.stack(losses).sum() if losses else torch.zeros(())


def flat(value: Any, path: str = "") -> Leaves:
    """The leaves of any object, in the dataclasses and caches too that torch has not been told of."""
    return list(_flat(value, path))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and not isinstance(value, (Tensor, type))):
        items = list(vars(value).items())
    else:
        yield path, value
        return
    for key, item in items:
        yield from _flat(item, f"{path}{type(value).__name__}[{key!r}] ")


# -- comparing -------------------------------------------------------------------------------------------------------


def compare(have: Step, want: Step) -> Comparison:
    return Comparison(
        same_outputs(have.outputs, want.outputs),
        same_by_name(have.gradients, want.gradients),
        same_by_name(have.buffers, want.buffers) or (have.inputs and same_by_name(have.inputs, want.inputs)) or "",
    )


def same_outputs(have: Leaves, want: Leaves, tolerance: float = TOLERANCE) -> str:
    if [path for path, _ in have] != [path for path, _ in want]:
        return "another tree of outputs"
    pairs = [(path, leaf, wanted) for (path, leaf), (_, wanted) in zip(have, want, strict=True)]
    return _first_difference(pairs, tolerance)


def same_by_name(have: Mapping[str, Any], want: Mapping[str, Any], tolerance: float = TOLERANCE) -> str:
    if list(have) != list(want):
        return f"other names: {sorted({*have} ^ {*want})[:3]}"
    return _first_difference([(name, have[name], want[name]) for name in want], tolerance)


def _first_difference(pairs: Sequence[tuple[str, Any, Any]], tolerance: float) -> str:
    largest = max((_size(want) for _, _, want in pairs), default=0.0)
    return next((text for pair in pairs if (text := _difference(*pair, SMALL * largest, tolerance))), "")


def _difference(path: str, have: Any, want: Any, floor: float, tolerance: float) -> str:
    if isinstance(have, Tensor) != isinstance(want, Tensor):
        return f"{path}: {_kind(have)} instead of {_kind(want)}"
    if not isinstance(want, Tensor):
        is_same = have is want or (type(have) is type(want) and bool(have == want))
        return "" if is_same else f"{path}: {have!r} instead of {want!r}"
    if (have.shape, have.dtype) != (want.shape, want.dtype):
        return f"{path}: {_kind(have)} instead of {_kind(want)}"
    have = have.to(want.device)
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(have, want) else f"{path}: other {want.dtype} values"
    allowed = tolerance * max(_size(want), floor)
    if torch.allclose(have, want, rtol=0.0, atol=allowed, equal_nan=True):
        return ""
    return f"{path}: differs by {(have - want).abs().max().item():.1e}, {allowed:.1e} allowed"


def _size(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    numbers = value.detach().abs()
    return float(numbers[numbers.isfinite()].max()) if numbers.isfinite().any() else 0.0


def _kind(value: Any) -> str:
    return (
        f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else "none" if value is None else repr(value)
    )
