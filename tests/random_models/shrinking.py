"""Smaller cases that go wrong in the same way."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

from random_models.case import Case

Judge = Callable[[Case], Mapping[str, object]]


def shrunk(case: Case, verdict: Mapping[str, object], judge: Judge, attempts: int = 80) -> Case:
    """The smallest case that is found with so many verdicts."""
    way = manner(verdict)
    while attempts > 0:
        for smaller in _smaller(case):
            attempts -= 1
            if manner(judge(smaller)) == way:
                case = smaller
                break
            if attempts <= 0:
                break
        else:
            break
    return case


def manner(verdict: Mapping[str, object]) -> str:
    """How a case goes wrong, whatever its numbers and names: wrong gradients, say, or a KeyError."""
    detail = re.sub(r"^step \d+ \(\w+\): ", "", str(verdict["detail"]))
    if "refused" in detail[:40]:
        detail = "a step that was refused"
    return f"{verdict['kind']} {' '.join(detail.split()[:1])}"


def _smaller(case: Case) -> Iterator[Case]:
    lines = case.program
    size = len(lines) // 2
    while size:
        for start in range(0, len(lines), size):
            left = [number for number in range(len(lines)) if not start <= number < start + size]
            ends = tuple(left.index(number) for number in case.by_hand if number in left)
            stages = len(ends) + 1 if case.by_hand else case.stages
            yield dataclasses.replace(case, program=tuple(lines[n] for n in left), by_hand=ends, stages=stages)
        size //= 2
    for number in range(len(case.batches) - 1, 0, -1):
        yield dataclasses.replace(case, batches=case.batches[:number] + case.batches[number + 1 :])
    simple = {
        "by_hand": (), "schedule": "1f1b", "checkpoint": "never", "stages": 2, "chunks": 2, "deferred": False,
        "input_gradient": False,
    }  # fmt: skip
    for name, value in simple.items():
        if getattr(case, name) != value:
            yield dataclasses.replace(case, **{name: value})
    for number, line in enumerate(lines):
        for change in ({"is_part": False}, {"one": 0, "two": 0}):
            changed = dataclasses.replace(line, **change)
            if changed != line and number not in case.by_hand:
                yield dataclasses.replace(case, program=(*lines[:number], changed, *lines[number + 1 :]))
