"""The order of a stream of mini-batches, which never flushes: PipeDream and PipeDream-2BW.

A stage starts a mini-batch for each one that has gone back through it, and updates its weights immediately:

    device 0: 0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 0B2 0U2 ...
    device 1: 1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1F4 ...
    device 2: 2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 ...

Stage j of n has n - j mini-batches in flight. The weights change between forward and backward of a mini-batch, while
backward needs the weights of its forward. The *version* of a stage's weights is the number of updates so far. The
*policy* selects the version that a mini-batch uses at a stage, forward and backward:

- weight stashing: the newest version when the mini-batch arrives at the stage; stages use different versions;
- vertical sync: at all stages the version that was the newest at the first stage;
- double buffering (2BW): at all stages the version one mini-batch back, w(t+1) = w(t) - lr * gradient(w(t-1)). A
  mini-batch is split into micro-batches, whose gradients are accumulated, and two versions are enough.

Micro-batches are numbered through the stream. Rows grow as mini-batches are admitted, in an order that does not depend
on when. `drain` completes all mini-batches; those admitted later start with the newest version.

*Replicas* (1F1B-RR): micro-batch i goes to replica i modulo their number. Three replicas, then one:

    device 0    0F0 0F3 0B0 0F6 0B3 0F9 0B6 ...
    device 0'   0F1 0F4 0B1 0F7 0B4 0F10 0B7 ...
    device 0''  0F2 0F5 0B2 0U2 0F8 0B5 0U5 0F11 0B8 0U8 ...
    device 1    1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 ...

A *round* of a stage is a sequence of mini-batches in which each of its R replicas has one. After the last backward of a
round, all replicas are updated by the mean gradient of its mini-batches. They all use the same version: the newest when
the first of them arrives at the stage, with W micro-batches then in flight (`scheduling.replicas`): round k uses the
version after the first max(0, floor((k R + 1 - W) / R)) updates. Stages have separate rounds, except with vertical
sync: there all have the rounds of the stage with the most replicas, so their versions are of the same mini-batches.

*Joint mini-batches* have one loss of all their micro-batches, so the last stage runs all F of one before its first B.
Stages alternate as above, with mini-batches instead of micro-batches, which so have the same versions as unsplit ones:

    device 0: 0F0 0F1 0F2 0F3 0B0 0B1 0U1 0F4 0F5 0B2 0B3 0U3 ...
    device 1: 1F0 1F1 1B0 1B1 1U1 1F2 1F3 1B2 1B3 1U3 1F4 1F5 ...

Between the rows of a stage's replicas (`awaited`) U waits for the backwards of its round and for the previous U, and a
forward for its version. Otherwise the order is as on a single device, so no row waits forever.

>>> order = StreamSchedule(2, WeightPolicy.STASHING)
>>> for _ in range(3): print(*(" ".join(map(str, row)) for row in order.admit(1)), sep=" | ")
0F0 | 1F0 1B0 1U0
0F1 0B0 0U0 | 1F1 1B1 1U1
0F2 0B1 0U1 | 1F2 1B2 1U2
>>> [order.version(0, t) for t in range(3)], [order.version(1, t) for t in range(3)]
([0, 0, 1], [0, 1, 2])

Sources: Narayanan et al., PipeDream, SOSP 2019, https://doi.org/10.1145/3341301.3359646; Memory-Efficient
Pipeline-Parallel DNN Training, ICML 2021, https://arxiv.org/abs/2006.09503.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule
from fxpipe.scheduling.replicas import forwards_ahead, rows_of_replicas


class WeightPolicy(enum.Enum):
    """The rule by which a mini-batch gets a version of a stage's weights."""

    STASHING = "weight stashing"
    VERTICAL_SYNC = "vertical sync"
    DOUBLE_BUFFERING = "double buffering"


# Schedules by name whose steps may follow each other as a stream, without a flush.
STREAM_POLICIES: Mapping[str, WeightPolicy] = MappingProxyType(
    {"pipedream": WeightPolicy.STASHING, "pipedream_2bw": WeightPolicy.DOUBLE_BUFFERING}
)


def stream_flights(stages: int, replicas: Sequence[int] = (), unit: int = 1) -> tuple[int, ...]:
    """Counts for each stage the units that a stream has in flight there, in all replicas together.

    A unit is a micro-batch, or a joint mini-batch of `unit` micro-batches.

    >>> stream_flights(3), stream_flights(2, (15, 1)), stream_flights(2, (1, 2)), stream_flights(2, (15, 1), 4)
    ((3, 2, 1), (30, 1), (3, 2), (8, 1))
    """
    counts = tuple(-(-count // unit) for count in tuple(replicas) or (1,) * stages)
    return tuple(ahead * count for ahead, count in zip(forwards_ahead(counts), counts, strict=True))


def round_sizes(policy: WeightPolicy, replicas: Sequence[int], micro_batches: int = 1) -> tuple[int, ...]:
    """Counts for each stage the mini-batches of a round, if each has `micro_batches` micro-batches.

    >>> round_sizes(WeightPolicy.STASHING, (3, 1)), round_sizes(WeightPolicy.STASHING, (3, 1), 2)
    ((3, 1), (2, 1))
    >>> round_sizes(WeightPolicy.VERTICAL_SYNC, (3, 1)), round_sizes(WeightPolicy.DOUBLE_BUFFERING, (3, 1))
    ((3, 3), (1, 1))
    """
    widest = {WeightPolicy.VERTICAL_SYNC: max(replicas), WeightPolicy.DOUBLE_BUFFERING: 1}
    return tuple(-(-widest.get(policy, count) // micro_batches) for count in replicas)


def weight_versions(
    schedule: object,
    stages: int,
    stage: int,
    micro_batches: int = 1,
    replicas: Sequence[int] = (),
    is_joint: bool = False,
) -> int:
    """Counts the versions of its weights that a stage holds at most: one, if the schedule is not a stream.

    `micro_batches`: of a mini-batch, which may be joint. `replicas`: of each stage; if empty, each has one.

    >>> [weight_versions("pipedream", 4, j) for j in range(4)]
    [4, 3, 2, 1]
    >>> [weight_versions("pipedream_2bw", 4, j) for j in range(4)]
    [2, 2, 2, 2]
    >>> [weight_versions("pipedream", 2, j, replicas=(15, 1)) for j in range(2)]
    [3, 1]
    """
    policy = STREAM_POLICIES.get(schedule) if isinstance(schedule, str) else None
    counts = tuple(replicas) or (1,) * stages
    if policy is None or sum(counts) == 1:
        return 1
    if policy is WeightPolicy.DOUBLE_BUFFERING:
        return 2
    unit = micro_batches if is_joint else 1
    others = (stream_flights(stages, counts, unit)[stage] - 1) * unit  # micro-batches in flight, without this unit
    return 1 + -(-others // (round_sizes(policy, counts, micro_batches)[stage] * micro_batches))


def is_stream(schedule: object) -> bool:
    """Returns True for the name of a schedule whose steps follow each other without a flush."""
    return isinstance(schedule, str) and schedule in STREAM_POLICIES


def steady_micro_batches(schedule: object, stages: int, micro_batches: int, replicas: Sequence[int] = ()) -> int:
    """Returns the micro-batches of a step; in a stream at least the number in flight, of several mini-batches."""
    return max(micro_batches, *stream_flights(stages, replicas)) if is_stream(schedule) else micro_batches


@dataclass(frozen=True, slots=True)
class SteadyWindow:
    """The steady part of a stream, in which the pipe neither fills nor drains."""

    first: int  # the window starts with its update at the first stage
    last: int  # and ends with the first stage's update for this one
    mini_batches: int  # number in the full stream

    @classmethod
    def of(
        cls, name: str, stages: int, micro_batches: int, replicas: Sequence[int] = (), is_joint: bool = False
    ) -> SteadyWindow:
        """Returns a window at least as long as the mini-batches in flight take through all stages and back.

        It holds full rounds, and a whole number of turns of the replicas of all stages.

        >>> SteadyWindow.of("pipedream", 4, 1), SteadyWindow.of("pipedream", 4, 8)
        (SteadyWindow(first=3, last=6, mini_batches=10), SteadyWindow(first=1, last=3, mini_batches=5))
        >>> SteadyWindow.of("pipedream", 2, 1, (2, 1))
        SteadyWindow(first=3, last=7, mini_batches=11)
        """
        counts = tuple(replicas) or (1,) * stages
        units = 1 if is_joint else micro_batches
        flights = stream_flights(stages, counts, micro_batches // units)
        others = -(-(flights[0] - 1) // units)  # mini-batches in flight, without one
        turns = math.lcm(*counts)
        turn = math.lcm(
            turns // math.gcd(turns, micro_batches), *round_sizes(STREAM_POLICIES[name], counts, micro_batches)
        )
        first = -(-(others + 1) // turn) * turn - 1
        last = first + -(-max(2, others) // turn) * turn
        return cls(first, last, last + 1 + others)


def stream_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    mini_batches: int,
    modes: Sequence[str] | None = None,
    replicas: Sequence[int] = (),
    is_joint: bool = False,
) -> Schedule:
    """Makes the schedule of `mini_batches` mini-batches, from an empty pipe to an empty pipe, with their updates.

    >>> print(stream_schedule("pipedream", 2, 1, 3))
    pipedream: 2 stages, 3 micro-batches
    device 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
    device 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2
    >>> print(stream_schedule("pipedream", 2, 1, 6, replicas=(1, 2)))
    pipedream: 2 stages, 6 micro-batches
    device 0: 0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 0B2 0U2 0F5 0B3 0U3 0B4 0U4 0B5 0U5
    device 1: 1F0 1B0 1F2 1B2 1F4 1B4
    device 2: 1F1 1B1 1U1 1F3 1B3 1U3 1F5 1B5 1U5
    """
    order = StreamSchedule(stages, STREAM_POLICIES[name], modes, replicas, micro_batches)
    parts = [*(order.admit(micro_batches, is_joint) for _ in range(mini_batches)), order.drain()]
    rows = tuple(tuple(action for part in parts for action in part[d]) for d in range(sum(order.replicas)))
    awaited = {action: needed for row in rows for action in row if (needed := order.awaited(action))}
    counts = order.replicas if max(order.replicas) > 1 else ()
    return Schedule(
        name, stages, micro_batches * mini_batches, rows, is_validated=True, replicas=counts, awaited=awaited
    )


class StreamSchedule:
    """The rows of a stream, extended mini-batch by mini-batch."""

    def __init__(
        self,
        stages: int,
        policy: WeightPolicy,
        modes: Sequence[str] | None = None,
        replicas: Sequence[int] = (),
        chunks: int = 1,
    ):
        """`modes`: checkpoint modes of the stages, by default "never". `replicas` of each stage have adjacent rows.

        `chunks`: the number of micro-batches of a mini-batch; some may have fewer.
        """
        self.stages, self.policy = stages, policy
        self.replicas = tuple(replicas) or (1,) * stages
        self.modes = tuple(modes or ("never",) * stages)
        self._flights = self._split_flights = stream_flights(stages, self.replicas)
        self._joint_flights = stream_flights(stages, self.replicas, chunks)
        self._widths = round_sizes(policy, self.replicas)  # minimum number of micro-batches in a round
        self._ends = [0]  # micro-batches up to the end of each mini-batch, from 0 for none
        self._units = [0]  # the same in units, whose F, and whose B, follow each other: micro-batch, joint mini-batch
        self._starts = [0]  # mini-batches that have begun with an empty pipe
        self._rounds = [[0] for _ in range(stages)]  # by stage: mini-batches up to the end of each round, from 0
        self._forward = [0] * stages  # by stage: the next unit to run forward,
        self._back = [0] * stages  # the next to run backward,
        self._updated = [0] * stages  # and the number of updates so far

    @property
    def admitted(self) -> int:
        return len(self._ends) - 1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches admitted so far, and so the index of the next."""
        return self._ends[-1]

    def admit(self, micro_batches: int, is_joint: bool = False) -> Rows:
        """Admits a mini-batch; returns for each row the actions to be queued next.

        `is_joint`: its loss needs all its micro-batches. This may change after a drain only.
        """
        self._ends.append(self._ends[-1] + micro_batches)
        self._units.append(self._units[-1] + (1 if is_joint else micro_batches))
        self._flights = self._joint_flights if is_joint else self._split_flights
        for rounds, width in zip(self._rounds, self._widths, strict=True):
            if self._ends[-1] - self._ends[rounds[-1]] >= width:
                rounds.append(self.admitted)
        return self._rows(is_last=False)

    def drain(self) -> Rows:
        """Completes all mini-batches in flight; returns for each row the actions to be queued next."""
        for rounds in self._rounds:
            if rounds[-1] < self.admitted:
                rounds.append(self.admitted)
        rows = self._rows(is_last=True)
        self._starts.append(self.admitted)
        return rows

    def place(self, micro_batch: int) -> tuple[int, int]:
        """Returns the mini-batch of a micro-batch, and the index of the micro-batch in it."""
        t = bisect_right(self._ends, micro_batch) - 1
        return t, micro_batch - self._ends[t]

    def micro_batches_of(self, mini_batch: int) -> range:
        return range(*self._ends[mini_batch : mini_batch + 2])

    def version(self, stage: int, mini_batch: int) -> int:
        """Returns the version that a mini-batch, or the next to be admitted, uses at a stage."""
        rounds = self._rounds[stage]
        first = rounds[bisect_right(rounds, mini_batch) - 1]
        start = self._updates_with(stage, self._starts[bisect_right(self._starts, first) - 1])
        if self.policy is WeightPolicy.DOUBLE_BUFFERING:
            return max(start, mini_batch - (1 if self._flights[0] > 1 else 0))
        at = 0 if self.policy is WeightPolicy.VERTICAL_SYNC else stage
        # When the first unit of the round arrives, the stage is full: this unit is in flight, too.
        ended = self._units[first] + 1 - self._flights[at]
        return max(start, self._updates_with(stage, bisect_right(self._units, ended) - 1))

    def _updates_with(self, stage: int, mini_batches: int) -> int:
        """Counts the rounds of a stage that end within the first `mini_batches` mini-batches."""
        return bisect_right(self._rounds[stage], mini_batches) - 1

    def round_of(self, stage: int, mini_batch: int) -> range:
        """Returns the mini-batches of the completed round that contains `mini_batch`."""
        rounds = self._rounds[stage]
        k = bisect_right(rounds, mini_batch)
        return range(rounds[k - 1], rounds[k])

    @property
    def mini_batches_to_end(self) -> int:
        """The number of mini-batches to admit until the first of them ends on all stages."""
        return max(width + flight - 1 for width, flight in zip(self._widths, self._split_flights, strict=True))

    def awaited(self, action: Action, in_order: Collection[int] = ()) -> tuple[Action, ...]:
        """Returns the actions in rows of other replicas of its stage that an action waits for."""
        # `in_order`: stages in which F of a micro-batch needs F of the previous micro-batch.
        kind, j, i = action
        count = self.replicas[j]
        if count == 1:
            return ()
        t, k = self.place(i)
        if kind is ActionKind.UPDATE:  # the previous update, and the last backward of each other replica in the round
            first = self._ends[self.round_of(j, t).start]
            before = [Action(ActionKind.UPDATE, j, first - 1)] if first else []
            return (*before, *(Action(ActionKind.BACKWARD, j, h) for h in range(max(first, i - count + 1), i)))
        last, is_joint = self._ends[t + 1] - 1, self._units[t + 1] - self._units[t] == 1
        if kind is ActionKind.BACKWARD and j == self.stages - 1 and is_joint and i < last:
            return (Action(ActionKind.FORWARD, j, last),)  # which computes the loss
        if kind is not ActionKind.FORWARD:
            return ()
        version = self.version(j, t) if k < count else 0  # the first micro-batch of its mini-batch on this replica
        update = [Action(ActionKind.UPDATE, j, self._ends[self._rounds[j][version]] - 1)] if version else []
        return (*update, *([Action(ActionKind.FORWARD, j, i - 1)] if j in in_order and i else []))

    def _rows(self, is_last: bool) -> Rows:
        return rows_of_replicas(tuple(self._actions(j, is_last) for j in range(self.stages)), self.replicas)

    def _actions(self, j: int, is_last: bool) -> tuple[Action, ...]:
        """Returns the next actions of a stage, as if it were on one device."""
        actions = self._due_update(j)
        while True:
            next_forward, next_back = self._forward[j], self._back[j]
            in_flight = next_forward - next_back
            is_full = in_flight == self._flights[j] or (  # or the version for the next does not exist yet
                in_flight and self.version(j, bisect_right(self._units, next_forward) - 1) > self._updated[j]
            )
            if not is_full and next_forward < self._units[-1]:
                actions += [Action(ActionKind.FORWARD, j, i) for i in self._micro_batches_in(next_forward)]
                self._forward[j] += 1
            elif is_full or (is_last and in_flight):
                for i in self._micro_batches_in(next_back):
                    t, k = self.place(i)
                    if Action(ActionKind.RECOMPUTE, j, k) in self.recomputed(len(self.micro_batches_of(t))):
                        actions.append(Action(ActionKind.RECOMPUTE, j, i))
                    actions.append(Action(ActionKind.BACKWARD, j, i))
                self._back[j] += 1
                actions += self._due_update(j)
            else:
                return tuple(actions)

    def _micro_batches_in(self, unit: int) -> range:
        t = bisect_right(self._units, unit) - 1
        own = self.micro_batches_of(t)
        size = len(own) // (self._units[t + 1] - self._units[t])
        start = own.start + (unit - self._units[t]) * size
        return range(start, start + size)

    def _due_update(self, j: int) -> list[Action]:
        """Returns the update of the next round, if all its backwards have run."""
        rounds, k = self._rounds[j], self._updated[j] + 1
        if k == len(rounds) or self._back[j] < self._units[rounds[k]]:
            return []
        self._updated[j] = k
        return [Action(ActionKind.UPDATE, j, self._ends[rounds[k]] - 1)]

    def recomputed(self, micro_batches: int) -> frozenset[Action]:
        """Returns R of all stages for a mini-batch of `micro_batches`, by micro-batch index in the mini-batch."""
        counts = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}
        return frozenset(
            Action(ActionKind.RECOMPUTE, j, k) for j, mode in enumerate(self.modes) for k in range(counts[mode])
        )
