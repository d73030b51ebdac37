"""A profile as a file: JSON with numbers and nothing that is run or parsed as a formula.

    profile.save("profile.json")
    fxpipe.Profile.load("profile.json")

    {"format": "fxpipe profile", "version": 1, "fingerprint": "5d2c...", "micro_batch": 4, "device": "cpu", ...,
     "operations": [{"dtype": "float32", "flops": [0, 200704], "moved": [1024, 2048]}, ...],
     "nodes": [{"name": "linear", "forward": [1e-06, 2.5e-05], ..., "output_bytes": [0, 100352], ...,
                "work": [[0], [1, 2], [1]]}, ...],
     "saved": [{"bytes": [0, 2048], "maker": 3, "savers": [4, 7]}, ...]}

Seconds are a pair, the fixed cost and that of a sample; bytes and FLOPs are coefficients of polynomials in the batch
size (`profiling.coefficients`, which also says what becomes of other formulas). The work of a node is said by places
among the operations: of its forward, of its backward, and of its backward to its inputs only. What is read is checked
piece by piece: a file of another kind, a damaged one or a forged one is an `ArgumentError`, and so is one of another
graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy

from fxpipe.documents import from_document
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.files import write_whole
from fxpipe.profiling.coefficients import as_json, coefficients, formula, from_json
from fxpipe.profiling.costs import NodeCost, Profile, Saved, Seconds
from fxpipe.work import Operation, Work

if TYPE_CHECKING:
    from fxpipe.tracing.traced import Traced

FORMAT, VERSION = "fxpipe profile", 2

_SECONDS = ("forward", "backward", "weight")
_FORMULAS = (
    "parameter_bytes",
    "output_bytes",
    "flops",
    "backward_flops",
    "saved_bytes",
    "temporary_bytes",
    "working_bytes",
)
_FIELDS = ("format", "version", "fingerprint", "micro_batch", "device", "estimated_for", "operations", "nodes", "saved")


def save(profile: Profile, path: str | Path) -> None:
    """Writes a profile.

    Raises:
        ArgumentError: one of its formulas is no polynomial in the batch size, nor bounded by one.
        FileError: the file cannot be written.
    """

    def numbers(expression: sympy.Expr) -> list[int | str]:
        return as_json(coefficients(expression, profile.batch))

    operations: dict[Operation, int] = {}

    def places(work: Work | None) -> list[list[int]] | None:
        if work is None:
            return None
        rows = (work.forward, work.backward, work.to_inputs)
        return [[operations.setdefault(one, len(operations)) for one in row] for row in rows]

    nodes: list[dict[str, Any]] = [
        {"name": node.name}
        | {key: [getattr(node, key).fixed, getattr(node, key).per_sample] for key in _SECONDS}
        | {key: numbers(getattr(node, key)) for key in _FORMULAS}
        | {"work": places(node.work)}
        for node in profile.nodes
    ]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": profile.fingerprint,
        "micro_batch": profile.micro_batch,
        "device": profile.device,
        "estimated_for": profile.estimated_for,
        "operations": list(map(asdict, operations)),
        "nodes": nodes,
        "saved": [{"bytes": numbers(s.bytes), "maker": s.maker, "savers": list(s.savers)} for s in profile.saved],
    }
    write_whole(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode(), "a profile")


def load(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ArgumentError: the file is none, or is damaged: it says where.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
        return _profile(json.loads(text, parse_constant=_no_number))
    except (ArgumentError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ArgumentError(
            f"{path} is no profile of fxpipe, or is damaged: {why}; write one with fxpipe.profile(...).save(path)"
        ) from None


def profile_for(traced: Traced, given: Profile | str | Path) -> Profile:
    """A profile of this very graph: the one given, or the one in the file of this name.

    Raises:
        ArgumentError: it is no profile, or one of another graph.
        OSError: the file cannot be read.
    """
    if not isinstance(given, (Profile, str, Path)):
        raise ArgumentTypeError(f"profile is a {type(given).__name__}; expected a Profile or the path of a saved one")
    profile = given if isinstance(given, Profile) else load(given)
    what = "the profile" if isinstance(given, Profile) else f"the profile {str(given)!r}"
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


def _profile(document: Any) -> Profile:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ArgumentError(f"it does not say that its format is {FORMAT!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise ArgumentError(f"it has version {_short(version)}, and this fxpipe reads version {VERSION}")
    fields = _fields(document, _FIELDS, "the profile")
    batch = sympy.Symbol("b", integer=True, positive=True)
    micro_batch = _count(fields["micro_batch"], "micro_batch", 1)
    operations = [
        _operation(one, f"operations[{place}]") for place, one in enumerate(_list(fields["operations"], "operations"))
    ]
    nodes = tuple(
        _node(node, batch, micro_batch, operations, f"nodes[{place}]")
        for place, node in enumerate(_list(fields["nodes"], "nodes"))
    )
    saved = tuple(
        _saved(one, batch, micro_batch, len(nodes), f"saved[{number}]")
        for number, one in enumerate(_list(fields["saved"], "saved"))
    )
    device, hardware, fingerprint = (_text(fields[key], key) for key in ("device", "estimated_for", "fingerprint"))
    return Profile(nodes, micro_batch, batch, device, hardware, saved, fingerprint)


def _operation(value: Any, where: str) -> Operation:
    found = from_document(Operation, value, where)
    if any(c < 0 for formula in (found.flops, found.moved) for c in formula.coefficients):
        raise ArgumentError(f"{where}: a coefficient is less than 0")
    return found


def _work(value: Any, operations: Sequence[Operation], where: str) -> Work | None:
    if value is None:
        return None
    rows = _list(value, where)
    if len(rows) != 3:
        raise ArgumentError(f"{where}: expected three lists, got {len(rows)}")
    most = len(operations) - 1
    return Work(*(tuple(operations[_count(k, where, 0, most)] for k in _list(row, where)) for row in rows))


def _node(value: Any, batch: sympy.Symbol, samples: int, operations: Sequence[Operation], where: str) -> NodeCost:
    fields = _fields(value, ("name", *_SECONDS, *_FORMULAS, "work"), where)
    seconds = {key: _seconds(fields[key], f"{where}.{key}") for key in _SECONDS}
    formulas = {key: _formula(fields[key], batch, samples, f"{where}.{key}") for key in _FORMULAS}
    work = _work(fields["work"], operations, f"{where}.work")
    return NodeCost(_text(fields["name"], f"{where}.name"), **seconds, **formulas, work=work)


def _saved(value: Any, batch: sympy.Symbol, samples: int, nodes: int, where: str) -> Saved:
    fields = _fields(value, ("bytes", "maker", "savers"), where)
    savers = _list(fields["savers"], f"{where}.savers")
    places = tuple(_count(place, f"{where}.savers", 0, nodes - 1) for place in savers)
    if not places or any(a >= b for a, b in pairwise(places)):
        raise ArgumentError(f"{where}.savers: expected ascending places")
    maker = _count(fields["maker"], f"{where}.maker", -1, nodes - 1)
    return Saved(_formula(fields["bytes"], batch, samples, f"{where}.bytes"), maker, places)


def _seconds(value: Any, where: str) -> Seconds:
    numbers = _list(value, where)
    for number in numbers:
        if type(number) not in (int, float) or not 0 <= number <= sys.float_info.max:
            raise ArgumentError(f"{where}: expected finite seconds, 0 or more, got {_short(number)}")
    if len(numbers) != 2:
        raise ArgumentError(f"{where}: expected two numbers, got {len(numbers)}")
    return Seconds(*map(float, numbers))


def _formula(value: Any, batch: sympy.Symbol, samples: int, where: str) -> sympy.Expr:
    try:
        found = from_json(value)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None
    if found and (found[-1] < 0 or sum(c * samples**power for power, c in enumerate(found)) < 0):
        raise ArgumentError(f"{where}: {value} is less than 0")
    return formula(found, batch)


def _fields(value: Any, names: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where}: expected an object, got {_short(value)}")
    if value.keys() != {*names}:
        raise ArgumentError(f"{where}: expected the fields {', '.join(names)}, got {', '.join(value)[:200] or 'none'}")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ArgumentError(f"{where}: expected a list, got {_short(value)}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"{where}: expected text, got {_short(value)}")
    return value


def _count(value: Any, where: str, least: int, most: int = 2**63) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ArgumentError(f"{where}: expected a whole number from {least} to {most}, got {_short(value)}")
    return value


def _no_number(text: str) -> Any:
    raise ArgumentError(f"{text} is no number")


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
