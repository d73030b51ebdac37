"""Where time runs in a picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """Time 0 is at `left`, the step's end at `right`."""

    left: float
    right: float
    seconds: float

    @property
    def width(self) -> float:
        return self.right - self.left

    def x(self, time: float) -> float:
        return self.left + self.width * min(1.0, max(0.0, time / self.seconds)) if self.seconds else self.left
