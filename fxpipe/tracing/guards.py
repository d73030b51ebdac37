"""Guards: forward has read the value of a tensor, and its graph holds where the value is the same.

A read that hangs on nothing but constants is none. One that hangs on inputs, buffers or parameters alone is asked in
every step, on the whole mini-batch, as the plain model would ask; the answers choose the graph, and other answers are
another graph. Never micro-batch by micro-batch: these may disagree where one graph is right for all. A read of what is
computed from inputs and parameters is known to nobody before the step; nor is one of a buffer that forward changes.

`lifted` takes the reads out of a graph. What they hang on becomes a program of its own, and is left in the graph only
where that uses it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.thread_state import applied
from fxpipe.tracing.devices import on_device
from fxpipe.tracing.draws import Draws
from fxpipe.tracing.refusals import CannotRecord, written
from fxpipe.tracing.traced import WORKING, Traced, call, lookup


@dataclass(frozen=True, slots=True)
class Guard:
    """What forward has read, and where."""

    node: fx.Node  # of the program
    expected: Any
    where: str  # the user's source line

    def __str__(self) -> str:
        file, _, line = self.where.rpartition(":")
        read = f"{self.node.meta['text']} of {self.node.args[0]}"
        return f"{read} was {_short(self.expected)} at {os.path.basename(file)}:{line}"


@dataclass(frozen=True, slots=True, eq=False)
class Guards:
    """All guards of a graph, and the program that answers them; it reads inputs by place and attributes by name."""

    program: tuple[fx.Node, ...] = ()
    questions: tuple[Guard, ...] = ()

    @property
    def draws(self) -> bool:
        """Do answers hang on random numbers?"""
        return any(node.meta.get("draw") for node in self.program)

    def hold(self, traced: Traced, leaves: Sequence[Any], seed: int) -> bool:
        """Are the answers for these inputs those of the recording? `seed` is that of the numbers drawn."""
        asked = {guard.node: guard for guard in self.questions}
        values: dict[fx.Node, Any] = {}
        draws = Draws(seed)
        for node in self.program:
            if node.op == "placeholder":
                given = leaves[int(node.name.removeprefix("in_"))]
                values[node] = given.detach().to("cpu", copy=True)  # the program may write to it
            elif node.op == "get_attr":
                values[node] = lookup(traced, node).detach().to("cpu", copy=True)
            else:
                values[node] = _value(node, values, draws)
                if node in asked and not same_answer(values[node], asked[node].expected):
                    return False
        return True


def _value(node: fx.Node, values: dict[fx.Node, Any], draws: Draws) -> Any:
    def run() -> Any:
        with applied(node.meta["state"]), torch.no_grad():
            return call(node, values.__getitem__)

    return draws.take(run) if node.meta.get("draw") else run()


def same_answer(have: Any, want: Any) -> bool:
    """Equal, and nan equal to itself; arrays are compared as lists."""
    if isinstance(have, list) and isinstance(want, list):
        return len(have) == len(want) and all(map(same_answer, have, want))
    return bool(type(have) is type(want) and (have == want or (have != have and want != want)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:36] + " ..."


def refuse_unanswerable(traced: Traced) -> None:
    """Raises where a question cannot be answered before a step.

    Raises:
        CannotRecord: names the first, and the modules that would have to be kept whole.
    """
    errors = [error for read in _reads(traced) if (error := _unanswerable(traced, read)) is not None]
    if errors:
        raise CannotRecord(str(errors[0]), frozenset[str]().union(*(e.modules for e in errors)))


def lifted(traced: Traced) -> Guards:
    """Takes the reads out of a graph whose fixed sizes are constants."""
    reads = _reads(traced)
    needs = {read: _needed(read) for read in reads}
    asked = [read for read in reads if set(_sources(traced, needs[read]))]
    wanted = {n for read in asked for n in needs[read]}
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node in wanted | {_batched_input(traced)}:
            copies[node] = program.node_copy(node)
        elif node in wanted and _is_size(node):
            batched = _batched_input(traced)
            size = program.call_method("size", (copies[batched], traced.in_dims[traced.place_of(batched)]))
            copies[node] = program.call_function(_formula(node.meta["number"], traced.batch), (size,))
            size.meta["state"] = copies[node].meta["state"] = node.meta["state"]
        elif node in wanted:
            copies[node] = program.node_copy(node, copies.__getitem__)
            on_device(copies[node], torch.device("cpu"))
    guards = tuple(Guard(copies[read], read.meta["read"], read.meta["source"]) for read in asked)
    dead = set[fx.Node]().union(*needs.values())
    for node in reversed(list(traced.graph.nodes)):
        is_dead = node in dead and not node.users and node.op in WORKING
        if is_dead and ("read" in node.meta or not (node.meta["random"] or any(_written(node)))):
            traced.graph.erase_node(node)
    return Guards(tuple(program.nodes), guards)


def _reads(traced: Traced) -> list[fx.Node]:
    return [n for n in traced.graph.nodes if "read" in n.meta]


def _batched_input(traced: Traced) -> fx.Node:
    return next(node for place, node in traced.placeholders.items() if traced.in_dims[place] is not None)


def _formula(size: sympy.Expr, batch: sympy.Symbol) -> Callable[[int], int]:
    def size_of_value(samples: int) -> int:
        return int(size.subs(batch, samples))

    return size_of_value


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose tensors a node writes to."""
    if node.op not in WORKING:
        return
    found: list[fx.Node] = []
    fx.map_arg(tuple(written(node.target, node.args, dict(node.kwargs))), lambda n: found.append(n))
    yield from found


def _roots(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and what its tensor may be a view of."""
    while True:
        yield node
        if not node.args or not isinstance(node.args[0], fx.Node):
            return
        node = node.args[0]


def _is_changed(attribute: fx.Node) -> bool:
    """Does the graph write to this parameter or buffer?"""
    return any(attribute in set(_roots(target)) for node in attribute.graph.nodes for target in _written(node))


def _needed(read: fx.Node) -> set[fx.Node]:
    """What a read hangs on: the nodes before it, those among them included that write to what it hangs on."""
    needed: set[fx.Node] = {read}
    roots: set[fx.Node] = set()
    node = read
    while node.op != "root":
        if node in needed or any(root in roots for target in _written(node) for root in _roots(target)):
            needed.add(node)
            if _is_size(node):  # known without the value
                node = node.prev
                continue
            needed.update(node.all_input_nodes)
            roots.update(root for n in node.all_input_nodes for root in _roots(n))
        node = node.prev
    return needed


def _sources(traced: Traced, needed: set[fx.Node]) -> Iterator[str]:
    """What a read hangs on in the end."""
    for node in needed:
        if node.op == "placeholder":
            yield "the inputs"
        elif node.op == "get_attr" and node.target not in traced.constants:
            yield str(node.target)
        elif node.meta.get("random"):
            yield "random numbers"


def _is_size(node: fx.Node) -> bool:
    return node.target in ("size", "stride")


def _unanswerable(traced: Traced, read: fx.Node) -> CannotRecord | None:
    """Why a read cannot be answered before a step, if so."""
    sources = sorted(set(_sources(traced, _needed(read))))
    attributes = {str(n.target): n for n in traced.graph.nodes if n.op == "get_attr"}
    own = [s for s in sources if s in attributes]
    trained = [s for s in own if isinstance(lookup(traced, attributes[s]), torch.nn.Parameter)]
    changing = [s for s in own if s in traced.assigned or _is_changed(attributes[s])]
    is_number = isinstance(read.meta["read"], (float, complex))
    path = read.meta["module"]
    if "random numbers" in sources and not _are_draws(read):
        what = "random numbers"
    elif "the inputs" in sources and trained:
        what = f"the inputs and {trained[0]!r}"
    elif changing:
        what = f"{changing[0]!r}, which forward changes"
    elif path and is_number and (trained or "the inputs" in sources):
        what = repr(trained[0]) if trained else "the inputs"  # another number, and another graph, in every step
    else:
        return None
    nested = "nested_tensor" in str(read.target)
    remedy = (
        "build it with TransformerEncoder(..., enable_nested_tensor=False)"
        if nested
        else "keep the decision in tensors (torch.where, masks), or take it outside forward"
    )
    return CannotRecord(
        f"the model{f' in module {path!r}' if path else ''} reads the value of a tensor ({read.meta['text']}) that "
        f"hangs on {what} at {read.meta['source']}; {remedy}",
        frozenset({path}) if path else frozenset(),
    )


def _are_draws(read: fx.Node) -> bool:
    return all(n.meta.get("draw") or not n.meta.get("random") for n in _needed(read) if n.op in WORKING)
