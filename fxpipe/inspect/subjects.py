"""What a command line is about: a model of the user's, a type of transformers, or a plan that was saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fxpipe.errors import ArgumentError
from fxpipe.inspect.hugging_face import PREFIX, ModelType, parse_model_type
from fxpipe.inspect.target import FORMS, Target, parse_target


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan that was saved."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Subject: TypeAlias = Target | ModelType | PlanFile


def parse_subject(text: str) -> Subject:
    """`hf:gpt2`, `plan.json`, or a factory."""
    if text.startswith(PREFIX):
        return parse_model_type(text)
    if text.endswith(".json"):
        return PlanFile(Path(text))
    try:
        return parse_target(text)
    except ArgumentError:
        raise ArgumentError(f"{text!r}: expected {FORMS}, hf:gpt2 or another type, or a saved plan.json") from None
