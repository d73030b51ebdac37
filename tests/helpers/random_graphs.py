"""Random models as a hypothesis strategy."""

import copy

import hypothesis
import hypothesis.strategies as st
import torch
from random_models.case import Case, Line
from random_models.judge import plain_model
from random_models.operations import PLAIN
from torch import nn

from helpers.every_cut import loss_of

BATCH = 5  # in 3 chunks: 2, 2, 1


lines = st.builds(Line, st.sampled_from([*PLAIN]), st.integers(0, 6), st.integers(0, 6))


def runs(model: nn.Module, *args: torch.Tensor) -> bool:
    """Does torch itself carry it out? It refuses some writes to what backward needs."""
    try:
        model = copy.deepcopy(model)
        loss_of(model(*[a.clone() for a in args])).backward()
    except RuntimeError:
        return False
    return True


# What is asked of any model, in any step.
ANY_MODEL_AND_STEP = {
    "program": st.lists(lines, min_size=2, max_size=12).map(tuple),
    "chunks": st.sampled_from([1, 3]),
    "schedule": st.sampled_from(["drop-in", "1f1b", "gpipe"]),
    "checkpoint": st.sampled_from(["never", "except_last", "always"]),
}


def random_model(program: tuple[Line, ...]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, if torch itself carries it out."""
    model, args = plain_model(Case(program, ())), (torch.randn(BATCH, 3, 4), torch.randint(0, 3, (BATCH, 3)))
    hypothesis.assume(runs(model, *args))
    return model, args
