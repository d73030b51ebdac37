"""Rows of streams: in the order of the papers, with no more versions of weights than they have."""

from __future__ import annotations

from itertools import product

import pytest

from fxpipe.scheduling import (
    ActionKind,
    Schedule,
    StreamSchedule,
    WeightPolicy,
    dependencies,
    micro_batches_in_flight,
    validate,
    weight_versions,
)

SIZES = ([1] * 9, [2] * 6, [4] * 5, [3, 1, 2, 5, 1])
NAMES = {WeightPolicy.STASHING: "pipedream", WeightPolicy.DOUBLE_BUFFERING: "pipedream_2bw"}


def streamed(stages, policy, sizes, drains=(), modes=None):
    order = StreamSchedule(stages, policy, modes)
    rows = [[] for _ in range(stages)]
    for t, size in enumerate(sizes):
        parts = [order.admit(size)] + ([order.drain()] if t in drains else [])
        for part in parts:
            for row, more in zip(rows, part, strict=True):
                row += more
    for row, more in zip(rows, order.drain(), strict=True):
        row += more
    return order, tuple(map(tuple, rows))


def versions_held(order, stage, row):
    """Goes through a row as the runtime does; each forward finds its version there."""
    held, newest, most = {0}, 0, 1
    for kind, _, i in row:
        t, k = order.place(i)
        if kind is ActionKind.FORWARD and k == 0:
            assert order.version(stage, t) in held
        if kind is ActionKind.UPDATE:
            newest += 1
            held = {version for version in held if version >= order.version(stage, t + 1)} | {newest}
            most = max(most, len(held))
    return most


def test_stages_alternate_once_they_are_full():
    _, rows = streamed(3, WeightPolicy.STASHING, [1] * 5)
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 0B2 0U2 0B3 0U3 0B4 0U4",
        "1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1F4 1B3 1U3 1B4 1U4",
        "2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2U3 2F4 2B4 2U4",
    ]


@pytest.mark.parametrize("policy", WeightPolicy)
def test_rows_can_run_and_hold_as_many_versions_as_is_said(policy):
    for n, sizes, drains in product((1, 2, 3, 4), SIZES, ((), (2,))):
        order, rows = streamed(n, policy, sizes, drains)
        schedule = Schedule("stream", n, sum(sizes), rows)
        validate(schedule)
        assert all(have <= n - j for j, have in enumerate(micro_batches_in_flight(schedule)))
        for j, row in enumerate(rows):
            held = versions_held(order, j, row)
            if policy in NAMES:
                assert held <= weight_versions(NAMES[policy], n, j, min(sizes))
            else:
                assert held <= n
            if sizes == SIZES[0] and not drains:
                assert held == {"STASHING": n - j, "VERTICAL_SYNC": n}.get(policy.name, min(n, 2))


def test_what_is_queued_waits_for_nothing_that_is_not():
    for policy, n, sizes in product(WeightPolicy, (2, 3, 4), SIZES):
        order, queued = StreamSchedule(n, policy), set()
        for size in sizes:
            queued |= {action for row in order.admit(size) for action in row}
            needs = {need for action in queued for need in dependencies(action, n)}
            assert {need for need in needs if need.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)} <= queued


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (WeightPolicy.STASHING, lambda n, j, t: max(0, t - (n - 1 - j))),
        (WeightPolicy.VERTICAL_SYNC, lambda n, j, t: max(0, t - (n - 1))),
        (WeightPolicy.DOUBLE_BUFFERING, lambda n, j, t: max(0, t - (n > 1))),
    ],
)
def test_versions_are_those_of_the_papers(policy, rule):
    for n in (1, 2, 3, 5):
        order, _ = streamed(n, policy, [1] * 8)
        assert all(order.version(j, t) == rule(n, j, t) for j in range(n) for t in range(8))


def test_behind_a_drain_the_newest_version_is_taken():
    for policy in WeightPolicy:
        order, _ = streamed(3, policy, [1] * 8, drains=(4,))
        assert {order.version(j, 5) for j in range(3)} == {5}
        assert order.version(0, 6) == 5


def test_recomputation_goes_before_its_backward():
    _, rows = streamed(2, WeightPolicy.DOUBLE_BUFFERING, [2, 2], modes=("always", "except_last"))
    assert " ".join(map(str, rows[0])) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0U1 0F3 0R2 0B2 0R3 0B3 0U3"
    assert " ".join(map(str, rows[1])) == "1F0 1R0 1B0 1F1 1B1 1U1 1F2 1R2 1B2 1F3 1B3 1U3"


def test_schedules_with_a_flush_have_one_version():
    assert weight_versions("1f1b", 4, 0) == 1
    assert [weight_versions("pipedream", 4, j, 3) for j in range(4)] == [2, 2, 2, 1]
