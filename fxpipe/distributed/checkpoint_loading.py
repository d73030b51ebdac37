"""`fxpipe.distributed.load`: each process reads its part of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fxpipe._torch.module_internals import with_metadata
from fxpipe.distributed.checkpoint_readers import CheckpointReader, open_checkpoint
from fxpipe.distributed.initialization import InitFunction, check_init_fn, initialize_missing, refuse_missing_values
from fxpipe.distributed.materialization import GivenMemory
from fxpipe.distributed.pipeline import DistributedPipeline, distributed_state
from fxpipe.errors import ArgumentError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.planning.options.parse import parse_switch
from fxpipe.utils.units import names_text


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
