"""The costs of the nodes of a graph, as frozen data: bytes and FLOPs as formulas in `b` and dynamic sizes.

All costs are of one micro-batch with `b` samples, for any cut. A storage that several nodes save for backward counts
once per stage, so it lists these nodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import sympy

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import NodeWork
from fxpipe.utils.files import dataclass_from_json, dataclass_to_json, write_atomically
from fxpipe.utils.polynomial import ZERO, Polynomial
from fxpipe.utils.polynomial_bound import polynomial_bound
from fxpipe.utils.text_table import text_table
from fxpipe.utils.units import with_article

if TYPE_CHECKING:
    from fxpipe.tracing.traced import Traced


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds at the dynamic sizes of the profile: a fixed cost, and a cost per sample. Neither is negative."""

    fixed: float = 0.0
    per_sample: float = 0.0
    growing: Polynomial = ZERO  # the part that grows with the batch and the dynamic sizes, for other sizes

    def at(self, samples: int) -> float:
        return self.fixed + self.per_sample * samples

    def formula(self, here: Mapping[str, int]) -> Polynomial:
        """Returns the seconds for any size; `here` are the sizes of the profile, by name."""
        if not self.growing:
            return Polynomial.in_b(self.fixed, self.per_sample)
        return self.growing + Polynomial.in_b(self.at(here["b"]) - float(self.growing.value(here)))

    def __add__(self, other: Seconds) -> Seconds:
        growing = self.growing + other.growing if self.growing and other.growing else self.growing or other.growing
        return Seconds(self.fixed + other.fixed, self.per_sample + other.per_sample, growing)


NO_TIME = Seconds()
MOST_SAMPLES = 2**63
ZERO_FORMULA = sympy.Integer(0)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cost of one working node."""

    name: str
    forward: Seconds
    backward: Seconds  # zero if no gradient flows through the node
    parameter_bytes: sympy.Expr  # parameters and buffers that no earlier node uses, so sums count each once
    output_bytes: sympy.Expr  # new memory of its result; 0 for views and in-place operations
    weight: Seconds = NO_TIME  # the part of backward that computes gradients of parameters
    flops: sympy.Expr = ZERO_FORMULA  # forward
    backward_flops: sympy.Expr = ZERO_FORMULA
    # storages kept for backward that no earlier node keeps; see `SavedStorage`
    saved_bytes: sympy.Expr = ZERO_FORMULA
    # temporary, forward or backward, in addition to saved storages; see `working_bytes_of`
    working_bytes: sympy.Expr = ZERO_FORMULA
    work: NodeWork | None = None  # its operations; None: unknown


_FORMULAS = ("parameter_bytes", "output_bytes", "flops", "backward_flops", "saved_bytes", "working_bytes")


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that autograd keeps from forward to backward. Tensors of the model are excluded."""

    bytes: sympy.Expr
    maker: int  # place of the node that created it, or wrote to it last before it was saved; -1: an input of the model
    savers: tuple[int, ...]  # places of the nodes whose backward needs it, ascending


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of all nodes, made by `fxpipe.profile`. `print` shows a table."""

    nodes: tuple[NodeCost, ...]  # in the order of the graph
    micro_batch: int  # samples for which `seconds` holds
    batch: sympy.Symbol  # the `b` of the formulas
    device: str
    estimated_for: str = ""  # hardware of estimated seconds; empty if measured
    saved: tuple[SavedStorage, ...] = ()
    fingerprint: str = ""  # of the graph (`Traced.fingerprint`); empty if unknown
    loss: NodeCost | None = None  # cost of the loss of the outputs; None: unknown, or a part of the model
    sizes: tuple[tuple[str, int], ...] = ()  # dynamic sizes for which `seconds` holds, by name

    @property
    def lengths(self) -> tuple[tuple[sympy.Symbol, int], ...]:
        """The dynamic sizes, by their symbols in the formulas."""
        return tuple((sympy.Symbol(name, integer=True, positive=True), size) for name, size in self.sizes)

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON.

        Raises:
            ArgumentError: a formula is not a polynomial in the batch size, nor bounded by one.
            FileError: the file cannot be written.
        """
        symbols = (self.batch, *(symbol for symbol, _ in self.lengths))
        fields = dataclass_to_json(self, lambda formula: polynomial_bound(formula, *symbols))
        del fields["batch"]
        document = {"format": PROFILE_FORMAT, "version": PROFILE_VERSION, **fields}
        write_atomically(path, (json.dumps(document, allow_nan=False) + "\n").encode(), "a profile")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile.

        Raises:
            ArgumentError: the file is not a profile, or is damaged: the message says where.
            OSError: the file cannot be read.
        """
        try:
            document = json.loads(Path(path).read_bytes().decode())
            if not isinstance(document, dict) or document.pop("format", None) != PROFILE_FORMAT:
                raise ArgumentError(f"it does not say that its format is {PROFILE_FORMAT!r}")
            version = document.pop("version", None)
            if type(version) is not int or version != PROFILE_VERSION:
                reads = f"and this fxpipe reads version {PROFILE_VERSION}: profile again"
                raise ArgumentError(f"it has version {str(version)[:40]}, {reads}")
            names = {field.name for field in dataclasses.fields(Profile)} - {"batch"}
            if lost := names - document.keys():
                raise ArgumentError(f"it has no field {min(lost)!r}")
            batch = sympy.Symbol("b", integer=True, positive=True)
            profile = dataclass_from_json(Profile, {**document, "batch": batch}, "the profile")
            _check_profile(profile)
            return profile
        except (ValueError, RecursionError, OverflowError) as error:  # includes ArgumentError
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ArgumentError(
                f"{path} is no profile of fxpipe, or is damaged: {why}; write one with fxpipe.profile(...).save(path)"
            ) from None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each node, forward and backward, which partitioning balances."""
        return tuple((n.forward + n.backward).at(self.micro_batch) for n in self.nodes)

    @property
    def forward_seconds(self) -> float:
        return sum(n.forward.at(self.micro_batch) for n in self.nodes)

    @property
    def backward_seconds(self) -> float:
        return sum(n.backward.at(self.micro_batch) for n in self.nodes)

    @property
    def parameter_bytes(self) -> sympy.Expr:
        return sympy.Add(*(n.parameter_bytes for n in self.nodes))

    @property
    def output_bytes(self) -> sympy.Expr:
        return sympy.Add(*(n.output_bytes for n in self.nodes))

    @property
    def saved_bytes(self) -> sympy.Expr:
        """Bytes that autograd keeps for one micro-batch."""
        return sympy.Add(*(n.saved_bytes for n in self.nodes))

    @property
    def flops(self) -> sympy.Expr:
        """FLOPs, forward and backward."""
        return sympy.Add(*(n.flops + n.backward_flops for n in self.nodes))

    def __str__(self) -> str:
        costs = self.nodes if self.loss is None else (*self.nodes, self.loss)
        rows = [_cost_row(cost.name, [cost], self.micro_batch) for cost in costs]
        table = text_table([*rows, _cost_row("total", costs, self.micro_batch)], PROFILE_HEADERS, left=("node",))
        how = "".join(f", {name}={size}" for name, size in self.sizes)
        how += f", seconds estimated for {self.estimated_for}" if self.estimated_for else ""
        return f"{len(self.nodes)} nodes on {self.device}, micro-batch of {self.micro_batch}{how}\n{table}"


PROFILE_HEADERS = ("node", "forward ms", "backward ms", "FLOPs", "parameter bytes", "output bytes", "saved bytes")


def _cost_row(name: str, costs: Sequence[NodeCost], samples: int) -> tuple[str, ...]:
    formulas = ("parameter_bytes", "output_bytes", "saved_bytes")
    return (
        name,
        f"{sum(cost.forward.at(samples) for cost in costs) * 1e3:.3f}",
        f"{sum(cost.backward.at(samples) for cost in costs) * 1e3:.3f}",
        str(sympy.Add(*(cost.flops + cost.backward_flops for cost in costs))),
        *(str(sympy.Add(*(getattr(cost, formula) for cost in costs))) for formula in formulas),
    )


# A file is JSON of the fields, checked against their types (`utils.files`) and for consistency. Formulas that are not
# polynomials are bounded by some (`utils/polynomial_bound.py`).
PROFILE_FORMAT, PROFILE_VERSION = "fxpipe profile", 9


def _check_profile(profile: Profile) -> None:
    """Raises `ArgumentError` unless the parts of a profile are consistent."""
    costs = [*profile.nodes, *([profile.loss] if profile.loss is not None else [])]
    seconds = [time for cost in costs for time in (cost.forward, cost.backward, cost.weight)]
    works = [cost.work for cost in costs if cost.work is not None]
    operations = {one for work in works for row in (work.forward, work.backward, work.to_inputs) for one in row}
    names, n = [name for name, _ in profile.sizes], len(profile.nodes)
    wrong = {
        "micro_batch": not 1 <= profile.micro_batch <= MOST_SAMPLES,
        "sizes": "b" in names or not all(name.isidentifier() and size >= 1 for name, size in profile.sizes),
        "seconds": any(min(time.fixed, time.per_sample) < 0 for time in seconds),
        "saved": not all(
            -1 <= one.maker < n and one.savers and all(a < b for a, b in pairwise((-1, *one.savers, n)))
            for one in profile.saved
        ),
        "operations": any(c < 0 for one in operations for p in (one.flops, one.moved) for _, c in p.terms),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ArgumentError(f"its {name} cannot be: out of range, or of other nodes")
    here, symbols = {"b": profile.micro_batch, **dict(profile.sizes)}, [symbol for symbol, _ in profile.lengths]
    formulas = {one.bytes for one in profile.saved} | {getattr(cost, key) for cost in costs for key in _FORMULAS}
    polynomials = {polynomial_bound(formula, profile.batch, *symbols) for formula in formulas}
    for polynomial in polynomials | {time.growing for time in seconds}:
        if unknown := {name for powers, _ in polynomial.terms for name, _ in powers} - here.keys():
            raise ArgumentError(f"a formula has the unknown size {min(unknown)!r}")
        if polynomial and (polynomial.terms[-1][1] < 0 or polynomial.value(here) < 0):
            raise ArgumentError(f"the formula {polynomial.formula} is less than 0")


def profile_for(traced: Traced, profile_or_path: Profile | str | Path) -> Profile:
    """Returns a profile of this graph: the profile passed, or loaded from a path.

    Raises:
        ArgumentError: it is not a profile, or a profile of another graph.
    """
    if not isinstance(profile_or_path, (Profile, str, Path)):
        raise ArgumentTypeError(
            f"profile is {with_article(profile_or_path)}; expected a Profile or the path of a saved one"
        )
    profile = profile_or_path if isinstance(profile_or_path, Profile) else Profile.load(profile_or_path)
    what = "the profile" if isinstance(profile_or_path, Profile) else f"the profile {str(profile_or_path)!r}"
    if profile.fingerprint != traced.fingerprint():
        raise ArgumentError(
            f"{what} was made for another graph (fingerprint {profile.fingerprint or 'not known'}, here "
            f"{traced.fingerprint()}): the model, its mode or its inputs have changed. Make a new one: "
            "fxpipe.profile(traced, args).save(path), or leave profile out"
        )
    if [cost.name for cost in profile.nodes] != [node.name for node in traced.nodes]:
        raise ArgumentError(f"{what} does not have the nodes of the graph that its fingerprint names: it is damaged")
    return profile
