"""The first values of a pipe: `fxpipe.distributed.load` reads a checkpoint, `initialize` draws random numbers.

Each process reads its part of a checkpoint. The random numbers of a model that was built on the meta device equal the
plain model's: every rank initializes all modules in the plain order. Modules of other ranks get scratch memory, one
module (and its children) at a time. A tensor that no function has written to has no values afterwards: uninitialized
memory is never kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from fxpipe._torch.modes import TorchDispatchMode
from fxpipe._torch.module_internals import reset_method_of, tensor_stores, with_metadata
from fxpipe._torch.operators import schema_of
from fxpipe._torch.tensor_data import replace_data
from fxpipe.distributed.held_tensors import GivenMemory
from fxpipe.distributed.pipeline import DistributedPipeline, distributed_state
from fxpipe.distributed.rank_state import RankState
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.planning.options.parse import parse_switch
from fxpipe.tracing.model_state import preserve_rng, python_rng_state, set_python_rng_state
from fxpipe.tracing.tensors import has_values, storage_of, tensors_in
from fxpipe.utils.random_generators import mix_seed, peek_seed
from fxpipe.utils.units import names_text, with_article

INDEX_SUFFIX = ".safetensors.index.json"
DCP_METADATA = ".metadata"  # a file in every folder of torch.distributed.checkpoint


class CheckpointReader(Protocol):
    """A checkpoint on disk."""

    @property
    def keys(self) -> Set[str]:
        """The keys of all entries."""

    def shape_of(self, key: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None if the entry is not a tensor."""

    def read(self, values: dict[str, Any]) -> None:
        """Fills tensors in place, and replaces other values, by key; reads no other entries."""


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Returns the reader for a folder or a file. Raises `ArgumentError` if it is not a known kind of checkpoint."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path is {with_article(path)}; expected the path of a checkpoint")
    place = Path(path)
    if not place.exists():
        raise ArgumentError(f"there is no checkpoint {str(place)!r}")
    if place.is_file():
        if place.name.endswith(INDEX_SUFFIX):
            return SafetensorsReader.of_index(place)
        if place.suffix == ".safetensors":
            return SafetensorsReader.of_file(place)
    else:
        if (place / DCP_METADATA).is_file():
            return DistributedCheckpointReader(place)
        indices, files = sorted(place.glob(f"*{INDEX_SUFFIX}")), sorted(place.glob("*.safetensors"))
        if len(indices) == 1:
            return SafetensorsReader.of_index(indices[0])
        if len(files) == 1 and not indices:
            return SafetensorsReader.of_file(files[0])
        if indices or files:
            names = ", ".join(one.name for one in (indices or files)[:6])
            raise ArgumentError(f"{str(place)!r} has several checkpoints, {names}: give the path of one")
    raise ArgumentError(
        f"{str(place)!r} is no checkpoint of a known kind: expected a folder as torch.distributed.checkpoint.save "
        f"writes it, a .safetensors file, a {INDEX_SUFFIX} file, or a folder with one of these"
    )


class DistributedCheckpointReader:
    """A folder of `torch.distributed.checkpoint`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._items = FileSystemReader(folder).read_metadata().state_dict_metadata

    @property
    def keys(self) -> Set[str]:
        return self._items.keys()

    def shape_of(self, key: str) -> tuple[int, ...] | None:
        item = self._items[key]
        return tuple(item.size) if isinstance(item, TensorStorageMetadata) else None

    def read(self, values: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: each rank reads alone
            load_in_place(values, checkpoint_id=self._folder, no_dist=True)


class SafetensorsReader:
    """One or more safetensors files."""

    def __init__(self, files: Mapping[str, Path]):
        """`files`: the file of each key."""
        self._files = files

    @classmethod
    def of_file(cls, path: Path) -> SafetensorsReader:
        with _opened(path) as file:
            return cls(dict.fromkeys(file.keys(), path))

    @classmethod
    def of_index(cls, path: Path) -> SafetensorsReader:
        """Returns a reader of the files that an index lists, as Hugging Face ships large models."""
        try:
            names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            files = {key: path.parent / name for key, name in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{str(path)!r} is no index of safetensors, with a weight_map: {error!r}") from error
        if missing := sorted({str(file) for file in files.values() if not file.is_file()}):
            raise ArgumentError(f"{str(path)!r} names files that are not there: {', '.join(missing[:6])}")
        return cls(files)

    @property
    def keys(self) -> Set[str]:
        return self._files.keys()

    def shape_of(self, key: str) -> tuple[int, ...] | None:
        with _opened(self._files[key]) as file:
            try:
                return tuple(file.get_slice(key).get_shape())
            except Exception as error:
                raise ArgumentError(f"{str(self._files[key])!r} cannot be read for {key!r}: {error}") from error

    def read(self, values: dict[str, Any]) -> None:
        by_file: dict[Path, list[str]] = {}
        for key in values:
            by_file.setdefault(self._files[key], []).append(key)
        for path, keys in by_file.items():
            with _opened(path) as file, torch.no_grad():
                for key in keys:
                    values[key].copy_(file.get_tensor(key))


def _opened(path: Path) -> Any:
    """Opens a safetensors file. Raises `StateError` without the package, `ArgumentError` if it is not such a file."""
    if importlib.util.find_spec("safetensors") is None:
        raise StateError(
            f"to read {str(path)!r} the package safetensors is needed, which is not installed: pip install safetensors"
        )
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise ArgumentError(f"{str(path)!r} is no file of safetensors: {error}") from error


def load(
    pipe: Pipeline,
    path: str | os.PathLike[str],
    *,
    key: str = "",
    strict: bool = True,
    init_fn: InitFunction | None = None,
) -> None:
    """Loads a checkpoint into a pipe. Over processes, all ranks call it, and each reads the part of its stages.

        with torch.device("meta"):
            model = Model()
        pipe = fxpipe.pipeline(model, chunks=16, example_args=(x,))  # or devices=mesh["pipe"]
        fxpipe.distributed.load(pipe, "checkpoint")
        optimizer = torch.optim.AdamW(pipe.parameters())

    Parameters and buffers without values, of a model built on the meta device, are allocated on the devices of their
    stages and read there one by one: the host never holds the model. Parameters stay the same objects; tied ones are
    read once. Values are cast to the dtype of the model, as by `load_state_dict`.

    Args:
        path: a checkpoint of the `state_dict()` of the model or of any pipe of it: a folder that
            `torch.distributed.checkpoint.save` has written; a .safetensors file; a .safetensors.index.json, as Hugging
            Face ships large models; or a folder with one of these.
        key: the key of the model's state in a larger checkpoint: "model" for {"model": pipe.state_dict(), ...}.
        strict: refuse missing or unexpected keys. If False, tensors missing from the checkpoint must have values.
        init_fn: a function of a module that fills tensors without values that are not persistent: non-persistent
            buffers (rotary tables, position ids) and plain tensors. It is called before the checkpoint is read, for
            the modules that hold such tensors; parameters that it also initializes get the values of the checkpoint.
            Default: the module's `reset_parameters`.

    Raises:
        ArgumentError: on all ranks, before anything is loaded: names keys that are missing, unexpected, or have other
            shapes.
        StateError: names tensors that have no values afterwards. Or the pipe has no plan yet.
    """
    state = _state_of(pipe)
    parse_switch("strict", strict)
    check_init_fn(init_fn)
    with state.engine.running(), state.group.together():
        reader, prefix = open_checkpoint(path), f"{key}." if key else ""
        entries = pipe.state_dict(keep_vars=True)
        _check_fit(state, reader, entries, state.model.state_dict().keys(), prefix, path, strict)
        persistent, own = {id(value) for value in entries.values()}, state.own_tensors()
        initialize_missing(state, [n for n in state.own_without_values() if id(own.get(n)) not in persistent], init_fn)
        covered = {name: value for name, value in entries.items() if prefix + name in reader.keys}
        entries = with_metadata(covered, entries)
        _read(state, reader, entries, prefix)
        pipe.load_state_dict(entries, strict=False)  # for hooks and extra state; the tensors already have their values
        refuse_missing_values(state, "load", "they are not in the checkpoint")


def _state_of(pipe: object) -> PipelineState:
    if isinstance(pipe, Pipeline) and not isinstance(pipe, DistributedPipeline):
        return pipe._fxpipe
    return distributed_state(pipe)


def _check_fit(
    state: PipelineState,
    reader: CheckpointReader,
    entries: Mapping[str, Any],
    all_keys: Iterable[str],
    prefix: str,
    path: Any,
    strict: bool,
) -> None:
    """Compares the keys and shapes of a checkpoint with the model, in all processes."""
    keys = {name.removeprefix(prefix) for name in reader.keys if name.startswith(prefix)}
    present = {id(entries[name]) for name in entries.keys() & keys}  # a tied weight may be stored under one name
    shapes = []
    for name in entries.keys() & keys:
        value, shape = entries[name], reader.shape_of(prefix + name)
        own = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape != own:
            shapes.append(f"{name!r} ({_shape_text(shape)}, in the model {_shape_text(own)})")
    missing = [name for name, value in entries.items() if name not in keys and id(value) not in present]
    everybody = state.group.gather((missing, sorted(shapes)), "its part of the checkpoint")
    unexpected = sorted(keys - {*all_keys})
    all_missing = list(dict.fromkeys(name for names, _ in everybody for name in names))
    all_shapes = list(dict.fromkeys(text for _, texts in everybody for text in texts))
    problems = []
    if strict and all_missing:
        problems.append(f"it lacks {names_text(all_missing)}")
    if strict and unexpected:
        problems.append(f"it has {names_text(unexpected)}, which the model has not")
    if all_shapes:
        more = f" and {len(all_shapes) - 6} more" if len(all_shapes) > 6 else ""
        problems.append(f"shapes differ: {', '.join(all_shapes[:6])}{more}")
    if problems:
        raise ArgumentError(
            f"the checkpoint {os.fspath(path)!r} does not fit the model: {'; '.join(problems)}"
            f"{_key_hint(reader, prefix)}"
        )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(shape)


def _key_hint(reader: CheckpointReader, prefix: str) -> str:
    """Returns a hint if the keys do not match `prefix`, or the model is below the key "model"."""
    heads = sorted({name.partition(".")[0] for name in reader.keys})
    if prefix or "model" not in heads:
        return f". Its keys begin with {names_text(heads)}" if prefix else ""
    return ". It has keys below 'model': if that is the model's state, give key='model'"


def _read(state: PipelineState, reader: CheckpointReader, entries: dict[str, Any], prefix: str) -> None:
    names = {id(value): name for name, value in reversed(entries.items()) if isinstance(value, torch.Tensor)}
    tensors = [value for value in entries.values() if isinstance(value, torch.Tensor)]
    memory = GivenMemory(tensors, lambda tensor: state.device_of(names[id(tensor)]))
    try:
        first: dict[int, str] = {}
        others = [name for name, value in entries.items() if first.setdefault(id(value), name) != name]
        values = {
            prefix + name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
            if name not in others
        }
        reader.read(values)
        entries.update({n: values[prefix + n] for n in first.values() if not isinstance(entries[n], torch.Tensor)})
        for name in others:
            _check_tie(reader, entries[name], prefix + first[id(entries[name])], prefix + name)
    except BaseException:
        memory.take_back()
        raise


def _check_tie(reader: CheckpointReader, tensor: torch.Tensor, first: str, other: str) -> None:
    """Refuses a checkpoint that has two different values for a tied weight."""
    again = {other: torch.empty_like(tensor)}
    reader.read(again)
    if not torch.equal(again[other], tensor):
        raise ArgumentError(
            f"{first!r} and {other!r} are one tied weight of the model, but the checkpoint has different values for "
            "them: it is of a model whose weights are not tied"
        )


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
            f"        if isinstance(module, {type(_holder_of(state.model, missing[0])).__name__}):\n"
            f"            module.{missing[0].rpartition('.')[2]}.copy_(...)\n"
            f"    fxpipe.distributed.{after}(pipe, {'path, ' if after == 'load' else ''}init_fn=init_fn)"
        )


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
    wanted = {_holder_of(model, name) for name in names}
    tensors = [tensor for name, tensor in state.own_tensors().items() if name in names]
    with preserve_rng(), _initializing(tensors, model) as initialization:
        for number, module in enumerate(dict.fromkeys(_children_first(model))):
            if module in wanted:
                torch.default_generator.manual_seed(mix_seed(seed, number))
                initialization.run(module, init_fn)
    state.settle()


def _holder_of(model: nn.Module, name: str) -> nn.Module:
    """Returns the module that holds a tensor, also if it is in a list."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    path = name.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    return modules[path]


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
