"""Operations that a recording cannot represent, and the error that reports them.

Most are possible in an opaque module, whose Python runs in every step as one node. The error says so if that would not
help (writing to a parameter, drawing from another generator).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxpipe._torch.autograd_functions import is_in_functorch_transform
from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.functions import opname, overload_writes
from fxpipe._torch.module_internals import global_hooks
from fxpipe._torch.operators import OpOverload
from fxpipe.errors import TraceError
from fxpipe.tracing.node_info import dependencies_of, info
from fxpipe.utils.python_objects import class_of_model


class CannotRecord(TraceError):
    """Recording failed."""

    __module__, __qualname__ = "fxpipe.errors", "TraceError"  # the name that users catch and tracebacks show

    def __init__(
        self,
        message: str,
        modules: frozenset[str] = frozenset(),  # paths of modules to keep opaque
        is_final: bool = False,  # no other method would help
        # By path of a module with a possible graph break: its calls of other modules before it, not to be repeated.
        calls: Mapping[str, int] | None = None,
        source: str = "",  # the user's line that forward could go on from as Python
        reads_size: bool = False,  # forward reads a size that depends on values
        counters: frozenset[str] = frozenset(),  # numbers that forward changes, if it changes no other attributes
    ):
        super().__init__(message)
        self.source, self.reads_size, self.counters = source, reads_size, counters
        self.modules, self.is_final = modules, is_final
        self.calls = dict(calls or {})


class MakesState(CannotRecord):
    """Forward creates or changes state that is not a tensor, or was empty, perhaps only in its first call."""

    __module__, __qualname__ = "fxpipe.errors", "TraceError"


def calls_before_effects(graph: fx.Graph, path: str, calls: int) -> int:
    """Returns how many of the first `calls` calls of a module come before all effects that must not happen twice.

    A read of the samples counts: the graph would read the mini-batch's value, and Python after it the micro-batch's.
    """
    # Nodes that depend on inputs by more than their sizes, except on 0-dim inputs, which are not split.
    dependent: set[fx.Node] = set()
    written: set[int] = set()  # storages
    for node in graph.nodes:
        known = info(node)
        if node.op == "placeholder":
            is_of = known.recorded_rank != 0
        else:
            sources = node.all_input_nodes
            is_size = node.target in ("size", "stride") and not known.is_data_dependent
            is_of = not is_size and any(n in dependent or not written.isdisjoint(info(n).storages) for n in sources)
            if is_of:
                written |= known.written_storages
        if is_of:
            dependent.add(node)
        if known.module == path and (known.is_random or known.written_storages or (known.is_guarded_read and is_of)):
            calls = min(calls, known.recorded_at.calls)
    return calls


def is_of_inputs_alone(node: fx.Node) -> bool:
    """Returns whether a step can compute the value before it runs: of inputs that nothing has written to so far."""
    changed = frozenset[int]().union(*(info(n).written_storages for n in node.graph.nodes))
    known = [info(n) for n in dependencies_of(node) if n.op != "placeholder"]
    return not any(one.state is None or one.is_random or one.opaque or one.storages & changed for one in known)


def python_rng_error(modules: frozenset[str] = frozenset()) -> CannotRecord:
    """Returns the error if these modules, or the model itself if empty, draw Python's or NumPy's random numbers."""
    text = (
        "forward draws from Python's or numpy's random numbers, which would be the same ones in every step; draw with "
        "torch (torch.rand, torch.randint) instead"
    )
    opaque = "" if modules else f"{OPAQUE_REMEDY} (leaf_modules=[name or class])"
    return CannotRecord(text + opaque, modules, is_final=not modules)


CHANGED_STATE = "which forward changes"  # in the reason of Python that runs as a node, since it reads such state
OPAQUE_REMEDY = ", or in a module inside the model, which recording keeps whole"

# Refused functions, with a description. A module that calls them can be kept opaque.
_REFUSED = {
    "register_hook": "puts a hook on a tensor",
    "register_post_accumulate_grad_hook": "puts a hook on a tensor",
    "retain_grad": "keeps the gradient of a tensor",
    "backward": "runs backward",
}
# Refused functions that see the gradient of a tensor.
TENSOR_HOOKS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad".split())
_IN_PLACE = frozenset(
    "__setitem__ __ior__ __iand__ __ixor__ __ilshift__ __irshift__ __imod__ __iadd__ __isub__ __imul__ __itruediv__ "
    "__idiv__ __ifloordiv__ __ipow__ setitem".split()
)


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the arguments that a function, or the method of this name, will write to, as far as known."""
    if isinstance(function, OpOverload):
        yield from overload_writes(function, args, kwargs)
        return
    name = opname(function)
    if name == "requires_grad_":
        return
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
        yield from args[:1] or tuple(kwargs.values())[:1]
    max_norm = kwargs.get("max_norm", (*args, None, None, None, None)[3])
    if name in ("embedding", "embedding_bag") and max_norm is not None:
        yield from args[1:2]  # it scales the rows in place
    yield kwargs.get("out")


def refusal_of_call(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str, bool] | None:
    """Returns the problem of a call, its remedy, and whether an opaque module would help; None if there is none."""
    if name in _REFUSED:
        return _REFUSED[name], "do so outside forward", True
    if name == "requires_grad_" and not (*args[1:], *kwargs.values(), True)[0] and args[0].requires_grad:
        remedy = "do so before the model is called, or use detach()"
        return "switches off gradients of a tensor in forward", remedy, False
    if isinstance(kwargs.get("generator"), torch.Generator):
        remedy = "draw from torch's default one (leave out generator=)"
        return "draws from a random generator of its own", remedy, False
    if name == "_pack_padded_sequence":
        what = "packs a sequence, and Python reads its lengths (tolist), or loops over its samples,"
        return what, "give the lengths as a tensor, and use torch functions over all samples", True
    if is_in_functorch_transform():
        return "uses a transform of torch.func (vmap, grad)", "write the batched function out", True
    return None


DISTRIBUTED = (
    "was given to fully_shard, or another function of torch.distributed that spreads it over processes; give the model "
    "as it was before: a pipe spreads it by stages (devices=mesh over processes), and data_parallel= has replicas of it"
)


def refuse_model(model: nn.Module) -> None:
    lines = [f"- {line}" for line in _problems_of(model)]
    if lines:
        raise CannotRecord(f"{type(model).__name__} cannot be traced as it is:\n" + "\n".join(lines), is_final=True)


def _problems_of(model: nn.Module) -> Iterator[str]:
    for _, hook in global_hooks():
        yield f"the hook {hook!r}, put on all modules, would not run in the pipeline; remove it (handle.remove())"
    for path, module in model.named_modules():
        kind = type(module)
        name = f"module {path!r} ({kind.__name__})" if path else f"the model ({kind.__name__})"
        if not path.isascii() and path.encode(errors="replace").decode() != path:
            yield f"{name} has a lone surrogate in its name, which no file and no code can hold; give it another name"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{name} is TorchScript, whose functions cannot be seen; use the Python module it was made from"
        elif class_of_model(kind) is not None:
            yield f"{name} is a pipe itself; use the module it was made from (fxpipe.unwrap(pipe))"
        elif _has_distributed_class(kind):
            yield f"{name} {DISTRIBUTED}"
        elif kind.__module__.startswith(("torch.nn.parallel.", "torch.distributed.")):
            yield f"{name} is a wrapper for several processes or devices; use the module inside (wrapped.module)"
    if not any(_has_distributed_class(type(module)) for module in model.modules()):  # else reported for the module
        for name, parameter in model.named_parameters():
            if type(parameter.data).__module__.startswith("torch.distributed.tensor"):
                yield f"{name!r} is a DTensor: the model {DISTRIBUTED}"
                break
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            yield f"{name!r} is not initialized; call the model once on example inputs first"
        elif not issubclass(type(tensor), (nn.Parameter, FakeTensor)) and type(tensor) is not torch.Tensor:
            yield (
                f"{name!r} is a {type(tensor).__name__}, a class of its own, which stages do not know; make it a plain "
                "tensor (as_subclass(torch.Tensor)), or let the class be a subclass of nn.Parameter"
            )
        elif tensor.is_inference():
            yield f"{name!r} was made in inference mode and cannot be changed any more; make the model outside of it"


def _has_distributed_class(kind: type[nn.Module]) -> bool:
    """Returns whether a function of torch.distributed replaced the model's class in place."""
    own = (base for base in kind.__bases__ if issubclass(base, nn.Module) and base is not nn.Module)
    return kind.__module__.startswith("torch.distributed.") and any(own)
