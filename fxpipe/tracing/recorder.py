"""The recorder: a function mode under which a model runs once, and every torch function it calls becomes a graph node.

Recording meets real tensors, so whatever Python the model does simply runs. It goes on inside the modules of
`torch.nn`: the graph holds functions only, and the tensors of the model are `get_attr` nodes, found by identity. What a
function mode does not see is handled here as well, since forgetting it gives a graph that is silently wrong:

- `autograd.Function.apply` becomes one node that keeps its backward; reentrant `torch.utils.checkpoint` is called
  through (non-reentrant checkpoint needs nothing), since recompute is the pipeline's own business.
- `no_grad`, `inference_mode` and autocast are remembered with every node (`ThreadState`).
- A node is *random* if torch's generators moved while it ran. No list of random functions to keep.
- Sizes are `sizes.Size`; what the model concludes from them is kept as `SizeRead`.
- A read of a tensor's value that hangs on inputs, parameters or buffers is refused, with the user's line: the graph
  would hold for these inputs only. So are hooks on tensors, autograd inside forward, and transforms of `torch.func`.
- A tensor of unknown origin is refused: something made it that the mode does not see.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import TraceError
from fxpipe.thread_state import ThreadState
from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.functions import opname, written_by
from fxpipe.tracing.sizes import Shape, Size, SizeRead
from fxpipe.tracing.snapshot import held_in_containers, slots_of
from fxpipe.tracing.source import user_line

# Answers that are the same for every run of one graph, or text for people: they run and leave no node.
_FREE = frozenset(
    "dense_dim sparse_dim dim_order cudnn_is_acceptable dim ndimension is_floating_point is_complex is_signed "
    "element_size is_contiguous storage_offset data_ptr get_device __hash__ untyped_storage can_cast __dir__ "
    "result_type promote_types is_storage __len__ is_inference __dlpack_device__ has_names get_default_device "
    "is_same_size __repr__ __format__ __str__ is_tensor is_grad_enabled "
    "is_autocast_enabled get_autocast_dtype get_default_dtype".split()
)
_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero equal "
    "allclose".split()
)
_STATES = frozenset("_set_grad_enabled _enter_autocast _exit_autocast".split())  # kept by ThreadState
_REFUSED = {
    "register_hook": "puts a hook on a tensor",
    "register_post_accumulate_grad_hook": "puts a hook on a tensor",
    "retain_grad": "keeps the gradient of a tensor",
    "backward": "runs backward",
    "requires_grad_": None,  # refused where it asks for gradients: see `_refuse`
}
_TENSOR_ATTRIBUTES = frozenset("data T mT H mH real imag _base".split())  # the other attributes are no tensors
_PLAIN = (bool, int, float, complex, str)
_CONSTANTS = (type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PATCHING = threading.RLock()  # one recording at a time puts its patches in and takes them out


def generator_states() -> list[Any]:
    """Where torch's generators stand."""
    states: list[Any] = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += [g.get_offset() for g in torch.cuda.default_generators]
    return states


def _same_states(left: list[Any], right: list[Any]) -> bool:
    return bool(torch.equal(left[0], right[0])) and left[1:] == right[1:]


def _is_one_function(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not module._modules


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a function is going to write to, as far as its name and arguments say so."""
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name in ("__setitem__", "__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__", "__imod__")
    in_place |= name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__ipow__")
    if in_place or kwargs.get("inplace"):
        yield from tensors_in(args[:1] or tuple(kwargs.values())[:1])
    if (
        name in ("embedding", "embedding_bag")
        and kwargs.get("max_norm", (*args, None, None, None, None)[3]) is not None
    ):
        yield from tensors_in(args[1:2])  # it scales the rows in place
    yield from tensors_in(kwargs.get("out"))


def _named_function(function: type[torch.autograd.Function], apply: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd.Function as a plain function with its name, for the code of the graph."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(function, *args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = function.__module__
    return call


class Recorder(TorchFunctionMode):
    """Records what runs while it is active. `fxpipe.tracing.record` is the way to use it."""

    def __init__(self, model: nn.Module, held: Mapping[str, torch.Tensor] | None = None):
        """`held`: tensors that whatever runs in the model's place keeps by itself, by name: constants of the graph."""
        super().__init__()
        self.model = model
        self.graph = fx.Graph()
        self.recording = True
        self.size_reads: list[SizeRead] = []
        self.attributes_read: dict[
            tuple[nn.Module, str], Any
        ] = {}  # what forward went by: another value, another graph
        self.constants: dict[str, torch.Tensor] = {}  # found in lists, tuples and dicts that modules keep
        self.refusal: TraceError | None = None
        self.module_of_error: str | None = None
        self.origin: tuple[str, str] | None = (
            None  # module path and source line, where those that run are not the user's
        )
        self.hashed_at: str | None = None  # the user's line that took a size as a key
        self._paused = 0
        self._known: dict[int, tuple[fx.Node, torch.Tensor]] = {}  # holds the tensor: its id must not come again
        self._size_nodes: dict[tuple[fx.Node, str, int], fx.Node] = {}
        self._attributes: dict[int, str] = {}
        self._attribute_nodes: dict[str, fx.Node] = {}
        self._held: dict[int, tuple[str, torch.Tensor]] = {}
        self._parameters = {
            p.untyped_storage()._cdata: name for name, p in model.named_parameters() if p.layout == torch.strided
        }
        self._default_dtype = torch.get_default_dtype()
        self._stack: list[tuple[str, nn.Module]] = []
        self._paths = {id(m): path for path, m in reversed(list(model.named_modules()))}
        # A tensor of several names goes by that of the parameter, under which optimizers and `state_dict` know it.
        for slot, tensor in sorted(slots_of(model).items(), key=lambda item: item[0].kind != "parameter"):
            self._attributes.setdefault(id(tensor), slot.name)
        for name, tensor in (*held_in_containers(model).items(), *(held or {}).items()):
            self._held.setdefault(id(tensor), (name, tensor))

    # -- values to nodes ---------------------------------------------------------------------------------------------

    def placeholder(self, name: str, tensor: torch.Tensor) -> None:
        self._keep(tensor, self.graph.placeholder(name))

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known

    def read_names(self) -> frozenset[str]:
        """Names of the model's tensors that were read."""
        return frozenset(self._attribute_nodes)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) in self._known:
            return self._known[id(tensor)][0]
        name = self._attributes.get(id(tensor))
        if name is None and id(tensor) in self._held:
            name = self._held[id(tensor)][0]
            if tensor.requires_grad:
                raise self._refuse(
                    f"uses {name!r}, a tensor that requires grad in a plain container",
                    "register it (nn.Parameter, nn.ParameterList, register_buffer)",
                )
            self.constants[name] = tensor
        if name is None and isinstance(tensor, nn.Parameter):
            raise self._refuse("makes a parameter or a module in forward", "make it in __init__")
        if name is None:
            raise self._refuse(
                f"uses a tensor of unknown origin ({tuple(tensor.shape)}, {tensor.dtype})",
                "make it with a torch function in forward (not by numpy, nor by a compiled or scripted function), "
                "or keep it in the module (register_buffer)",
            )
        if name not in self._attribute_nodes:
            node = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
            self._attribute_nodes[name] = node
        return self._attribute_nodes[name]

    def argument(self, value: Any) -> Any:
        """A value as the argument of a node."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, Size):
            return value.node if value.recorder is self else int.__int__(value)
        if isinstance(value, (Shape, torch.Size)):
            return tuple(map(self.argument, value))
        if isinstance(value, tuple):
            items = map(self.argument, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return list(map(self.argument, value))
        if type(value) is dict:
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, _CONSTANTS):
            return value
        for kind in _PLAIN:  # without what a subclass adds: numpy.float64, enumerations
            if isinstance(value, kind):
                return value if type(value) is kind else kind.__call__(value)
        if type(value).__module__ == "numpy" and not getattr(value, "shape", ()) and hasattr(value, "item"):
            return self.argument(value.item())
        raise self._refuse(
            f"passes a {type(value).__module__}.{type(value).__qualname__} to a torch function",
            "convert it to a tensor or a plain number first",
        )

    def where(self) -> tuple[str, str]:
        """The module that runs, and the user's line."""
        return self.origin or (self._stack[-1][0] if self._stack else "", user_line())

    def add(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> fx.Node:
        path, source = self.where()
        name = opname(target)
        # Named after the module, so that stage code reads like the model; a torch.nn module is its one function.
        parts = [path] if self._stack and _is_one_function(self._stack[-1][1]) else [path, name]
        if args and isinstance(args[0], fx.Node) and args[0].op == "get_attr" and name.endswith("_"):
            parts = [path, str(args[0].target).rpartition(".")[2], name]  # `bn_num_batches_tracked_add`; not `bn`
        label = "_".join(part.strip("_").replace(".", "_") for part in parts if part.strip("_")) or name.strip("_")
        if label[0].isdigit():
            label = f"_{label}"
        node = self.graph.create_node(op, target, args, kwargs or {}, name=label)
        node.meta.update(source=source, module=path, state=ThreadState.now(), random=False)
        return node

    def _keep(self, value: Any, node: fx.Node) -> None:
        """Remembers which node made the tensors in `value`."""
        if isinstance(value, torch.Tensor):
            self._known[id(value)] = (node, value)
        elif isinstance(value, (Mapping, tuple, list)):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                if any(True for _ in tensors_in(item)):
                    part = self.graph.create_node(
                        "call_function", operator.getitem, (node, key), name=f"{node.name}_{key}"
                    )
                    part.meta.update(node.meta, random=False)
                    self._keep(item, part)

    # -- sizes -------------------------------------------------------------------------------------------------------

    def _sizes(self, tensor: torch.Tensor, method: str) -> tuple[int, ...]:
        numbers = tensor.shape if method == "size" else tensor.stride()
        if id(tensor) not in self._known:
            return numbers  # a tensor of the model: its sizes do not change
        node = self.node_of(tensor)
        return Shape(Size(number, self._size_node(node, method, i), self) for i, number in enumerate(numbers))

    def _size_node(self, node: fx.Node, method: str, dim: int) -> fx.Node:
        key = (node, method, dim)
        if key not in self._size_nodes:
            self._size_nodes[key] = self.add("call_method", method, (node, dim))
        return self._size_nodes[key]

    def add_size(self, function: Callable[..., Any], *operands: Any) -> fx.Node:
        return self.add("call_function", function, tuple(map(self.argument, operands)))

    def read_size(self, function: Callable[..., Any], operands: tuple[Any, ...], result: Any) -> None:
        self.size_reads.append(SizeRead(function, tuple(map(self.argument, operands)), result, self.where()[1]))

    # -- torch functions ---------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = opname(func)
        if self._paused or name in _FREE or name in _STATES or (name.startswith("is_") and name != "is_nonzero"):
            return func(*args, **kwargs)
        if name in ("__get__", "__set__"):
            return self._attribute(func, name, args)
        if name in ("size", "stride"):
            sizes = self._sizes(args[0], name)
            dim = (*args[1:], *kwargs.values())
            return sizes if not dim or dim[0] is None else sizes[dim[0]]
        if name in ("numel", "nelement"):
            return math.prod(self._sizes(args[0], "size"))
        self._refuse_unrecordable(func, name, args, kwargs)
        if name == "__iter__":
            parts, _ = self._run(torch.Tensor.unbind, (args[0], 0), {})
            self._keep(parts, self.add("call_method", "unbind", (self.node_of(args[0]), 0)))
            return iter(parts)
        node_args, node_kwargs = self.argument(args), self.argument(kwargs)
        if name in _READS:
            self._refuse_read(name, (node_args, node_kwargs))
        result, random = self._run(func, args, kwargs)
        if result is not None and not any(True for _ in tensors_in(result)):
            if any(isinstance(leaf, (int, float, complex)) for leaf in pytree.tree_leaves(result)):
                self._refuse_read(name, (node_args, node_kwargs))
            return result  # text, a dtype, or a number that is always the same
        if name == "__setitem__":
            node = self.add("call_function", operator.setitem, node_args, node_kwargs)
        else:
            node = self._call(func, name, node_args, node_kwargs)
            self._keep(result, node)
        node.meta["random"] = random
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """The result of a function, and whether it drew random numbers. Nothing is recorded meanwhile."""
        self._paused += 1  # a custom op applies autograd.Functions of its own
        try:
            before = generator_states()
            result = func(*args, **kwargs)
            return result, not _same_states(before, generator_states())
        finally:
            self._paused -= 1

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        is_method = getattr(torch.Tensor, name, None) is func
        is_method |= type(func).__name__ in ("method_descriptor", "wrapper_descriptor")
        # `x ** 2` and the like: wrappers that torch._tensor does not export.
        is_method |= getattr(func, "__module__", "") == "torch._tensor" and not hasattr(torch._tensor, name)
        return (
            self.add("call_method", name, args, kwargs) if is_method else self.add("call_function", func, args, kwargs)
        )

    def _attribute(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        attribute = func.__self__.__name__
        if name == "__set__":
            raise self._refuse(
                f"sets the attribute `.{attribute}` of a tensor", "use a function that gives a new tensor"
            )
        if attribute == "shape":
            return self._sizes(args[0], "size")
        value = func(*args)
        if attribute == "grad" and value is not None:
            raise self._refuse("reads a gradient", "read gradients outside forward")
        if attribute in _TENSOR_ATTRIBUTES and value is not None:
            self._keep(value, self.add("call_function", getattr, (self.node_of(args[0]), attribute)))
        return value

    # -- what is refused ---------------------------------------------------------------------------------------------

    def _refuse(self, what: str, remedy: str) -> TraceError:
        """The error to raise; kept, should forward swallow it."""
        path, line = self.where()
        module = f" in module {path!r}" if path else ""
        error = TraceError(f"the model{module} {what} at {line}; {remedy}")
        self.refusal = self.refusal or error
        return error

    def _refuse_unrecordable(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _REFUSED and (what := _REFUSED[name]) is not None:
            raise self._refuse(what, "do so outside forward")
        if name == "requires_grad_" and args[0].requires_grad != (asked := (*args[1:], *kwargs.values(), True)[0]):
            what = (
                "starts to ask for gradients in forward" if asked else "switches off gradients of a tensor in forward"
            )
            raise self._refuse(what, "do so before the model is called, or use detach()")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise self._refuse(
                "draws from a random generator of its own", "draw from torch's default one (leave out generator=)"
            )
        if torch.get_default_dtype() != self._default_dtype:
            raise self._refuse("changes the default dtype", "do so outside forward, or pass dtype= to the functions")
        is_overload = isinstance(func, torch._ops.OpOverload)
        for tensor in written_by(func, args, kwargs) if is_overload else _written(name, args, kwargs):
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._parameters:
                raise self._refuse(
                    f"writes to the parameter {self._parameters[tensor.untyped_storage()._cdata]!r}",
                    "keep what forward changes in a buffer (register_buffer), or change the parameter outside forward",
                )
        if name == "grad" and getattr(func, "__module__", "") == "torch.autograd":
            raise self._refuse("runs autograd inside forward", "do so outside forward")
        if name == "_pack_padded_sequence":
            raise self._refuse("packs a sequence, whose sizes hang on lengths", "use padded tensors and a mask")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise self._refuse("uses a transform of torch.func (vmap, grad)", "write the batched function out")

    def _refuse_read(self, name: str, args: Any) -> None:
        kind = _hangs_on(args)
        if kind is not None and "nested_tensor" in name:
            raise self._refuse(
                f"makes a nested tensor of a mask that hangs on {kind} (the fast path of nn.TransformerEncoder)",
                "build it with TransformerEncoder(..., enable_nested_tensor=False)",
            )
        if kind is not None:
            raise self._refuse(
                f"reads the value of a tensor ({name.strip('_')}) that hangs on {kind}",
                "the graph would hold for this value only: keep the decision in tensors (torch.where, masks), or "
                "take it outside forward",
            )

    # -- what a function mode does not see ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """Module calls are followed for their paths, autograd functions become nodes: in the recording thread only."""
        here = threading.get_ident()
        _PATCHING.acquire()
        module_call = nn.Module.__call__
        function_apply = torch.autograd.Function.__dict__["apply"]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return module_call(module, *args, **kwargs)
            self._refuse_hooks(module)
            path = self._paths.get(id(module), self._stack[-1][0] if self._stack else "")
            self._stack.append((path, module))
            try:
                return module_call(module, *args, **kwargs)
            except BaseException:
                self.module_of_error = self.module_of_error or path
                raise
            finally:
                self._stack.pop()

        def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or self._paused:
                return function_apply.__func__(function, *args, **kwargs)
            if function is CheckpointFunction:
                return args[0](*args[2:])
            node_args, node_kwargs = self.argument(args), self.argument(kwargs)
            result, random = self._run(function_apply.__func__, (function, *args), kwargs)
            node = self.add("call_function", _named_function(function, function_apply.__func__), node_args, node_kwargs)
            node.meta["random"] = random
            self._keep(result, node)
            return result

        def getattribute(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if type(value) in _PLAIN and name != "training" and threading.get_ident() == here and not self._paused:
                own = object.__getattribute__(module, "__dict__")  # not what its class has
                if name in own and id(module) in self._paths:
                    self.attributes_read[module, name] = value
            return value

        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__call__ = module_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]
            _PATCHING.release()

    def _refuse_hooks(self, module: nn.Module) -> None:
        """A hook would run now and never again. Those of torch itself (weight_norm) only compute, and are recorded."""
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if not type(hook).__module__.startswith("torch.nn.utils")]
        foreign += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if foreign:
            path = self._paths.get(id(module), "")
            self.refusal = TraceError(
                f"module {path!r} ({type(module).__name__}) has the hook {foreign[0]!r}, which would not run in the "
                "pipeline; remove it before fxpipe.pipeline (hook.remove()), or move what it does into forward"
            )
            raise self.refusal


def _hangs_on(args: Any) -> str | None:
    """What the arguments of a node hang on: inputs, the model's tensors, random numbers; None for constants."""
    todo: list[fx.Node] = []
    fx.map_arg(args, lambda n: todo.append(n))
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node.target in ("size", "stride"):
            continue
        seen.add(node)
        todo.extend(node.all_input_nodes)
        if node.op == "placeholder":
            return "the inputs"
        if node.op == "get_attr":
            return f"{node.target!r}"
        if node.meta.get("random"):
            return "random numbers"
    return None
