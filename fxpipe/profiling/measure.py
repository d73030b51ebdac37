"""Seconds of every node of a graph, forward and backward apart, measured node by node on real values.

Rounds over the graph at several micro-batch sizes take turns, so that a machine which slows down does so for all of
them. How one round goes, `rounds` says; when there are enough, `kinds`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.profiling.clock import Clock
from fxpipe.profiling.rounds import Measured, Rounds
from fxpipe.progress import Step, progress
from fxpipe.tracing.checking.check import take
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.traced import Traced


def measure(
    traced: Traced,
    effects: Effects,
    leaves: Sequence[Any],
    device: torch.device,
    micro_batch: int,
    others: Iterable[int] = (),
    *,
    repeats: int = 5,
    budget: float = 10.0,
) -> dict[int, dict[fx.Node, Measured]]:
    """Measures every working node on the first samples of flattened inputs. The model stays as it is.

    Args:
        device: where to run; parameters and inputs that are elsewhere come there one by one.
        micro_batch: how many samples to run.
        others: further sizes, the best first. The first at which the graph runs is measured as well.
        repeats: samples for each kind of node, besides the one that warms up; more where they disagree.
        budget: seconds after which one sample for each kind is enough.

    Returns:
        What was found, by size.
    """
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.inference_mode(False), on_gpu, progress("profiling", budget, "s") as spend, warnings.catch_warnings():
        # Tensors come to a GPU one by one, so the weights of an RNN do not lie side by side there.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        clock, step = Clock.on(device), _spending(budget, spend)

        deadline = time.perf_counter() + budget

        def rounds_of(size: int) -> Rounds:
            sample, to_inputs = take(traced, leaves, 0, size), size == micro_batch
            return Rounds(traced, effects, sample, clock, repeats, deadline, step, True, device, to_inputs)

        rounds = {micro_batch: rounds_of(micro_batch)}
        rounds[micro_batch].round()
        for size in others:
            other = rounds_of(size)
            try:
                other.round()
            except Exception:  # too few samples for batch norm, too many for the device
                continue
            rounds[size] = other
            break
        # A list: all take their turn in each round.
        while any([r.round() for r in rounds.values()]):
            pass
    here = {node: rounds[micro_batch].measured(node) for node in effects.nodes}
    found = {micro_batch: here}
    for size, other in rounds.items():
        if size != micro_batch:
            found[size] = {node: _shared(other.measured(node), here[node]) for node in effects.nodes}
    return found


def _shared(found: Measured, like: Measured) -> Measured:
    """With the share of gradients of parameters in backward that was seen in a micro-batch."""
    share = like.weight_seconds / like.backward_seconds if like.backward_seconds else 0.0
    return replace(found, weight_seconds=share * found.backward_seconds)


def _spending(budget: float, spend: Step) -> Callable[[], object]:
    """What to call after each node: tells how much of the budget has gone. What is due in any case may take more."""
    start, spent, nodes = time.perf_counter(), 0.0, 0

    def step() -> None:
        nonlocal spent, nodes
        nodes += 1
        now = min(time.perf_counter() - start, budget)
        spend(now - spent, f"{nodes} nodes run")
        spent = now

    return step
