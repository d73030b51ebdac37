"""Questions of forward about its inputs that do not depend on their sizes or values.

Forward is recorded on copies of its inputs; the graph holds for inputs with the same answers.
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
# Methods and attributes that describe one tensor.
INPUT_METHODS = frozenset("is_conj is_neg is_pinned is_shared _is_view".split())
INPUT_ATTRIBUTES = frozenset("_base _version is_leaf grad grad_fn retains_grad".split())


@dataclass(frozen=True, slots=True)
class InputRead:
    """A question about the flattened inputs, and the answer for the copies."""

    question: Callable[[Sequence[Any]], Any]
    answer: Any
    text: str
    where: str  # the user's source line

    def holds(self, leaves: Sequence[Any]) -> bool:
        return bool(self.question(leaves) == self.answer)


@dataclass(slots=True)
class InputReads:
    leaves: Sequence[Any] = ()  # the copies
    paths: Sequence[str] = ()
    reads: dict[str, InputRead] = field(default_factory=dict)

    def ask_all(self, question: Callable[[Sequence[Any]], Any], text: str, where: str) -> None:
        if text not in self.reads:
            self.reads[text] = InputRead(question, question(self.leaves), text, where)

    def ask_layouts(self, where: str) -> None:
        self.ask_all(layouts_of, "the memory layout of its inputs", where)

    def ask_memory(self, where: str) -> None:
        self.ask_all(memory_of, "the memory of its inputs", where)

    def ask(self, tensor: Any, ask: Callable[[Any], Any], name: str, where: str) -> None:
        """Records a question about a tensor if it is an input."""
        for place, leaf in enumerate(self.leaves):
            if leaf is tensor:
                self.ask_all(
                    functools.partial(_answer_for, place, ask), f"{name} of the input {self.paths[place]}", where
                )
                return


def refuse_other_answers(reads: Sequence[InputRead], leaves: Sequence[Any]) -> None:
    """Raises `ArgumentError` if the inputs answer differently from the copies on which forward was recorded."""
    for read in reads:
        if not read.holds(leaves):
            raise ArgumentError(
                f"forward asks for {read.text} at {read.where}, and for the tensors given the answer is another one "
                "than for the copies on which it was traced; give copies (x.clone(), x.contiguous()), or ask outside "
                "forward"
            )


def layouts_of(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the strides of each tensor; () for a contiguous one."""
    return [() if leaf.is_contiguous() else leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def memory_of(leaves: Sequence[Any]) -> list[tuple[int, bool]]:
    """Returns for each tensor the index of the first tensor in its storage, and whether it fills the storage."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    first = [storage_of(tensor) for tensor in tensors]
    return [(first.index(storage_of(tensor)), tensor.untyped_storage().nbytes() == tensor.nbytes) for tensor in tensors]


def _answer_for(place: int, ask: Callable[[Any], Any], leaves: Sequence[Any]) -> Any:
    """Returns the answer for one input: a number or bool, or whether the answer is not None."""
    answer = ask(leaves[place])
    return answer if isinstance(answer, (bool, int)) else answer is not None
