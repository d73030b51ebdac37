"""The order of a stream of mini-batches, which never flushes: PipeDream and PipeDream-2BW.

A stage takes up a mini-batch for each one that it has gone back through, and updates its weights at once. Three stages:

    device 0: 0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 0B2 0U2 ...
    device 1: 1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1F4 ...
    device 2: 2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 ...

So stage j of n has n - j of them in flight, the weights change between forward and backward of each, and backward needs
those of its forward. A *version* of a stage's weights is the number of updates that have made it. Which version the
stage takes for a mini-batch, forward and backward, is the *policy*:

- weight stashing: the newest, when the mini-batch comes to the stage; so stages take different ones;
- vertical sync: at all stages that which was the newest at the first one;
- double buffering (2BW): at all stages that of one mini-batch before it, w(t+1) = w(t) - lr * gradient(w(t-1)).

With 2BW a mini-batch is cut into micro-batches, whose gradients are added up, and two versions are enough: the one that
the mini-batch in flight has, and the one that the next has. (As long as there are no fewer micro-batches than stages,
no stage waits for a version to be made.) With one stage nothing is in flight when the next one comes, and all of them
are plain training.

Micro-batches are counted through the stream. Rows grow as mini-batches are admitted, in an order that does not depend
on when they are. `drain` lets all of them end; what is admitted then begins anew, with the newest version.

>>> order = StreamSchedule(2, WeightPolicy.STASHING)
>>> for _ in range(3): print(*(" ".join(map(str, row)) for row in order.admit(1)), sep=" | ")
0F0 | 1F0 1B0 1U0
0F1 0B0 0U0 | 1F1 1B1 1U1
0F2 0B1 0U1 | 1F2 1B2 1U2
>>> [order.version(0, t) for t in range(3)], [order.version(1, t) for t in range(3)]
([0, 0, 1], [0, 1, 2])

Sources: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019,
https://doi.org/10.1145/3341301.3359646; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021,
https://arxiv.org/abs/2006.09503. Replication of stages is not here.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule


class WeightPolicy(enum.Enum):
    """The rule by which a mini-batch gets a version of a stage's weights."""

    STASHING = "weight stashing"
    VERTICAL_SYNC = "vertical sync"
    DOUBLE_BUFFERING = "double buffering"


# Schedules by name whose steps may follow each other as a stream, without a flush.
STREAM_POLICIES: Mapping[str, WeightPolicy] = MappingProxyType(
    {"pipedream": WeightPolicy.STASHING, "pipedream_2bw": WeightPolicy.DOUBLE_BUFFERING}
)


def weight_versions(schedule: object, stages: int, stage: int, micro_batches: int = 1) -> int:
    """Counts the versions of its weights that a stage holds at most.

    Args:
        schedule: its name; of all that are no streams there is one.
        micro_batches: of a mini-batch.

    >>> [weight_versions("pipedream", 4, j) for j in range(4)]
    [4, 3, 2, 1]
    >>> [weight_versions("pipedream_2bw", 4, j) for j in range(4)]
    [2, 2, 2, 2]
    """
    policy = STREAM_POLICIES.get(schedule) if isinstance(schedule, str) else None
    if policy is None or stages == 1:
        return 1
    if policy is WeightPolicy.DOUBLE_BUFFERING:
        return 2
    others = stages - stage - 1  # micro-batches in flight beside one
    return 1 + -(-others // micro_batches)


def is_stream(schedule: object) -> bool:
    """Returns True for the name of a schedule whose steps follow each other without a flush."""
    return isinstance(schedule, str) and schedule in STREAM_POLICIES


def steady_micro_batches(schedule: object, stages: int, micro_batches: int) -> int:
    """Returns the micro-batches of a step that has as many of them in flight as there are at any time.

    Of a stream those of several mini-batches are in flight.
    """
    return max(micro_batches, stages) if is_stream(schedule) else micro_batches


@dataclass(frozen=True, slots=True)
class SteadyWindow:
    """The mini-batches of a stream, from an empty pipe to an empty one, in which no stage waits for a first or last."""

    first: int  # from its update at the first stage on,
    last: int  # to that of this one
    mini_batches: int  # of the whole stream

    @classmethod
    def of(cls, stages: int, micro_batches: int) -> SteadyWindow:
        """Returns a window as long as what is in flight takes to go through all stages and back, or twice as long.

        >>> SteadyWindow.of(4, 1), SteadyWindow.of(4, 8)
        (SteadyWindow(first=3, last=6, mini_batches=10), SteadyWindow(first=1, last=3, mini_batches=5))
        """
        others = -(-(stages - 1) // micro_batches)  # mini-batches in flight beside one
        last = others + max(2, others)
        return cls(others, last, last + 1 + others)


def stream_schedule(
    name: str, stages: int, micro_batches: int, mini_batches: int, modes: Sequence[str] | None = None
) -> Schedule:
    """The schedule of a stream of so many mini-batches, from an empty pipe to an empty one, with their updates.

    >>> print(stream_schedule("pipedream", 2, 1, 3))
    pipedream: 2 stages, 3 micro-batches
    device 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
    device 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2
    """
    order = StreamSchedule(stages, STREAM_POLICIES[name], modes)
    parts = [*(order.admit(micro_batches) for _ in range(mini_batches)), order.drain()]
    rows = tuple(tuple(action for part in parts for action in part[j]) for j in range(stages))
    return Schedule(name, stages, micro_batches * mini_batches, rows, is_validated=True)


class StreamSchedule:
    """The rows of a stream, which grow by mini-batches."""

    def __init__(self, stages: int, policy: WeightPolicy, modes: Sequence[str] | None = None):
        """`modes`: the checkpoint mode of each stage; "never" if not given."""
        self.stages, self.policy = stages, policy
        self._modes = tuple(modes or ("never",) * stages)
        self._ends = [0]  # micro-batches up to the end of each mini-batch, from 0 for none
        self._starts = [0]  # mini-batches that have begun with an empty pipe
        self._forward = [0] * stages  # by stage: the next micro-batch to go forward,
        self._back = [0] * stages  # and to go back

    @property
    def admitted(self) -> int:
        """The number of mini-batches admitted so far."""
        return len(self._ends) - 1

    def admit(self, micro_batches: int) -> Rows:
        """Takes in a mini-batch of so many micro-batches; returns for each stage the actions to be queued next."""
        self._ends.append(self._ends[-1] + micro_batches)
        return tuple(self._actions(j, is_last=False) for j in range(self.stages))

    def drain(self) -> Rows:
        """Lets all end that are in flight; returns for each stage the actions to be queued next."""
        rows = tuple(self._actions(j, is_last=True) for j in range(self.stages))
        self._starts.append(self.admitted)
        return rows

    def place(self, micro_batch: int) -> tuple[int, int]:
        """Returns the mini-batch of a micro-batch, and its number in it."""
        t = bisect_right(self._ends, micro_batch) - 1
        return t, micro_batch - self._ends[t]

    def size(self, mini_batch: int) -> int:
        """Returns the number of micro-batches of a mini-batch."""
        return self._ends[mini_batch + 1] - self._ends[mini_batch]

    def version(self, stage: int, mini_batch: int) -> int:
        """Returns the version that a mini-batch has at a stage; also of the next one that may be admitted."""
        start = self._starts[bisect_right(self._starts, mini_batch) - 1]
        if self.policy is WeightPolicy.DOUBLE_BUFFERING:
            return max(start, mini_batch - (1 if self.stages > 1 else 0))
        at = 0 if self.policy is WeightPolicy.VERTICAL_SYNC else stage
        # When its first micro-batch comes, that one and others are in flight: as many as the stage may have.
        ended = self._ends[mini_batch] + 1 - (self.stages - at)
        return max(start, bisect_right(self._ends, ended) - 1)

    def _actions(self, j: int, is_last: bool) -> tuple[Action, ...]:
        actions: list[Action] = []
        while True:
            next_forward, next_back = self._forward[j], self._back[j]
            in_flight = next_forward - next_back
            is_full = in_flight == self.stages - j or (in_flight and self._awaits_version(j, next_forward))
            if not is_full and next_forward < self._ends[-1]:
                actions.append(Action(ActionKind.FORWARD, j, next_forward))
                self._forward[j] += 1
            elif is_full or (is_last and in_flight):
                actions += self._backward(j, next_back)
                self._back[j] += 1
            else:
                return tuple(actions)

    def _awaits_version(self, j: int, micro_batch: int) -> bool:
        """Returns whether the version of the next micro-batch is still to be made."""
        if micro_batch >= self._ends[-1]:
            return self.version(j, self.admitted) > self.place(self._back[j])[0]
        return self.version(j, self.place(micro_batch)[0]) > self.place(self._back[j])[0]

    def _backward(self, j: int, micro_batch: int) -> list[Action]:
        t, k = self.place(micro_batch)
        is_end = k == self.size(t) - 1
        actions = [Action(ActionKind.BACKWARD, j, micro_batch)]
        if Action(ActionKind.RECOMPUTE, j, k) in self.recomputed(self.size(t)):
            actions.insert(0, Action(ActionKind.RECOMPUTE, j, micro_batch))
        if is_end:
            actions.append(Action(ActionKind.UPDATE, j, micro_batch))
        return actions

    def recomputed(self, micro_batches: int) -> frozenset[Action]:
        """Returns R of all stages for a mini-batch of so many micro-batches, by their numbers in it."""
        counts = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}
        return frozenset(
            Action(ActionKind.RECOMPUTE, j, k) for j, mode in enumerate(self._modes) for k in range(counts[mode])
        )

    def recomputes_in(self, stage: int) -> bool:
        """Returns whether a stage recomputes any."""
        return self._modes[stage] != "never"

    def first_micro_batch(self, mini_batch: int) -> int:
        """Returns the number of the first micro-batch of a mini-batch."""
        return self._ends[mini_batch]
