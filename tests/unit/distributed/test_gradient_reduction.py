"""Gradients go to the other replicas as soon as they are complete, and their sums are those of all replicas."""

import pytest
import torch
import torch.nn.functional as F
from helpers.rank_models import DENSE_CUTS, Dense
from helpers.ranks import square_mesh

import fxpipe
from fxpipe.distributed.gradient_reduction import GradientReduction
from fxpipe.runtime.step import Step


def watch_reduction(mesh, schedule):
    """The actions of a rank in the third step, and the gradients that the reducer is given."""
    torch.manual_seed(0)
    events, mesh = [], square_mesh()
    perform, give = Step.perform, GradientReduction.give

    def noted(step, action):
        events.append(("begin", str(action)))
        perform(step, action)
        events.append(("end", str(action)))

    def noted_gradient(reduction, key, gradient):
        events.append(("give", key))
        give(reduction, key, gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "perform", noted)
        patch.setattr(GradientReduction, "give", noted_gradient)
        x = torch.randn(8, 4)
        balance = DENSE_CUTS[4 if schedule == "interleaved_1f1b" else 2]
        pipe = fxpipe.pipeline(
            Dense(), mesh["pipe"], 4, data_parallel=mesh["data"], schedule=schedule, balance=balance,
            example_args=(x,), hardware="cpu", progress=False, check=False,
        )  # fmt: skip
        for _ in range(3):
            events.clear()
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return events


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_gradients_go_to_the_other_replicas_while_the_last_backward_runs(four_ranks, schedule):
    for rank, events in enumerate(four_ranks.run(watch_reduction, schedule)):
        kinds = [kind for kind, _ in events]
        places = [place for place, kind in enumerate(kinds) if kind == "give"]
        assert len(places) == 4, rank  # two blocks of weight and bias
        for place in places:  # within an action, not behind it
            assert kinds[:place].count("begin") == kinds[:place].count("end") + 1
