"""Cuts by hand through the whole pipe: names, maps of modules, pins and marks; what is left free is balanced."""

import copy
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.oracle import closing
from helpers.plan_models import assert_trains_like
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, PartitionError
from fxpipe.planning.choose import choose_cut
from fxpipe.planning.options.pipeline_options import PipelineOptions, make_settings

BATCH, CHUNKS = 6, 3


class Tied(nn.Module):
    """Six blocks between an embedding and a head that has its weight; `cuts`: blocks before which forward marks one."""

    def __init__(self, cuts: tuple[int, ...] = ()):
        super().__init__()
        self.cuts = cuts
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for k, block in enumerate(self.blocks):
            if k in self.cuts:
                fxpipe.cut()
            x = x + block(x)
        out: torch.Tensor = self.lm_head(self.norm(x))
        return out


def pipe_of(model: nn.Module, devices: int = 3, **options: Any) -> Any:
    ids = torch.randint(11, (BATCH, 5))
    return closing(fxpipe.pipeline(model, ["cpu"] * devices, CHUNKS, example_args=(ids,), **options))


def device_of(pipe: Any, module: str) -> set[int]:
    """The numbers of the devices that have nodes of a module."""
    start = module.replace(".", "_")
    return {
        pipe.plan.placement[stage.index]
        for stage in pipe.plan.stages
        if any(name == start or name.startswith(f"{start}_") for name in stage.nodes)
    }


def assert_trains(plain: nn.Module, pipe: Any) -> None:
    """As the plain model; the tied weight within a tolerance, as its gradient is summed stage by stage."""
    assert_trains_like(plain, pipe, lambda: (torch.randint(11, (BATCH, 5)),), chunks=CHUNKS, loose=["tokens.weight"])


@pytest.mark.parametrize(
    ("names", "last"),
    [
        (["blocks.1", "blocks.3"], {"blocks_1_1", "blocks_3_1"}),
        (["blocks_1_0"], {"blocks_1_0"}),  # a node; the other cut is free
        (["tokens"], {"tokens"}),
    ],
)
def test_stages_end_behind_the_names(names: list[str], last: set[str]) -> None:
    plain = Tied()
    with pipe_of(copy.deepcopy(plain), balance=names) as pipe:
        assert last <= {stage.nodes[-1] for stage in pipe.plan.stages}
        assert pipe.plan.balance == "by hand"
        assert_trains(plain, pipe)


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ({"balance": {"tokens": 0, "blocks.2": 1, "lm_head": 2}}, (0, 1, 2)),
        ({"balance": {"": 1, "tokens": 0, "lm_head": 0}}, (0, 1, 0)),  # all modules: no device but theirs
        ({"pin": {"tokens": 0, "lm_head": 0}}, (0, 1, 2, 0)),  # the tied weight on one device
        ({"pin": {"blocks.0": 1}}, (0, 1, 2)),
        ({"pin": {"tokens": 2}}, (2, 0, 1)),
        ({"pin": {"lm_head": 1}, "stages_per_device": 2}, (0, 1, 2, 0, 1, 2, 1)),
    ],
)
def test_modules_go_where_they_are_pinned(options: Any, placement: tuple[int, ...]) -> None:
    plain = Tied()
    with pipe_of(copy.deepcopy(plain), **options) as pipe:
        assert pipe.plan.placement == placement
        pins = options.get("pin") or options["balance"]
        for module, device in pins.items():
            assert not module or device_of(pipe, module) == {device}
        assert_trains(plain, pipe)


@pytest.mark.parametrize(("cuts", "devices"), [((2, 4), 3), ((3,), 3), ((1,), 2)])
def test_marks_in_forward_end_stages(cuts: tuple[int, ...], devices: int) -> None:
    plain = Tied(cuts)
    with pipe_of(copy.deepcopy(plain), devices) as pipe:
        firsts = {stage.nodes[0] for stage in pipe.plan.stages}
        assert {f"blocks_{k}_0" for k in cuts} <= firsts
        assert_trains(plain, pipe)


def test_marks_and_names_go_together() -> None:
    with pipe_of(Tied((2,)), balance=["blocks.3"]) as pipe:
        assert [stage.nodes[0] for stage in pipe.plan.stages][1:] == ["blocks_2_0", "add_3"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"pin": {"head": 0}}, PartitionError, "no node or module is named 'head'"),
        ({"pin": {"lm_head": 0.5}}, ArgumentTypeError, r"pin\['lm_head'\]=0.5 is a float"),
        ({"pin": ["lm_head"]}, ArgumentTypeError, "expected a dict from names of modules or nodes to devices"),
        ({"pin": {"lm_head": 0}, "balance": ["tokens"]}, ArgumentError, "or pin; give one of them"),
        ({"pin": {"lm_head": 0}, "checkpoint": ("always",) * 3}, ArgumentError, "has 3 modes, but with these pins"),
        ({"pin": {"lm_head": 0}, "balance": "block"}, PartitionError, "balance='block' cannot heed pins"),
    ],
)
def test_what_cannot_be_asked_for(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says), pipe_of(Tied(), **options):
        pass


def test_a_checkpoint_mode_for_each_stage_that_pins_make() -> None:
    modes = ("always", "never", "never", "except_last")
    with pipe_of(Tied(), pin={"lm_head": 0}, checkpoint=modes) as pipe:
        assert pipe.plan.placement == (0, 1, 2, 0)
        assert pipe.plan.modes == modes


def test_a_device_that_a_map_leaves_out_takes_its_seconds_along() -> None:
    """Profiles are for each kind of device in turn; those of the CPU came first, and counted for the GPU."""
    ids = torch.randint(11, (BATCH, 5))
    traced = fxpipe.trace(Tied(), (ids,))
    on_cpu = fxpipe.profile(traced, (ids,), hardware="cpu")
    on_gpu = fxpipe.profile(traced, (ids,), hardware="h100")
    options = PipelineOptions(
        devices=["cpu", "cuda:0"], chunks=2, pin={"": 1}, stages_per_device=1, memory_limit="1GiB"
    )
    settings = make_settings(options, anywhere=True)
    cut = choose_cut(traced, [on_cpu, on_gpu], BATCH, settings)
    assert [str(worker) for worker in cut.settings.workers] == ["cuda:0"]
    assert cut.profiles == (on_gpu,)
    assert cut.loads[0].cost.forward == pytest.approx(on_gpu.forward_seconds)


def test_more_marks_than_cuts_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"3 cuts are asked for \(3 by fxpipe.cut\(\)\), but 2 stages have 1"):
        fxpipe.plan(Tied((1, 2, 3)), 2, example_args=(torch.randint(11, (4, 5)),))


def test_a_mark_in_a_module_kept_whole_is_refused() -> None:
    model = nn.Sequential(Tied((2,)), nn.Linear(11, 2))
    with pytest.raises(ArgumentError, match="stands in a part of module '0' that runs as one node"):
        fxpipe.trace(model, (torch.randint(11, (4, 5)),), leaf_modules=["0"])


def test_a_mark_between_the_uses_of_parts_is_where_the_cut_stands() -> None:
    class Split(Layered, one=(4, 8), two=4):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.one(x).chunk(2, 1)
            left = parts[0] * 2
            fxpipe.cut()
            return self.two(left + parts[1])

    plan = fxpipe.plan(Split(), 2, example_args=(torch.randn(4, 4),))
    assert plan.stages[1].nodes[0] == "add"


class Idle(Layered, start=nn.Identity, a=4, b=4, c=4, between=lambda: nn.Sequential(nn.Identity()), unused=4):
    """Modules that compute nothing, at the start, between others, and not at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.between(self.b(self.a(self.start(x)))))


@pytest.mark.parametrize("name", ["between", "between.0"])
def test_a_stage_ends_behind_a_module_that_computes_nothing(name: str) -> None:
    plan = fxpipe.plan(Idle(), 2, example_args=(torch.randn(4, 4),), chunks=2, balance=[name], profile_budget=0.0)
    assert [stage.nodes for stage in plan.stages] == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("start", "'start' ends before the first node, where no stage can end: leave it out"),
        ("unused", "the module 'unused' has no nodes: forward does not call it, or it computes nothing"),
    ],
)
def test_where_no_stage_can_end_behind_it_the_error_says_so(name: str, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        fxpipe.plan(Idle(), 2, example_args=(torch.randn(4, 4),), chunks=2, balance=[name], profile_budget=0.0)


def test_a_map_of_modules_may_be_that_of_zbv_and_name_modules_that_compute_nothing() -> None:
    on = {"start": 1, "a": 0, "b": 1, "between": 0, "c": 0, "unused": 1}
    model = nn.Sequential(Idle(), Idle())
    pins = {f"0.{name}": device for name, device in on.items() if name != "c"}
    pins |= {"0.c": 1, "1": 1, "1.c": 0}
    plan = fxpipe.plan(
        model, 4, example_args=(torch.randn(4, 4),), chunks=4, balance=pins, schedule="zbv", profile_budget=0.0
    )
    assert plan.placement == (0, 1, 1, 0)
    assert [name for stage in plan.stages for name in stage.nodes] == [f"_{k}_{c}" for k in (0, 1) for c in "abc"]
    assert (plan.stages[0].nodes, plan.stages[3].nodes) == (("_0_a",), ("_1_c",))
