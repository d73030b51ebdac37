"""Readers of single tensors from checkpoints on disk: `torch.distributed.checkpoint` and safetensors."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.utils.units import with_article

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
