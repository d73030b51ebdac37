"""Entries of the zoo at several sizes: of their inputs, those dimensions vary with which the plain model runs.

What varies is found by trying: dimensions of one size together (ids and their mask), in steps that a model may take (a
picture in patches of eight). Inputs are cut to their last positions, where padding is, or go on from their beginning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.entry import Call, Entry
from zoo.reference import STEP_SEED, flat

Sizes = Mapping[tuple[int, int], int]  # place among the tensors of the inputs, dimension -> size

MANY_GRAPHS = 2  # one of the first size, one of all; more have a reason
STEPS = ((8, (4, -3, 8, -1)), (4, (2, -1, 4, -2)), (2, (1, 2, 3, -1)), (1, (1, 2, 3)))  # part of a size, how many more


@dataclass(frozen=True, slots=True)
class SizedEntry:
    """An entry, and sizes of its inputs with which the plain model runs."""

    entry: Entry
    sizes: tuple[Sizes, ...]

    def at(self, sizes: Sizes) -> Entry:
        """The entry with inputs of these sizes."""

        def make() -> tuple[nn.Module, Call]:
            model, inputs = self.entry.make()
            return model, resized(inputs, sizes)

        return replace(self.entry, make=make)

    def __str__(self) -> str:
        return " ".join("x".join(map(str, sizes.values())) for sizes in self.sizes)


def resized(inputs: Call, sizes: Sizes) -> Call:
    leaves, spec = pytree.tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for (number, dim), size in sizes.items():
        leaf = leaves[places[number]]
        index = torch.arange(-size, 0) % leaf.shape[dim]
        leaves[places[number]] = leaf.detach().index_select(dim, index).requires_grad_(leaf.requires_grad)
    call: Call = pytree.tree_unflatten(leaves, spec)
    return call


def with_sizes(entry: Entry, training: bool) -> SizedEntry | None:
    """The entry with sizes that it takes; None where no dimension can vary."""
    if entry.has_one_size:
        return None
    model, inputs = entry.build()
    model.train(training)
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    varying: list[tuple[Sizes, ...]] = []
    for dims in _dimensions(entry, tensors):
        if not any(key in sizes for group in varying for sizes in group for key in dims):
            varying += _sizes_taken(model, inputs, tensors, dims)
    if not varying:
        return None
    count = min(map(len, varying))
    together = tuple({key: size for group in varying for key, size in group[i].items()} for i in range(count))
    oblong = {key: together[place % count][key] for place, key in enumerate(together[0])}
    if oblong not in together and _runs(model, inputs, oblong):
        together = (*together, oblong)
    if not all(_runs(model, inputs, sizes) for sizes in together):
        together = varying[0]
    return SizedEntry(entry, together)


def _dimensions(entry: Entry, tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, int]]]:
    """Yields dimensions that may vary together: all of one size, those that are no features, those next to samples."""
    given = entry.options.get("in_dims", 0)
    if not isinstance(given, int):
        return  # it is of other things than lengths
    all_dims = [(n, d) for n, t in enumerate(tensors) for d in range(t.dim()) if d != given and t.shape[d] >= 4]
    for size in dict.fromkeys(tensors[n].shape[d] for n, d in all_dims):
        alike = [(n, d) for n, d in all_dims if tensors[n].shape[d] == size]
        no_features = [(n, d) for n, d in alike if d < tensors[n].dim() - 1 or not tensors[n].is_floating_point()]
        yield from (dims for dims in (alike, no_features, [(n, d) for n, d in alike if d == 1]) if dims)


def _sizes_taken(
    model: nn.Module, inputs: Call, tensors: Sequence[Tensor], dims: Sequence[tuple[int, int]]
) -> list[tuple[Sizes, ...]]:
    number, dim = dims[0]
    size = tensors[number].shape[dim]
    for part, steps in STEPS:
        if size % part == 0:
            wanted = tuple(dict.fromkeys(dims, size + step * size // part) for step in steps)
            if all(_runs(model, inputs, sizes) for sizes in wanted):
                return [wanted]
    return []


def _runs(model: nn.Module, inputs: Call, sizes: Sizes) -> bool:
    args, kwargs = resized(inputs, sizes)
    torch.manual_seed(STEP_SEED)
    try:
        with torch.no_grad():
            return len(flat(model(*args, **kwargs))) > 0
    except Exception:
        return False
