"""The result of a tuner, which prints itself."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.planning.tuning.candidates import TuningData
from fxpipe.utils.text_table import show_as_printed


@dataclass(frozen=True, slots=True)
class Tuning(TuningData):
    """The candidates of `fxpipe.tune`, and the best one. `print` shows them as a table."""

    def __str__(self) -> str:
        from fxpipe.inspect.tuning_text import tuning_text

        return tuning_text(self)

    _repr_pretty_ = show_as_printed

    def _repr_html_(self) -> str:
        from fxpipe.inspect.tuning_text import tuning_html

        return tuning_html(self)
