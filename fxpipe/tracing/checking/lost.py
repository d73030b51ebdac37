"""What a graph that others have made may have lost is looked for: gradients, changes of buffers and attributes.

Such a graph can give the right output and still be wrong: export and symbolic tracing record what the forward of an
`autograd.Function` computes and forget that its backward is another, they drop hooks on tensors, and what forward keeps
in attributes. The recorder sees all of it; for its own graphs there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.tracing.checking.check import agree
from fxpipe.tracing.checking.witness import witnessed
from fxpipe.tracing.evaluation import evaluated, leaf_copy, outputs_in, run, writable
from fxpipe.tracing.recording.draws import generator_states, same_states
from fxpipe.tracing.recording.fake import is_faked
from fxpipe.tracing.recording.hooks import run_model
from fxpipe.tracing.snapshot import forked_random, slots_of, undone
from fxpipe.tracing.traced import Traced, lookup
from fxpipe.trees import flatten_output, untouched


@dataclass(frozen=True, slots=True)
class _Run:
    spec: pytree.TreeSpec  # of the outputs
    gradients: dict[str, torch.Tensor | None]
    kept: dict[str, torch.Tensor]  # the tensors of the model that are no parameters, after the run
    generators: list[Any]  # where torch's random generators stand after the outputs


def check_nothing_lost(traced: Traced, leaves: Sequence[Any]) -> None:
    """Compares, on the example inputs, gradients (for one direction of the outputs) and what stays behind.

    The output gets the model's structure. Its values are compared at several sizes elsewhere.

    Raises:
        TraceError: something differs; names it.
    """
    seed = torch.default_generator.initial_seed() % 2**31
    with undone(traced.model) as snapshot, untouched(traced.in_spec):
        torch.manual_seed(seed)
        want = _run_model(traced, leaves)
        snapshot.assigned(_read(traced))
    snapshot.refuse_changes()
    if want.spec != traced.out_spec:
        if want.spec.num_leaves != traced.out_spec.num_leaves:
            raise TraceError(
                f"the graph that {traced.tracer!r} made returns {traced.out_spec.num_leaves} values and the model "
                f"{want.spec.num_leaves}; leave it to recording (tracer='record')"
            )
        traced.out_spec = want.spec  # fx makes plain dicts of all kinds of dicts
    with forked_random():
        torch.manual_seed(seed)
        have = _run_graph(traced, leaves)
    if not is_faked() and not same_states(want.generators, have.generators):
        raise TraceError(
            f"forward draws random numbers that the graph which {traced.tracer!r} made does not draw: what was made of "
            "them, or decided by them, would be the same in every step; leave it to recording (tracer='record')"
        )
    for name, gradient in want.gradients.items():
        other = have.gradients[name]
        same = gradient is other if gradient is None or other is None else agree(gradient, other, _tolerance(gradient))
        if not same:
            raise TraceError(
                f"the gradient of {name!r} by the graph that {traced.tracer!r} made is not the model's: forward may "
                "use an autograd.Function with a backward of its own, hooks on tensors, or switch gradients off, which "
                "such a graph loses; leave it to recording (tracer='record')"
            )
    for name, tensor in want.kept.items():
        if name not in have.kept or not agree(tensor, have.kept[name], _tolerance(tensor)):
            raise TraceError(
                f"forward changes {name!r}, and the graph that {traced.tracer!r} made does not do the same; keep what "
                "forward changes in a buffer (register_buffer), or leave it to recording (tracer='record')"
            )


def _read(traced: Traced) -> set[str]:
    """Names of the model's tensors that the graph reads."""
    return {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tolerance(value: torch.Tensor) -> float | None:
    """What another order of summing may do, many times over; a wrong backward is further away."""
    return torch.finfo(value.dtype).eps ** 0.5 if value.is_floating_point() or value.is_complex() else None


def _run_model(traced: Traced, leaves: Sequence[Any]) -> _Run:
    inputs = list(map(leaf_copy, leaves))
    args, kwargs = pytree.tree_unflatten(map(writable, inputs), traced.in_spec)
    with witnessed(traced.model, inputs):
        result = run_model(traced.model, args, kwargs)
    outputs, spec = pytree.tree_flatten(result)
    if spec != traced.out_spec:  # there may be objects in it
        outputs, spec = flatten_output(result, _is_tensor)
    generators = generator_states()
    read = _read(traced)
    kept = {
        slot.name: tensor.detach().clone()
        for slot, tensor in slots_of(traced.model).items()
        # What requires grad and is not read is made anew by each forward, as weight_norm does.
        if slot.kind != "parameter" and not (tensor.requires_grad and slot.name not in read)
    }
    return _Run(spec, _gradients(traced, outputs, inputs), kept, generators)


def _run_graph(traced: Traced, leaves: Sequence[Any]) -> _Run:
    inputs = list(map(leaf_copy, leaves))
    after = {id(tensor): tensor for tensor in slots_of(traced.model).values()}  # a tensor may have several names

    def given(node: fx.Node) -> Any:
        return writable(inputs[traced.place_of(node)])

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = lookup(traced, node)
        after[id(tensor)] = tensor if tensor.requires_grad else tensor.detach().clone()
        return after[id(tensor)]

    values = evaluated(traced.graph.nodes, given, attribute, run)
    generators = generator_states()
    kept = {slot.name: after[id(tensor)] for slot, tensor in slots_of(traced.model).items()}
    kept |= {name: values[node] for name, node in traced.assigned.items()}
    return _Run(traced.out_spec, _gradients(traced, outputs_in(traced, values), inputs), kept, generators)


def _gradients(traced: Traced, outputs: Sequence[Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor | None]:
    wanted = {name: p for name, p in traced.model.named_parameters() if p.requires_grad}
    leaves = zip(traced.leaves, inputs, strict=True)
    wanted |= {f"input {leaf.path}": x for leaf, x in leaves if _is_tensor(x) and x.requires_grad}
    ends = [o for o in outputs if _is_tensor(o) and o.requires_grad]
    if not ends or not wanted:
        return dict.fromkeys(wanted)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype) for o in ends]
    try:
        found = torch.autograd.grad(ends, list(wanted.values()), directions, allow_unused=True)
    except Exception as error:
        raise TraceError(
            f"the gradients of the graph that {traced.tracer!r} made cannot be compared with the model's, since "
            f"backward raises {type(error).__name__}: {error}; trace it in a block of torch.no_grad() if it is not to "
            "be trained, or leave it to recording (tracer='record')"
        ) from error
    return dict(zip(wanted, found, strict=True))
