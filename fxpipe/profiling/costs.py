"""What the nodes of a graph cost, as plain frozen data: bytes and FLOPs as formulas in the batch size `b`.

All of it is of one micro-batch with `b` samples; nothing here depends on where the graph will be cut. What does is said
by places (indexes of nodes in order of running): a storage that several nodes keep for backward counts once in a stage
that holds them both, and twice in two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import sympy
from tabulate import tabulate

from fxpipe.work import Work


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time over the micro-batch size: a fixed cost, and a cost per sample. Neither is negative."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: int) -> float:
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.fixed + other.fixed, self.per_sample + other.per_sample)


NO_TIME = Seconds()
NOTHING = sympy.Integer(0)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One working node."""

    name: str
    forward: Seconds
    backward: Seconds  # all of it; zero where no gradient goes through
    parameter_bytes: sympy.Expr  # parameters and buffers that no node before it uses: sums count each of them once
    output_bytes: sympy.Expr  # new memory for what it returns; 0 for views, and for a node that writes in place
    weight: Seconds = NO_TIME  # the part of backward that makes gradients of parameters
    flops: sympy.Expr = NOTHING  # forward
    backward_flops: sympy.Expr = NOTHING
    saved_bytes: sympy.Expr = NOTHING  # storages kept for backward that no node before it keeps; see `Saved`
    temporary_bytes: sympy.Expr = NOTHING  # held for a moment while it runs, beside what it reads, returns and saves
    working_bytes: sympy.Expr = NOTHING  # held for a moment, forward or back, beside what is saved; see `working`
    work: Work | None = None  # its operations; None: not known


@dataclass(frozen=True, slots=True)
class Saved:
    """One storage that autograd keeps from forward to backward. The model's own tensors are not among them."""

    bytes: sympy.Expr
    maker: int  # place of the node that made it, or wrote to it last before it was saved; -1: an input of the model
    savers: tuple[int, ...]  # places of the nodes whose backward needs it, ascending


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of all nodes. Made by `fxpipe.profile`; `print` shows a table."""

    nodes: tuple[NodeCost, ...]  # in the order of the graph
    micro_batch: int  # samples for which `seconds` holds
    batch: sympy.Symbol  # the `b` of the formulas
    device: str
    estimated_for: str = ""  # the hardware whose seconds these would be; empty where they were measured
    saved: tuple[Saved, ...] = ()
    fingerprint: str = ""  # of the graph (`Traced.fingerprint`); empty where it is not known

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON; see `fxpipe.profiling.storing`.

        Raises:
            ArgumentError: a formula is no polynomial in the batch size, nor bounded by one.
            FileError: the file cannot be written.
        """
        from fxpipe.profiling.storing import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote.

        Raises:
            ArgumentError: the file is no profile.
            OSError: it cannot be read.
        """
        from fxpipe.profiling.storing import load

        return load(path)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Forward and backward of each node: what partitioning balances."""
        return tuple((n.forward + n.backward).at(self.micro_batch) for n in self.nodes)

    @property
    def forward_seconds(self) -> float:
        return sum(n.forward.at(self.micro_batch) for n in self.nodes)

    @property
    def backward_seconds(self) -> float:
        return sum(n.backward.at(self.micro_batch) for n in self.nodes)

    @property
    def parameter_bytes(self) -> sympy.Expr:
        return _sum(n.parameter_bytes for n in self.nodes)

    @property
    def output_bytes(self) -> sympy.Expr:
        return _sum(n.output_bytes for n in self.nodes)

    @property
    def saved_bytes(self) -> sympy.Expr:
        """What autograd keeps of one micro-batch."""
        return _sum(n.saved_bytes for n in self.nodes)

    @property
    def flops(self) -> sympy.Expr:
        """Forward and backward."""
        return _sum(n.flops + n.backward_flops for n in self.nodes)

    def __str__(self) -> str:
        rows = [_row(cost, self.micro_batch) for cost in self.nodes]
        table = tabulate(
            [*rows, self._total()],
            headers=HEADERS,
            colalign=("left", *["right"] * (len(HEADERS) - 1)),
            disable_numparse=True,
        )
        how = f", seconds estimated for {self.estimated_for}" if self.estimated_for else ""
        return f"{len(self.nodes)} nodes on {self.device}, micro-batch of {self.micro_batch}{how}\n{table}"

    def _total(self) -> tuple[str, ...]:
        return (
            "total",
            f"{self.forward_seconds * 1e3:.3f}",
            f"{self.backward_seconds * 1e3:.3f}",
            str(self.flops),
            str(self.parameter_bytes),
            str(self.output_bytes),
            str(self.saved_bytes),
        )


HEADERS = ("node", "forward ms", "backward ms", "FLOPs", "parameter bytes", "output bytes", "saved bytes")


def _row(cost: NodeCost, samples: int) -> tuple[str, ...]:
    return (
        cost.name,
        f"{cost.forward.at(samples) * 1e3:.3f}",
        f"{cost.backward.at(samples) * 1e3:.3f}",
        str(cost.flops + cost.backward_flops),
        str(cost.parameter_bytes),
        str(cost.output_bytes),
        str(cost.saved_bytes),
    )


def _sum(expressions: Iterable[sympy.Expr]) -> sympy.Expr:
    return sympy.Add(*expressions)
