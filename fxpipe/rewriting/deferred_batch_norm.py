"""Deferred batch norm: running statistics of the mini-batch, although the model sees micro-batches.

Batch norm normalizes each micro-batch by its statistics. For evaluation it should track the statistics of the whole
mini-batch, once, as without a pipeline. So in a stage

    y = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)

becomes, with the same bits of `y`,

    mean, var = zeros_like(running_mean), zeros_like(running_var)
    y = F.batch_norm(x, mean, var, weight, bias, True, 1.0, eps)

With a momentum of 1 the kernel writes the statistics of `x` to `mean` and `var`. With the number of values they are
outputs of F; the runtime combines them when the step ends without an error. Opaque calls are intercepted when they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpipe.errors import ArgumentError, StateError
from fxpipe.rewriting.program import BatchStatistics
from fxpipe.tracing.node_info import container_of, info, named_arguments, parameter_names
from fxpipe.tracing.tensors import storage_of
from fxpipe.tracing.traced import Traced, attribute_tensor
from fxpipe.tracing.verify.effects import Effects, running_statistics

BATCH_COUNTER = "num_batches_tracked"

# Read by code that torch.compile traces, which supports no cached function.
_NORM_PARAMETERS = {function: parameter_names(function) for function in (F.batch_norm, torch.batch_norm)}
_NORM_DEFAULTS = {"training": False, "momentum": 0.1}  # of F.batch_norm


@dataclass(frozen=True, slots=True)
class DeferredBatchNorm:
    """The parts of a graph that wait for the end of the mini-batch, by the names of nodes and of model tensors."""

    norms: frozenset[str] = frozenset()  # batch norm nodes that track
    whole: frozenset[str] = frozenset()  # opaque nodes that may contain batch norm
    statistics: frozenset[str] = frozenset()  # buffers that `norms` track
    counters: frozenset[str] = frozenset()  # buffers that count mini-batches

    @classmethod
    def of(cls, traced: Traced) -> DeferredBatchNorm:
        """Finds batch norm that tracks running statistics. Raises `ArgumentError` if these cannot be deferred."""
        effects = traced.effects
        assert effects is not None
        norms = {
            n: running_statistics(n) for n in effects.nodes if n.target in _NORM_PARAMETERS and running_statistics(n)
        }
        for node, statistics in norms.items():
            if problem := _undeferrable_reason(node, statistics, norms, traced, effects):
                raise ArgumentError(
                    f"deferred_batch_norm=True, but batch norm {node.name} (module {info(node).module!r}, "
                    f"{info(node).source}) {problem}; change that, or give deferred_batch_norm=False"
                )
        as_it_is = [n for n in effects.nodes if info(n).opaque is not None and container_of(n) is None]
        attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
        tensors = {n: attribute_tensor(traced, n) for n in attributes}
        buffers = {n for n, t in tensors.items() if t.is_floating_point() and not isinstance(t, torch.nn.Parameter)}
        whole = {n for n in as_it_is if not buffers.isdisjoint(n.all_input_nodes)}
        tracked = {str(s.target) for statistics in norms.values() for s in statistics}
        tracking = {name.rpartition(".")[0] for name in tracked}
        counters = {
            str(n.target)
            for n in attributes
            if not tensors[n].is_floating_point() and _is_counter(n, tracking, whole, traced, effects)
        }
        names = [frozenset(n.name for n in nodes) for nodes in (norms, whole)]
        return cls(names[0], names[1], frozenset(tracked), frozenset(counters))


def _undeferrable_reason(
    norm: fx.Node,
    statistics: Sequence[fx.Node],
    norms: Mapping[fx.Node, Sequence[fx.Node]],
    traced: Traced,
    effects: Effects,
) -> str | None:
    """Returns why statistics of a batch norm cannot wait for the end of the step; None if they can."""
    if len(statistics) < 2 or any(s.op != "get_attr" for s in statistics):
        return "tracks its running statistics in a part of a buffer, or in a value that forward has made"
    if any(str(s.target) in traced.assigned for s in statistics):
        return "tracks running statistics that forward also sets"
    if isinstance(named_arguments(norm).get("momentum"), fx.Node):
        return "has a momentum that depends on the size of the batch"
    classes = {effects.alias[s] for s in statistics}
    for node, written in zip(effects.nodes, effects.written_classes, strict=True):
        if node not in norms and classes & written:
            return f"tracks running statistics that {node.name} ({info(node).source}) also changes"
        reads = any(effects.alias.get(s) in classes for s in node.all_input_nodes)
        if node not in norms and reads and effects.place[node] > effects.place[norm]:
            return f"tracks running statistics that {node.name} ({info(node).source}) then reads"
    if any(isinstance(o, fx.Node) and effects.alias.get(o) in classes for o in traced.handed_out):
        return "tracks running statistics that forward returns"
    return None


def _is_counter(attribute: fx.Node, tracking: set[str], whole: set[fx.Node], traced: Traced, effects: Effects) -> bool:
    """Returns whether a buffer next to running statistics changes independently of the inputs."""
    name, users = str(attribute.target), list(attribute.users)
    path, _, key = name.rpartition(".")
    if any(user in whole for user in users):
        return key == BATCH_COUNTER
    new = traced.assigned.get(name)
    writers = [
        n for n in users if n in effects.place and effects.alias[attribute] in effects.written_classes[effects.place[n]]
    ]
    writers += [new] if isinstance(new, fx.Node) else []
    return path in tracking and bool(writers) and all(set(n.all_input_nodes) <= {attribute} for n in writers)


def _untracked(function: Any, arguments: dict[str, Any], names: tuple[str, str]) -> tuple[Any, BatchStatistics]:
    """Runs batch norm that tracks nothing; returns its result, and the statistics of its input."""
    x, momentum = arguments["input"], arguments["momentum"]
    mean, var = torch.zeros_like(arguments["running_mean"]), torch.zeros_like(arguments["running_var"])
    result = function(**arguments | {"running_mean": mean, "running_var": var, "momentum": 1.0})
    return result, (*names, x.numel() // max(x.size(1), 1), mean, var, momentum)


def defer_batch_norm(function: Callable[..., Any], names: tuple[str, str]) -> Callable[..., Any]:
    """Makes batch norm in the graph of a stage a function that tracks nothing, and also returns the statistics."""

    def untracked_batch_norm(*args: Any, **kwargs: Any) -> tuple[Any, BatchStatistics]:
        arguments = _NORM_DEFAULTS | dict(zip(_NORM_PARAMETERS[function], args, strict=False)) | kwargs
        return _untracked(function, arguments, names)

    return untracked_batch_norm


def defer_in_opaque_call(function: Callable[..., Any], node: fx.Node) -> Callable[..., Any]:
    """Wraps an opaque `function`: it also returns, last, the statistics of the batch norm in it."""
    arguments = [argument for group in node.args for argument in group]  # type: ignore[union-attr]
    names = [str(a.target) if isinstance(a, fx.Node) and a.op == "get_attr" else None for a in arguments]

    @functools.wraps(function)
    def call(tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> tuple[Any, ...]:
        own = {storage_of(t): (name, t) for name, t in zip(names, (*tensors, *leaves), strict=True) if name is not None}
        catching = _BatchNormCatcher(own)
        with catching:  # without `as`: torch.compile, which resumes inside, would lose the name
            results = function(tensors, leaves)
        return (*results, tuple(catching.statistics))

    return call


class _BatchNormCatcher(TorchFunctionMode):
    """Intercepts batch norm in opaque Python, so that it does not track."""

    def __init__(self, own: dict[Any, tuple[str, torch.Tensor]]):
        super().__init__()
        self.own, self.statistics = own, list[BatchStatistics]()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NORM_PARAMETERS:
            return func(*args, **kwargs)
        arguments = _NORM_DEFAULTS | dict(zip(_NORM_PARAMETERS[func], args, strict=False)) | kwargs
        statistics = [arguments["running_mean"], arguments["running_var"]]
        names = [self._name_of(s) for s in statistics if s is not None] if arguments["training"] else []
        if len(names) < 2 or names[0] is None or names[1] is None:
            return func(*args, **kwargs)
        result, of_input = _untracked(func, arguments, (names[0], names[1]))
        self.statistics.append(of_input)
        return result

    def _name_of(self, statistic: torch.Tensor) -> str | None:
        """Returns the name of the buffer of a statistic; None if it is not a buffer passed to the function."""
        memory = storage_of(statistic)
        if memory not in self.own:  # not `get`, which torch.compile lacks (2.11) when it runs this for custom backends
            return None
        name, buffer = self.own[memory]
        if statistic.shape != buffer.shape or statistic.data_ptr() != buffer.data_ptr():
            raise StateError(
                f"deferred_batch_norm=True, but batch norm in a module kept whole tracks running statistics in a part "
                f"of the buffer {name!r}; give it a buffer for each, or give deferred_batch_norm=False"
            )
        return name
