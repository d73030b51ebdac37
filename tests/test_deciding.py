"""What planning decides, through the public API: cuts within memory, recomputation, balance, order, and by what costs."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same_gradients, assert_same_state, closing, train_step
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, MemoryLimitError
from fxpipe.hardware import HARDWARE, Hardware
from fxpipe.inspect.figures import plan_figures
from fxpipe.partitioning import Link
from fxpipe.profiling import Seconds
from fxpipe.scheduling import Kind
from fxpipe.sites import MARGIN, Worker

BATCH, CHUNKS = 8, 4


class Deep(nn.Module):
    """Equal layers that keep much more than they send."""

    def __init__(self, width: int = 8, layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin() * 2
        return x


def rows() -> torch.Tensor:
    return torch.randn(BATCH, 4, 8)


def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, t)


@functools.cache
def deep_profile() -> fxpipe.Profile:
    """Estimated, so that no noise decides the cut. Each layer: 5 + 3 * 5 microseconds forward, 30 or 35 back."""
    model, x = Deep(), rows()
    return fxpipe.profile(fxpipe.trace(model, (x,), chunks=CHUNKS), (x,), micro_batch=2, hardware="cpu")


def planned(stages: int = 3, **options: Any) -> fxpipe.Plan:
    options = {"chunks": CHUNKS, "profile": deep_profile(), "optimizer_state": 1.0} | options
    return fxpipe.plan(Deep(), stages, example_args=(rows(),), **options)


def needs(plan: fxpipe.Plan) -> list[int]:
    return [int(plan.memory(stage.index, b=plan.micro_batch)) for stage in plan.stages]


def bottleneck(plan: fxpipe.Plan) -> dict[str, float]:
    return {found.balance: found.seconds for found in plan.bottlenecks}


def assert_within(plan: fxpipe.Plan) -> None:
    """No stage needs more than it may take, by the plan's own word."""
    limits = [stage.memory_limit for stage in plan.stages]
    assert all(limit is None or need <= limit for need, limit in zip(needs(plan), limits, strict=True))


def assert_trains_like(
    plain: nn.Module, pipe: Any, inputs: Callable[[], tuple[torch.Tensor, ...]], steps: int = 3
) -> None:
    """Steps of Adam: every gradient, and every parameter in the end, bit for bit."""
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (plain, pipe)]
    for _ in range(steps):
        args = inputs()
        with torch.no_grad():
            target = torch.randn_like(plain(*args))
        for model in (plain, pipe):
            model.zero_grad()
        train_step(plain, args, {}, target, loss, chunks=CHUNKS, order="1f1b", seed=0, batch=len(args[0]))
        pipe.forward_backward(*args, target=target, loss_fn=loss)
        assert_same_gradients(pipe, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(pipe, plain)


def recomputed(pipe: Any) -> set[int]:
    """The stages that ran a micro-batch's forward again in the last step."""
    return {record.action.stage for record in pipe.last_step.actions if record.action.kind is Kind.RECOMPUTE}


# -- within memory -----------------------------------------------------------------------------------------------------


def test_where_all_fits_nobody_recomputes() -> None:
    free = planned()
    plan = planned(memory_limit=max(needs(free)))
    assert plan.checkpoint == "never"
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in free.stages]
    assert [stage.memory_limit for stage in plan.stages] == [max(needs(free))] * 3
    assert (free.balance, plan.balance) == ("block", "optimal")


def test_the_least_limit_at_which_nobody_recomputes_moves_the_cut() -> None:
    """Rather a slower cut than one that does not fit; rather a move of the cut than recomputation."""
    free = planned()
    limit = max(needs(free)) - 1
    never = planned(memory_limit=limit, checkpoint="never")
    assert_within(never)
    assert never.checkpoint == "never"
    assert [stage.nodes for stage in never.stages] != [stage.nodes for stage in free.stages]
    auto = planned(memory_limit=limit)
    assert_within(auto)
    assert bottleneck(auto)["optimal"] <= bottleneck(never)["optimal"]


def test_stages_that_do_not_fit_recompute_and_train_like_the_plain_model() -> None:
    limit = int(max(needs(planned())) * 0.8)
    plain = Deep()
    options: dict[str, Any] = {"profile": deep_profile(), "optimizer_state": 1.0, "memory_limit": limit}
    pipe = fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, CHUNKS, example_args=(rows(),), **options)
    with closing(pipe):
        assert_within(pipe.plan)
        assert set(pipe.plan.modes) == {"always", "never"}
        assert pipe.plan.modes[-1] == "never"  # it has one micro-batch in flight
        assert_trains_like(plain, pipe, lambda: (rows(),))
        assert recomputed(pipe) == {j for j, mode in enumerate(pipe.plan.modes) if mode == "always"}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("checkpoint", ["auto", "never", "always", "except_last"])
def test_what_is_planned_fits_by_the_plans_own_word(schedule: str, checkpoint: str) -> None:
    """From where all fits easily down to where nothing does."""
    options = {"schedule": schedule, "checkpoint": checkpoint}
    largest, fitted, refused = max(needs(planned(**options))), 0, 0
    for share in (1.1, 0.95, 0.85, 0.75, 0.65, 0.4):
        try:
            plan = planned(memory_limit=int(share * largest), **options)
        except MemoryLimitError:
            refused += 1
        else:
            assert not refused, "a higher limit was refused"
            assert_within(plan)
            assert plan.checkpoint == checkpoint or checkpoint == "auto"
            fitted += 1
    assert fitted
    assert refused


def test_no_cut_by_hand_is_better() -> None:
    """Every cut into two stages: the best one that fits is the one that is found."""
    nodes = [name for stage in planned(2).stages for name in stage.nodes]
    limit = int(0.95 * max(needs(planned(2))))
    options = {"memory_limit": limit, "checkpoint": "never"}
    found: list[float] = []
    for count in range(1, len(nodes)):
        try:
            plan = planned(2, balance=[count, len(nodes) - count], **options)
        except MemoryLimitError:
            continue
        assert_within(plan)
        found.append(bottleneck(plan)["block"])
    assert 0 < len(found) < len(nodes) - 1
    assert bottleneck(planned(2, **options))["optimal"] == pytest.approx(min(found))
    assert bottleneck(planned(2, **options))["block"] < min(found)  # it would not fit


# -- where nothing fits ------------------------------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    with pytest.raises(MemoryLimitError) as caught:
        planned(**options)
    return str(caught.value)


def remedies(message: str) -> list[dict[str, Any]]:
    """What it says would fit, as arguments of `plan`."""
    said = re.search(r"What would fit: (.*)\.$", message)
    assert said is not None, message
    found: list[dict[str, Any]] = []
    for words in said[1].split("; or "):
        if words == "let stages recompute":
            found.append({"checkpoint": "auto"})
        elif devices := re.fullmatch(r"use (\d+) devices", words):
            found.append({"stages": int(devices[1])})
        else:
            chunks = re.fullmatch(r"use chunks=(\d+) \(micro-batches of (\d+)\)", words)
            assert chunks is not None, words
            assert -(-BATCH // int(chunks[1])) == int(chunks[2])
            found.append({"chunks": int(chunks[1])})
    return found


def test_a_refusal_says_what_each_stage_needs_what_is_at_fault_and_what_would_fit() -> None:
    limit = int(0.7 * max(needs(planned())))
    message = refusal(memory_limit=limit, checkpoint="never")
    head, header, *stages, problem, fits = message.splitlines()
    assert re.match(r"no cut into 3 stages fits into memory; the best one is over by .* in stage 2:", head)
    assert (
        header.split() == "stage nodes parameters gradients, optimizer activations working needs limit over by".split()
    )
    assert [line.split()[0] for line in stages] == ["0", "1", "2"]
    assert re.match(r"The problem: .* of stage 2\.", problem)
    assert fits == "What would fit: let stages recompute; or use 5 devices; or use chunks=8 (micro-batches of 1)."


@pytest.mark.parametrize(
    ("options", "share", "kinds"),
    [
        ({"checkpoint": "never"}, 0.7, {"checkpoint", "stages", "chunks"}),
        ({"checkpoint": "never", "schedule": "gpipe"}, 0.8, {"checkpoint", "stages"}),
        ({"checkpoint": "auto"}, 0.6, {"stages", "chunks"}),
        ({"checkpoint": "except_last"}, 0.8, {"stages", "chunks"}),
        ({"checkpoint": "always", "schedule": "gpipe"}, 0.9, {"stages", "chunks"}),
        ({"balance": "block", "checkpoint": "never"}, 0.7, {"checkpoint", "chunks"}),
        ({"balance": "block"}, 0.6, {"chunks"}),
        ({"balance": [8, 8, 8]}, 0.6, {"chunks"}),
        ({"balance": ["layers.2"]}, 0.6, {"chunks"}),
        ({"pin": {"layers.0": 0, "layers.5": 0}}, 0.6, {"chunks"}),
        ({"stages_per_device": 3, "stages": 6, "checkpoint": "never"}, 2.8, {"checkpoint", "chunks"}),
    ],
)
def test_every_remedy_that_is_named_works(options: dict[str, Any], share: float, kinds: set[str]) -> None:
    """`share`: of what a stage needs where nothing is limited, a device has."""
    options |= {"memory_limit": int(share * max(needs(planned(**options))))}
    found = remedies(refusal(**options))
    assert {key for remedy in found for key in remedy} == kinds
    for remedy in found:
        assert_within(planned(**options | remedy))


def test_smaller_micro_batches_are_cut_anew_where_time_decides() -> None:
    """A head with a fixed cost: the smaller the micro-batch, the more of the model is before it."""
    profile = deep_profile()
    *rest, last = profile.nodes
    heavy = replace(last, forward=Seconds(fixed=200e-6), backward=Seconds())
    grows = [replace(cost, forward=Seconds(per_sample=5e-6), backward=Seconds(per_sample=15e-6)) for cost in rest]
    options = {"profile": replace(profile, nodes=(*grows, heavy)), "balance": "block", "stages": 2}
    cuts = {chunks: len(planned(chunks=chunks, **options).stages[1].nodes) for chunks in (2, 4, 8)}
    assert cuts[2] > cuts[4] > cuts[8]
    before = {chunks: max(needs(planned(chunks=chunks, **options, checkpoint="always"))) for chunks in (2, 4, 8)}
    for limit in range(min(before.values()), before[2], 400):
        try:
            planned(chunks=2, **options, memory_limit=limit)
        except MemoryLimitError as error:
            for remedy in remedies(str(error)) if "What would fit" in str(error) else ():
                assert_within(planned(memory_limit=limit, **options | {"chunks": 2} | remedy))


def test_nothing_that_was_tried_would_fit() -> None:
    message = refusal(memory_limit=1000)
    assert "The problem: node 'layers_1' alone needs 1.6 KiB, more than any device has." in message
    assert message.endswith("Nothing that was tried would fit: the model needs devices with more memory.")


def test_what_is_refused_can_be_caught_as_what_it_is() -> None:
    for error in (fxpipe.errors.PartitionError, fxpipe.errors.FxpipeError, ValueError):
        with pytest.raises(error, match="fits into memory"):
            planned(memory_limit="1KiB")


# -- limits beside what is said by hand --------------------------------------------------------------------------------


def test_unequal_limits_move_the_cut() -> None:
    largest = max(needs(planned(2)))
    even, first, second = (
        planned(2, memory_limit=limits, checkpoint="never")
        for limits in ([largest, largest], [2 * largest, int(0.7 * largest)], [int(0.9 * largest), largest])
    )
    for plan in (even, first, second):
        assert_within(plan)
    assert len(first.stages[0].nodes) > len(even.stages[0].nodes) > len(second.stages[0].nodes)
    assert [stage.memory_limit for stage in second.stages] == [int(0.9 * largest), largest]


def test_a_device_may_be_without_a_limit() -> None:
    largest = max(needs(planned(2)))
    plan = planned(2, memory_limit=[int(0.5 * largest), None], checkpoint="auto")
    assert_within(plan)
    assert [stage.memory_limit for stage in plan.stages] == [int(0.5 * largest), None]
    assert plan.modes[1] == "never"  # there is no need


def test_without_any_limit_only_time_matters() -> None:
    for limit in (None, [None, None, None]):
        plan = planned(memory_limit=limit)
        assert (plan.balance, plan.checkpoint) == ("block", "never")
        assert [stage.memory_limit for stage in plan.stages] == [None] * 3


@pytest.mark.parametrize(
    "options",
    [{"balance": "block"}, {"balance": [8, 8, 8]}, {"balance": ["layers.1", "layers.3"]}, {"balance": ["layers.1"]}],
    ids=["block", "counts", "names", "a name"],
)
def test_a_cut_that_is_given_stays_and_its_stages_recompute(options: dict[str, Any]) -> None:
    free = planned(**options)
    plan = planned(**options, memory_limit=int(0.85 * max(needs(free))))
    assert_within(plan)
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in free.stages]
    assert plan.balance == free.balance
    assert plan.modes[0] == "always"
    assert plan.modes[2] == "never"


def test_pins_and_a_limit() -> None:
    pins = {"layers.0": 1, "layers.5": 1}
    limit = max(needs(planned(2, pin=pins)))
    plan = planned(2, pin=pins, memory_limit=limit)
    assert_within(plan)
    assert (plan.balance, plan.placement) == ("optimal", (1, 0, 1))
    assert [stage.memory_limit for stage in plan.stages] == [limit // 2, limit, limit // 2]  # two of them share one


def test_marks_and_a_limit() -> None:
    class Marked(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, layer in enumerate(self.layers):
                if k == 2:
                    fxpipe.cut()
                x = torch.tanh(layer(x)).sin() * 2
            return x

    options: dict[str, Any] = {"example_args": (rows(),), "chunks": CHUNKS}
    profile = fxpipe.profile(fxpipe.trace(Marked(), (rows(),), chunks=CHUNKS), (rows(),), micro_batch=2, hardware="cpu")
    free = fxpipe.plan(Marked(), 3, profile=profile, **options)
    plan = fxpipe.plan(Marked(), 3, profile=profile, memory_limit=int(0.8 * max(needs(free))), **options)
    assert_within(plan)
    assert "layers_2" in {stage.nodes[0] for stage in plan.stages}
    assert "always" in plan.modes


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"])
@pytest.mark.parametrize("options", [{}, {"pin": {"layers.0": 0, "layers.5": 0}}], ids=["free", "pinned"])
def test_copies_and_pickles_recompute_as_their_pipe(how: Callable[[Any], Any], options: dict[str, Any]) -> None:
    plain, limit = Deep(), int(0.85 * max(needs(planned())))
    options = {"profile": deep_profile(), "memory_limit": limit, "optimizer_state": 1.0} | options
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, CHUNKS, example_args=(rows(),), **options) as pipe:
        assert "always" in pipe.plan.modes
        with how(pipe) as other:
            assert_trains_like(plain, other, lambda: (rows(),), steps=2)
            assert other.plan == pipe.plan
            assert recomputed(other) == {j for j, mode in enumerate(pipe.plan.modes) if mode == "always"}


def test_several_stages_on_a_device_share_its_memory_and_what_is_pinned_stays() -> None:
    options: dict[str, Any] = {"stages_per_device": 2, "pin": {"layers.2": 1}}
    free = planned(4, **options)
    limit = 2 * max(needs(free))
    plan = planned(4, **options, memory_limit=limit)
    assert plan.placement == (0, 1, 0, 1)
    assert [stage.memory_limit for stage in plan.stages] == [limit // 2] * 4
    assert_within(plan)
    where = {name: plan.placement[stage.index] for stage in plan.stages for name in stage.nodes}
    assert where["layers_2"] == 1


def test_chunks_are_halved_down_to_one_sample_and_no_further() -> None:
    """7 samples: micro-batches of 4, 2, 1."""
    x = torch.randn(7, 4, 8)
    options: dict[str, Any] = {"example_args": (x,), "profile": deep_profile(), "checkpoint": "always"}
    whole = fxpipe.plan(Deep(), 1, chunks=2, **options)
    assert whole.micro_batch == 4
    limit = int(whole.memory(0, b=1))
    with pytest.raises(MemoryLimitError, match=r"use chunks=8 \(micro-batches of 1\)"):
        fxpipe.plan(Deep(), 1, chunks=2, memory_limit=limit, **options)
    plan = fxpipe.plan(Deep(), 1, chunks=8, memory_limit=limit, **options)
    assert plan.micro_batch == 1
    assert_within(plan)


# -- hardware, links and unequal devices -------------------------------------------------------------------------------


def hardware(link: Link | None = None, memory: int = 2**30, **fields: Any) -> Hardware:
    """One operation takes a microsecond at least, and here none takes longer."""
    between = link or Link(1e9)
    return Hardware("mine", {"float32": 1e15}, 1e15, memory=memory, within=link, between=between, launch=1e-6, **fields)


SLOW = Link(1e7, 5e-6)  # 100 KB take 10 ms


def estimated(model: nn.Module, stages: int, *args: torch.Tensor, **options: Any) -> fxpipe.Plan:
    return fxpipe.plan(model, stages, example_args=args, **{"chunks": CHUNKS} | options)


@pytest.mark.parametrize("name", ["a100-80gb", "h100", "h200", "cpu"])
def test_a_plan_for_hardware_that_is_not_here(name: str) -> None:
    known = HARDWARE[name]
    plan = estimated(Deep(), 3, rows(), hardware=name)
    assert plan.estimated_for == known.name
    assert plan.balance == "optimal"
    assert plan.devices == (("cpu",) * 3 if name == "cpu" else ("cuda:0", "cuda:1", "cuda:2"))
    for stage in plan.stages:
        assert stage.memory_limit == int(known.memory * (1 - MARGIN))
        assert stage.forward_seconds >= known.launch
    ways = {(way.source, way.target): way for way in plan.sendings}
    assert set(ways) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    for way in ways.values():
        assert way.bytes == 2 * 4 * 8 * 4
        link = known.within
        assert way.seconds == (0.0 if link is None else link.latency + way.bytes / link.bytes_per_second)


def test_devices_of_two_nodes_have_the_longer_way() -> None:
    near, far = Link(1e9, 1e-6), Link(1e8, 1e-5)
    mine = Hardware("mine", {"float32": 1e15}, 1e15, 2**30, near, far, devices_per_node=2, launch=1e-6)
    plan = estimated(Deep(), 4, rows(), hardware=mine)
    seconds = {(way.source, way.target): way.seconds for way in plan.sendings}
    size = 2 * 4 * 8 * 4
    assert seconds[0, 1] == seconds[1, 0] == seconds[2, 3] == near.latency + size / near.bytes_per_second
    assert seconds[1, 2] == seconds[2, 1] == far.latency + size / far.bytes_per_second


def test_given_devices_need_not_be_here_if_the_hardware_is_given() -> None:
    plan = fxpipe.plan(Deep(), devices=["cuda:3", "cuda:5"], example_args=(rows(),), hardware="h100")
    assert plan.devices == ("cuda:3", "cuda:5")
    with pytest.raises(ArgumentError, match="cuda:3"):
        fxpipe.plan(Deep(), devices=["cuda:3", "cuda:5"], example_args=(rows(),))


def test_the_memory_of_the_hardware_is_a_limit() -> None:
    free = estimated(Deep(), 3, rows(), hardware=hardware())
    small = int(max(needs(free)) * 0.85 / (1 - MARGIN))
    plan = estimated(Deep(), 3, rows(), hardware=hardware(memory=small))
    assert_within(plan)
    assert "always" in plan.modes
    assert {stage.memory_limit for stage in plan.stages} == {int(small * (1 - MARGIN))}
    given = estimated(Deep(), 3, rows(), hardware=hardware(memory=small), memory_limit="1GiB")  # the user knows better
    assert given.checkpoint == "never"
    with pytest.raises(MemoryLimitError, match="What would fit"):
        estimated(Deep(), 1, rows(), hardware=hardware(memory=small))


class Narrow(nn.Module):
    """Wide values but at one place, which is not in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(64, 64), nn.Linear(64, 1)
        self.wide, self.last = nn.Linear(1, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.narrow(torch.tanh(self.first(x))))
        for layer in self.last:
            x = layer(x)
        return x


def test_slow_links_move_the_cut_to_where_little_is_sent() -> None:
    x = torch.randn(BATCH, 64)
    handed_over, fast, slow = (estimated(Narrow(), 2, x, hardware=hardware(link)) for link in (None, Link(1e12), SLOW))
    for plan in (handed_over, fast):
        assert plan.stages[0].nodes[-1].startswith("last")
    assert slow.stages[0].nodes[-1] == "narrow"
    for plan in (handed_over, fast, slow):
        assert bottleneck(plan)["optimal"] <= bottleneck(plan)["block"]
    assert bottleneck(slow)["optimal"] < bottleneck(slow)["block"]
    block = estimated(Narrow(), 2, x, hardware=hardware(SLOW), balance="block")
    assert block.balance == "block"
    assert [stage.nodes for stage in block.stages] == [stage.nodes for stage in handed_over.stages]
    assert bottleneck(block) == {"block": bottleneck(slow)["block"]}
    assert plan_figures(slow).step_seconds < plan_figures(block).step_seconds


class Causal(nn.Module):
    """A causal mask as large as the input is long, used in every layer."""

    def __init__(self, width: int = 8, layers: int = 6):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        t = x.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + (q @ k.transpose(1, 2) + mask).softmax(-1) @ v
        return x


def ids() -> torch.Tensor:
    return torch.randint(11, (BATCH, 48))


def test_slow_links_make_copies_of_masks_and_the_pipe_trains_like_the_plain_model() -> None:
    fast = estimated(Causal(), 3, ids(), hardware=hardware(Link(1e13)))
    assert [stage.copies for stage in fast.stages] == [()] * 3
    assert any(portal.name == "triu" for portal in fast.portals) or "triu" in str(fast.stages[1].code)
    plain = Causal()
    options: dict[str, Any] = {"example_args": (ids(),), "hardware": hardware(Link(1e9, 5e-6))}
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, CHUNKS, **options) as pipe:
        copies = [stage.copies for stage in pipe.plan.stages]
        assert copies[0] == ()
        assert ("full", "triu") in copies
        assert not any(portal.name == "triu" for portal in pipe.plan.portals)
        assert_trains_like(plain, pipe, lambda: (ids(),))


def test_a_stage_that_computes_copies_takes_the_time_for_it() -> None:
    """A node takes 1 microsecond."""
    plan = estimated(Causal(), 3, ids(), hardware=hardware(Link(1e9, 5e-6)))
    seconds = {name: [j for j, stage in enumerate(plan.stages) if name in stage.copies] for name in ("full", "triu")}
    assert seconds["full"] == seconds["triu"] != []
    for stage in plan.stages:
        launches = stage.forward_seconds / 1e-6
        assert launches == pytest.approx(round(launches))
        views = sum(name.startswith(("chunk", "transpose", "getitem", "getattr")) for name in stage.nodes)
        assert round(launches) <= len(stage.nodes) + len(stage.copies) - views


def two_kinds(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """The second of two devices is of another kind, that many times as slow."""
    measured = fxpipe.profiling.profile
    asked: list[int] = []

    def profile(*args: Any, **options: Any) -> fxpipe.Profile:
        asked.append(1)
        found = measured(*args, **options | {"hardware": hardware(), "device": None})
        if len(asked) == 1:
            return found

        def slower(seconds: Seconds) -> Seconds:
            return Seconds(times * seconds.fixed, times * seconds.per_sample)

        return replace(
            found,
            nodes=tuple(
                replace(n, forward=slower(n.forward), backward=slower(n.backward), weight=slower(n.weight))
                for n in found.nodes
            ),
            estimated_for="",
        )

    monkeypatch.setattr("fxpipe.profiling.profile", profile)
    monkeypatch.setattr("fxpipe.sites.kinds_of", lambda devices: list(devices[:2]))
    monkeypatch.setattr("fxpipe.sites.workers_of", lambda settings: (Worker(0, None), Worker(1, None)))


@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_unequal_devices_get_unequal_shares(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    two_kinds(monkeypatch, times)
    plan = fxpipe.plan(Deep(), 2, example_args=(rows(),), chunks=CHUNKS)
    assert plan.balance == "optimal"
    assert bottleneck(plan)["optimal"] < bottleneck(plan)["block"]
    fewer, more = sorted(plan.stages, key=lambda stage: len(stage.nodes))
    assert (fewer.index == 1) == (times > 1)
    assert len(more.nodes) == pytest.approx(3 * len(fewer.nodes), abs=2)
    largest = max(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    assert bottleneck(plan)["optimal"] == pytest.approx(largest)
    for stage in plan.stages:  # the parts of a stage's time are those of its own device
        assert 0 < stage.weight_seconds < stage.backward_seconds
    assert "2 stages" in str(plan)


def test_measured_links_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between devices that are at hand."""
    monkeypatch.setattr("fxpipe.sites.link_at_hand", lambda one, other: SLOW)
    x = torch.randn(BATCH, 64)
    plan = estimated(Narrow(), 2, x)
    assert plan.balance == "optimal"
    assert plan.estimated_for == ""
    assert plan.stages[0].nodes[-1] == "narrow"
    assert [way.seconds for way in plan.sendings] == [SLOW.latency + 8 / SLOW.bytes_per_second] * 2


def test_memory_at_hand_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = planned()
    memory = int(0.85 * max(needs(free)) / (1 - MARGIN))
    monkeypatch.setattr("fxpipe.sites.memory_at_hand", lambda device: memory)
    plan = planned()
    assert_within(plan)
    assert "always" in plan.modes
    assert {stage.memory_limit for stage in plan.stages} == {int(memory * (1 - MARGIN))}


# -- the order of the graph --------------------------------------------------------------------------------------------


class Translation(nn.Module):
    """Both embeddings first, as people write it. The decoder's is needed behind the encoder only."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.source, self.target = nn.Embedding(11, width), nn.Embedding(11, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, y = self.source(source), self.target(target)
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        x = x.mean(1, keepdim=True)
        for layer in self.decoder:
            y = torch.tanh(layer(y)) + x
        return y


class Towers(nn.Module):
    """Two towers in turns, which meet in the end."""

    def __init__(self, width: int = 32, depth: int = 4):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x, y = torch.tanh(left(x)), torch.tanh(right(y))
        return self.head(torch.cat([x, y], -1))


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (BATCH, 12)), torch.randint(11, (BATCH, 12))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 32), torch.randn(BATCH, 32)


ORDERED: list[tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = [
    (Translation, sentences),
    (Towers, vectors),
]


def order_of(plan: fxpipe.Plan) -> list[str]:
    return [name for stage in plan.stages for name in stage.nodes]


def as_traced(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[str]:
    return [node.name for node in fxpipe.trace(model, args, chunks=CHUNKS).nodes]


@pytest.mark.parametrize(("model", "inputs"), ORDERED)
def test_side_branches_run_next_to_their_use_where_links_are_slow(model: Any, inputs: Any) -> None:
    plan = estimated(model(), 3, *inputs(), hardware=hardware(SLOW))
    assert order_of(plan) != as_traced(model(), inputs())
    assert sorted(order_of(plan)) == sorted(as_traced(model(), inputs()))


@pytest.mark.parametrize(("model", "inputs"), [(Deep, lambda: (rows(),)), (Causal, lambda: (ids(),))])
def test_a_graph_in_a_good_order_stays(model: Any, inputs: Any) -> None:
    plan = estimated(model(), 1, *inputs(), hardware=hardware(SLOW))
    assert order_of(plan) == as_traced(model(), inputs())


@pytest.mark.parametrize("link", [None, Link(1e9, 1e-6), SLOW, Link(1e5, 1e-4)], ids=["none", "fast", "slow", "slower"])
@pytest.mark.parametrize(("model", "inputs"), [*ORDERED, (Causal, lambda: (ids(),))])
def test_never_slower_than_the_traced_order(
    monkeypatch: pytest.MonkeyPatch, model: Any, inputs: Any, link: Link | None
) -> None:
    """By the simulator's word."""
    options = {"hardware": hardware(link)}
    found = {stages: estimated(model(), stages, *inputs(), **options) for stages in (2, 3, 4)}
    monkeypatch.setattr("fxpipe.rewriting.ordering.ordered", lambda traced: traced)
    for stages, plan in found.items():
        plain = estimated(model(), stages, *inputs(), **options)
        assert order_of(plain) == as_traced(model(), inputs())
        step, traced_step = plan_figures(plan).step_seconds, plan_figures(plain).step_seconds
        assert step <= traced_step * (1 + 1e-9), f"{stages} stages: {step} s, as traced {traced_step} s"


@pytest.mark.parametrize(("model", "inputs"), ORDERED)
def test_another_order_trains_and_evaluates_like_the_plain_model(model: Any, inputs: Any) -> None:
    plain = model()
    options: dict[str, Any] = {"example_args": inputs(), "hardware": hardware(SLOW)}
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, CHUNKS, **options) as pipe:
        assert order_of(pipe.plan) != as_traced(plain, inputs())
        assert_trains_like(plain, pipe, inputs)
        args = inputs()
        plain.eval()
        pipe.eval()
        with torch.no_grad():  # another graph beside the first
            want = torch.cat([plain(*part) for part in zip(*(a.tensor_split(CHUNKS) for a in args), strict=True)])
            assert torch.equal(pipe(*args), want)
        plain.train()
        pipe.train()
        assert_trains_like(plain, pipe, inputs, steps=1)


def test_a_plan_in_another_order_is_used_again(tmp_path: Any) -> None:
    plain, args = Translation(), sentences()
    plan = estimated(plain, 3, *args, hardware=hardware(SLOW))
    plan.save(tmp_path / "plan.json")
    loaded = fxpipe.Plan.load(tmp_path / "plan.json")
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, plan=loaded, example_args=args) as pipe:
        assert order_of(pipe.plan) == order_of(plan) != as_traced(plain, args)
        assert [stage.copies for stage in pipe.plan.stages] == [stage.copies for stage in plan.stages]
        assert_trains_like(plain, pipe, sentences)


@pytest.mark.parametrize("options", [{"balance": ["encoder.5"]}, {"pin": {"decoder": 1}}, {"balance": [20, 20]}])
def test_what_is_cut_by_hand_keeps_the_order_of_forward(options: dict[str, Any]) -> None:
    args, model = sentences(), Translation()
    traced = as_traced(model, args)
    if "balance" in options and isinstance(options["balance"][0], int):
        options = {"balance": [20, len(traced) - 20]}
    assert order_of(estimated(model, 2, *args, hardware=hardware(SLOW), **options)) == traced


# -- profiles made before ----------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a node is run to be measured")

    for name in ("measure", "estimate", "count"):
        monkeypatch.setattr(f"fxpipe.profiling.{name}", refuse)


def profile_of(model: nn.Module, x: torch.Tensor, **options: Any) -> fxpipe.Profile:
    return fxpipe.profile(fxpipe.trace(model, (x,), chunks=CHUNKS), (x,), micro_batch=2, **options)


def test_a_profile_made_before_is_used_and_nothing_is_run(request: pytest.FixtureRequest, tmp_path: Any) -> None:
    model, x = Deep(), rows()
    profile = profile_of(model, x, budget=0.05)
    profile.save(tmp_path / "profile.json")
    request.getfixturevalue("nothing_is_measured")
    of_file = [
        tmp_path / "profile.json",
        str(tmp_path / "profile.json"),
        fxpipe.Profile.load(tmp_path / "profile.json"),
    ]
    for given in (profile, *of_file):
        plan = fxpipe.plan(model, 3, example_args=(x,), chunks=CHUNKS, profile=given)
        costs = {cost.name: cost for cost in profile.nodes}
        for stage in plan.stages:
            assert stage.forward_seconds == pytest.approx(sum(costs[name].forward.at(2) for name in stage.nodes))
            assert stage.backward_seconds == pytest.approx(sum(costs[name].backward.at(2) for name in stage.nodes))
        assert plan.estimated_for == ""
    with closing(fxpipe.pipeline(model, ["cpu"] * 3, CHUNKS, example_args=(x,), profile=profile)) as pipe:
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


def test_a_profile_of_another_graph_is_refused(tmp_path: Any) -> None:
    other = profile_of(Deep(layers=5), rows(), hardware="cpu")
    other.save(tmp_path / "profile.json")
    for given in (other, tmp_path / "profile.json"):
        with pytest.raises(ArgumentError, match=r"made for another graph.*fxpipe\.profile\(traced, args\)\.save"):
            planned(profile=given)
    with pytest.raises(FileNotFoundError):
        planned(profile=tmp_path / "none.json")
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(ArgumentError, match="is no profile of fxpipe, or is damaged"):
        planned(profile=tmp_path / "profile.json")


def test_a_profile_of_hardware_says_so_in_the_plan() -> None:
    assert planned().estimated_for == HARDWARE["cpu"].name
