"""`pipeline`, `plan` and `tune` take the same options, in one order, with the same defaults; limits of memory."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drawn_plans import drawn_plan

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.planning.options.parse import (
    parse_balance,
    parse_compile,
    parse_devices,
    parse_memory_limit,
    parse_pins,
    parse_switch,
    parse_training_schedule,
    worker_count_for,
)
from fxpipe.planning.options.pipeline_options import (
    OPTION_DEFAULTS,
    PLANNING_OPTIONS,
    PipelineOptions,
    check_replicas,
    is_default,
    make_settings,
)
from fxpipe.utils import accelerator

ONLY_TO_RUN = {"deferred_batch_norm", "compile"}
ONLY_TO_PLAN = {"data_parallel", "mesh", "processes"}  # a pipe has them from the mesh of its ranks
CHOSEN = {
    "schedule",
    "pin",
    "chunks",
    "checkpoint",
    "stages_per_device",
    "data_parallel",
    "mesh",
}  # by the tuner, or several of them to choose from
TAKEN = {
    fxpipe.pipeline: OPTION_DEFAULTS.keys() - ONLY_TO_PLAN,
    fxpipe.plan: OPTION_DEFAULTS.keys() - ONLY_TO_RUN,
    fxpipe.tune: OPTION_DEFAULTS.keys() - ONLY_TO_RUN - CHOSEN,
}


@pytest.fixture(params=TAKEN, ids=lambda function: function.__name__)
def function(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


def test_the_signatures_have_all_options_with_their_types_and_defaults(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    types = {name: PipelineOptions.__annotations__[name].__forward_arg__ for name in TAKEN[function]}
    types = {name: text.removeprefix("Annotated[").rpartition(",")[0] for name, text in types.items()}
    if function is fxpipe.tune:
        types["balance"] = "str"  # no cut by hand
    if function is fxpipe.pipeline:  # alone runs over processes
        types["devices"] = "int | Sequence[str | torch.device] | DeviceMesh | ProcessGroup | None"
    assert {name: parameters[name].annotation for name in types} == types
    assert {name: parameters[name].default for name in types} == {name: OPTION_DEFAULTS[name] for name in types}


def test_another_keyword_is_refused_as_python_does(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'chunk'$"):
        function(None, chunk=4)


def test_each_argument_is_described(function: Callable[..., Any]) -> None:
    told = inspect.getdoc(function).partition("Args:")[2].partition("Raises:")[0]  # type: ignore[union-attr]
    heads = re.findall(r"^    (\w[\w, \n]*?):(?:\s)", told, flags=re.MULTILINE)
    described = {name for head in heads for name in re.split(r"[,\s]+", head)}
    assert described == {*inspect.signature(function).parameters}


@pytest.mark.parametrize("name", PLANNING_OPTIONS)
def test_what_is_for_planning_is_refused_beside_a_plan(name: str) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.ones(4, 2)
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, hardware="cpu")
    given = {"balance": [1, 1], "pin": {"0": 0}, "optimizer_state": 1.0, "hardware": "cpu"}.get(name, 1)
    with pytest.raises(fxpipe.errors.ArgumentError, match=f"^{name}=.* and a plan, which is made already"):
        fxpipe.pipeline(model, plan=plan, **{name: given})


def test_what_is_left_out_is_never_compared_with_a_tensor() -> None:
    two = torch.ones(2)
    assert not is_default(two, None)
    assert is_default(two, two)
    assert is_default([], ())
    assert is_default({}, None)
    assert not is_default([], "auto")
    assert is_default(2, 2.0)
    assert not is_default(1, None)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream_2bw"])
def test_a_plan_brings_its_number_of_micro_batches_to_every_schedule(schedule: str) -> None:
    x = torch.ones(8, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plan = fxpipe.plan(model, 2, chunks=4, schedule=schedule, example_args=(x,), progress=False)
    for asked, chunks in (("auto", 4), (2, 2)):
        with fxpipe.pipeline(model, ["cpu"] * 2, asked, plan=plan, schedule=schedule, progress=False) as pipe:
            pipe.eval()(x)
            assert pipe.plan.chunks == chunks


def test_a_number_of_devices_takes_the_first_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    present = tuple(torch.device("cuda", index) for index in range(3))
    monkeypatch.setattr(accelerator, "local_devices", lambda: present)
    assert parse_devices(2) == present[:2]
    assert parse_devices(None) == present
    with pytest.raises(ArgumentError, match=r"devices=4: CUDA has 3 here.*\['cpu', 'cpu'\].*hardware"):
        parse_devices(4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("70GiB", 70 * 2**30),
        ("80GB", 80 * 10**9),
        ("512 mib", 512 * 2**20),
        ("1.5kB", 1500),
        ("100B", 100),
        ("4096", 4096),
        (12345, 12345),
        (2e9, 2 * 10**9),
    ],
)
def test_one_limit_for_all(given: Any, expected: int) -> None:
    assert parse_memory_limit(given, 3) == (expected,) * 3


def test_a_limit_for_each_device() -> None:
    assert parse_memory_limit(["1KiB", None, 7], 3) == (1024, None, 7)
    assert parse_memory_limit(None, 3) is None


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("much", ArgumentError, "memory_limit='much' is no number of bytes; expected '70GiB'"),
        ("GiB", ArgumentError, "memory_limit='GiB' is no number of bytes"),
        ("-1GiB", ArgumentError, "memory_limit='-1GiB' is no number of bytes"),
        ("0GiB", ArgumentError, "memory_limit='0GiB': expected at least 1 byte"),
        (0, ArgumentError, "memory_limit=0: expected at least 1 byte"),
        (float("nan"), ArgumentError, "memory_limit=nan: expected at least 1 byte"),
        ("0.4", ArgumentError, "memory_limit='0.4': expected at least 1 byte: '70GiB'"),
        (0.4, ArgumentError, "memory_limit=0.4: expected at least 1 byte"),
        (float("inf"), ArgumentError, "memory_limit=inf: expected at least 1 byte"),
        (True, ArgumentTypeError, "memory_limit=True is a bool; expected '70GiB'"),
        ({}, ArgumentTypeError, "memory_limit={} is a dict"),
        (["1GiB"], ArgumentError, r"memory_limit=\['1GiB'\] has 1 entries for 2 devices: give one for each"),
        (["1GiB", "x"], ArgumentError, "memory_limit='x' is no number of bytes"),
    ],
)
def test_what_is_no_limit_is_refused(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parse_memory_limit(given, 2)


TWO = (torch.device("cpu"), torch.device("cpu"))
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "switch": (lambda: parse_switch("check", 1), "check=1: expected True or False"),
    "names": (lambda: parse_balance(["a", "b"], 2), "has 2 names for 2 stages: give 1 or fewer"),
    "counts": (lambda: parse_balance([1, 2], 3), "has 2 entries for 3 stages: give 3 numbers of nodes"),
    "a number below": (lambda: parse_pins("pin", {"a": -1}, TWO), "there are 2 devices"),
    "a number above": (lambda: parse_pins("pin", {"a": 2}, TWO), "there are 2 devices"),
    "a name": (lambda: parse_pins("pin", {"a": "cpu"}, TWO), "stands 2 times in devices"),
    "graphs": (lambda: parse_compile({"options": {"triton.cudagraphs": True}}), "runs CUDA graphs"),
    "modes": (lambda: parse_compile({"mode": "max-autotune"}), "runs CUDA graphs"),
    "a mode of graphs": (lambda: parse_compile({"mode": "reduce-overhead"}), "runs CUDA graphs"),
    "replicas": (lambda: make_settings({"devices": ["cpu"] * 4, "data_parallel": 3}), "cannot be shared out evenly"),
    "stages": (lambda: worker_count_for(5, "interleaved_1f1b", 2), "cannot be shared out with stages_per_device=2"),
    "stages of a V": (lambda: worker_count_for(3, "zbv", None), "with stages_per_device=2, as 'zbv' has it"),
    "a plan's devices": (
        lambda: make_settings({"devices": ["cpu"] * 3}, drawn_plan(2)),
        "devices has 3 entries; give 2",
    ),
    "a table's stages": (
        lambda: make_settings({"devices": ["cpu"], "schedule": "0F0 0B0", "stages_per_device": 2}),
        "has 1 stages, but with stages_per_device=2 there are 2",
    ),
    "no backward": (lambda: parse_training_schedule("0F0 0F1"), "has no B, and so trains nothing"),
    "in turn": (lambda: check_replicas(in_turn(2), 2), "replicas that take micro-batches in turn"),
    "as often": (lambda: check_replicas(replace(in_turn(2), replica_devices=()), 2), "has each stage once"),
}


def in_turn(count: int) -> fxpipe.Plan:
    return replace(drawn_plan(2), balance="pipedream", replica_devices=(("cpu",) * count,) * 2)


@pytest.mark.parametrize("name", WRONG)
def test_what_an_option_cannot_be_is_said(name: str) -> None:
    parse, words = WRONG[name]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        parse()


def test_a_plan_brings_what_is_left_out() -> None:
    plan = replace(drawn_plan(2), checkpoint="always", chunks=5)
    settings = make_settings({"devices": ["cpu", "cpu"]}, plan)
    assert (settings.checkpoint, settings.chunks) == ("always", 5)
    settings = make_settings({"devices": ["cpu", "cpu"], "checkpoint": "never", "chunks": 3}, plan)
    assert (settings.checkpoint, settings.chunks) == ("never", 3)


def test_a_pin_goes_before_the_map_of_modules() -> None:
    options = {"devices": ["cpu", "cpu"], "pin": {"a": 0}, "balance": {"a": 1, "b": 1}}
    assert make_settings(options).pins == {"a": 0, "b": 1}


def test_stages_of_pipedream_have_a_device_each() -> None:
    left = make_settings({"devices": ["cpu", "cpu"], "schedule": "auto"}).left
    assert left == {"schedule", "chunks", "stages_per_device"}
    assert make_settings({"devices": ["cpu", "cpu"], "schedule": "auto", "balance": "pipedream"}).left == left - {
        "stages_per_device"
    }
