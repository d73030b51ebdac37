"""Measures how workers on CPUs slow each other down: a profile uses one thread, but caches and memory are shared.

The graph is cut into a part of consecutive nodes for each worker. The slowest nodes of each part run forward and
backward: one part alone, and then all parts at the same time, each in a thread.

    alone      |part 0| |part 1|
    together   |part 0 ====|          seconds together / seconds alone = the contention
               |part 1 ====|

Both alternate, so other load disturbs both; if each worker has one thread, processor time is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import fx

from fxpipe._torch.thread_state import ThreadState, set_thread_state
from fxpipe.partitioning.block import block_partition
from fxpipe.profiling.backward_timing import NodeCall
from fxpipe.profiling.node_kinds import NodeValue, as_leaf, distinct_tensors, map_tensors_in
from fxpipe.tracing.node_info import info
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.verify.effects import Effects
from fxpipe.utils.locks import planning_block

LEAST_SECONDS = 0.01  # seconds of a micro-batch, forward and backward; below, Python dominates
MOST_NODES = 6  # limit for each part
MOST_SHARE = 0.8  # share of the seconds of a part at which its nodes are enough
BUDGET_SHARE = 0.2  # share of the budget of a profile
MOST_ROUNDS = 7


@dataclass(slots=True)
class ConcurrentCall:
    """A node to run repeatedly, and its samples."""

    function: NodeCall
    values: Mapping[fx.Node, NodeValue]
    state: ThreadState
    weight: float  # number of nodes that it represents
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # alone, together

    def run(self, clock: Callable[[], float], at_once: bool | None) -> None:
        """Runs forward and backward; takes a sample unless `at_once` is None."""
        start = clock()
        values = {n: map_tensors_in(as_leaf, value) for n, value in self.values.items()}
        function, args, kwargs = self.function.bound(values)
        with set_thread_state(self.state), torch.enable_grad():
            result = function(*args, **kwargs)
        ends = distinct_tensors(t for t in tensors_in(result) if t.grad_fn is not None)
        starts = distinct_tensors(t for t in tensors_in(list(values.values())) if t.requires_grad)
        if ends and starts:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(ends, starts, [torch.ones_like(t) for t in ends], allow_unused=True)
        if at_once is not None:
            self.seconds[at_once].append(clock() - start)

    def seconds_of_all(self, at_once: bool) -> float:
        return self.weight * median(self.seconds[at_once])


def heavy_nodes(
    effects: Effects, seconds: Mapping[fx.Node, float], kinds: Mapping[fx.Node, Any], workers: int, longest: float
) -> list[dict[fx.Node, int]]:
    """Selects the nodes to run in each part: node -> number of nodes of its kind in the part.

    Args:
        seconds: seconds of each node, forward and backward.
        longest: seconds. A longer node (the head over a vocabulary) runs only if its part has no shorter ones.
    """
    nodes = effects.nodes
    if sum(seconds.values()) < LEAST_SECONDS or not 1 < workers <= len(nodes):
        return []
    costs = [seconds[node] for node in nodes]
    parts, start = [], 0
    for length in block_partition(costs, workers):
        part = nodes[start : start + length]
        start += length
        by_kind: dict[Any, list[fx.Node]] = {}
        for node in part:
            if is_plain(node, effects):
                by_kind.setdefault(kinds[node], []).append(node)
        short = [own for own in by_kind.values() if seconds[own[0]] <= longest]
        ordered = sorted(short or by_kind.values(), key=lambda own: -sum(map(seconds.__getitem__, own)))
        total, covered, chosen = sum(map(seconds.__getitem__, part)), 0.0, dict[fx.Node, int]()
        for own in ordered[:MOST_NODES]:
            if covered >= MOST_SHARE * total:
                break
            chosen[own[0]] = len(own)
            covered += sum(map(seconds.__getitem__, own))
        parts.append(chosen)
    return parts


def is_plain(node: fx.Node, effects: Effects) -> bool:
    """Returns whether several threads may run a node at the same time: no user's Python, no write."""
    return info(node).opaque is None and not info(node).is_hook and not effects.written_classes[effects.place[node]]


def measure_contention(parts: Sequence[Sequence[ConcurrentCall]], seconds: float) -> float:
    """Measures the seconds of the calls together relative to alone; 1 if there is nothing to measure.

    `parts`: by worker. `seconds`: time limit; at least one round is measured.
    """
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return 1.0
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    deadline = time.perf_counter() + seconds
    for part in parts:
        _run_part(part, clock, None)  # warm-up
    for count in range(MOST_ROUNDS):
        if count and time.perf_counter() >= deadline:
            break
        for part in parts:
            _run_part(part, clock, False)
        _run_at_once(parts, clock)
    alone, at_once = (sum(call.seconds_of_all(way) for part in parts for call in part) for way in (False, True))
    return max(1.0, at_once / alone) if alone else 1.0


def _run_part(part: Collection[ConcurrentCall], clock: Callable[[], float], at_once: bool | None) -> None:
    for call in part:
        call.run(clock, at_once)


def _run_at_once(parts: Sequence[Sequence[ConcurrentCall]], clock: Callable[[], float]) -> None:
    """Runs each part in a thread; finished threads continue untimed until all have finished."""
    barrier, running, failures = threading.Barrier(len(parts)), [len(parts)], list[BaseException]()
    lock = threading.Lock()

    @planning_block()
    def work(part: Sequence[ConcurrentCall]) -> None:
        try:
            barrier.wait()
            _run_part(part, clock, True)
        except BaseException as error:
            failures.append(error)
        with lock:
            running[0] -= 1
        while running[0] and not failures:
            part[0].run(clock, None)

    threads = [threading.Thread(target=work, args=(part,), name="fxpipe contention") for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
