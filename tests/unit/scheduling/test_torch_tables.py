"""The tables of `torch.distributed.pipelining`: each is accepted as it is, and runs to the bits of the plain model."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import assert_same_gradients, train_step
from helpers.torch_tables import LOOPED, SINGLE, V_SHAPED, torch_table, torch_tables, torch_text
from torch import nn

import fxpipe
from fxpipe.errors import ScheduleError
from fxpipe.scheduling import (
    SCHEDULES,
    ActionKind,
    Schedule,
    activations_in_flight,
    make_schedule,
    micro_batches_in_flight,
    parse_schedule,
    validate,
)
from fxpipe.scheduling.factory import placement_of
from fxpipe.simulation import StageCost, simulate_schedule

QUICK = {"progress": False, "check": False, "hardware": "cpu"}
WHOLE_AND_SPLIT = "0F0 0F1 0B0 0B1 0F2 0B2 0W0 0W2"  # in one row: micro-batch 1 has no W


def is_mixed(schedule: Schedule) -> bool:
    """Whether a stage has W for some micro-batches and not for others."""
    split = schedule.split_backwards
    counts = [sum((j, i) in split for i in range(schedule.micro_batches)) for j in range(schedule.stages)]
    return any(0 < count < schedule.micro_batches for count in counts)


def test_every_table_is_accepted_as_it_is():
    names, mixed = set(), set()
    for table in torch_tables(range(1, 6), range(1, 13)):
        validate(table)
        parsed = parse_schedule(str(table))
        assert parsed.rows == table.rows
        names.add(table.name)
        if is_mixed(table):
            mixed.add(table.name)
    assert names == {*SINGLE, *LOOPED, *V_SHAPED}
    assert mixed == {*V_SHAPED}


def test_the_text_that_torch_writes_of_a_table_is_accepted_as_it_is():
    """One line for each device, as in its CSV: idle slots are empty there."""
    seen = set()
    sizes = ((1, 2, 4), (2, 2, 4), (3, 2, 6))
    cases = [*product((*LOOPED, *V_SHAPED), sizes), *((name, (p, 1, m)) for name in SINGLE for p, _, m in sizes)]
    for name, (p, v, m) in cases:
        table = torch_table(name, p, v, m)
        text = torch_text(name, p, v, m)
        assert table is not None
        assert parse_schedule(text).rows == table.rows
        assert make_schedule(text, p * v, m).rows == table.rows
        assert make_schedule(lambda *_, text=text: text, p * v, m).rows == table.rows
        assert make_schedule(lambda *_, text=text: text.splitlines(), p * v, m).rows == table.rows
        seen |= {mark for mark in ("I", "OVERLAP_F_B", ",,", "0REDUCE_GRAD") if mark in text}
    assert seen == {"I", "OVERLAP_F_B", ",,", "0REDUCE_GRAD"}


def test_transfers_and_sums_of_gradients_in_a_table_of_torch_are_skipped():
    """As in its files with format="compute_comms"."""
    text = """
        0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
        1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
    """
    assert parse_schedule(text).rows == parse_schedule("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1").rows
    with pytest.raises(ScheduleError, match="action '0SEND_F': expected stage"):
        parse_schedule("0F0 0SEND_F 0B0")


NAMED = {
    "ScheduleGPipe": "gpipe",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved_zero_bubble",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}


@pytest.mark.parametrize("name", NAMED)
def test_no_schedule_of_ours_is_longer_than_its_table(name):
    """Nor keeps more. F, B and W take as long as each other, or B longer than F and F longer than W."""
    sizes = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 4) for m in (1, 2, 3, 5, 8, 16)]
    costs = StageCost(forward=1, backward=2, weight=1, saved_bytes=1), StageCost(3, 6, weight=2, saved_bytes=1)
    count = 0
    for p, v, m in sizes:
        table = torch_table(name, p, v, m)
        if table is None or not SCHEDULES[NAMED[name]].takes(v):
            continue
        ours = make_schedule(NAMED[name], p * v, m, placement=placement_of(table))
        for cost in costs:
            theirs = simulate_schedule(table, [cost] * table.stages)
            own = simulate_schedule(ours, [cost] * ours.stages)
            assert own.step_seconds <= theirs.step_seconds, (p, v, m)
            if cost is costs[0]:
                most = [max(memory.peak for memory in one.memory) for one in (own, theirs)]
                assert most[0] <= most[1], (p, v, m)
        count += 1
    assert count >= 10


class Blocks(nn.Module):
    """Weights that W computes, and those of norms, which stay with B; one weight is used twice."""

    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + block[0](x)
        return x


def runs_as_the_plain_model(schedule: Schedule, **options: object) -> None:
    n, m = schedule.stages, schedule.micro_batches
    torch.manual_seed(0)
    plain = Blocks(n)
    cuts = [f"blocks.{j}" for j in range(n - 1)]
    batches = [2 * m + 1, 2 * m]
    devices = ["cpu"] * len(schedule.rows)
    example = torch.randn(batches[0], 3)
    model = copy.deepcopy(plain)
    with fxpipe.pipeline(
        model, devices, schedule=schedule, balance=cuts, example_args=(example,), **QUICK, **options
    ) as pipe:
        assert pipe.plan.placement == placement_of(schedule)
        for batch in batches:
            x, t = torch.randn(batch, 3), torch.randn(batch, 3)
            order = "gpipe" if schedule.name == "ScheduleLoopedBFS" else "1f1b"
            want = train_step(plain, (x,), {}, t, F.mse_loss, chunks=m, order=order, seed=0, batch=batch)
            have = pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
            torch.testing.assert_close(have, want)
            assert_same_gradients(pipe, plain)
            for one in (plain, pipe):
                one.zero_grad()
        ran = {r.action for r in pipe.last_step.actions if r.action.kind is not ActionKind.RECOMPUTE}
        assert ran == {a for row in schedule.rows for a in row}


SMALL = [
    ("ScheduleGPipe", 3, 1, 4),
    ("ScheduleLoopedBFS", 2, 2, 3),
    ("ScheduleInterleaved1F1B", 2, 2, 4),
    ("ScheduleInterleavedZeroBubble", 2, 2, 4),
    ("ScheduleInterleavedZeroBubble", 2, 3, 2),
    ("ScheduleZBVZeroBubble", 2, 2, 5),
    ("ScheduleDualPipeV", 1, 2, 3),
    ("ScheduleDualPipeV", 2, 2, 7),
    ("ScheduleDualPipeV", 3, 2, 6),
]


@pytest.mark.parametrize("sizes", SMALL, ids=lambda sizes: "-".join(map(str, sizes)))
def test_gradients_of_a_table_are_those_of_the_plain_model_to_the_bit(sizes):
    tables = [torch_table(*sizes, is_merged) for is_merged in (False, True)]
    for table in dict.fromkeys(table for table in tables if table is not None):
        runs_as_the_plain_model(table)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_table_whose_stages_split_some_backwards_recomputes_as_any_other(checkpoint):
    table = torch_table("ScheduleDualPipeV", 2, 2, 4)
    assert table is not None
    assert is_mixed(table)
    runs_as_the_plain_model(table, checkpoint=checkpoint)


def test_a_micro_batch_without_w_in_a_stage_with_w_is_one_backward():
    schedule = parse_schedule(WHOLE_AND_SPLIT)
    cost = StageCost(forward=1, backward=3, weight=1, saved_bytes=1)
    simulation = simulate_schedule(schedule, [cost])
    spans = {str(span.action): span.end - span.start for span in simulation.spans}
    assert (spans["0B0"], spans["0B1"], spans["0B2"]) == (2, 3, 2)
    assert simulation.step_seconds == 3 * 4
    held = [parts.activations for _, parts in simulation.memory[0].steps]
    assert max(held) == 2  # 0 and 1, then 0 and 2: B gave 1 back
    assert micro_batches_in_flight(schedule) == activations_in_flight(schedule) == (2,)
    assert {str(a) for row in schedule.rows for a in row if a.kind is ActionKind.WEIGHT} == {"0W0", "0W2"}


def test_the_table_of_a_stage_that_splits_some_backwards_runs():
    runs_as_the_plain_model(parse_schedule(WHOLE_AND_SPLIT))
