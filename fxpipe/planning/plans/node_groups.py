"""Groups the nodes of a stage by modules, as deep as a picture has room for.

Grouping starts with the stage as one group and repeatedly opens the slowest group: several modules, then a module's
children and operations, then nodes. Small groups are joined with their neighbors. Groups keep the execution order: a
module whose nodes run in several runs is several groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from fxpipe.inspect.style import fit_text, text_width
from fxpipe.planning.plans.data import StagePlan

RANGE_DASH = " – "  # from the first name to the last
NUMBER_LETTERS = frozenset("0123456789.…" + RANGE_DASH)
MIN_LETTERS = 4.5  # minimum width of a name cut in its middle, as a multiple of the font size


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Consecutive nodes of a stage."""

    name: str  # their module; for several modules, the first and the last
    nodes: tuple[str, ...]
    share: float  # share of the stage's seconds, 0 to 1
    is_elided: bool = False  # joined only because they are small


def node_groups_of(stage: StagePlan, most: int, least: float) -> tuple[NodeGroup, ...]:
    """Divides the stage into at most `most` groups. Only groups between larger ones have a share below `least`."""
    nodes = _stage_nodes(stage)
    if not nodes:
        return ()
    runs, closed = [_NodeRun(nodes)], [False]
    while not all(closed):
        at = max((k for k in range(len(runs)) if not closed[k]), key=lambda k: runs[k].share)
        parts = _join_small(list(_open_run(runs[at])), least)
        if len(parts) == 1 or len(runs) + len(parts) - 1 > most:
            closed[at] = True
            continue
        runs[at : at + 1] = parts
        closed[at : at + 1] = [len(part.nodes) == 1 or part.share < least for part in parts]
    return tuple(run.group() for run in _join_small(runs, least))  # now also joins nodes of different modules


def short_group_name(name: str, width: float, size: float) -> str:
    """Shortens a name to its last parts: `transformer.h.0.attn` -> `…0.attn`; if only digits remain, to both ends."""
    first, to, last = name.partition(RANGE_DASH)
    for depth in range(max(first.count("."), last.count(".")), -1, -1):
        short = _last_parts(first, depth) + (to + _last_parts(last, depth) if to else "")
        if text_width(short, size) <= width:
            if set(short) <= NUMBER_LETTERS:  # only layer numbers
                break
            return short
    return fit_text(name, width, size) if width >= MIN_LETTERS * size else ""


def _last_parts(name: str, depth: int) -> str:
    parts = name.split(".")
    return name if depth + 1 >= len(parts) else "…" + ".".join(parts[-depth - 1 :])


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    path: tuple[str, ...]  # path of its module
    share: float


@dataclass(frozen=True)  # no slots, for the cached property
class _NodeRun:
    nodes: Sequence[_Node]
    is_elided: bool = False
    is_outside_module: bool = False  # a node shown by its name instead of its module's

    @cached_property
    def share(self) -> float:
        return sum(node.share for node in self.nodes)

    @property
    def prefix(self) -> tuple[str, ...]:
        """The common prefix of the module paths of all nodes."""
        first, last = min(node.path for node in self.nodes), max(node.path for node in self.nodes)
        length = next((k for k, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None)
        return first if length is None else first[:length]

    def group(self) -> NodeGroup:
        return NodeGroup(self._name(), tuple(node.name for node in self.nodes), self.share, self.is_elided)

    def _name(self) -> str:
        first, last = self.nodes[0], self.nodes[-1]
        prefix = self.prefix
        if len(self.nodes) == 1:
            return first.name if self.is_outside_module else ".".join(first.path) or first.name
        if prefix and not self.is_elided:
            return ".".join(prefix)
        ends = [".".join(node.path) or node.name for node in (first, last)]
        return ends[0] if ends[0] == ends[1] else RANGE_DASH.join(ends)


def _stage_nodes(stage: StagePlan) -> list[_Node]:
    """Lists the nodes of a stage; with even shares or without modules if the plan has none."""
    shares = stage.shares or (1 / max(1, len(stage.nodes)),) * len(stage.nodes)
    modules = stage.modules or ("",) * len(stage.nodes)
    return [
        _Node(name, tuple(module.split(".")) if module else (), share)
        for name, module, share in zip(stage.nodes, modules, shares, strict=True)
    ]


def _open_run(run: _NodeRun) -> Iterator[_NodeRun]:
    depth = len(run.prefix)
    if all(len(node.path) == depth for node in run.nodes):
        yield from (_NodeRun([node], is_outside_module=True) for node in run.nodes)
        return
    for _, nodes in groupby(run.nodes, key=lambda node: node.path[depth : depth + 1]):
        yield _NodeRun(list(nodes))


def _join_small(parts: list[_NodeRun], least: float) -> list[_NodeRun]:
    gathered: list[_NodeRun] = []
    for is_small, runs in groupby(parts, key=lambda run: run.share < least):
        group = list(runs)
        if is_small and len(group) > 1:
            gathered.append(_NodeRun([node for run in group for node in run.nodes], is_elided=True))
        else:
            gathered += group
    return gathered
