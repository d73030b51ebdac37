"""Cuts a traced graph into stages: pure functions, and a table of the values that they send to each other.

For each stage, in this order:

1. Find the earlier values that its nodes need. Each is received from the last stage before it that changed the value
   in place, or else from the stage of its node.
2. A stage that writes to received memory clones it at entry, and recreates from the clone every alias that it, or a
   later stage, still uses. So no stage writes to the memory of another.
3. Copy its nodes, set the thread state when it changes, seed random nodes and replace devices.
4. Send the values that later stages need. A value that skips stages goes through a portal, directly from its maker to
   the stages that use it, so no stage in between holds it:

    stage 0                       stage 1            stage 2
    x = relu(in_0)                y = linear(x)      x_popped = pop(x, 'x')
    x_stashed = stash(x, 'x')     return y           return y + x_popped
    return x_stashed

Portals are from torchgpipe (C. Kim et al., arXiv 2004.09910, 2020), where users mark skips; here they are found.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from fxpipe._torch.autograd import refuse_other_backwards, version_of
from fxpipe._torch.saved_tensor_hooks import with_saved_tensors
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import StateError
from fxpipe.rewriting.cut_points import Aliases
from fxpipe.rewriting.deferred_batch_norm import DeferredBatchNorm, defer_batch_norm, defer_in_opaque_call
from fxpipe.rewriting.program import (
    PIPE_INPUT,
    ConstantOutput,
    Program,
    ReceivedValue,
    Skip,
    SourceLocation,
    Stage,
    clone,
)
from fxpipe.rewriting.rng import forbid_random_numbers, seeded_function
from fxpipe.rewriting.stage_callables import make_stage_callable
from fxpipe.tracing.graph_text import node_expression, short_source_line
from fxpipe.tracing.node_info import container_of, info, opaque_call_of, set_node_device, state_of, update_info
from fxpipe.tracing.traced import Traced, attribute_tensor
from fxpipe.tracing.verify.effects import repeated_state, running_statistics

T = TypeVar("T")


def with_checks(function: Callable[..., T], places: Sequence[int], name: str, is_hook: bool) -> Callable[..., T]:
    """Wraps an opaque call: it must not write to arguments that it did not write to in the trace; others use them.

    A hook on a module may keep tensors of a micro-batch: a loss of them cannot run backward here.
    """

    @functools.wraps(function)
    def call(tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> T:
        if is_hook:
            refuse_other_backwards(values)
        read = [x for place in places if isinstance(x := values[place], torch.Tensor) and not x.is_inference()]
        versions = [version_of(tensor) for tensor in read]
        result = function(tensors, values)
        if any(version_of(tensor) != version for tensor, version in zip(read, versions, strict=True)):
            raise StateError(
                f"{name}, kept whole, writes to an input of it, which it did not when it was traced; let it write to a "
                "copy (x = x.clone())"
            )
        return result

    return call


def set_grad(enabled: bool) -> None:
    """Enters or leaves a `no_grad`, `enable_grad` or `inference_mode` block of the model."""
    torch.set_grad_enabled(enabled)


def set_autocast(device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    """Sets autocast like a block of the model, without the cast cache, which belongs to the process."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache and not enabled)
    if not enabled:
        torch.clear_autocast_cache()


def stash(value: T, name: str) -> T:
    """Marks, in its maker, a value that skips stages."""
    return value


def pop(value: T, name: str) -> T:
    """Marks, in its user, a value that has skipped stages."""
    return value


_COLUMN = 88


def format_stage_code(graph: fx.Graph, index: int) -> str:
    """Formats a stage as a function. Parameters and buffers appear under their names in the model."""
    received = [n.name for n in graph.nodes if n.op == "placeholder" and not info(n).attribute]
    lines = [f"def stage{index}({', '.join(received)}):"]
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        has_value = node.target not in (set_grad, set_autocast, operator.setitem)
        text = f"    {node.name} = {node_expression(node)}" if has_value else f"    {node_expression(node)}"
        where = " ".join(part for part in (info(node).module, short_source_line(node)) if part)
        lines.append(f"{text:<{_COLUMN}}  # {where}" if where else text)
    output = graph.output_node().args[0]
    names = [n.name for n in output if isinstance(n, fx.Node)]  # type: ignore[union-attr]
    return "\n".join([*lines, f"    return {', '.join(names)}"])


def split_into_stages(
    traced: Traced,
    starts: Sequence[int],
    devices: Sequence[torch.device],
    deferred_batch_norm: bool = False,
    compile_options: Mapping[str, Any] | None = None,
) -> Program:
    """Makes stages that begin at the places `starts` (the first is 0), for one device each.

    Args:
        deferred_batch_norm: stages return the statistics of batch norm (`fxpipe.rewriting.deferred_batch_norm`).
        compile_options: keywords of `torch.compile` for the stages; None: stages are not compiled.
    """
    cut = _StageCut(traced, starts)
    drafts = [_draft_stage(cut, stage) for stage in range(cut.count)]
    written = cut.effects.written_inputs
    left = traced.left
    handed_out = (o for o in traced.handed_out if isinstance(o, fx.Node))
    outputs = dict.fromkeys([*handed_out, *written, *left.values()])
    # By receiver, the end of the pipe last: the received values, and the stage that sends each.
    table = [{node: cut.owner(node, stage) for node in draft.needs} for stage, draft in enumerate(drafts)]
    table.append({node: cut.owner(node, cut.count) for node in outputs})
    skips = tuple(
        Skip(node.name, source, target)
        for target, row in enumerate(table[:-1])
        for node, source in row.items()
        if PIPE_INPUT < source < target - 1
    )
    ordinals = {node: k for k, node in enumerate(n for n in cut.effects.nodes if info(n).is_random)}
    repeated = repeated_state(traced)
    deferring = DeferredBatchNorm.of(traced) if deferred_batch_norm else DeferredBatchNorm()
    stages = []
    for stage, draft in enumerate(drafts):
        sends = list(dict.fromkeys(n for row in table for n, source in row.items() if source == stage))
        builder = _StageBuilder(cut, devices[stage], ordinals, deferring)
        # The parameters and buffers that the stage reads or sends.
        users, handed_on = {*draft.nodes, *draft.again}, {*sends, *draft.assigns.values()}
        attributes = [n for n in cut.attributes if n in handed_on or not users.isdisjoint(n.users)]
        builder.receive(attributes, draft, {skip.name for skip in skips if skip.target == stage})
        builder.copy(draft.nodes)
        builder.send(sends, draft.assigns, {skip.name for skip in skips if skip.source == stage})
        builder.graph.lint()
        stages.append(
            Stage(
                fx.GraphModule({}, builder.graph, class_name=f"Stage{stage}"),
                tuple(str(n.target) for n in attributes),
                tuple(ReceivedValue(n.name, source) for n, source in table[stage].items()),
                tuple(n.name for n in sends),
                tuple(draft.assigns),
                tuple(str(n.target) for n in attributes if cut.may_change(n, stage)),
                tuple(str(n.target) for n in attributes if str(n.target) in {*deferring.statistics, *cut.updated}),
                tuple(str(n.target) for n in attributes if str(n.target) in deferring.counters),
                repeated.intersection(str(n.target) for n in attributes),
                {n.name: SourceLocation(info(n).module, info(n).source) for n in (*draft.again, *draft.nodes)},
                format_stage_code(builder.graph, stage),
                functools.partial(make_stage_callable, options=compile_options),
            )
        )
    names = {place: node.name for place, node in traced.placeholders.items()}
    return Program(
        tuple(stages),
        tuple(names.get(place) for place in range(max(len(traced.leaves), *(place + 1 for place in names)))),
        tuple(
            ReceivedValue(o.name, table[-1][o])
            if isinstance(o, fx.Node)
            else ConstantOutput(devices[-1] if isinstance(o, torch.device) else o)  # the device of the outputs
            for o in traced.handed_out
        ),
        skips,
        bool(ordinals),
        {traced.place_of(node): ReceivedValue(node.name, table[-1][node]) for node in written},
        {name: ReceivedValue(node.name, table[-1][node]) for name, node in left.items()},
    )


@dataclass(slots=True)
class _StageDraft:
    nodes: list[fx.Node]
    needs: list[fx.Node]  # received
    clones: list[fx.Node]  # received, cloned at entry
    again: list[fx.Node]  # recreated here: views of the clones
    assigns: dict[str, fx.Node]  # buffers that get a new value here


class _StageCut:
    def __init__(self, traced: Traced, starts: Sequence[int]):
        effects = traced.effects
        assert effects is not None
        self.traced, self.effects, self.starts, self.count = traced, effects, starts, len(starts)
        self.aliases = Aliases(effects)
        self.attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
        self.updated = () if traced.update is None else traced.update.names  # no stage writes to this state
        # Alias classes of parameters and other buffers.
        self.states = {effects.alias[n] for n in self.attributes if n.target not in self.updated}
        # By stage: the alias classes that it changes.
        ends = [*starts[1:], len(effects.nodes)]
        self.written_classes = [
            set[int]().union(*effects.written_classes[a:b]) for a, b in zip(starts, ends, strict=True)
        ]

    def _stage_at(self, place: int) -> int:
        """Returns the stage of a place; INPUT before the first node, `count` for the end of the graph."""
        return self.count if place == len(self.effects.nodes) else bisect_right(self.starts, place) - 1

    def is_received(self, node: fx.Node, stage: int) -> bool:
        return node in self.effects.place and self._stage_at(self.effects.place[node]) < stage

    def is_alive(self, node: fx.Node, stage: int) -> bool:
        return self.is_received(node, stage) and stage <= self._stage_at(self.effects.last[node])

    def nodes_of(self, stage: int) -> list[fx.Node]:
        end = self.starts[stage + 1] if stage + 1 < self.count else None
        return self.effects.nodes[self.starts[stage] : end]

    def owner(self, node: fx.Node, user: int) -> int:
        """Returns the stage that sends a value to `user`: the last one before `user` that changed it, or its maker."""
        if node.op == "get_attr":  # the stage that changes a parameter or a buffer, else the last
            changed = (t for t in range(self.count) if self.effects.alias[node] in self.written_classes[t])
            assigned = (t for t in range(self.count) if str(node.target) in self.assigns_of(t))
            return next(changed, next(assigned, self.count - 1))
        maker = self._stage_at(self.effects.place[node])
        changed = (t for t in range(user - 1, maker, -1) if self.effects.alias[node] in self.written_classes[t])
        return next(changed, maker)

    def assigns_of(self, stage: int) -> dict[str, fx.Node]:
        return {name: value for name, value in self.traced.carried_state.items() if self._setter(name, value) == stage}

    def may_change(self, attribute: fx.Node, stage: int) -> bool:
        """Returns whether the stage, or in another step an opaque call in it, may write to this parameter or buffer."""
        if self.effects.alias[attribute] in self.written_classes[stage] or attribute.target in self.updated:
            return True
        here = set(self.nodes_of(stage))
        if not all(info(user).opaque_module is not None and user in here for user in attribute.users):
            return False
        tensor = attribute_tensor(self.traced, attribute)
        is_writable = not isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        return is_writable and tensor.layout == torch.strided and 0 not in tensor.stride()

    def _setter(self, name: str, value: fx.Node) -> int:
        """Finds the stage that computes a buffer's new value; for an attribute, the first that reads either one."""
        if value.op != "get_attr":
            return max(self.owner(value, self.count), 0)
        both = [value, *(n for n in self.attributes if n.target == name)]
        return min(
            (self._stage_at(self.effects.place[u]) for n in both for u in n.users if u in self.effects.place), default=0
        )


def _draft_stage(cut: _StageCut, stage: int) -> _StageDraft:
    nodes, assigns = cut.nodes_of(stage), cut.assigns_of(stage)
    read = [*(n for node in nodes for n in node.all_input_nodes), *assigns.values()]
    needs = dict.fromkeys(n for n in read if cut.is_received(n, stage))
    clones: list[fx.Node] = []
    again: list[fx.Node] = []
    for alias in sorted(cut.written_classes[stage] - cut.states):
        members = [n for n in cut.aliases.members[alias] if cut.is_alive(n, stage)]
        roots, views = list(members), list[fx.Node]()  # each input is a separate tensor
        if stage and members:
            root = cut.aliases.nearest_root(members)
            assert root is not None, "a cut that `forbidden_cuts` forbids"
            roots, views = [root[0]], root[1]
        for member in members:
            needs.pop(member, None)
        # A view may take its size from elsewhere (`view_as`).
        others = [n for view in views for n in view.all_input_nodes if cut.effects.alias[n] != alias]
        needs |= dict.fromkeys([*roots, *(n for n in others if cut.is_received(n, stage))])
        clones += roots
        again += views
    return _StageDraft(nodes, list(needs), clones, sorted(again, key=cut.effects.place.__getitem__), assigns)


class _StageBuilder:
    def __init__(
        self, cut: _StageCut, device: torch.device, ordinals: dict[fx.Node, int], deferring: DeferredBatchNorm
    ):
        self.cut, self.device, self.ordinals, self.deferring = cut, device, ordinals, deferring
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.statistics: list[Any] = []  # untracked batch norm statistics: an output for each node
        self._state = cut.traced.state

    def receive(self, attributes: Iterable[fx.Node], draft: _StageDraft, popped: Collection[str]) -> None:
        for node in attributes:
            self.copies[node] = self.graph.placeholder(node.name)
            update_info(self.copies[node], attribute=str(node.target), known_shapes=info(node).known_shapes)
        for node in draft.needs:
            self.copies[node] = self.graph.placeholder(node.name)
            known = info(node)
            update_info(self.copies[node], known_shapes=known.known_shapes, dynamic_shapes=known.dynamic_shapes)
        for node in draft.needs:
            if node.name in popped:
                self.copies[node] = self._call(pop, (self.copies[node], node.name), f"{node.name}_popped")
        for node in draft.clones:
            self.copies[node] = self._call(clone, (self.copies[node],), f"{node.name}_copy")
        for node in draft.again:
            same = self.cut.effects.same.get(node)
            self.copies[node] = self.copies[same] if same is not None else self._copied(node)

    def copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.copies[node] = self._copied(node)
            ordinal, copy = self.ordinals.get(node), self.copies[node]
            if node.name in self.deferring.norms:
                mean, var = (str(n.target) for n in running_statistics(node))
                copy.target = defer_batch_norm(copy.target, (mean, var))  # type: ignore[arg-type]
                self.copies[node] = self._call(operator.getitem, (copy, 0), f"{node.name}_value")
                self.copies[node].meta = dict(copy.meta)
                self.statistics.append((self._call(operator.getitem, (copy, 1), f"{node.name}_statistics"),))
            elif node.name in self.deferring.whole:
                copy.target = defer_in_opaque_call(node.target, node)  # type: ignore[arg-type]
                self.statistics.append(self._call(operator.getitem, (copy, -1), f"{node.name}_statistics"))
            if info(node).opaque is not None and container_of(node) is None:
                # The positions of the arguments that it was not observed to write to.
                effects, values = self.cut.effects, node.args[1]
                may_change = effects.written_classes[effects.place[node]] | self.cut.states
                assert isinstance(values, (tuple, list))
                nodes_of = {k: n for k, n in enumerate(values) if isinstance(n, fx.Node)}
                only_read = [k for k, n in nodes_of.items() if effects.alias[n] not in may_change]
                checked = with_checks(copy.target, only_read, node.name, info(node).is_hook)  # type: ignore[arg-type]
                copy.target = with_saved_tensors(checked)
            if ordinal is None and info(node).opaque is not None:
                alone = functools.partial(seeded_function, len(self.ordinals), device=self.device)
                wrap = alone if opaque_call_of(node).seeds_generator else forbid_random_numbers
                copy.target = wrap(copy.target)  # type: ignore[arg-type]
            if ordinal is not None:
                draws = info(node).rng
                assert draws is not None
                copy.op = "call_function"
                copy.target = seeded_function(ordinal, copy.target, self.device, draws.from_python)

    def send(self, sends: Iterable[fx.Node], assigns: dict[str, fx.Node], stashed: Collection[str]) -> None:
        self._set_state(self.cut.traced.state)  # a copy made in a `no_grad` block would lose its gradient
        values = []
        for node in sends:
            value = self.copies[node]
            if self.cut.effects.alias[node] in self.cut.states:
                # Memory of a parameter or a buffer, which will be overwritten while others still read this value.
                value = self._call(clone, (value,), f"{node.name}_copy")
            if node.name in stashed:
                value = self._call(stash, (value, node.name), f"{node.name}_stashed")
            values.append(value)
        self.graph.output((*values, *(self.copies[node] for node in assigns.values()), *self.statistics))

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", function, args, name=name)

    def _copied(self, node: fx.Node) -> fx.Node:
        self._set_state(state_of(node))
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        set_node_device(copy, self.device)
        return copy

    def _set_state(self, new: ThreadState) -> None:
        old, self._state = self._state, new
        if new.grad != old.grad:
            self.graph.call_function(set_grad, (new.grad,))
        for before, after in zip(old.autocast, new.autocast, strict=True):
            if after != before:
                # The cast cache belongs to the process: another worker would clear it in between.
                cache = after.cache and new == self.cut.traced.state
                self.graph.call_function(set_autocast, (after.device, after.enabled, after.dtype, cache))
