"""The verdict on the loss of a mini-batch: its micro-batches add up to it, or gradients would be wrong.

A run gives evidence (`loss_checks`): the weights of elements in each micro-batch and, if it was due, the comparison
with the loss of all outputs. Over processes every rank has a part of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpipe.errors import LossError, UnequalOutputsError
from fxpipe.runtime.loss_checks import LossHistory, LossWeightingCheck
from fxpipe.runtime.losses import LOSS_REMEDIES, MODEL_LOSS_REMEDIES
from fxpipe.runtime.step import Step


@dataclass(slots=True)
class LossEvidence:
    """The evidence of one process. All but `weights_of_elements` is of the process with the loss."""

    wrong: str | None = None  # describes how the weights of elements differ between micro-batches
    wrong_means: str | None = None  # describes it for means only, if the loss was not compared
    can_verify: bool | None = False  # None: the loss draws random numbers
    is_verified: bool = False
    shares: Sequence[Any] = ()  # by micro-batch, for checks in other processes
    weights_of_elements: dict[Any, Any] = field(default_factory=dict)  # recorded by the loss weighting check

    @property
    def is_proved(self) -> bool:
        """True if the micro-batches add up to the loss of all outputs."""
        return self.is_verified and bool(self.can_verify)

    @classmethod
    def of(cls, step: Step, history: LossHistory, is_verified: bool, is_asked: bool) -> tuple[LossEvidence, list[Any]]:
        """Returns the evidence of a step, and its gathered outputs, if they were kept.

        `is_verified`: compare with the loss of all outputs. `is_asked`: the caller needs the outputs.
        """
        stage, outputs = step.loss, list[Any]()
        assert stage is not None
        share = stage.losses.share
        wrong = step.loss_weighting.difference(share)
        is_verified = is_verified and stage.keep_outputs
        try:
            outputs = stage.gather_outputs() if stage.keep_outputs else []
        except UnequalOutputsError:
            if is_asked:
                raise
            is_verified = False
        if is_verified:
            start = time.perf_counter()
            history.can_verify = stage.verify(outputs)
            step.log.verifications.append(time.perf_counter() - start)
        can_verify = history.can_verify
        wrong_means = step.loss_weighting.difference(share, means_only=can_verify is False) if wrong else None
        return cls(wrong, wrong_means, can_verify, is_verified), outputs


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """The verdict on whether elements have the same weight in all micro-batches."""

    evidence: Sequence[Sequence[LossEvidence]]  # by replica of the pipe and rank
    of_last: Sequence[LossEvidence]  # by replica, of the rank of the last stage
    wrong: Sequence[str | None]  # by replica, how weights differ
    firsts: Sequence[int]  # by replica, the number of its first micro-batch

    @classmethod
    def of(cls, evidence: Sequence[Sequence[LossEvidence]], last: int = 0, firsts: Sequence[int] = (0,)) -> LossVerdict:
        of_last = [of_replica[last] for of_replica in evidence]
        wrong = [
            _wrong_weights(of_replica, of_last[k], of_last[k].wrong, means_only=False)
            for k, of_replica in enumerate(evidence)
        ]
        return cls(evidence, of_last, wrong, firsts)

    @property
    def is_unsure(self) -> bool:
        """Returns whether only the loss of all outputs together can decide."""
        pairs = zip(self.wrong, self.of_last, strict=True)
        return any(wrong and of_last.can_verify and not of_last.is_verified for wrong, of_last in pairs)

    def check(self, history: LossHistory | None, micro_batches: int, replica: int = 0) -> None:
        """Raises `LossError` in all processes if gradients would be wrong; else counts the pass in the history."""
        wrong_means = None
        for of_replica, of_last, wrong in zip(self.evidence, self.of_last, self.wrong, strict=True):
            if wrong and not of_last.is_proved:
                wrong_means = wrong_means or _wrong_weights(of_replica, of_last, of_last.wrong_means, means_only=True)
        if len(self.evidence) > 1 and not any(self.wrong):
            wrong_means = self._wrong_between_replicas()
        if wrong_means:
            raise wrong_loss(wrong_means)
        if history is not None and micro_batches > 1:
            history.count_pass(is_mistaken=self.wrong[replica] is not None and self.of_last[replica].is_proved)

    def _wrong_between_replicas(self) -> str | None:
        """Describes how elements have different weights on different replicas, which no replica can detect alone."""
        check = LossWeightingCheck(True, frozenset())
        shares: dict[int, Any] = {}
        for first, of_last, of_replica in zip(self.firsts, self.of_last, self.evidence, strict=True):
            shares |= {first + i: share for i, share in enumerate(of_last.shares)}
            for one in of_replica:
                for (place, i), note in one.weights_of_elements.items():
                    check.gradients[place, first + i] = note
        return check.difference(shares.__getitem__, means_only=True)


def wrong_loss(wrong: str) -> LossError:
    return LossError(f"{wrong} {LOSS_REMEDIES}. {MODEL_LOSS_REMEDIES}")


def _wrong_weights(
    evidence: Sequence[LossEvidence], of_last: LossEvidence, wrong: str | None, *, means_only: bool
) -> str | None:
    """Returns how weights differ: from the rank of the last stage, or computed from the records of the other ranks."""
    if wrong:
        return wrong
    notes = {key: value for one in evidence if one is not of_last for key, value in one.weights_of_elements.items()}
    if not notes:
        return None
    check = LossWeightingCheck(True, frozenset())
    check.gradients.update(notes)
    return check.difference(of_last.shares.__getitem__, means_only)
