"""The cost of the nodes of a graph, as plain frozen data: bytes and FLOPs as formulas in the batch size `b`.

Where sizes besides the batch are dynamic, the formulas are in these as well, by their names (`Profile.sizes`).

All of it is of one micro-batch with `b` samples; nothing here depends on where the graph will be cut. What does is said
by places (indexes of nodes in order of running): a storage that several nodes keep for backward counts once in a stage
that holds them both, and twice in two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import NodeWork, Operation
from fxpipe.utils.files import dataclass_from_json, dataclass_to_json, write_atomically
from fxpipe.utils.polynomial import ZERO, Polynomial, SizePoint
from fxpipe.utils.polynomial_bound import polynomial_bound
from fxpipe.utils.text_table import text_table
from fxpipe.utils.units import with_article

if TYPE_CHECKING:
    from fxpipe.tracing.traced import Traced


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time over the micro-batch size: a fixed cost, and a cost per sample. Neither is negative.

    Both are for the dynamic sizes of the profile; with others, `growing` changes.
    """

    fixed: float = 0.0
    per_sample: float = 0.0
    growing: Polynomial = ZERO  # of the seconds, what grows with the batch and the dynamic sizes

    def at(self, samples: int) -> float:
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Seconds) -> Seconds:
        growing = self.growing + other.growing if self.growing and other.growing else self.growing or other.growing
        return Seconds(self.fixed + other.fixed, self.per_sample + other.per_sample, growing)


NO_TIME = Seconds()
ZERO_FORMULA = sympy.Integer(0)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One working node."""

    name: str
    forward: Seconds
    backward: Seconds  # all of it; zero where no gradient goes through
    parameter_bytes: sympy.Expr  # parameters and buffers that no node before it uses: sums count each of them once
    output_bytes: sympy.Expr  # new memory for what it returns; 0 for views, and for a node that writes in place
    weight: Seconds = NO_TIME  # the part of backward that makes gradients of parameters
    flops: sympy.Expr = ZERO_FORMULA  # forward
    backward_flops: sympy.Expr = ZERO_FORMULA
    # storages kept for backward that no node before it keeps; see `SavedStorage`
    saved_bytes: sympy.Expr = ZERO_FORMULA
    # held for a moment, forward or back, beside what is saved; see `working_bytes_of`
    working_bytes: sympy.Expr = ZERO_FORMULA
    work: NodeWork | None = None  # its operations; None: not known


@dataclass(frozen=True, slots=True)
class SavedStorage:
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
    saved: tuple[SavedStorage, ...] = ()
    fingerprint: str = ""  # of the graph (`Traced.fingerprint`); empty where it is not known
    loss: NodeCost | None = None  # that steps take of the outputs; None: not known, or the model takes it itself
    sizes: tuple[tuple[str, int], ...] = ()  # dynamic sizes for which `seconds` holds, by name
    contention: float = 1.0  # times as long as `seconds` while all workers are at work, on CPUs

    @property
    def lengths(self) -> tuple[tuple[sympy.Symbol, int], ...]:
        """The dynamic sizes, by their symbols in the formulas."""
        return tuple((sympy.Symbol(name, integer=True, positive=True), size) for name, size in self.sizes)

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON; see `fxpipe.profiling.profile_data`.

        Raises:
            ArgumentError: a formula is no polynomial in the batch size, nor bounded by one.
            FileError: the file cannot be written.
        """
        save_profile(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save_profile` wrote.

        Raises:
            ArgumentError: the file is no profile.
            OSError: it cannot be read.
        """
        return load_profile(path)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each node, forward and backward: what partitioning balances."""
        return tuple((n.forward + n.backward).at(self.micro_batch) for n in self.nodes)

    @property
    def forward_seconds(self) -> float:
        return sum(n.forward.at(self.micro_batch) for n in self.nodes)

    @property
    def backward_seconds(self) -> float:
        return sum(n.backward.at(self.micro_batch) for n in self.nodes)

    @property
    def parameter_bytes(self) -> sympy.Expr:
        return _formula_sum(n.parameter_bytes for n in self.nodes)

    @property
    def output_bytes(self) -> sympy.Expr:
        return _formula_sum(n.output_bytes for n in self.nodes)

    @property
    def saved_bytes(self) -> sympy.Expr:
        """Bytes that autograd keeps of one micro-batch."""
        return _formula_sum(n.saved_bytes for n in self.nodes)

    @property
    def flops(self) -> sympy.Expr:
        """FLOPs, forward and backward."""
        return _formula_sum(n.flops + n.backward_flops for n in self.nodes)

    def __str__(self) -> str:
        costs = self.nodes if self.loss is None else (*self.nodes, self.loss)
        rows = [_cost_row(cost, self.micro_batch) for cost in costs]
        table = text_table([*rows, self._total()], PROFILE_HEADERS, left=("node",))
        how = "".join(f", {name}={size}" for name, size in self.sizes)
        how += f", seconds estimated for {self.estimated_for}" if self.estimated_for else ""
        return f"{len(self.nodes)} nodes on {self.device}, micro-batch of {self.micro_batch}{how}\n{table}"

    def _total(self) -> tuple[str, ...]:
        return (
            "total",
            f"{(self.forward_seconds + (self.loss.forward.at(self.micro_batch) if self.loss else 0)) * 1e3:.3f}",
            f"{(self.backward_seconds + (self.loss.backward.at(self.micro_batch) if self.loss else 0)) * 1e3:.3f}",
            str(self.flops),
            str(self.parameter_bytes),
            str(self.output_bytes),
            str(self.saved_bytes),
        )


PROFILE_HEADERS = ("node", "forward ms", "backward ms", "FLOPs", "parameter bytes", "output bytes", "saved bytes")


def _cost_row(cost: NodeCost, samples: int) -> tuple[str, ...]:
    return (
        cost.name,
        f"{cost.forward.at(samples) * 1e3:.3f}",
        f"{cost.backward.at(samples) * 1e3:.3f}",
        str(cost.flops + cost.backward_flops),
        str(cost.parameter_bytes),
        str(cost.output_bytes),
        str(cost.saved_bytes),
    )


def _formula_sum(expressions: Iterable[sympy.Expr]) -> sympy.Expr:
    return sympy.Add(*expressions)


# -- A profile as a file: JSON with numbers and nothing that is run or parsed as a formula ---------------------------
#
#     profile.save("profile.json")
#     fxpipe.Profile.load("profile.json")
#
#     {"format": "fxpipe profile", "version": 7, "fingerprint": "5d2c...", "micro_batch": 4, "device": "cpu", ...,
#      "operations": [{"dtype": "float32", "flops": [0, 200704], "moved": [1024, 2048]}, ...],
#      "nodes": [{"name": "linear", "forward": [1e-06, 2.5e-05], ..., "output_bytes": [0, 100352], ...,
#                 "work": [[0], [1, 2], [1]]}, ...],
#      "loss": null, or as a node,
#      "saved": [{"bytes": [0, 2048], "maker": 3, "savers": [4, 7]}, ...]}
#
# Seconds are a pair, the fixed cost and that of a sample, and where there are dynamic sizes ("sizes", by name) a third,
# the polynomial of what grows with them; bytes and FLOPs are coefficients of polynomials in the batch size and those
# (`Polynomial.to_json`; `utils/polynomial_bound.py` says what becomes of other formulas). The work of a node is
# said by places among the operations: of its forward, of its backward, and of its backward to its inputs only.
# What is read is checked piece by piece: a file of another kind, a damaged one or a forged one is an `ArgumentError`,
# and so is one of another graph.

PROFILE_FORMAT, PROFILE_VERSION = "fxpipe profile", 7

_SECONDS = ("forward", "backward", "weight")
_FORMULAS = (
    "parameter_bytes",
    "output_bytes",
    "flops",
    "backward_flops",
    "saved_bytes",
    "working_bytes",
)
_FIELDS = (
    *("format", "version", "fingerprint", "micro_batch", "device", "estimated_for"),
    *("operations", "nodes", "saved", "loss", "sizes", "contention"),
)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile.

    Raises:
        ArgumentError: one of its formulas is no polynomial in the batch size, nor bounded by one.
        FileError: the file cannot be written.
    """

    symbols = (profile.batch, *(symbol for symbol, _ in profile.lengths))

    def numbers(expression: sympy.Expr) -> list[Any]:
        return polynomial_bound(expression, *symbols).to_json()

    def seconds(time: Seconds) -> list[Any]:
        return [time.fixed, time.per_sample, *([time.growing.to_json()] if time.growing else [])]

    operations: dict[Operation, int] = {}

    def places(work: NodeWork | None) -> list[list[int]] | None:
        if work is None:
            return None
        rows = (work.forward, work.backward, work.to_inputs)
        return [[operations.setdefault(one, len(operations)) for one in row] for row in rows]

    def cost(node: NodeCost) -> dict[str, Any]:
        return (
            {"name": node.name}
            | {key: seconds(getattr(node, key)) for key in _SECONDS}
            | {key: numbers(getattr(node, key)) for key in _FORMULAS}
            | {"work": places(node.work)}
        )

    nodes = list(map(cost, profile.nodes))
    loss = None if profile.loss is None else cost(profile.loss)
    document = {
        "format": PROFILE_FORMAT,
        "version": PROFILE_VERSION,
        "fingerprint": profile.fingerprint,
        "micro_batch": profile.micro_batch,
        "device": profile.device,
        "estimated_for": profile.estimated_for,
        "sizes": [list(size) for size in profile.sizes],
        "contention": profile.contention,
        "operations": list(map(dataclass_to_json, operations)),
        "nodes": nodes,
        "saved": [{"bytes": numbers(s.bytes), "maker": s.maker, "savers": list(s.savers)} for s in profile.saved],
        "loss": loss,
    }
    write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode(), "a profile")


def load_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ArgumentError: the file is none, or is damaged: it says where.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
        return _parse_profile(json.loads(text, parse_constant=_refuse_constant))
    except (ArgumentError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ArgumentError(
            f"{path} is no profile of fxpipe, or is damaged: {why}; write one with fxpipe.profile(...).save(path)"
        ) from None


def profile_for(traced: Traced, profile_or_path: Profile | str | Path) -> Profile:
    """A profile of this very graph: the one given, or the one in the file of this name.

    Raises:
        ArgumentError: it is no profile, or one of another graph.
        OSError: the file cannot be read.
    """
    if not isinstance(profile_or_path, (Profile, str, Path)):
        raise ArgumentTypeError(
            f"profile is {with_article(profile_or_path)}; expected a Profile or the path of a saved one"
        )
    profile = profile_or_path if isinstance(profile_or_path, Profile) else load_profile(profile_or_path)
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


# -- reading, piece by piece -------------------------------------------------------------------------------------------


def _parse_profile(document: Any) -> Profile:
    if not isinstance(document, dict) or document.get("format") != PROFILE_FORMAT:
        raise ArgumentError(f"it does not say that its format is {PROFILE_FORMAT!r}")
    version = document.get("version")
    if type(version) is not int or version != PROFILE_VERSION:
        raise ArgumentError(
            f"it has version {_short(version)}, and this fxpipe reads version {PROFILE_VERSION}: profile again"
        )
    fields = _parse_fields(document, _FIELDS, "the profile")
    batch = sympy.Symbol("b", integer=True, positive=True)
    micro_batch = _parse_count(fields["micro_batch"], "micro_batch", 1)
    sizes = tuple(_parse_size(one, f"sizes[{k}]") for k, one in enumerate(_parse_list(fields["sizes"], "sizes")))
    here = SizePoint(micro_batch, sizes)
    operations = [
        _parse_operation(one, f"operations[{place}]")
        for place, one in enumerate(_parse_list(fields["operations"], "operations"))
    ]
    nodes = tuple(
        _parse_node_cost(node, here, operations, f"nodes[{place}]")
        for place, node in enumerate(_parse_list(fields["nodes"], "nodes"))
    )
    saved = tuple(
        _parse_saved_storage(one, here, len(nodes), f"saved[{number}]")
        for number, one in enumerate(_parse_list(fields["saved"], "saved"))
    )
    device, hardware, fingerprint = (
        _parse_text(fields[key], key) for key in ("device", "estimated_for", "fingerprint")
    )
    loss = fields["loss"]
    of_loss = None if loss is None else _parse_node_cost(loss, here, operations, "loss")
    contention = _parse_number(fields["contention"], "contention")
    if contention < 1:
        raise ArgumentError(f"contention: {contention} is less than 1")
    return Profile(nodes, micro_batch, batch, device, hardware, saved, fingerprint, of_loss, sizes, contention)


def _parse_size(value: Any, where: str) -> tuple[str, int]:
    pair = _parse_list(value, where)
    if len(pair) != 2:
        raise ArgumentError(f"{where}: expected a name and a size, got {len(pair)}")
    name = _parse_text(pair[0], where)
    if not name.isidentifier() or name == "b":
        raise ArgumentError(f"{where}: {_short(name)} is no name of a size")
    return name, _parse_count(pair[1], where, 1)


def _parse_operation(value: Any, where: str) -> Operation:
    operation = dataclass_from_json(Operation, value, where)
    if any(c < 0 for formula in (operation.flops, operation.moved) for _, c in formula.terms):
        raise ArgumentError(f"{where}: a coefficient is less than 0")
    return operation


def _parse_work(value: Any, operations: Sequence[Operation], where: str) -> NodeWork | None:
    if value is None:
        return None
    rows = _parse_list(value, where)
    if len(rows) != 3:
        raise ArgumentError(f"{where}: expected three lists, got {len(rows)}")
    most = len(operations) - 1
    return NodeWork(
        *(tuple(operations[_parse_count(k, where, 0, most)] for k in _parse_list(row, where)) for row in rows)
    )


def _parse_node_cost(value: Any, here: SizePoint, operations: Sequence[Operation], where: str) -> NodeCost:
    fields = _parse_fields(value, ("name", *_SECONDS, *_FORMULAS, "work"), where)
    seconds = {key: _parse_seconds(fields[key], here, f"{where}.{key}") for key in _SECONDS}
    formulas = {key: _parse_formula(fields[key], here, f"{where}.{key}").formula for key in _FORMULAS}
    work = _parse_work(fields["work"], operations, f"{where}.work")
    return NodeCost(_parse_text(fields["name"], f"{where}.name"), **seconds, **formulas, work=work)


def _parse_saved_storage(value: Any, here: SizePoint, nodes: int, where: str) -> SavedStorage:
    fields = _parse_fields(value, ("bytes", "maker", "savers"), where)
    savers = _parse_list(fields["savers"], f"{where}.savers")
    places = tuple(_parse_count(place, f"{where}.savers", 0, nodes - 1) for place in savers)
    if not places or any(a >= b for a, b in pairwise(places)):
        raise ArgumentError(f"{where}.savers: expected ascending places")
    maker = _parse_count(fields["maker"], f"{where}.maker", -1, nodes - 1)
    return SavedStorage(_parse_formula(fields["bytes"], here, f"{where}.bytes").formula, maker, places)


def _parse_seconds(value: Any, here: SizePoint, where: str) -> Seconds:
    figures = _parse_list(value, where)
    numbers, growing = figures[:2], ZERO
    if len(figures) == 3 and here.others:
        growing = _parse_formula(figures[2], here, where)
    elif len(figures) > 2:
        numbers = figures
    parsed = [_parse_number(number, where) for number in numbers]
    if len(parsed) != 2:
        raise ArgumentError(f"{where}: expected two numbers, got {len(parsed)}")
    fixed, per_sample = parsed
    return Seconds(fixed, per_sample, growing)


def _parse_number(number: Any, where: str) -> float:
    if type(number) not in (int, float) or not 0 <= number <= sys.float_info.max:
        raise ArgumentError(f"{where}: expected finite seconds, 0 or more, got {_short(number)}")
    return float(number)


def _parse_formula(value: Any, here: SizePoint, where: str) -> Polynomial:
    try:
        formula = Polynomial.from_json(value)
        is_negative = bool(formula) and (formula.terms[-1][1] < 0 or formula.value(here.values) < 0)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None
    if is_negative:
        raise ArgumentError(f"{where}: {value} is less than 0")
    return formula


def _parse_fields(value: Any, names: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where}: expected an object, got {_short(value)}")
    if value.keys() != {*names}:
        raise ArgumentError(f"{where}: expected the fields {', '.join(names)}, got {', '.join(value)[:200] or 'none'}")
    return value


def _parse_list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ArgumentError(f"{where}: expected a list, got {_short(value)}")
    return value


def _parse_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"{where}: expected text, got {_short(value)}")
    return value


def _parse_count(value: Any, where: str, least: int, most: int = 2**63) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ArgumentError(f"{where}: expected a whole number from {least} to {most}, got {_short(value)}")
    return value


def _refuse_constant(text: str) -> Any:
    raise ArgumentError(f"{text} is no number")


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, (str, int, float, type(None))) else with_article(value)
