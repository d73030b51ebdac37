"""The first values of a pipe: `fxpipe.distributed.load` reads a checkpoint, `initialize` draws random numbers.

Each process reads its part of a checkpoint. To draw the random numbers of the plain model, every rank initializes all
modules in the plain order; modules of other ranks get scratch memory, one module (and its children) at a time. A tensor
that no function has written to has no values afterwards: uninitialized memory is never kept.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from fxpipe._torch.modes import TorchDispatchMode
from fxpipe._torch.module_internals import reset_method_of, tensor_stores, with_metadata
from fxpipe._torch.operators import schema_of
from fxpipe._torch.tensor_data import replace_data
from fxpipe.distributed.held_tensors import GivenMemory
from fxpipe.distributed.pipeline import DistributedPipeline, distributed_state
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.planning.options.parse import parse_switch
from fxpipe.tracing.model_state import preserve_rng, python_rng_state, set_python_rng_state
from fxpipe.tracing.tensors import has_values, storage_of, tensors_in
from fxpipe.utils.accelerator import mix_seed, peek_seed
from fxpipe.utils.units import names_text, with_article

INDEX_SUFFIX = ".safetensors.index.json"
DCP_METADATA = ".metadata"  # a file in every folder of torch.distributed.checkpoint


class Checkpoint:
    """A checkpoint on disk, which readers of `torch.distributed.checkpoint` read."""

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}
        self._readers: dict[str, FileSystemReader] = {}  # by key
        self.keys = self._items.keys()

    def add(self, reader: FileSystemReader, keys: Collection[str] | None = None) -> Checkpoint:
        """Adds what a reader has, or only these keys of it."""
        items = reader.read_metadata().state_dict_metadata
        chosen = {key: item for key, item in items.items() if keys is None or key in keys}
        self._items.update(chosen)
        self._readers.update(dict.fromkeys(chosen, reader))
        return self

    def shape_of(self, key: str) -> str:
        """Returns the shape of a tensor as text, or "no tensor"."""
        item = self._items[key]
        return str(tuple(item.size)) if isinstance(item, TensorStorageMetadata) else "no tensor"

    def read(self, values: dict[str, Any]) -> None:
        """Fills tensors in place, and replaces other values, by key; reads no other entries."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: each rank reads alone
            for reader in dict.fromkeys(self._readers[key] for key in values):
                part = {key: value for key, value in values.items() if self._readers[key] is reader}
                load_in_place(part, storage_reader=reader, no_dist=True)
                values.update(part)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a folder or a file. Raises `ArgumentError` if it is not a known kind of checkpoint."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path is {with_article(path)}; expected the path of a checkpoint")
    place = Path(path)
    if not place.exists():
        raise ArgumentError(f"there is no checkpoint {str(place)!r}")
    if (place / DCP_METADATA).is_file():
        return Checkpoint().add(FileSystemReader(place))
    files = [place]
    if place.is_dir():
        files = sorted(place.glob(f"*{INDEX_SUFFIX}")) or sorted(place.glob("*.safetensors"))
    if len(files) > 1:
        names = ", ".join(one.name for one in files[:6])
        raise ArgumentError(f"{str(place)!r} has several checkpoints, {names}: give the path of one")
    if files and files[0].name.endswith((INDEX_SUFFIX, ".safetensors")):
        return _open_safetensors(files[0])
    raise ArgumentError(
        f"{str(place)!r} is no checkpoint of a known kind: expected a folder as torch.distributed.checkpoint.save "
        f"writes it, a .safetensors file, a {INDEX_SUFFIX} file, or a folder with one of these"
    )


def _open_safetensors(path: Path) -> Checkpoint:
    """Opens a file, or the files that an index lists, as Hugging Face ships large models."""
    files: dict[Path, set[str] | None] = {path: None}  # with their keys; None: all
    if path.name.endswith(INDEX_SUFFIX):
        try:
            pairs = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
            files = {path.parent / file: {key for key, its in pairs if its == file} for _, file in pairs}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{str(path)!r} is no index of safetensors, with a weight_map: {error!r}") from error
        if missing := [str(file) for file in files if not file.is_file()]:
            raise ArgumentError(f"{str(path)!r} names files that are not there: {', '.join(missing[:6])}")
    if importlib.util.find_spec("safetensors") is None:
        raise StateError(
            f"to read {str(path)!r} the package safetensors is needed, which is not installed: pip install safetensors"
        )
    checkpoint = Checkpoint()
    for file, keys in files.items():
        reader = HuggingFaceStorageReader(str(path.parent))
        reader.fs.ls = lambda path, file=file: [str(file)]  # type: ignore[method-assign,misc]  # not all of the folder
        try:
            checkpoint.add(reader, keys)
        except Exception as error:
            raise ArgumentError(f"{str(file)!r} is no file of safetensors: {error}") from error
    return checkpoint


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
    is_alone = isinstance(pipe, Pipeline) and not isinstance(pipe, DistributedPipeline)
    state: PipelineState = pipe._fxpipe if is_alone else distributed_state(pipe)
    parse_switch("strict", strict)
    check_init_fn(init_fn)
    with state.engine.running(), state.group.together():
        reader, prefix = open_checkpoint(path), f"{key}." if key else ""
        entries = pipe.state_dict(keep_vars=True)
        _check_fit(state, reader, entries, state.model.state_dict().keys(), prefix, path, strict)
        persistent, own = {id(value) for value in entries.values()}, state.own_tensors()
        names = [name for name in state.own_without_values() if id(own.get(name)) not in persistent]
        wanted = {_holder_of(state.model, name) for name in names}
        # Random numbers depend on the module, not on the rank.
        seed = state.group.broadcast(peek_seed(), "the seed of its random numbers")
        with preserve_rng(), _initializing([own[name] for name in names if name in own]) as initialization:
            for number, module in enumerate(dict.fromkeys(_children_first(state.model))):
                if module in wanted:
                    torch.default_generator.manual_seed(mix_seed(seed, number))
                    initialization.run(module, init_fn)
        state.settle()
        covered = {name: value for name, value in entries.items() if prefix + name in reader.keys}
        entries = with_metadata(covered, entries)
        _read(state, reader, entries, prefix)
        pipe.load_state_dict(entries, strict=False)  # for hooks and extra state; the tensors already have their values
        refuse_missing_values(state, "load", "they are not in the checkpoint")


def _check_fit(
    state: PipelineState,
    reader: Checkpoint,
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
        value = entries[name]
        own = str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "no tensor"
        if (shape := reader.shape_of(prefix + name)) != own:
            shapes.append(f"{name!r} ({shape}, in the model {own})")
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
        heads, hint = sorted({name.partition(".")[0] for name in reader.keys}), ""
        if prefix:
            hint = f". Its keys begin with {names_text(heads)}"
        elif "model" in heads:
            hint = ". It has keys below 'model': if that is the model's state, give key='model'"
        raise ArgumentError(f"the checkpoint {os.fspath(path)!r} does not fit the model: {'; '.join(problems)}{hint}")


def _read(state: PipelineState, reader: Checkpoint, entries: dict[str, Any], prefix: str) -> None:
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    first = {id(value): name for name, value in reversed(tensors.items())}  # the first name of a tied weight
    memory = GivenMemory(tensors.values(), lambda tensor: state.device_of(first[id(tensor)]))
    try:
        values = {prefix + name: value for name, value in entries.items() if first.get(id(value), name) == name}
        values = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        reader.read(values)
        entries.update({name: values[prefix + name] for name in entries.keys() - tensors.keys()})
        for name, tensor in tensors.items():
            if (other := first[id(tensor)]) == name:
                continue
            again = {prefix + name: torch.empty_like(tensor)}
            reader.read(again)
            if not torch.equal(again[prefix + name], tensor):
                raise ArgumentError(
                    f"{prefix + other!r} and {prefix + name!r} are one tied weight of the model, but the checkpoint "
                    "has different values for them: it is of a model whose weights are not tied"
                )
    except BaseException:
        memory.take_back()
        raise


InitFunction = Callable[[nn.Module], object]
CPU = torch.device("cpu")


def initialize(pipe: Pipeline, init_fn: InitFunction | None = None) -> None:
    """Initializes a pipe over processes whose model was built on the meta device. All ranks call it.

        torch.manual_seed(0)
        fxpipe.distributed.initialize(pipe)  # a pipe as for `load`
        optimizer = torch.optim.AdamW(pipe.parameters())

    It replaces `model.to_empty(...)` and `model.apply(init_fn)`, but allocates only the parameters and buffers of this
    rank's stages, on its device. They stay the same objects.

    Random numbers are drawn on the CPU, from the generators of rank 0: the weights equal those of
    `torch.manual_seed(0); model = Model()`, bit for bit, if the layers initialize themselves in their constructors, and
    are created in their order in the model. A tied weight has the values of the last module that holds it. If the
    constructor of the model initializes again (`self.apply(self._init_weights)`), call `initialize(pipe)`, and then
    `initialize(pipe, model._init_weights)`.

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
    with state.engine.running(), state.group.together() as connection:
        generators = torch.get_rng_state(), python_rng_state()
        numbers, python_states = state.group.broadcast(generators, "the state of its random generators")
        torch.set_rng_state(numbers)
        set_python_rng_state(python_states)
        modules = _children_first(state.model)
        if init_fn is None:  # the plain model constructs each module once
            modules = list(dict.fromkeys(modules))
        with _initializing(state.own_tensors().values()) as initialization:
            for module in modules:
                initialization.run(module, init_fn)
            everybody = connection.all_gather(initialization.digest, "the end of the initialization", is_long=True)
            if len({*everybody}) > 1:
                raise StateError(
                    "the ranks have drawn different random numbers in the initialization: init_fn must do the same on "
                    "all of them, also for the modules of other ranks, and may use no tensors that are not below the "
                    "module"
                )
        state.settle()
        why = "no module has a reset_parameters that writes to them" if init_fn is None else "init_fn writes to none"
        refuse_missing_values(state, "initialize", why)


def check_init_fn(init_fn: object) -> None:
    if not (init_fn is None or callable(init_fn)):
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


def _holder_of(model: nn.Module, name: str) -> nn.Module:
    """Returns the module that holds a tensor, also if it is in a list."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    path = name.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    return modules[path]


def _children_first(model: nn.Module) -> list[nn.Module]:
    modules: list[nn.Module] = []
    nn.Module.apply(model, modules.append)
    return modules


@contextlib.contextmanager
def _initializing(tensors: Iterable[torch.Tensor]) -> Iterator[_Initialization]:
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
        stores = [store for below in module.modules() for store in tensor_stores(below)]
        items = ((store, key, value) for store in stores for key, value in store.items())
        places = [place for place in items if isinstance(place[2], torch.Tensor)]
        scratch: dict[int, torch.Tensor] = {}  # takes no physical memory until it is written to
        for store, key, tensor in places:
            if id(tensor) not in self._targets and id(tensor) not in scratch:
                memory = torch.empty_like(tensor.detach(), device=CPU)
                is_parameter = isinstance(tensor, nn.Parameter)
                scratch[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
            store[key] = scratch.get(id(tensor), tensor)
        values = {}
        try:
            yield
        finally:
            for store, key, tensor in places:
                if id(tensor) in self._targets and store.get(key) is not tensor:
                    values[id(tensor)] = tensor, store.get(key), key
                store[key] = tensor
        for tensor, value, key in values.values():  # of tensors that have replaced others
            if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise ArgumentError(
                    f"the initialization sets {key!r} of {with_article(module)}, which was planned as {tensor.dtype} "
                    f"{tuple(tensor.shape)}, to {what}"
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
