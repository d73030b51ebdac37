"""Checks, while planning a pipe for training, that evaluation will not be refused.

Evaluation has another graph (no dropout, other branches, no gradients), which is traced at its first call. So the model
is also recorded in evaluation mode, on two samples, without comparing anything. Only if that fails, the graph is
prepared as the first evaluation would, and discarded: the error is the one that evaluation would raise. This does not
predict errors for other inputs, or for a graph that differs from its model.
"""

from __future__ import annotations

import warnings
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.planning.passes import PreparedGraph, prepare_additional_graph
from fxpipe.utils.locks import planning_block
from fxpipe.utils.progress import show_phases, show_progress

EVALUATION_SAMPLES = 2  # samples


@planning_block()
@show_phases("checking evaluation")
def refusal_of_evaluation(
    first: PreparedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0
) -> FxpipeError | None:
    """Predicts the error that refuses `model.eval()` under `no_grad`, and leaves the model unchanged.

    Returns None for a model that is not in training mode or was not recorded, and for errors of the model itself.
    """
    import torch

    from fxpipe.tracing.cache_key import in_mode
    from fxpipe.tracing.model_state import preserve_state
    from fxpipe.tracing.print_calls import mute_repeated_prints

    model, settings = first.traced.model, first.settings
    if not model.training or first.traced.recording_options is None:
        return None
    everything = [name for name, _ in model.named_modules()]
    with (
        warnings.catch_warnings(),
        mute_repeated_prints(is_first_run=False),
        show_progress(False),
        in_mode(model, everything),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # evaluation itself will issue them
        if _can_be_recorded(first, args, kwargs):
            return None
        with preserve_state(model):  # the first evaluation must see the original state
            try:
                prepare_additional_graph(first, args, kwargs, settings, seed)
            except FxpipeError as error:
                return error
            except Exception:
                return None
    return None


def _can_be_recorded(first: PreparedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Checks that a recording on few samples raises no error."""
    from fxpipe._torch import torch_pytree as pytree
    from fxpipe.tracing import trace_unverified
    from fxpipe.tracing.model_state import model_on, move_inputs
    from fxpipe.tracing.verify.equivalence import slice_samples
    from fxpipe.utils.pytree import flatten

    traced, settings = first.traced, first.settings
    with model_on(traced.model, traced.device):
        args, kwargs = move_inputs((args, kwargs), traced.device)
        leaves, spec = flatten((args, kwargs))
        few = slice_samples(leaves, traced.in_dims, 0, min(EVALUATION_SAMPLES, traced.batch_of(leaves)))
        args, kwargs = pytree.tree_unflatten(few, spec)
        try:
            trace_unverified(traced, args, kwargs, settings.in_dims, settings.out_dims)
        except Exception:
            return False
    return True
