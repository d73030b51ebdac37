"""The kinds of losses that a pipe has trained with, and when each is verified.

To verify a loss all outputs of a mini-batch are kept and the loss is taken once more: in the first step with it, the
tenth, the hundredth and so on. What comes in between is not compared; but on the CPU each step looks at what elements
count in sums and means (see `elements`), which is where padding shows. On a GPU that would wait for it, so it is done
in the same steps only.

Losses are of one kind if the same code makes them, with the same switches (`reduction="sum"`), from a target of the
same make-up: a loop may well make its loss function anew in each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.runtime.assembly import Assembly
from fxpipe.trees import flatten


@dataclass(slots=True)
class Kind:
    """What is known of one kind of loss."""

    is_cheap: bool  # to look at numbers, since nobody has to wait for them
    passes: int = 0  # steps so far
    can_verify: bool = False  # has its value been compared
    is_mistaken: bool = False  # do its elements rightly count what they do, whatever it looks like

    @property
    def is_due(self) -> bool:
        """In the 1st step, the 10th, the 100th; and again until one passes."""
        return str(self.passes + 1).strip("0") == "1"

    @property
    def look_at_elements(self) -> bool:
        return (self.is_cheap or self.is_due) and not self.is_mistaken

    def passed(self, is_mistaken: bool = False) -> None:
        """A step has ended well."""
        self.passes += 1
        self.is_mistaken |= is_mistaken


@dataclass(slots=True)
class KnownLosses:
    """By what makes them."""

    kinds: dict[Any, Kind] = field(default_factory=dict)

    def of(self, loss_fn: Callable[..., Any], reduction: str, target: tuple[Any, ...], assembly: Assembly) -> Kind:
        """The kind of a loss of `forward_backward`."""
        leaves = [(x.dtype, x.dim()) if isinstance(x, torch.Tensor) else type(x) for x in flatten(target)[0]]
        return self._kind((_maker_of(loss_fn), reduction, tuple(leaves), assembly.out_dims), assembly)

    def of_call(self, assembly: Assembly) -> Kind:
        """The drop-in knows nothing of the loss but what the model itself takes."""
        return self._kind(assembly.out_dims, assembly)

    def _kind(self, key: Any, assembly: Assembly) -> Kind:
        if key not in self.kinds:
            self.kinds[key] = Kind(all(device.type == "cpu" for device in assembly.devices))
        return self.kinds[key]


def _maker_of(loss_fn: Any) -> Any:
    """What stays the same where a loop makes its loss function anew in each step."""
    if isinstance(loss_fn, functools.partial):
        return _maker_of(loss_fn.func), _options(loss_fn.args), _options(loss_fn.keywords.items())
    if hasattr(loss_fn, "__code__"):
        cells = [cell.cell_contents for cell in loss_fn.__closure__ or ()]
        return loss_fn.__code__, _options(cells), *(_maker_of(c) for c in cells if isinstance(c, nn.Module))
    return type(loss_fn), _options(getattr(loss_fn, "__dict__", {}).items())


def _options(values: Iterable[Any]) -> tuple[Any, ...]:
    """Names and switches, such as `reduction`; not numbers, which a schedule may change in every step."""
    kinds = (str, bool, type(None))
    return tuple(v for v in values if isinstance(v[-1] if isinstance(v, tuple) and v else v, kinds))
