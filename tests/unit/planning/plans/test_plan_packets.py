"""What stages hand each other over processes: relays by cut, the seconds of a message, and steps that know both."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.plan_hardware import hardware
from helpers.rank_models import DENSE_CUTS, Dense
from helpers.skipping_models import SKIPPING_CUTS, Skipping
from torch import nn

import fxpipe
from fxpipe.cluster import Link
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.planning import choose, passes
from fxpipe.planning.plans.retarget import LOOPBACK, MESSAGE_SECONDS

X = torch.zeros(8, 16)
VALUE = 4 * 16 * 4  # bytes of one value of a micro-batch


def planned(**options: Any) -> fxpipe.Plan:
    usual = {"hardware": hardware(Link(1e9, 1e-6)), "chunks": 2, "balance": SKIPPING_CUTS, "processes": True}
    return fxpipe.plan(Skipping(), 4, example_args=(X,), **usual | options)


def test_packets_have_all_that_crosses_a_cut_and_what_of_it_is_relayed():
    plan = planned()
    packets = {
        (one.source, one.target): (one.bytes // VALUE, one.relayed.at(plan.here) // VALUE) for one in plan.packets
    }
    assert packets == {
        (0, 1): (2, 1),  # the first layer's value; the input, which only the last stage uses
        (1, 2): (3, 2),  # the second layer's; tanh of the first one's, and the input, for the last stage
        (2, 3): (3, 0),  # the third layer's; both of these, where they are used
        (3, 2): (2, 1),  # gradients: of the third layer's value; of that for the last stage, to stage 1
        (2, 1): (2, 0),
        (1, 0): (1, 0),
    }


@pytest.fixture
def cuts(monkeypatch):
    """The cuts that are chosen."""
    chosen, choose_cut = [], choose.choose_cut

    def note_cut(*arguments: Any, **options: Any) -> Any:
        chosen.append(choose_cut(*arguments, **options))
        return chosen[-1]

    monkeypatch.setattr(passes, "choose_cut", note_cut)
    return chosen


@pytest.mark.parametrize("model", [Skipping, Dense])
def test_a_cut_is_judged_by_the_bytes_of_its_packets(model, cuts):
    names, x = (SKIPPING_CUTS, X) if model is Skipping else (DENSE_CUTS[4], torch.zeros(8, 4))
    options = {"hardware": hardware(Link(1e9)), "chunks": 2, "balance": names}
    plan = fxpipe.plan(model(), 4, example_args=(x,), processes=True, **options)
    assert {(one.source, one.target): one.bytes for one in cuts[-1].transfers} == {
        (one.source, one.target): one.bytes for one in plan.packets
    }
    fxpipe.plan(model(), 4, example_args=(x,), processes=False, **options)
    assert len(cuts[-1].transfers) != len(cuts[0].transfers)


def test_a_packet_takes_one_latency_and_both_ends_for_its_message():
    for one in planned().packets:
        assert one.seconds == pytest.approx(1e-6 + one.bytes / 1e9)
        assert one.handling == MESSAGE_SECONDS
    at_hand = planned(hardware="cpu").packets[0]
    assert at_hand.seconds == pytest.approx(LOOPBACK.latency + at_hand.bytes / LOOPBACK.bytes_per_second)


def test_packets_follow_the_size_of_micro_batches_and_the_hardware():
    plan = planned()
    larger = plan.at(b=8)
    assert [one.bytes for one in larger.packets] == [2 * one.bytes for one in plan.packets]
    slow = fxpipe.simulate(plan, hardware=hardware(Link(1e3)))
    assert slow.transfers[0].seconds == pytest.approx(plan.packets[0].bytes / 1e3)


def test_over_processes_neighbours_send_to_each_other_only():
    plan = planned()
    over = fxpipe.simulate(plan)
    assert {abs(one.source - one.target) for one in over.transfers} == {1}
    assert not over.one_interpreter
    within = fxpipe.simulate(plan, processes=False)
    assert (1, 3) in {(one.source, one.target) for one in within.transfers}
    assert sum(over.sent.values()) == 2 * (2 + 3 + 3 + 2 + 2 + 1) * VALUE
    assert fxpipe.simulate(planned(processes=False), processes=True).step_seconds == over.step_seconds


def test_recomputation_does_not_wait_for_the_gradient():
    spans = {str(s.action): s for s in fxpipe.simulate(planned(), schedule="1f1b", checkpoint="always").spans}
    assert spans["0R0"].end <= spans["1B0"].end < spans["0B0"].start


def test_the_tuner_knows_what_a_message_costs():
    tuning = fxpipe.tune(
        nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]),
        ["cuda:0", "cuda:1"],
        hardware=hardware(Link(1e12)),
        example_args=(X,),
        schedules=["1f1b"],
        processes=True,
    )
    more = {}
    for row in tuning.rows:
        if row.plan is not None:
            assert row.plan.is_over_processes
            free = replace(row.plan, packets=tuple(replace(one, handling=0.0) for one in row.plan.packets))
            more[row.chunks, row.stages_per_device] = row.step_seconds - fxpipe.simulate(free).step_seconds
    assert more[1, 1] == pytest.approx(4 * MESSAGE_SECONDS)  # a packet there and one back, of two ends each
    assert more[8, 1] > more[1, 1]


def test_a_plan_that_does_not_know_its_packets_is_refused_over_processes():
    by_hand = replace(planned(processes=False), packets=())
    assert fxpipe.simulate(by_hand).step_seconds > 0
    with pytest.raises(ArgumentError, match="does not know what its stages hand each other over processes"):
        fxpipe.simulate(by_hand, processes=True)


def test_what_is_in_several_nodes_is_over_processes():
    plan = fxpipe.plan(
        Skipping(), hardware=replace(hardware(), devices_per_node=2, nodes=2), example_args=(X,), chunks=2
    )
    assert plan.is_over_processes
    assert {abs(one.source - one.target) for one in fxpipe.simulate(plan).transfers} == {1}
    with pytest.raises(ArgumentError, match="processes=False: devices in several nodes"):
        fxpipe.simulate(plan, processes=False)
    with pytest.raises(ArgumentTypeError, match="processes=1: expected True or False"):
        fxpipe.simulate(plan, processes=1)
