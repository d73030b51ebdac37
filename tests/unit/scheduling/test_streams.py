"""Rows of streams: in the order of the papers, with no more versions of weights than they have."""

from itertools import product

import pytest
from helpers.cases import each_once

from fxpipe.scheduling import (
    Action,
    ActionKind,
    Schedule,
    StreamSchedule,
    WeightPolicy,
    dependencies,
    micro_batches_in_flight,
    validate,
)
from fxpipe.scheduling.streams import weight_versions

NAMES = {WeightPolicy.STASHING: "pipedream", WeightPolicy.DOUBLE_BUFFERING: "pipedream_2bw"}


def streamed(stages, policy, sizes, drains=(), modes=None, replicas=(), is_joint=False):
    order = StreamSchedule(stages, policy, modes, replicas, max(sizes))
    rows = [[] for _ in range(sum(order.replicas))]
    for t, size in enumerate(sizes):
        parts = [order.admit(size, is_joint)] + ([order.drain()] if t in drains else [])
        for part in parts:
            for row, more in zip(rows, part, strict=True):
                row += more
    for row, more in zip(rows, order.drain(), strict=True):
        row += more
    return order, tuple(map(tuple, rows))


def test_stages_alternate_once_they_are_full():
    _, rows = streamed(3, WeightPolicy.STASHING, [1] * 5)
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 0B2 0U2 0B3 0U3 0B4 0U4",
        "1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1F4 1B3 1U3 1B4 1U4",
        "2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2U3 2F4 2B4 2U4",
    ]


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


def test_recomputation_goes_before_its_backward():
    _, rows = streamed(2, WeightPolicy.DOUBLE_BUFFERING, [2, 2], modes=("always", "except_last"))
    assert " ".join(map(str, rows[0])) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0U1 0F3 0R2 0B2 0R3 0B3 0U3"
    assert " ".join(map(str, rows[1])) == "1F0 1R0 1B0 1F1 1B1 1U1 1F2 1R2 1B2 1F3 1B3 1U3"


def test_schedules_with_a_flush_have_one_version():
    assert weight_versions("1f1b", 4, 0) == 1
    assert [weight_versions("pipedream", 4, j, 3) for j in range(4)] == [2, 2, 2, 1]
    assert [weight_versions("pipedream", 4, j, 3, is_joint=True) for j in range(4)] == [4, 3, 2, 1]


# -- Replicas ----------------------------------------------------------------------------------------------------------

SMALL = [counts for n in (1, 2, 3) for counts in product((1, 2, 3), repeat=n) if max(counts) > 1]
ALONE = [(1,) * n for n in (1, 2, 3, 4)]  # no replicas
REPLICAS = [*SMALL, (15, 1), (1, 15), (4, 2, 1), (1, 4, 1), (3, 2, 1, 2)]


def replicated(policy, sizes, replicas, drains=(), is_joint=False):
    """A stream whose drains come behind some mini-batches, as a schedule in which each row waits for what it needs."""
    order, rows = streamed(len(replicas), policy, sizes, drains, None, replicas, is_joint)
    awaited = {action: order.awaited(action) for row in rows for action in row}
    return order, Schedule("stream", len(replicas), sum(sizes), rows, replicas=order.replicas, awaited=awaited)


def needs_of(schedule, action):
    """What an action needs of other actions: with U the backwards of its round."""
    awaited = schedule.awaited[action]
    return awaited if action.kind is ActionKind.UPDATE else (*dependencies(action, schedule.stages), *awaited)


def in_order_of_time(schedule):
    """The actions as they may follow each other, row by row as far as each comes."""
    there, ended, places = {a for row in schedule.rows for a in row}, {}, [0] * len(schedule.rows)
    while len(ended) < len(there):
        before = len(ended)
        for d, row in enumerate(schedule.rows):
            while places[d] < len(row) and all(
                n in ended or n not in there for n in needs_of(schedule, row[places[d]])
            ):
                ended[row[places[d]]] = len(ended)
                places[d] += 1
        assert len(ended) > before
    return list(ended)


@pytest.mark.parametrize("policy", WeightPolicy)
@pytest.mark.parametrize("is_joint", [False, True])
def test_rows_of_replicas_run_and_every_forward_finds_its_version(policy, is_joint):
    """All small numbers of replicas, mini-batches of one and of several micro-batches, drains within a round."""
    streams = [1] * 17, [2] * 7, [3, 1, 2, 5, 1, 1, 4]
    for replicas, sizes, drains in product([*ALONE, *REPLICAS], streams[is_joint:], ((), (3,), (1, 4))):
        order, schedule = replicated(policy, sizes, replicas, drains, is_joint)
        validate(schedule)
        held, updates = [{0} for _ in replicas], [[] for _ in replicas]  # versions, and the updates that made them
        most = [1] * len(replicas)
        ended = in_order_of_time(schedule)
        done = set()
        for action in ended:
            kind, j, i = action
            t, k = order.place(i)
            if kind is ActionKind.FORWARD:
                version = order.version(j, t)
                assert version in held[j]
                if version and k < replicas[j] > 1:  # opens the stage on a replica, which may be ahead of the others
                    assert updates[j][version - 1] in order.awaited(action)
            if kind is ActionKind.BACKWARD:
                last = order.micro_batches_of(t)[-1] if is_joint and j == len(replicas) - 1 else i
                assert {Action(ActionKind.FORWARD, j, h) for h in (i, last)} <= done
            if kind is ActionKind.UPDATE:
                together = order.round_of(j, t)
                assert t == together[-1]
                first, end = order.micro_batches_of(together[0]).start, i + 1
                assert all(Action(ActionKind.BACKWARD, j, h) in done for h in range(first, end))
                newest = max(held[j]) + 1
                updates[j].append(action)
                held[j] = {version for version in held[j] if version >= order.version(j, t + 1)} | {newest}
                most[j] = max(most[j], len(held[j]))
            done.add(action)
        for j, of_stage in enumerate(held):
            assert max(of_stage) == len([a for a in ended if a.kind is ActionKind.UPDATE and a.stage == j])
            if replicas in ALONE:
                n = len(replicas)
                assert micro_batches_in_flight(schedule)[j] <= (n - j) * (max(sizes) if is_joint else 1)
                if (is_joint or sizes[0] == 1) and not drains:
                    assert most[j] == {"STASHING": n - j, "VERTICAL_SYNC": n}.get(policy.name, min(n, 2))
            if policy in NAMES:
                assert most[j] <= weight_versions(NAMES[policy], len(replicas), j, min(sizes), replicas, is_joint)
                if sizes[0] == 1 and not drains and len(sizes) > 3 * max(replicas):
                    assert most[j] == weight_versions(NAMES[policy], len(replicas), j, 1, replicas)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_mini_batches_go_round_and_rounds_cover_all_of_them_once(replicas):
    order, schedule = replicated(WeightPolicy.STASHING, [1] * 40, replicas)
    flights = micro_batches_in_flight(schedule)
    first_row = [sum(replicas[:j]) for j in range(len(replicas))]
    for j, count in enumerate(replicas):
        for replica in range(count):
            kinds = [a for a in schedule.rows[first_row[j] + replica] if a.kind is not ActionKind.UPDATE]
            assert {a.micro_batch for a in kinds} == {*range(replica, 40, count)}
            ahead = next(k for k, a in enumerate(kinds) if a.kind is ActionKind.BACKWARD)
            assert ahead <= flights[j]
        rounds = [order.round_of(j, t) for t in range(40)]
        assert all(t in own and len(own) == min(count, 40 - own.start) for t, own in enumerate(rounds))
        versions = [order.version(j, t) for t in range(40)]
        assert versions == sorted(versions)
        assert all(len({versions[t] for t in own}) == 1 for own in rounds)
    if len(replicas) == 2:  # as the paper has it
        assert flights[0] == -(-sum(replicas) // replicas[0])


@pytest.mark.parametrize("policy", WeightPolicy)
def test_so_many_mini_batches_in_flight_are_enough_for_the_first_of_them_to_end(policy):
    """Who waits for its loss admits no more: its updates are queued then, and all that they wait for."""
    for replicas, size, is_joint in each_once([*ALONE, *REPLICAS], (1, 2, 4), (False, True)):
        order, queued = StreamSchedule(len(replicas), policy, None, replicas, size), set()
        for t in range(20 + order.mini_batches_to_end):
            queued |= {action for row in order.admit(size, is_joint) for action in row}
            needs = {need for action in queued for need in order.awaited(action)}
            sooner = {a for a in queued if a.kind is not ActionKind.UPDATE}
            needs |= {n for a in sooner for n in dependencies(a, len(replicas)) if n.kind is not ActionKind.RECOMPUTE}
            assert needs <= queued
            oldest = t + 1 - order.mini_batches_to_end
            if oldest >= 0:
                for j in range(len(replicas)):
                    last = size * (order.round_of(j, oldest)[-1] + 1) - 1
                    assert Action(ActionKind.UPDATE, j, last) in queued
