"""What is no checkpoint, cannot be read, or lacks what one rank needs is an error that says what is accepted."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from fxpipe.distributed.initialization import _check_fit, open_checkpoint
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for path in (tmp_path / "notes.txt", tmp_path):
        with pytest.raises(ArgumentError, match=r"is no checkpoint of a known kind: expected .*safetensors file"):
            open_checkpoint(path)
    with pytest.raises(ArgumentError, match=r"there is no checkpoint '.*gone'"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(ArgumentTypeError, match="path is an int"):
        open_checkpoint(3)
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    with pytest.raises(ArgumentError, match="is no file of safetensors"):
        open_checkpoint(tmp_path / "bad.safetensors")


def test_an_index_that_cannot_be_followed_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ArgumentError, match="is no index of safetensors"):
            open_checkpoint(index)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ArgumentError, match=r"names files that are not there: .*model-00001-of-00002\.safetensors"):
        open_checkpoint(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    assert not open_checkpoint(tmp_path).keys  # `a` is then missing


def test_a_key_is_read_from_the_file_that_the_index_names(tmp_path):
    save_file({"a": torch.ones(2), "more": torch.ones(1)}, tmp_path / "m-1.safetensors")
    save_file({"b": torch.full((1,), 3.0), "a": torch.zeros(2)}, tmp_path / "m-2.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    reader, values = open_checkpoint(tmp_path), {"a": torch.empty(2), "b": torch.empty(1)}
    reader.read(values)
    assert {*reader.keys} == {"a", "b"}
    assert (values["a"].tolist(), values["b"].tolist()) == ([1.0, 1.0], [3.0])


def test_several_checkpoints_in_a_folder_are_not_chosen_from(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(ArgumentError, match=r"has several checkpoints, a\.safetensors, b\.safetensors"):
        open_checkpoint(tmp_path)


def test_without_the_package_the_error_names_it(tmp_path, monkeypatch):
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "safetensors" else find_spec(name, *more)
    )
    with pytest.raises(StateError, match="the package safetensors is needed, which is not installed: pip install"):
        open_checkpoint(tmp_path / "a.safetensors")


class Reader:
    keys = frozenset({"first.weight"})

    def shape_of(self, key):
        return "(2, 3)"


class State:
    """As of the first of two ranks; the second one has told `other`."""

    def __init__(self, other):
        self.other, self.group = other, self

    def gather(self, value, what):
        return [value, self.other]


def check(other, strict=True):
    entries, keys = {"first.weight": torch.zeros(2, 3)}, ["first.weight", "last.weight"]
    _check_fit(State(other), Reader(), entries, keys, "", "saved", strict)


def test_what_another_rank_misses_is_told_here():
    check(((), ()))
    with pytest.raises(ArgumentError, match=r"'saved' does not fit the model: it lacks .*last\.weight"):
        check((("last.weight",), ()))
    check((("last.weight",), ()), strict=False)


def test_a_shape_that_another_rank_has_is_told_here():
    with pytest.raises(ArgumentError, match=r"shapes differ: 'last\.weight' \(\[4\]"):
        check(((), ("'last.weight' ([4], in the model [5])",)), strict=False)
