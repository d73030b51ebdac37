"""The result of a tuner: a row for each candidate, and the one that it chose."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.planning.tuning.candidates import CandidateResult
from fxpipe.utils.ipython import show_as_printed


@dataclass(frozen=True, slots=True)
class Tuning:
    """The candidates that `fxpipe.tune` tried, and the best. `print` shows the table that it chose from."""

    best: CandidateResult
    rows: tuple[CandidateResult, ...]  # those that fit first, by the seconds of a step
    batch: int  # samples of the mini-batch, of all replicas
    devices: tuple[str, ...]  # by worker, of one replica
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty where they were measured

    def __str__(self) -> str:
        from fxpipe.inspect.tuning_text import tuning_text

        return tuning_text(self)

    _repr_pretty_ = show_as_printed

    def _repr_html_(self) -> str:
        from fxpipe.inspect.tuning_text import tuning_html

        return tuning_html(self)
