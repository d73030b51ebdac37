"""What a step did, and when."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.scheduling.actions import Action


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """One action of the last step; seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The actions of the last `forward_backward`, or of a drop-in forward and its backward, in order of their start."""

    schedule: str
    actions: tuple[ActionRecord, ...]

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end."""
        return max((a.end for a in self.actions), default=0.0)

    def busy(self, stage: int) -> float:
        """Seconds in which a stage was at work."""
        return sum(a.end - a.start for a in self.actions if a.action.stage == stage)

    def __str__(self) -> str:
        stages = sorted({a.action.stage for a in self.actions})
        shares = (f"stage {j} busy {self.busy(j) / (self.seconds or 1):.0%}" for j in stages)
        return f"{self.schedule}: {len(self.actions)} actions in {self.seconds * 1e3:.1f} ms; {', '.join(shares)}"


def record_of(schedule: str, times: dict[Action, tuple[float, float]]) -> StepRecord:
    """From host times of actions."""
    begin = min((start for start, _ in times.values()), default=0.0)
    actions = [ActionRecord(action, start - begin, end - begin) for action, (start, end) in times.items()]
    return StepRecord(schedule, tuple(sorted(actions, key=lambda a: a.start)))
