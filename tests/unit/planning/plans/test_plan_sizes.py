"""Plans of graphs with dynamic sizes: figures at any size, limits at the largest, files, and what balance becomes."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.models import GPT, UNet
from torch import nn
from torch.export import Dim

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from fxpipe.planning.plans import Plan

IDS = torch.randint(17, (8, 8))
PICTURES = torch.randn(4, 3, 16, 24)
LENGTHS = {"ids": {1: Dim("s", max=32)}}
AREAS = {"x": {2: "height", 3: "width"}}
OPTIONS: dict[str, Any] = {"hardware": "cpu", "progress": False}


@functools.cache
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, dropout=0.0)


def planned(ids: torch.Tensor = IDS, **options: Any) -> Plan:
    return fxpipe.plan(model(), 2, example_args=(ids,), dynamic_shapes=LENGTHS, **{"chunks": 4} | OPTIONS | options)


@functools.cache
def gpt() -> Plan:
    return planned()


@functools.cache
def unet() -> Plan:
    torch.manual_seed(0)
    return fxpipe.plan(UNet(depth=2), 3, example_args=(PICTURES,), dynamic_shapes=AREAS, chunks=2, **OPTIONS)


def by_hand(plan: Plan, ids: torch.Tensor) -> Plan:
    """The same cut, planned at these lengths."""
    return planned(ids, balance=[len(stage.nodes) for stage in plan.stages])


@pytest.mark.parametrize("length", [5, 31])
def test_figures_at_another_length_are_those_of_a_plan_made_there(length: int) -> None:
    plan = gpt()
    there = by_hand(plan, torch.randint(17, (8, length)))
    assert [stage.nodes for stage in there.stages] == [stage.nodes for stage in plan.stages]
    moved = plan.at(s=length)
    for j in range(2):
        assert plan.memory(j, b=2, s=length) == there.memory(j, b=2) > 0
        assert plan.flops(j, b=2, s=length) == there.flops(j, b=2) > 0
        assert moved.stages[j].activation_bytes == there.stages[j].activation_bytes
        assert moved.stages[j].sent_bytes == there.stages[j].sent_bytes
    assert [(way.source, way.target, way.bytes) for way in moved.sendings] == [
        (way.source, way.target, way.bytes) for way in there.sendings
    ]


def sent_in_a_step(pipe: fxpipe.Pipeline, ids: torch.Tensor) -> dict[tuple[int, int], int]:
    """The bytes from stage to stage in a step that runs; the loss is on the last one."""
    pipe.forward_backward(ids, target=ids, loss_fn=lambda y, t: y.float().pow(2).mean())
    sent: dict[tuple[int, int], int] = {}
    for way in pipe.last_step.transfers:
        pair = way.maker.stage, way.user.stage
        if pair[0] != pair[1] and max(pair) < len(pipe.plan.stages):
            sent[pair] = sent.get(pair, 0) + int(way.bytes)
    return sent


def sent_as_planned(plan: Plan) -> dict[tuple[int, int], int]:
    return {(way.source, way.target): plan.micro_batches * way.bytes for way in plan.sendings}


def test_a_pipe_that_has_met_a_second_length_has_the_formulas_of_all() -> None:
    with fxpipe.pipeline(model(), ["cpu", "cpu"], 4, example_args=(IDS,), profile_budget=0.1) as pipe:
        before = pipe.plan
        assert before.sizes == ()
        sent = sent_in_a_step(pipe, torch.randint(17, (8, 13)))
        plan = pipe.plan
        assert plan is pipe.plan
    (size,) = plan.sizes
    assert (size.name, size.size, size.largest) == ("ids_dim1", 8, 13)
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in before.stages]
    for j in range(2):
        assert plan.memory(j, b=2) == before.memory(j, b=2)
        assert plan.flops(j, b=3) == before.flops(j, b=3)
    assert sent_as_planned(plan) == sent_as_planned(before)
    assert sent_as_planned(plan.at(ids_dim1=13)) == sent
    cut = [len(stage.nodes) for stage in plan.stages]
    there = fxpipe.plan(model(), 2, example_args=(torch.randint(17, (8, 13)),), chunks=4, balance=cut, **OPTIONS)
    assert [plan.memory(j, b=2, ids_dim1=13) for j in range(2)] == [there.memory(j, b=2) for j in range(2)]
    assert fxpipe.simulate(plan, ids_dim1=13).step_seconds >= fxpipe.simulate(plan).step_seconds


def test_which_node_holds_most_may_depend_on_the_size() -> None:
    """A loss over many classes holds most where batches are short, attention where they are long."""

    def plan_at(ids: torch.Tensor, **options: Any) -> Plan:
        loss = {"loss_fn": lambda y, t: y.logsumexp(-1).sum(), "target": ids}
        return fxpipe.plan(Wide(), 1, example_args=(ids,), chunks=4, **loss, **OPTIONS, **options)

    plan = plan_at(IDS, dynamic_shapes=LENGTHS)
    assert plan.stages[0].bytes.working_elsewhere
    for length in (4, 8, 16, 31):
        there = plan_at(torch.randint(17, (8, length)))
        assert plan.memory(0, b=2, s=length) == there.memory(0, b=2)
        assert plan.memory(0).subs(dict.fromkeys(plan.memory(0).free_symbols, 2)) == plan.memory(0, b=2, s=2)


class Wide(Layered, embed=lambda: nn.Embedding(17, 4), head=(4, 40)):
    """Scores of all pairs of places, and many classes."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scores = torch.stack([x @ x.transpose(1, 2)] * 2, 1).softmax(-1)
        return self.head(scores.sum(1) @ x)


def test_a_size_that_is_left_out_is_that_of_the_plan() -> None:
    plan = gpt()
    assert plan.memory(1, b=2) == plan.memory(1, b=2, s=8)
    assert plan.flops(0, b=3) == plan.flops(0, b=3, s=8)
    (b,) = plan.memory(1, s=16).free_symbols
    assert plan.memory(1, s=16).subs(b, 2) == plan.memory(1, b=2, s=16)
    assert {symbol.name for symbol in plan.memory(1).free_symbols} == {"b", "s"}


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"length": 4}, ArgumentError, "length=4 is no size of the plan, nor another argument: the plan has 's'"),
        ({"s": 33}, ArgumentError, "s=33: the graph of the plan is one for sizes of 2 to 32"),
        ({"s": 1}, ArgumentError, "s=1: the graph of the plan is one for sizes of 2 to 32"),
        ({"s": 2.5}, ArgumentTypeError, "s=2.5: expected a whole number, the size of dimension 1 of ids"),
    ],
)
def test_a_size_that_cannot_be_is_refused(sizes: dict[str, Any], error: type[Exception], message: str) -> None:
    for ask in (
        lambda: gpt().memory(0, b=2, **sizes),
        lambda: gpt().flops(0, **sizes),
        lambda: gpt().at(**sizes),
        lambda: fxpipe.simulate(gpt(), **sizes),
    ):
        with pytest.raises(error, match=message):
            ask()


@pytest.mark.parametrize(
    ("samples", "error"), [(-8, ArgumentError), (0, ArgumentError), (2.5, ArgumentTypeError), (True, ArgumentTypeError)]
)
def test_a_number_of_samples_that_cannot_be_is_refused(samples: Any, error: type[Exception]) -> None:
    for ask in (lambda: gpt().memory(0, b=samples), lambda: gpt().flops(0, b=samples), lambda: gpt().at(b=samples)):
        with pytest.raises(error, match=f"b={samples}: expected a whole number of samples, at least 1"):
            ask()


def test_a_plan_without_dynamic_sizes_takes_none() -> None:
    plan = fxpipe.plan(model(), 2, example_args=(IDS,), chunks=4, **OPTIONS)
    assert plan.sizes == ()
    with pytest.raises(ArgumentError, match=r"s=8 is no size of the plan.*all sizes of the plan are fixed"):
        plan.memory(0, b=2, s=8)


@pytest.mark.parametrize("hardware", [None, "h100"])
def test_a_simulated_step_is_that_of_the_plan_at_that_size(hardware: str | None) -> None:
    plan = gpt()
    longer = fxpipe.simulate(plan, s=32, hardware=hardware)
    assert longer.step_seconds >= fxpipe.simulate(plan, hardware=hardware).step_seconds
    if hardware is None:
        assert longer.step_seconds == fxpipe.simulate(plan.at(s=32)).step_seconds
        peaks = [memory.peak for memory in longer.memory]
        assert peaks == [int(plan.memory(j, b=2, s=32)) for j in range(2)]


def test_memory_limits_are_asked_at_the_largest_size() -> None:
    plan = gpt()
    here, largest = (max(int(plan.memory(j, b=2, s=s)) for j in range(2)) for s in (8, 32))
    assert largest > 1.2 * here
    with pytest.raises(MemoryLimitError, match=r"Memory is asked at s=32, the largest that dynamic_shapes announces"):
        planned(memory_limit=here, checkpoint="never", balance=[len(s.nodes) for s in plan.stages])
    fitting = planned(memory_limit=largest, checkpoint="never")
    assert max(int(fitting.memory(j, b=2, s=32)) for j in range(2)) <= largest


def between() -> int:
    """A limit that holds the largest size with recomputation only."""
    again, kept = (
        max(memory.peak for memory in fxpipe.simulate(gpt(), checkpoint=mode, s=32).memory)
        for mode in ("always", "never")
    )
    assert again < kept
    return int(1.02 * again)


def test_recomputing_is_decided_at_the_largest_size() -> None:
    fitting = planned(memory_limit=(limit := between()))
    assert any(mode != "never" for mode in fitting.modes)
    assert max(int(fitting.memory(stage.index, b=2, s=32)) for stage in fitting.stages) <= limit


def test_the_tuner_asks_limits_at_the_largest_size() -> None:
    limit = between()
    tuning = fxpipe.tune(
        model(), ["cpu", "cpu"], example_args=(IDS,), dynamic_shapes=LENGTHS, hardware="cpu", memory_limit=limit,
        schedules=["gpipe", "1f1b"], chunks=[4], progress=False,
    )  # fmt: skip
    assert tuning.best.plan is not None
    assert max(tuning.best.memory) <= limit
    held = fxpipe.simulate(tuning.best.plan, s=32)
    assert max(memory.peak for memory in held.memory) == max(tuning.best.memory)


def test_the_plan_says_its_sizes_and_their_formulas() -> None:
    text = str(gpt())
    assert "micro-batches of at most 2 samples, s=8" in text
    assert "- s, dimension 1 of ids: 8 in these figures, may be 2 to 32; memory limits are asked at 32" in text
    assert "*b*s" in text.partition("memory in bytes")[2]
    assert "s=32" in str(gpt().at(s=32))


def test_the_balance_at_other_sizes_is_told() -> None:
    table = gpt().compare_sizes()
    rows = [line.split() for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["4", "8", "16", "32"]
    assert [row[0] for row in (line.split() for line in gpt().compare_sizes(s=(5, 31)).splitlines()[-2:])] == [
        "5",
        "31",
    ]
    assert [plan.here for plan in unet().at_sizes(height=(8, 32), width=(8, 40))] == [
        {"b": 2, "height": 8, "width": 8}, {"b": 2, "height": 32, "width": 40},
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match=r"as many values as the others \(height 1, width 2\)"):
        unet().compare_sizes(height=(8,), width=(8, 40))
    with pytest.raises(ArgumentError, match="s=5: expected the sizes to compare"):
        gpt().compare_sizes(s=5)


@functools.cache
def unbounded() -> Plan:
    return fxpipe.plan(model(), 2, example_args=(IDS,), dynamic_shapes={"ids": {1: "s"}}, chunks=4, **OPTIONS)


def test_a_plan_at_more_than_the_largest_size_is_read_and_asks_limits_there(tmp_path: Path) -> None:
    longer = unbounded().at(s=16)
    longer.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == longer
    assert {one.name: one.largest for one in longer.sizes} == {"s": 16}
    tuning = fxpipe.tune(longer, schedules=["1f1b"], chunks=[4], checkpoint=["never"], progress=False)
    assert max(tuning.best.memory) == max(memory.peak for memory in fxpipe.simulate(longer).memory)


def test_without_a_bound_twice_the_size_is_looked_at() -> None:
    assert [plan.here["s"] for plan in unbounded().at_sizes()] == [4, 8, 16]


def test_a_model_without_values_has_the_costs_of_one_with_values_at_all_sizes() -> None:
    def plan_on(device: str) -> Plan:
        shapes, ids = {"ids": {0: "batch", 1: "s"}}, IDS.to(device)
        return fxpipe.plan(model().to(device), 2, example_args=(ids,), dynamic_shapes=shapes, chunks=4, **OPTIONS)

    plan, without_values = plan_on("cpu"), plan_on("meta")
    assert without_values.sizes == plan.sizes != ()
    for stage in range(2):
        assert without_values.memory(stage) == plan.memory(stage)
        assert without_values.flops(stage, b=2, s=31) == plan.flops(stage, b=2, s=31)
    longer, other = plan.at(s=31), without_values.at(s=31)
    assert [stage.activation_bytes for stage in other.stages] == [stage.activation_bytes for stage in longer.stages]
    assert [stage.seconds for stage in other.stages] == pytest.approx([stage.seconds for stage in longer.stages])


@pytest.mark.parametrize("change", [{"name": "b"}, {"name": "no name"}, {"name": "t"}, {"size": 1}, {"largest": 4}])
def test_a_plan_with_forged_sizes_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    replace(gpt(), sizes=(replace(gpt().sizes[0], **change),)).save(path)
    with pytest.raises(ArgumentError, match="is no plan of fxpipe"):
        Plan.load(path)
