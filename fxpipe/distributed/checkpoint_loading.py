"""`fxpipe.distributed.load`: each process reads its part of a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from fxpipe._torch.module_internals import with_metadata
from fxpipe.distributed.held_tensors import GivenMemory
from fxpipe.distributed.initialization import InitFunction, check_init_fn, initialize_missing, refuse_missing_values
from fxpipe.distributed.pipeline import DistributedPipeline, distributed_state
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.planning.options.parse import parse_switch
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
        entries.update({name: values[prefix + name] for name in first.values() if not _is_tensor(entries[name])})
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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
