"""The plan of a pipe after its second size: the stages of the first graph, with the formulas of the second graph.

The second graph has symbols for the sizes; its bytes and FLOPs are counted on tensors without values. Seconds grow with
the FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from fxpipe.planning.describe_cut import formulas_of_sizes
from fxpipe.planning.passes import PreparedGraph
from fxpipe.planning.plans import Plan, StagePlan, StageSeconds
from fxpipe.profiling import NodeCost, Profile, Seconds
from fxpipe.profiling.formulas import size_point, size_polynomial
from fxpipe.profiling.memory import count_flops_and_bytes
from fxpipe.profiling.profile_data import ZERO_FORMULA
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.fake_tensors import with_fake_tensors
from fxpipe.tracing.traced import InputLeaf, Traced
from fxpipe.utils.locks import DISPATCH_MODE_LOCK, planning_block
from fxpipe.utils.polynomial import ZERO, Polynomial, polynomial_sum


@planning_block()
def plan_with_dynamic_sizes(plan: Plan, first: Sequence[InputLeaf], prepared: PreparedGraph) -> Plan | None:
    """Returns the plan with the formulas of another graph of the same stages; None if it is invalid at planned sizes.

    Args:
        first: the inputs of the planned graph.
        prepared: a graph with dynamic sizes, cut like the plan.

    Raises:
        Exception: from a node that cannot run without values.
    """
    traced, samples = prepared.traced, plan.micro_batch
    lengths = traced.dynamic.lengths_of(first)
    if lengths is None or not traced.holds_at(samples, lengths):
        return None
    profile = _uncosted_profile(traced, samples, lengths)
    here = size_point(samples, lengths).values
    sizes_of_stages, sizes_of_plan = formulas_of_sizes(
        traced, prepared.program, prepared.starts, [profile], samples, prepared.settings
    )
    stages = []
    for stage, sizes, (start, end) in zip(
        plan.stages, sizes_of_stages, pairwise([*prepared.starts, len(traced.nodes)]), strict=True
    ):
        costs = profile.nodes[start:end]
        flops, back = (
            polynomial_sum(size_polynomial(one, traced.batch, samples, lengths) for one in of)
            for of in ([cost.flops for cost in costs], [cost.backward_flops for cost in costs])
        )
        sizes = {**sizes, "flops": flops + back, "sent_bytes": stage.sent_bytes}
        stages.append(replace(stage, formulas=_formulas(stage, flops, back, here), **sizes))
    return replace(plan, stages=tuple(stages), **sizes_of_plan)


def _uncosted_profile(traced: Traced, samples: int, lengths: Lengths) -> Profile:
    """Counts bytes and FLOPs; seconds are unknown."""
    assert traced.effects is not None
    with DISPATCH_MODE_LOCK, with_fake_tensors(traced.model, _inputs_at(traced, lengths), always=True) as leaves:
        counts = count_flops_and_bytes(traced, traced.effects, leaves, samples)
    nodes = tuple(
        NodeCost(
            node.name,
            Seconds(),
            Seconds(),
            ZERO_FORMULA,
            ZERO_FORMULA,
            flops=counts.nodes[node].flops,
            backward_flops=counts.nodes[node].backward_flops,
            saved_bytes=counts.nodes[node].saved_bytes,
            working_bytes=counts.nodes[node].working_bytes,
        )
        for node in traced.nodes
    )
    sizes = size_point(samples, lengths).others
    return Profile(nodes, samples, traced.batch, "", saved=counts.saved, sizes=sizes)


def _inputs_at(traced: Traced, lengths: Lengths) -> list[Any]:
    """Creates inputs with these dynamic sizes; other sizes are as recorded."""
    values, inputs = dict(lengths), list[Any]()
    for place, leaf in enumerate(traced.leaves):
        if not leaf.is_tensor:
            inputs.append(leaf.constant)
            continue
        formulas = (traced.dynamic.formulas.get((place, dim)) for dim in range(len(leaf.shape)))
        shape = [s if f is None else int(f.xreplace(values)) for s, f in zip(leaf.shape, formulas, strict=True)]
        inputs.append(torch.zeros(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad))
    return inputs


def _formulas(stage: StagePlan, flops: Polynomial, back: Polynomial, here: dict[str, int]) -> StageSeconds:
    """Scales the growing part of a stage's seconds with its FLOPs; zero for a stage without FLOPs."""

    def formula(seconds: float, known: Polynomial, work: Polynomial) -> Polynomial:
        once, fixed = work.value(here), float(known.value({**here, "b": 0}))
        return work * (Fraction(max(0.0, seconds - fixed)) / Fraction(once)) + Polynomial.in_b(fixed) if once else ZERO

    known = stage.formulas
    return StageSeconds(
        formula(stage.forward_seconds, known.forward, flops),
        formula(stage.backward_seconds, known.backward, back or flops),
        formula(stage.weight_seconds, known.weight, back or flops),
        formula(stage.loss_seconds, known.loss, flops),
    )
