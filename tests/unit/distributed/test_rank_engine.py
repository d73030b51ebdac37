"""Rows in the words of the engine of torch: every schedule is one that comes to its end there."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from helpers.torch_tables import V_SHAPED, torch_table

from fxpipe._torch.pipelining import ScheduleEngine, check_order_of_messages
from fxpipe._torch.process_groups import PrefixStore, ProcessGroupGloo
from fxpipe.distributed.rank_engine import engine_rows
from fxpipe.scheduling import SCHEDULES, make_schedule

COUNTS = (1, 2, 5, 8)


@pytest.fixture(scope="module")
def lonely_group():
    """A group of this process alone; the engine looks at its rank, and at its size in the rows."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=PrefixStore("world", store), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_schedule_comes_to_its_end(lonely_group, name, devices):
    recipe = SCHEDULES[name]
    for each in {recipe.stages_per_device, 2} if recipe.most is None else {recipe.stages_per_device}:
        for count in COUNTS:
            for checkpoint in ("never", "always") if name != "inference" else ("never",):
                placement = recipe.placement(devices, each)
                schedule = make_schedule(name, devices * each, count, checkpoint, placement)
                ScheduleEngine(engine_rows(schedule), lonely_group, torch.device("cpu"))


@pytest.mark.parametrize("name", V_SHAPED)
def test_each_table_of_torch_comes_to_its_end(lonely_group, name):
    for devices, is_merged in product((2, 3), (False, True)):
        table = torch_table(name, devices, 2, 2 * devices + 1, is_merged)
        assert table is not None
        rows = engine_rows(table)
        words = {word.lstrip("0123456789")[0] for row in rows.values() for word in row}
        assert words == ({"F", "B", "I", "W"} if is_merged or name == "ScheduleDualPipeV" else {"F", "I", "W"})
        ScheduleEngine(rows, lonely_group, torch.device("cpu"))


def test_rows_that_wait_for_each_other_are_refused(lonely_group):
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        ScheduleEngine(
            {0: ["0F0", "0B0", "0F1", "0B1"], 1: ["1F1", "1F0", "1B1", "1B0"]}, lonely_group, torch.device("cpu")
        )


def test_messages_that_are_received_in_another_order_than_they_are_sent_are_refused(lonely_group, monkeypatch):
    rank_of = {0: 0, 1: 1, 2: 0}
    first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "2RECV_F0", "2F0", "2B0", "2SEND_B0", "0RECV_B0"]
    other = ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "1F1", "1RECV_B0", "1B0", "1SEND_B0"]
    check_order_of_messages({0: first, 1: other}, {**rank_of})
    late = [other[3], *other[:3], *other[4:]]
    with pytest.raises(ValueError, match="rank 0 sends 0F0 0F1 2B0, and rank 1 receives 0F1 0F0 2B0"):
        check_order_of_messages({0: first, 1: late}, rank_of)
    gradients_first = [other[5], *other[:5], *other[6:]]
    with pytest.raises(ValueError, match="rank 1 receives 2B0 0F0 0F1"):
        check_order_of_messages({0: first, 1: gradients_first}, rank_of)
    seen = []
    monkeypatch.setattr("fxpipe._torch.pipelining.check_order_of_messages", lambda *rows: seen.append(rows))
    ScheduleEngine(engine_rows(make_schedule("1f1b", 2, 2)), lonely_group, torch.device("cpu"))
    assert seen[0][0][0] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]


def test_recomputation_is_left_to_backward_and_backward_is_split_where_w_is():
    rows = engine_rows(make_schedule("0F0 0R0 0B0\n1F0 1B0 1W0", 2, 1))
    assert rows == {0: ["0F0", "0B0"], 1: ["1F0", "1I0", "1W0"]}


class Performed:
    """Notes what the engine asks for."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda j, i: self.calls.append((name, j, i))


def test_the_engine_performs_a_row_in_order(lonely_group):
    engine = ScheduleEngine({0: ["0F0", "0F1", "0B0", "0B1"]}, lonely_group, torch.device("cpu"))
    performed = Performed()
    for _ in range(2):
        engine.run(performed)
    once = [("forward", 0, 0), ("forward", 0, 1), ("backward", 0, 0), ("backward", 0, 1)]
    assert performed.calls == once * 2


def test_what_an_action_raises_comes_out_as_it_is_and_is_logged_by_nobody(lonely_group, capfd):
    class Broken(Performed):
        def __getattr__(self, name):
            raise ZeroDivisionError(name)

    engine = ScheduleEngine({0: ["0F0", "0B0"]}, lonely_group, torch.device("cpu"))
    with pytest.raises(ZeroDivisionError, match="forward"):
        engine.run(Broken())
    assert capfd.readouterr().err == ""
    performed = Performed()
    engine.run(performed)
    assert len(performed.calls) == 2


def test_a_group_of_its_own_needs_a_name_that_was_not_used(lonely_group):
    groups = [ProcessGroupGloo(PrefixStore(str(k), dist.HashStore()), 0, 1) for k in range(2)]
    assert [group.size() for group in groups] == [1, 1]
