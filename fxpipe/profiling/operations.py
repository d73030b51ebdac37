"""Operations as they ran for some batch sizes, and as formulas for every one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction

from fxpipe.polynomials import Polynomial, polynomial
from fxpipe.profiling.formulas import polynomial as through
from fxpipe.work import Operation, Work

Called = tuple[str, int, int]  # the type in which it computes, its arithmetic, bytes moved


@dataclass(frozen=True, slots=True)
class Ran:
    """What one node ran; as `Work`, at one size."""

    forward: tuple[Called, ...] = ()
    backward: tuple[Called, ...] = ()
    to_inputs: tuple[Called, ...] = ()


def work_of(found: Mapping[int, Ran], samples: int) -> Work:
    """From what ran for several numbers of samples; right in any case for `samples`.

    A number for which other operations ran is left out; what is known for one number only grows with the batch.
    """
    return _work(tuple(found.items()), samples)


@functools.lru_cache(maxsize=4096)
def _work(found: tuple[tuple[int, Ran], ...], samples: int) -> Work:
    here = dict(found)[samples]

    def operations(which: str) -> tuple[Operation, ...]:
        wanted = [dtype for dtype, _, _ in getattr(here, which)]
        rows = {size: getattr(ran, which) for size, ran in found}
        alike = {size: row for size, row in rows.items() if [dtype for dtype, _, _ in row] == wanted}
        return tuple(
            Operation(dtype, *(_formula(tuple((s, row[k][i]) for s, row in alike.items()), samples) for i in (1, 2)))
            for k, dtype in enumerate(wanted)
        )

    return Work(*(operations(field.name) for field in fields(Ran)))


@functools.lru_cache(maxsize=4096)
def _formula(counted: tuple[tuple[int, int], ...], samples: int) -> Polynomial:
    found = through(counted)
    if found is None or any(c < 0 for c in found):
        found = (Fraction(0), Fraction(dict(counted)[samples], samples))
    exact = polynomial(found)
    if exact(samples) == dict(counted)[samples]:
        return exact
    return Polynomial((dict(counted)[samples],))  # a share of it that is no number of a file
