"""Profiles as files, given to planning: what is saved is what is loaded; damaged or foreign ones are refused."""

import contextlib
import errno
import json
import os
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from helpers.plan_models import CHUNKS, Deep, deep_profile, planned, rows
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, FileError
from fxpipe.hardware import HARDWARE
from fxpipe.profiling.profile_data import NodeCost, Profile, SavedStorage, Seconds, profile_for
from fxpipe.utils.polynomial import Polynomial

b = sympy.Symbol("b", integer=True, positive=True)

seconds = st.builds(Seconds, st.floats(0, 1e6), st.floats(0, 1e6))
sizes = st.lists(st.integers(0, 10**15), max_size=3).map(lambda found: Polynomial.in_b(*found).formula)
names = st.text(max_size=10)


@st.composite
def profiles(draw):
    count = draw(st.integers(0, 4))
    nodes = tuple(
        draw(st.builds(NodeCost, names, seconds, seconds, sizes, sizes, seconds, sizes, sizes, sizes))
        for _ in range(count)
    )
    places = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))
    saved = (
        draw(st.lists(st.builds(SavedStorage, sizes, st.integers(-1, count - 1), places), max_size=3)) if count else ()
    )
    return Profile(nodes, draw(st.integers(1, 2**40)), b, draw(names), draw(names), tuple(saved), draw(names))


@given(profiles())
@example(Profile((NodeCost("\ud800", Seconds(), Seconds(), b, b),), 1, b, "cpu"))  # half a character
def test_a_profile_is_what_was_saved(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(self.first(x)[::2].repeat_interleave(2, 0).relu())


X = torch.ones(8, 8)


def _profiled(model=None):
    traced = fxpipe.trace(Model() if model is None else model, (X,))
    return traced, fxpipe.profile(traced, (X,), hardware="cpu")


def test_a_stale_profile_is_refused_and_how_to_make_a_new_one_is_said(tmp_path):
    _, profile = _profiled()
    profile.save(tmp_path / "p.json")

    class Longer(Model):
        def forward(self, x):
            return super().forward(x) * 2

    traced = fxpipe.trace(Longer(), (X,))
    message = r"made for another graph \(fingerprint {}, here {}\).*fxpipe.profile\(traced, args\).save\(path\)"
    for given_one in (profile, tmp_path / "p.json"):
        with pytest.raises(ArgumentError, match=message.format(profile.fingerprint, traced.fingerprint())):
            profile_for(traced, given_one)
    with pytest.raises(ArgumentError, match=r"p\.json"):
        profile_for(traced, tmp_path / "p.json")
    with pytest.raises(ArgumentTypeError, match="profile is an int"):
        profile_for(traced, 3)


def test_a_profile_with_other_nodes_is_refused(tmp_path):
    traced, profile = _profiled()
    document = _document(profile, tmp_path)
    document["nodes"][-1]["name"] = "other"
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match="does not have the nodes"):
        profile_for(traced, tmp_path / "p.json")


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path, profile = tmp_path / "profile.json", Profile((), 1, b, "cpu")
    profile.save(path)
    before = path.read_bytes()
    with pytest.raises(FileError, match=r"a profile cannot be saved to .*No such file or directory"):
        profile.save(tmp_path / "nowhere" / "profile.json")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match="No space left on device"):
        profile.save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Profile.load(tmp_path / "none.json")


def _document(profile, tmp_path):
    profile.save(tmp_path / "good.json")
    return json.loads((tmp_path / "good.json").read_text())


def _refused(tmp_path, content, words="is no profile of fxpipe, or is damaged"):
    path = tmp_path / "p.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArgumentError, match=words):
        Profile.load(path)


OTHERS = ["", "{", "[]", b"\xff\xfe\x00", "[" * 100_000, "1" * 10_000, "NaN", '{"format": "fxpipe profile"}']


@pytest.mark.parametrize("content", OTHERS, ids=lambda content: str(content[:20]))
def test_files_of_another_kind_are_refused(tmp_path, content):
    _refused(tmp_path, content)


SECONDS = {"fixed": 1.0, "per_sample": 2.0, "growing": []}
CHANGES = [
    (("version",), 1, "version 1, and this fxpipe reads version 9: profile again"),
    (("micro_batch",), 0, "its micro_batch cannot be"),
    (("micro_batch",), 1.0, r"micro_batch is 1.0: expected int"),
    (("device",), None, "device is None: expected str"),
    (("sizes",), [["b", 3]], "its sizes cannot be"),
    (("nodes",), {}, "nodes is a dict: expected a list"),
    (("nodes", 0), [], r"nodes\[0\] is a list: expected an object"),
    (("nodes", 0, "more"), 1, "has the unknown field 'more'"),
    (("nodes", 0, "forward"), SECONDS | {"per_sample": -1e-9}, "its seconds cannot be"),
    (("nodes", 0, "forward"), SECONDS | {"per_sample": float("nan")}, "expected a finite number"),
    (("nodes", 0, "forward"), SECONDS | {"fixed": True}, "is True: expected float"),
    (("nodes", 0, "forward"), SECONDS | {"fixed": 10**400}, "too large"),
    (("nodes", 0, "forward"), SECONDS | {"growing": [[2, {"t": 1}]]}, "unknown size 't'"),
    (("nodes", 0, "forward"), "11", "expected an object"),
    (("nodes", 0, "flops"), [-1], "the formula -1 is less than 0"),
    (("nodes", 0, "flops"), [-100, 1], "less than 0"),
    (("nodes", 0, "flops"), ["b**2"], "expected a coefficient"),
    (("nodes", 0, "flops"), [0] * 100, "list of at most"),
    (("saved", 0), {"bytes": [1], "maker": -1}, r"saved\[0\] has no field 'savers'"),
    (("saved", 0, "maker"), -2, "its saved cannot be"),
    (("saved", 0, "savers"), [], "its saved cannot be"),
    (("saved", 0, "savers"), [1, 1], "its saved cannot be"),
    (("saved", 0, "savers"), [[[0]]], r"savers\[0\] is a list: expected int"),
]


@pytest.mark.parametrize(("where", "value", "words"), CHANGES, ids=lambda x: str(x)[:40])
def test_damage_is_refused_and_the_place_named(tmp_path, where, value, words):
    costs = tuple(NodeCost(f"n{i}", Seconds(1.0, 2.0), Seconds(), 4 * b, b + 1) for i in range(3))
    document = _document(Profile(costs, 4, b, "cpu", saved=(SavedStorage(8 * b, 0, (1, 2)),)), tmp_path)
    *path, key = where
    inside = document
    for step in path:
        inside = inside[step]
    inside[key] = value
    _refused(tmp_path, json.dumps(document), words)


@given(st.data())
def test_a_file_with_damaged_bytes_is_a_profile_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "p.json"
    costs = tuple(NodeCost(f"n{i}", Seconds(1.0, 2e-5), Seconds(), 4 * b, b / 2) for i in range(2))
    Profile(costs, 4, b, "cpu", saved=(SavedStorage(8 * b, 0, (1,)),)).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(ArgumentError):
        loaded = Profile.load(path)
        loaded.save(path)
        assert Profile.load(path) == loaded


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    deep_profile()  # made once for all tests: if not yet, now

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a node is run to be measured")

    for name in ("measure", "count_flops_and_bytes"):
        monkeypatch.setattr(f"fxpipe.profiling.{name}", refuse)


def profile_of(model: nn.Module, x: torch.Tensor, **options: Any) -> Profile:
    return fxpipe.profile(fxpipe.trace(model, (x,), chunks=CHUNKS), (x,), micro_batch=2, **options)


def test_a_profile_made_before_is_used_and_nothing_is_run(request: pytest.FixtureRequest, tmp_path: Any) -> None:
    model, x = Deep(), rows()
    profile = profile_of(model, x, budget=0.05)
    profile.save(tmp_path / "profile.json")
    request.getfixturevalue("nothing_is_measured")
    of_file = [tmp_path / "profile.json", str(tmp_path / "profile.json"), Profile.load(tmp_path / "profile.json")]
    for passed in (profile, *of_file):
        plan = fxpipe.plan(model, 3, example_args=(x,), chunks=CHUNKS, profile=passed)
        costs = {cost.name: cost for cost in profile.nodes}
        for stage in plan.stages:
            assert stage.forward_seconds == pytest.approx(sum(costs[name].forward.at(2) for name in stage.nodes))
            assert stage.backward_seconds == pytest.approx(sum(costs[name].backward.at(2) for name in stage.nodes))
        assert plan.estimated_for == ""
    with fxpipe.pipeline(model, ["cpu"] * 3, CHUNKS, example_args=(x,), profile=profile) as pipe:
        assert [stage.nodes for stage in pipe.plan.stages] == [stage.nodes for stage in plan.stages]


def test_one_profile_serves_every_number_of_chunks(nothing_is_measured: None) -> None:
    fixed, grows = Seconds(3e-3, 0.0), Seconds(0.0, 1e-3)
    profile = deep_profile()
    half = len(profile.nodes) // 2
    nodes = [
        replace(cost, forward=fixed if k < half else grows, backward=Seconds()) for k, cost in enumerate(profile.nodes)
    ]
    profile = replace(profile, nodes=tuple(nodes))
    for chunks, micro_batch in ((1, 8), (2, 4), (8, 1)):
        plan = planned(2, chunks=chunks, profile=profile)
        assert plan.micro_batch == micro_batch
        total = sum(stage.forward_seconds for stage in plan.stages)
        assert total == pytest.approx(half * (3e-3 + micro_batch * 1e-3))
        # With more samples the part that grows is the larger one, and the cut moves into it.
        assert (len(plan.stages[0].nodes) > half) == (micro_batch > 3)


def test_a_profile_of_hardware_says_so_in_the_plan() -> None:
    assert planned().estimated_for == HARDWARE["cpu"].name
