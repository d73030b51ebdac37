"""What the nodes of a graph cost, as plain frozen data: seconds as numbers, bytes as formulas in the batch size."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from tabulate import tabulate


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One working node. Seconds are those of one micro-batch of the size profiled, bytes hold for every size."""

    name: str
    forward_seconds: float
    backward_seconds: float  # 0 where no gradient goes through
    parameter_bytes: sympy.Expr  # parameters and buffers that no node before it uses: sums count each of them once
    output_bytes: sympy.Expr  # new memory for what it returns; 0 for views, and for a node that writes in place


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of all nodes. Made by `fxpipe.profile`; `print` shows a table."""

    nodes: tuple[NodeCost, ...]  # in the order of the graph
    micro_batch: int  # samples for which the seconds hold
    batch: sympy.Symbol  # the `b` of the formulas
    device: str
    estimated_for: str = ""  # the hardware whose seconds these would be; empty where they were measured

    @property
    def seconds(self) -> tuple[float, ...]:
        """Forward and backward of each node: what partitioning balances."""
        return tuple(n.forward_seconds + n.backward_seconds for n in self.nodes)

    @property
    def forward_seconds(self) -> float:
        return sum(n.forward_seconds for n in self.nodes)

    @property
    def backward_seconds(self) -> float:
        return sum(n.backward_seconds for n in self.nodes)

    @property
    def parameter_bytes(self) -> sympy.Expr:
        return sympy.Add(*(n.parameter_bytes for n in self.nodes))

    @property
    def output_bytes(self) -> sympy.Expr:
        return sympy.Add(*(n.output_bytes for n in self.nodes))

    def __str__(self) -> str:
        total = NodeCost("total", self.forward_seconds, self.backward_seconds, self.parameter_bytes, self.output_bytes)
        table = tabulate(
            [_row(cost) for cost in (*self.nodes, total)],
            headers=("node", "forward ms", "backward ms", "parameter bytes", "output bytes"),
            colalign=("left", "right", "right", "right", "right"),
            disable_numparse=True,
        )
        how = f", seconds estimated for {self.estimated_for}" if self.estimated_for else ""
        return f"{len(self.nodes)} nodes on {self.device}, micro-batch of {self.micro_batch}{how}\n{table}"


def _row(cost: NodeCost) -> tuple[str, ...]:
    return (
        cost.name,
        f"{cost.forward_seconds * 1e3:.3f}",
        f"{cost.backward_seconds * 1e3:.3f}",
        str(cost.parameter_bytes),
        str(cost.output_bytes),
    )
