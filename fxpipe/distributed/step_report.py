"""The reports of all ranks after the rows, and the verdict on the loss that follows from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpipe.distributed.replicas import GradientReport, ReplicaLoss, ReplicaPart
from fxpipe.errors import LossError, StateError
from fxpipe.runtime.loss_weighting_check import LossWeightingCheck
from fxpipe.runtime.losses import LOSS_REMEDIES, MODEL_LOSS_REMEDIES


@dataclass(slots=True)
class StepReport:
    """One rank's report after the rows."""

    has_hooks: bool = False  # True if leaves of this rank have hooks, which may fail
    scale: float | None = None  # loss scale of its gradient scaler; None without a scaler
    loss: ReplicaLoss | None = None  # the fields up to `is_verified` are set by the rank of the last stage
    shares: Sequence[Any] = ()  # by micro-batch, for checks on other ranks
    wrong: str | None = None
    wrong_means: str | None = None
    can_verify: bool | None = False  # None: the loss draws random numbers
    is_verified: bool = False
    weights_of_elements: dict[Any, Any] = field(default_factory=dict)  # recorded by the loss weighting check
    gradients: GradientReport = field(default_factory=GradientReport)
    loss_parameters: int = 0  # number of parameters that loss_fn uses


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """The verdict of all ranks on whether elements have the same weight in all micro-batches."""

    reports: Sequence[Sequence[StepReport]]  # by replica and rank
    of_last: Sequence[Any]  # by replica, the report of the rank of the last stage
    wrong: Sequence[str | None]  # by replica, how weights differ
    part: ReplicaPart

    @classmethod
    def of(cls, reports: Sequence[Sequence[StepReport]], last: int, part: ReplicaPart) -> LossVerdict:
        of_last = [of_replica[last] for of_replica in reports]
        wrong = [
            _wrong_weights(of_replica, of_last[k], of_last[k].wrong, means_only=False)
            for k, of_replica in enumerate(reports)
        ]
        return cls(reports, of_last, wrong, part)

    @property
    def is_unsure(self) -> bool:
        """Returns whether only the loss of all outputs together can decide."""
        return any(
            wrong and of_last.can_verify and not of_last.is_verified
            for wrong, of_last in zip(self.wrong, self.of_last, strict=True)
        )

    def check(self) -> None:
        """Raises `LossError` on all ranks if gradients would be wrong."""
        wrong_means = None
        for of_replica, of_last, wrong in zip(self.reports, self.of_last, self.wrong, strict=True):
            if wrong and not (of_last.is_verified and of_last.can_verify):
                wrong_means = wrong_means or _wrong_weights(of_replica, of_last, of_last.wrong_means, means_only=True)
        if len(self.reports) > 1 and not any(self.wrong):
            wrong_means = self._wrong_between_replicas()
        if wrong_means:
            raise LossError(f"{wrong_means} {LOSS_REMEDIES}. {MODEL_LOSS_REMEDIES}")

    def _wrong_between_replicas(self) -> str | None:
        """Describes how elements have different weights on different replicas, which no replica can detect alone."""
        check = LossWeightingCheck(True, frozenset())
        shares: dict[int, Any] = {}
        for first, of_last, of_replica in zip(self.part.firsts, self.of_last, self.reports, strict=True):
            shares |= {first + i: share for i, share in enumerate(of_last.shares)}
            for report in of_replica:
                for (place, i), note in report.weights_of_elements.items():
                    check.gradients[place, first + i] = note
        return check.difference(shares.__getitem__, means_only=True)


def check_scales(reports: Sequence[Sequence[StepReport]]) -> None:
    """Raises `StateError` on all ranks if their gradient scalers differ."""
    scales = {report.scale for of_replica in reports for report in of_replica}
    if len(scales) > 1:
        texts = ", ".join("none" if scale is None else f"scale {scale:g}" for scale in scales)
        raise StateError(
            f"grad_scaler differs between ranks ({texts}): make one with the same arguments on all ranks, pass it in "
            "all calls, and call step and update on all ranks"
        )


def _wrong_weights(
    reports: Sequence[StepReport], of_last: StepReport, wrong: str | None, *, means_only: bool
) -> str | None:
    """Returns how weights differ: from the rank of the last stage, or computed from the records of the other ranks."""
    if wrong:
        return wrong
    notes = {
        key: value for report in reports if report is not of_last for key, value in report.weights_of_elements.items()
    }
    if not notes:
        return None
    check = LossWeightingCheck(True, frozenset())
    check.gradients.update(notes)
    return check.difference(of_last.shares.__getitem__, means_only)
