"""Questions that forward asks about its inputs and that neither their sizes nor their values answer.

Forward is recorded on copies of its inputs, and its graph holds for inputs that give the answers of the copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.errors import ArgumentError
from fxpipe.tracing.tensors import storage_of

MEMORY_QUESTIONS = frozenset("data_ptr is_set_to storage_offset".split())
# Methods and attributes that tell something about one tensor.
INPUT_METHODS = frozenset("is_conj is_neg is_pinned is_shared _is_view".split())
INPUT_ATTRIBUTES = frozenset("_base _version is_leaf grad grad_fn retains_grad".split())


@dataclass(frozen=True, slots=True)
class InputRead:
    """A question about the flattened inputs, and the answer for the copies."""

    question: Callable[[Sequence[Any]], Any]
    answer: Any
    text: str  # what was asked
    where: str  # the user's source line

    def holds(self, leaves: Sequence[Any]) -> bool:
        return bool(self.question(leaves) == self.answer)


@dataclass(slots=True)
class InputReads:
    """The questions of one recording."""

    leaves: Sequence[Any] = ()  # the copies
    paths: Sequence[str] = ()
    reads: dict[str, InputRead] = field(default_factory=dict)  # by what was asked

    def ask_all(self, question: Callable[[Sequence[Any]], Any], text: str, where: str) -> None:
        """Notes a question about all inputs."""
        if text not in self.reads:
            self.reads[text] = InputRead(question, question(self.leaves), text, where)

    def ask(self, tensor: Any, ask: Callable[[Any], Any], name: str, where: str) -> None:
        """Notes a question about a tensor, if it is an input."""
        for place, leaf in enumerate(self.leaves):
            if leaf is tensor:
                self.ask_all(
                    functools.partial(_answer_for, place, ask), f"{name} of the input {self.paths[place]}", where
                )
                return


def refuse_other_answers(reads: Sequence[InputRead], leaves: Sequence[Any]) -> None:
    """Raises `ArgumentError` if the copies on which forward was just recorded answer otherwise than the inputs."""
    for read in reads:
        if not read.holds(leaves):
            raise ArgumentError(
                f"forward asks for {read.text} at {read.where}, and for the tensors given the answer is another one "
                "than for the copies on which it was traced; give copies (x.clone(), x.contiguous()), or ask outside "
                "forward"
            )


def layouts_of(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the strides of each tensor; those of a contiguous one are its sizes'."""
    return [() if leaf.is_contiguous() else leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def memory_of(leaves: Sequence[Any]) -> list[tuple[int, bool]]:
    """Returns for each tensor which is the first in its memory, and whether it has all of that."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    first = [storage_of(tensor) for tensor in tensors]
    return [(first.index(storage_of(tensor)), tensor.untyped_storage().nbytes() == tensor.nbytes) for tensor in tensors]


def _answer_for(place: int, ask: Callable[[Any], Any], leaves: Sequence[Any]) -> Any:
    """Returns the answer for one input: a number or truth value, or whether it is something at all."""
    answer = ask(leaves[place])
    return answer if isinstance(answer, (bool, int)) else answer is not None
