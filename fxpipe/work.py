"""The work of nodes and stages, whatever the hardware: the operations that run, as formulas in the micro-batch size.

An operation has an arithmetic, in a type, and a traffic: with the figures of some hardware that makes seconds
(`Hardware.seconds`). So what was measured here can be reckoned for hardware that is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.polynomials import Polynomial

if TYPE_CHECKING:
    from fxpipe.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a kernel."""

    dtype: str  # in which it computes, by name; "" where it only moves
    flops: Polynomial
    moved: Polynomial  # bytes read and written

    def seconds(self, hardware: Hardware, b: int) -> float:
        return hardware.seconds(self.flops(b), self.dtype, self.moved(b))


@dataclass(frozen=True, slots=True)
class Work:
    """What a node runs, in order."""

    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()
    to_inputs: tuple[Operation, ...] = ()  # what backward would run, had no parameter a gradient
