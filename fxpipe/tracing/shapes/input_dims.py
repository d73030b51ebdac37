"""The dimension of each input that may hold the samples, and the number of rows per sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fxpipe.errors import ArgumentError
from fxpipe.tracing.traced import InputLeaf
from fxpipe.utils.batch_split import BatchDim, rows_per_sample


def candidate_dims(leaves: Sequence[InputLeaf], in_dims: Any) -> list[int | None]:
    """Returns for each input leaf the dimension that may hold the batch, from `in_dims` or else 0.

    In a dimension given by the user, each sample may have several rows (`BatchDim`); the smallest input has one.
    """
    heads = list(dict.fromkeys(leaf.head for leaf in leaves))
    if in_dims is None or isinstance(in_dims, int):
        by_head = {} if in_dims is None else dict.fromkeys(heads, in_dims)
    elif isinstance(in_dims, tuple) and len(in_dims) == len(heads):
        by_head = dict(zip(heads, in_dims, strict=True))
    elif isinstance(in_dims, dict) and set(in_dims) <= set(heads):
        by_head = in_dims
    else:
        raise ArgumentError(
            f"in_dims={in_dims!r} does not fit the inputs {heads}; give an int for all, a tuple with an entry (int "
            "or None) for each input, or a dict from input name to int or None"
        )
    dims: list[BatchDim | None] = []
    for leaf in leaves:
        dim = by_head.get(leaf.head, 0 if leaf.shape else None) if leaf.is_tensor else None
        if dim is not None and not -len(leaf.shape) <= dim < len(leaf.shape):
            raise ArgumentError(
                f"in_dims gives dimension {dim} for input {leaf.path}, which has shape {leaf.shape}; use None for it"
            )
        dims.append(dim if dim is None else BatchDim(dim % len(leaf.shape)))
    for leaf, dim in zip(leaves, dims, strict=True):
        if leaf.same_as is not None and dim != dims[leaf.same_as]:
            raise ArgumentError(
                f"the inputs {leaves[leaf.same_as].path} and {leaf.path} are the same tensor, and in_dims cuts them "
                "differently; give a copy of one of them (x.clone())"
            )
    sizes = {leaf.path: leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    batch = min(sizes.values(), default=0)
    if in_dims is None or batch == 0:
        return [*dims]
    smallest = next(path for path, size in sizes.items() if size == batch)
    for path, size in sizes.items():
        if size % batch:
            raise ArgumentError(
                f"in_dims says that {path} holds the batch, but its {size} rows are no whole number for each of the "
                f"{batch} samples of {smallest}; give each sample as many rows, or None in in_dims for an input "
                "without a batch"
            )
    return [
        None if dim is None else BatchDim(dim, leaf.shape[dim] // batch) for leaf, dim in zip(leaves, dims, strict=True)
    ]


def other_in_dims(leaves: Sequence[InputLeaf]) -> list[dict[str, int | None]]:
    """Returns `in_dims` to try if inputs of different sizes cannot all hold the batch, the most likely first.

    A list may have an entry for each sample (the boxes of each picture), which each micro-batch takes whole; the
    smallest input may hold the samples, and others several rows for each; or the inputs of the most frequent size hold
    them, and each micro-batch takes all of the others (a table).
    """
    ways: list[dict[str, int | None]] = []
    entries = {leaf.head: {x.path.split("]")[0] for x in leaves if x.head == leaf.head} for leaf in leaves}
    lists = {head for head, paths in entries.items() if len(paths) > 1}
    if any(x.shape[:1] == (len(entries[head]),) for head in lists for x in leaves if x.head not in lists):
        ways.append({head: None if head in lists else 0 for head in entries})
    sizes = {leaf.head: [x.shape[:1] for x in leaves if x.is_tensor and x.head == leaf.head] for leaf in leaves}
    counts = Counter(size for of_head in sizes.values() for shape in of_head for size in shape if size > 1)
    if len(counts) > 1:
        batch, (most, _) = min(counts), counts.most_common(1)[0]
        multiples = {size for size in counts if size % batch == 0}
        for holding in (multiples, {most}) if len(multiples) > 1 else ({most},):
            ways.append({h: 0 if all(holding.issuperset(s) and s for s in held) else None for h, held in sizes.items()})
    return [way for place, way in enumerate(ways) if way not in ways[:place]]


def cut_elements(leaves: Sequence[InputLeaf], dims: Sequence[int | None]) -> int:
    """Returns the number of elements of the inputs that are cut in these dimensions."""
    return sum(math.prod(leaf.shape) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)


def batch_sizes(leaves: Sequence[InputLeaf], dims: Sequence[int | None]) -> set[int]:
    """Returns the numbers of samples that inputs hold in these dimensions."""
    return {leaf.shape[dim] // rows_per_sample(dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
