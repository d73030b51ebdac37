"""Traces models without values, on the meta device or created under a `FakeTensorMode`.

Recording needs only sizes and devices. So inside a block the tensors of the model and of the inputs are replaced with
fake tensors of one mode: parameters with parameters, tied ones with one object. They are on the device of the model or
the inputs, else on the CPU. The graph equals the graph of the model with values, unless forward reads values.

Random functions do not advance torch's generators under this mode, so the mode counts them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.fake_tensor_mode import LOGGER, FakeTensor, FakeTensorMode, unset_fake_temporarily
from fxpipe._torch.modes import TorchDispatchMode
from fxpipe._torch.module_internals import MODULE_DICT_KEYS, tensor_stores
from fxpipe._torch.operators import DEVICE_OF, schema_of
from fxpipe.tracing.model_state import tensors_of
from fxpipe.tracing.record.unrecordable import refuse_model
from fxpipe.tracing.tensors import has_values, tensors_in
from fxpipe.utils.pytree import flatten, map_tensor_leaves


@contextlib.contextmanager
def mute_fake_tensor_logs() -> Iterator[None]:
    """A block in which torch does not log the errors of fake tensors with stacks: they are raised as well."""
    here, logger = threading.get_ident(), logging.getLogger(LOGGER)

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here or record.exc_info is None

    logger.addFilter(is_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_elsewhere)


class ModelFakeMode(FakeTensorMode):
    """The mode whose tensors replace a model's. Sizes are plain numbers."""

    def __init__(self, device: torch.device):
        super().__init__(allow_non_fake_inputs=True)  # numpy's, and tensors of libraries
        self.device = device  # for tensors without a device
        self.drawn = 0  # number of random functions that have run
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> the tensor and its fake tensor
        self._results = weakref.WeakValueDictionary[int, torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor) and not self.in_kernel_invocation:
            return args[0].fake_device  # torch's answer, at a tenth of the cost: more than half of all calls
        if torch.Tag.nondeterministic_seeded in func.tags and not draws_nothing(schema_of(func), args, kwargs or {}):
            self.drawn += 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._results.update((id(tensor), tensor) for tensor in tensors_in(result))
        return result

    def clear_caches(self) -> None:
        """Clears each `lru_cache` that holds a fake tensor, which its function would return outside the mode."""
        alive = set(self._results.keys()) - {id(fake) for _, fake in self._fakes.values()}
        for cache in [one for one in gc.get_objects() if type(one) is _LRU_CACHE] if alive else []:
            if not alive.isdisjoint(map(id, pytree.tree_leaves(gc.get_referents(cache)))):
                cache.cache_clear()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake tensor for a tensor: always the same object."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self:
            return tensor
        if id(tensor) not in self._fakes:
            bare = tensor.detach()
            # A fake tensor of a meta tensor shares its storage, so views of one tensor stay views of one tensor.
            is_meta = bare.is_meta and not isinstance(bare, FakeTensor)
            fake: torch.Tensor = FakeTensor(self, bare, self.device) if is_meta else self.from_tensor(bare)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._fakes[id(tensor)] = tensor, fake.requires_grad_(tensor.requires_grad)
        return self._fakes[id(tensor)][1]

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of a fake tensor; any other tensor unchanged."""
        return next((original for original, fake in self._fakes.values() if fake is tensor), tensor)


_LRU_CACHE = type(functools.lru_cache(id))


class ValuesNeededError(Exception):
    """Values are needed, in a run in which they may be other values."""


class WithoutProducts(TorchDispatchMode):
    """While it is active, zeros stand for products of matrices on the CPU: nearly all arithmetic of many models.

    If `is_blind`, operations that return values to Python, or a result whose size depends on values, raise an error.
    """

    def __init__(self, is_blind: bool = False) -> None:
        super().__init__()
        self.is_blind = is_blind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and not kwargs and {*map(type, args)} <= {torch.Tensor, nn.Parameter}:
            *_, left, right = args
            kinds = {(t.dtype, t.device.type, t.layout) for t in args}
            is_plain = left.is_floating_point() and kinds == {(left.dtype, "cpu", torch.strided)}
            if is_plain and (*left.shape[:-2], left.shape[-1]) == right.shape[:-1]:
                return torch.zeros((*left.shape[:-1], right.shape[-1]), dtype=left.dtype, device="cpu")
        if self.is_blind and not _VALUE_TAGS.isdisjoint(func.tags):
            # The size of `x[index]` depends on masks, but not on integer indices.
            masks = (torch.bool, torch.uint8)
            is_gather = func is torch.ops.aten.index.Tensor and all(t.dtype not in masks for t in tensors_in(args[1]))
            if not is_gather:
                raise ValuesNeededError(f"{func} of what may be other values")
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)
_VALUE_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class _Current(threading.local):
    mode: ModelFakeMode | None = None


_current = _Current()


def names_without_values(model: nn.Module) -> list[str]:
    return [name for name, tensor in tensors_of(model).items() if not has_values(tensor)]


@contextlib.contextmanager
def with_fake_tensors(model: nn.Module, inputs: Any, always: bool = False) -> Iterator[Any]:
    """A block in which either all tensors of model and inputs have values, or all are fake (always, if `always`).

    Yields the inputs. A `FakeTensorMode` or `torch.device("meta")` of the user is inactive in the block. Raises
    `CannotRecord` if the model cannot be recorded for another reason.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        tensors = [*tensors_of(model).values(), *(x for x in flatten(inputs)[0] if isinstance(x, torch.Tensor))]
        if not always and all(map(has_values, tensors)):
            yield inputs
            return
        refuse_model(model)
        devices = (t.device for t in tensors if t.device.type != "meta")
        mode = ModelFakeMode(next(devices, torch.device("cpu")))
        if torch.get_default_device() != mode.device:  # the device for functions without a device argument
            stack.enter_context(torch.device(mode.device))
        stack.enter_context(_replace_tensors(model, mode.fake))
        outer, _current.mode = _current.mode, mode
        try:
            yield map_tensor_leaves(mode.fake, inputs)
        finally:
            _current.mode = outer
            mode.clear_caches()


def active_fake_mode() -> ModelFakeMode | None:
    """Returns the mode of the innermost block of `with_fake_tensors` with fake tensors."""
    return _current.mode


def in_fake_mode() -> contextlib.AbstractContextManager[object]:
    """A block in which results are fake if `with_fake_tensors` is active with fake tensors."""
    return contextlib.nullcontext() if _current.mode is None else _current.mode


def is_faked() -> bool:
    """Returns whether a block of `with_fake_tensors` with fake tensors is active."""
    return _current.mode is not None


def fake_if_active(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a graph as it can be used now: fake if a block of `with_fake_tensors` uses fake tensors."""
    return tensor if _current.mode is None else _current.mode.fake(tensor)


def draws_nothing(schema: torch.FunctionSchema, args: Any, kwargs: Any) -> bool:
    """Returns whether a random function draws nothing with these arguments: no dropout, no training."""
    names = [argument.name for argument in schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if "dropout_p" in names:
        return bool(arguments.get("dropout_p", 0.0) == 0)
    if "train" not in names and "training" not in names:
        return False
    is_training = arguments.get("train", arguments.get("training", False))
    # The dropout of an RNN is between its layers.
    return not is_training or arguments.get("num_layers") == 1 or 0 in (arguments.get("p"), arguments.get("dropout"))


@contextlib.contextmanager
def _replace_tensors(model: nn.Module, other: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A block in which `other(tensor)` replaces every tensor that the model holds."""
    before: list[tuple[Any, Any, Any]] = []  # store, key, value

    def put(store: Any, key: Any, value: Any) -> None:
        before.append((store, key, store[key]))
        store[key] = value

    def replace_item(store: Any, key: Any, depth: int) -> None:
        """Replaces the value under `key` in `store`, in containers to the depth of `container_tensors`."""
        value = store[key]
        if isinstance(value, torch.Tensor):
            put(store, key, other(value))
        elif isinstance(value, weakref.ref) and isinstance(tensor := value(), torch.Tensor):  # nn.LSTM's, to weights
            put(store, key, weakref.ref(other(tensor)))
        elif depth and type(value) in (list, tuple, dict):
            inside = list(value) if isinstance(value, tuple) else value
            for item in list(inside) if isinstance(inside, dict) else range(len(inside)):
                replace_item(inside, item, depth - 1)
            if isinstance(value, tuple) and any(a is not b for a, b in zip(inside, value, strict=True)):
                put(store, key, tuple(inside))

    try:
        for module in model.modules():
            for store in tensor_stores(module):
                for key in [key for key in store if store is not module.__dict__ or key not in MODULE_DICT_KEYS]:
                    replace_item(store, key, 3)
        yield
    finally:
        for store, key, value in reversed(before):
            store[key] = value
