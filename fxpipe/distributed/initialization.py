"""Initialization of a pipe whose model was built on the meta device: each rank computes the values of its part.

The random numbers equal the plain model's: every rank initializes all modules in the plain order. Modules of
other ranks get scratch memory, one module (and its children) at a time.

A tensor that no function has written to has no values afterwards: uninitialized memory is never kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxpipe._torch.dispatch_modes import TorchDispatchMode
from fxpipe._torch.module_internals import reset_method_of, tensor_stores
from fxpipe._torch.operators import schema_of
from fxpipe._torch.tensor_data import replace_data
from fxpipe.distributed.held_tensors import GivenMemory
from fxpipe.distributed.pipeline import distributed_state
from fxpipe.distributed.rank_state import RankState
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.tracing.model_state import preserve_rng, python_rng_state, set_python_rng_state
from fxpipe.tracing.tensors import has_values, storage_of, tensors_in
from fxpipe.utils.random_generators import mix_seed, peek_seed
from fxpipe.utils.units import names_text, with_article

InitFunction = Callable[[nn.Module], object]
CPU = torch.device("cpu")


def initialize(pipe: Pipeline, init_fn: InitFunction | None = None) -> None:
    """Initializes a pipe over processes whose model was built on the meta device. All ranks call it.

        with torch.device("meta"):
            model = Model()
        pipe = fxpipe.pipeline(model, devices=mesh["pipe"], chunks=16, example_args=(x,))
        torch.manual_seed(0)
        fxpipe.distributed.initialize(pipe)
        optimizer = torch.optim.AdamW(pipe.parameters())

    It replaces `model.to_empty(...)` and `model.apply(init_fn)`, but allocates only the parameters and buffers of this
    rank's stages, on its device. They stay the same objects.

    Random numbers equal the plain model's on the CPU, drawn from the generators of rank 0: the weights equal
    the weights of `torch.manual_seed(0); model = Model()`, bit for bit, if the layers initialize themselves in their
    constructors, and are created in their order in the model. A tied weight has the values of the last module that
    holds it. If the constructor of the model initializes again (`self.apply(self._init_weights)`), call
    `initialize(pipe)`, and then `initialize(pipe, model._init_weights)`.

    Args:
        init_fn: a function of a module, called for all modules, children first, as by `model.apply(init_fn)`. It is
            also called for the modules of other ranks, with scratch memory for their tensors. Default: each module's
            `reset_parameters`, if it exists.

    Raises:
        StateError: names tensors without values, to which no `reset_parameters` or `init_fn` has written (tables that
            `__init__` computes, say). Or ranks have drawn different numbers, or there is no plan yet.
    """
    state = distributed_state(pipe)
    check_init_fn(init_fn)
    with state.engine.running(), state.group.together():
        initialize_stages(state, init_fn)
        why = "no module has a reset_parameters that writes to them" if init_fn is None else "init_fn writes to none"
        refuse_missing_values(state, "initialize", why)


def check_init_fn(init_fn: object) -> None:
    if init_fn is not None and not callable(init_fn):
        raise ArgumentTypeError(f"init_fn is {with_article(init_fn)}; expected a function of a module, or None")


def refuse_missing_values(state: PipelineState, after: str, why: str) -> None:
    """Raises `StateError` on all ranks if any rank has tensors without values; names them."""
    everybody = state.group.gather(state.own_without_values(), "the tensors without values")
    if missing := list(dict.fromkeys(name for names in everybody for name in names)):
        raise StateError(
            f"without values after fxpipe.distributed.{after}: {names_text(missing)} ({why}). What __init__ computes "
            "has none on the meta device; give a function that fills it for a module:\n"
            f"    def init_fn(module):\n"
            f"        if isinstance(module, {_holder_name(state.model, missing[0])}):\n"
            f"            module.{missing[0].rpartition('.')[2]}.copy_(...)\n"
            f"    fxpipe.distributed.{after}(pipe, {'path, ' if after == 'load' else ''}init_fn=init_fn)"
        )


def _holder_name(model: nn.Module, name: str) -> str:
    paths = {path for path, _ in model.named_modules()}
    return type(model.get_submodule(_path_of_module(name, paths))).__name__


def initialize_stages(state: RankState, init_fn: InitFunction | None) -> None:
    """Initializes the tensors of this rank. All ranks call it within a block that they run together."""
    connection, model = state.group.connection, state.model
    generators = (torch.get_rng_state(), python_rng_state())
    numbers, python_states = state.group.broadcast(generators, "the state of its random generators")
    torch.set_rng_state(numbers)
    set_python_rng_state(python_states)
    modules = list(_children_first(model))
    if init_fn is None:  # the plain model constructs each module once
        modules = list(dict.fromkeys(modules))
    with _initializing(state.own_tensors().values(), state.model) as initialization:
        for module in modules:
            initialization.run(module, init_fn)
        everybody = connection.all_gather(initialization.digest, "the end of the initialization", is_long=True)
        if len({*everybody}) > 1:
            raise StateError(
                "the ranks have drawn different random numbers in the initialization: init_fn must do the same on all "
                "of them, also for the modules of other ranks, and may use no tensors that are not below the module"
            )
    state.settle()


def initialize_missing(state: PipelineState, names: Collection[str], init_fn: InitFunction | None) -> None:
    """Initializes these tensors by their modules only. The random numbers depend on the module, not on the rank."""
    model, seed = state.model, state.group.broadcast(peek_seed(), "the seed of its random numbers")
    paths = {path for path, _ in model.named_modules()}
    wanted = {model.get_submodule(_path_of_module(name, paths)) for name in names}
    tensors = [tensor for name, tensor in state.own_tensors().items() if name in names]
    with preserve_rng(), _initializing(tensors, model) as initialization:
        for number, module in enumerate(dict.fromkeys(_children_first(model))):
            if module in wanted:
                torch.default_generator.manual_seed(mix_seed(seed, number))
                initialization.run(module, init_fn)
    state.settle()


def _path_of_module(name: str, paths: Collection[str]) -> str:
    """Returns the path of the module that holds a tensor, also if it is in a list."""
    path = name.rpartition(".")[0]
    while path not in paths:
        path = path.rpartition(".")[0]
    return path


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yields modules in the order of `module.apply`: children first."""
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextlib.contextmanager
def _initializing(tensors: Iterable[torch.Tensor], model: nn.Module) -> Iterator[_Initialization]:
    """Runs a block that initializes these tensors on the CPU. Tensors that it does not write to are unchanged."""
    tensors = list(tensors)
    memory = GivenMemory(tensors, lambda tensor: CPU)
    for tensor in tensors:
        if tensor.device != CPU:
            replace_data(tensor, tensor.data.to(CPU))
    initialization = _Initialization(tensors)
    try:
        with torch.no_grad(), CPU, initialization:
            yield initialization
    except BaseException:
        memory.take_back()
        raise
    memory.take_back(keep=initialization.is_written)


class _Initialization(TorchDispatchMode):
    """Initializes modules, and records which tensors are written to."""

    def __init__(self, targets: Collection[torch.Tensor]):
        super().__init__()
        self._targets = {id(tensor) for tensor in targets}
        self._storages = {storage_of(tensor) for tensor in targets}
        self._written: set[int] = set()  # a subset of `_storages`
        self.digest = b""  # states of the random generators after each module

    def is_written(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._written

    def run(self, module: nn.Module, init_fn: InitFunction | None) -> None:
        function = reset_method_of(module) if init_fn is None else lambda: init_fn(module)
        if function is None:
            return
        try:
            with self._scratch_memory(module):
                function()
        except Exception as error:
            error.add_note(f"fxpipe: raised while {with_article(module)} was initialized")
            raise
        states = pickle.dumps((bytes(torch.get_rng_state().tolist()), random.getstate()))
        self.digest = hashlib.sha256(self.digest + states).digest()

    @contextlib.contextmanager
    def _scratch_memory(self, module: nn.Module) -> Iterator[None]:
        """Runs a block in which tensors of a module and its children have memory; restores the objects afterwards."""
        places = [
            (store, key, tensor)
            for below in module.modules()
            for store in tensor_stores(below)
            for key, tensor in store.items()
            if isinstance(tensor, torch.Tensor)
        ]
        scratch: dict[int, torch.Tensor] = {}  # takes no physical memory until it is written to
        for store, key, tensor in places:
            if id(tensor) not in self._targets:
                if id(tensor) not in scratch:
                    memory = torch.empty_like(tensor.detach(), device=CPU)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    scratch[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                store[key] = scratch[id(tensor)]
        values = {}
        try:
            yield
        finally:
            for store, key, tensor in places:
                if id(tensor) in self._targets and store.get(key) is not tensor:
                    values[id(tensor)] = tensor, store.get(key), key
                store[key] = tensor
        for tensor, value, key in values.values():
            self._take(tensor, value, f"{key!r} of {with_article(module)}")

    def _take(self, tensor: torch.Tensor, value: Any, name: str) -> None:
        """Copies the values of a tensor that has replaced this one."""
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ArgumentError(
                f"the initialization sets {name}, which was planned as {tensor.dtype} {tuple(tensor.shape)}, to {what}"
            )
        if has_values(value):
            tensor.detach().copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for place, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self._written |= self._storages & {storage_of(tensor) for tensor in tensors_in(value)}
        return result
