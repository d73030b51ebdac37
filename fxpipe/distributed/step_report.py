"""The reports of all ranks at the end of the rows, and what they say of the loss together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.distributed.gradient_reduction import StageParameter
from fxpipe.distributed.replicas import ReplicaLoss, ReplicaPart
from fxpipe.errors import LossError, StateError
from fxpipe.runtime.loss_weighting_check import LossWeightingCheck
from fxpipe.runtime.losses import LOSS_REMEDIES, MODEL_LOSS_REMEDIES


@dataclass(slots=True)
class StepReport:
    """One rank's report at the end of the rows."""

    has_hooks: bool = False  # on leaves of this rank, which may fail
    scale: float | None = None  # by which its gradient scaler scales the loss; None: it has none
    loss: ReplicaLoss | None = None  # of the rank of the last stage, as all that follows
    shares: Sequence[Any] = ()  # of micro-batches, where other ranks have to ask
    wrong: str | None = None
    wrong_means: str | None = None
    can_verify: bool | None = False  # None: the loss draws random numbers
    is_verified: bool = False
    weights_of_elements: dict[Any, Any] = field(default_factory=dict)  # that the loss weighting check has noted here
    # Of gradients that are to be summed over replicas:
    missing: frozenset[StageParameter] = frozenset()  # those that this rank has none of
    late: frozenset[StageParameter] = frozenset()  # those that the reduction does not sum
    sparse: frozenset[StageParameter] = frozenset()  # those that the reduction can never sum
    loss_parameters: int = 0  # that loss_fn uses

    def note_gradients(
        self, own: Mapping[StageParameter, torch.Tensor], summed: Mapping[StageParameter, torch.Tensor]
    ) -> None:
        """Notes which gradients this rank has. `summed`: the parameters whose gradients the reduction sums."""
        sparse = frozenset(key for key, gradient in own.items() if gradient.is_sparse)
        self.missing = frozenset(summed) - (own.keys() - sparse)
        self.late = sparse | (own.keys() - summed.keys())
        self.sparse = sparse & summed.keys()


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """The finding of all ranks whether elements count the same in all micro-batches."""

    reports: Sequence[Sequence[StepReport]]  # by replica and rank
    of_last: Sequence[Any]  # by replica, that of the rank of the last stage
    wrong: Sequence[str | None]  # by replica, how elements count differently
    part: ReplicaPart

    @classmethod
    def of(cls, reports: Sequence[Sequence[StepReport]], last: int, part: ReplicaPart) -> LossVerdict:
        """`last`: the rank of the last stage."""
        of_last = [of_replica[last] for of_replica in reports]
        wrong = [
            _wrong_weights(of_replica, of_last[k], of_last[k].wrong, means_only=False)
            for k, of_replica in enumerate(reports)
        ]
        return cls(reports, of_last, wrong, part)

    @property
    def is_unsure(self) -> bool:
        """Tells whether the loss has to be taken of all outputs at once to know."""
        return any(
            wrong and of_last.can_verify and not of_last.is_verified
            for wrong, of_last in zip(self.wrong, self.of_last, strict=True)
        )

    def check(self) -> None:
        """Raises `LossError` on all ranks where gradients would be wrong."""
        wrong_means = None
        for of_replica, of_last, wrong in zip(self.reports, self.of_last, self.wrong, strict=True):
            if wrong and not (of_last.is_verified and of_last.can_verify):
                wrong_means = wrong_means or _wrong_weights(of_replica, of_last, of_last.wrong_means, means_only=True)
        if len(self.reports) > 1 and not any(self.wrong):
            wrong_means = self._wrong_between_replicas()
        if wrong_means:
            raise LossError(f"{wrong_means} {LOSS_REMEDIES}. {MODEL_LOSS_REMEDIES}")

    def _wrong_between_replicas(self) -> str | None:
        """Describes how elements count differently on different replicas, which no replica can see by itself."""
        check = LossWeightingCheck(True, frozenset())
        shares: dict[int, Any] = {}
        for first, of_last, of_replica in zip(self.part.firsts, self.of_last, self.reports, strict=True):
            shares |= {first + i: share for i, share in enumerate(of_last.shares)}
            for report in of_replica:
                for (place, i), note in report.weights_of_elements.items():
                    check.gradients[place, first + i] = note
        return check.difference(shares.__getitem__, means_only=True)


def check_scales(reports: Sequence[Sequence[StepReport]]) -> None:
    """Raises `StateError` on all ranks where their gradient scalers differ."""
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
    """Returns how elements count differently: as the rank of the last stage says, or of what others have reduced."""
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
