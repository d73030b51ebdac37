"""`torch.nn.utils.clip_grad_norm_` for a pipe over processes: the norm of the gradients of all ranks."""

from __future__ import annotations

import torch

from fxpipe.distributed.pipeline import DistributedPipeline, distributed_state
from fxpipe.errors import ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.utils.units import with_article


def clip_grad_norm_(
    pipe: Pipeline, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clips the gradients of a model by their norm over all ranks. All ranks call it.

        loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        fxpipe.distributed.clip_grad_norm_(pipe, 1.0)
        optimizer.step()

    The norm equals `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` on the plain model: over the parameters of
    all stages, with tied weights counted once. For a pipe in one process, it calls that function.

    Args:
        max_norm: the largest norm of the gradients after scaling.
        norm_type: order of the norm; `inf` for the largest element.
        error_if_nonfinite: raise on all ranks if the norm is NaN or infinite.

    Returns:
        The norm before clipping, on all ranks.

    Raises:
        StateError: gradients are not summed over replicas yet, after calls within `no_sync()`.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentTypeError(f"pipe is {with_article(pipe)}; expected what fxpipe.pipeline returns")
    if not isinstance(pipe, DistributedPipeline):
        return torch.nn.utils.clip_grad_norm_(pipe.parameters(), max_norm, norm_type, error_if_nonfinite)
    state = distributed_state(pipe)
    with state.engine.running(), state.group.together() as connection, torch.no_grad():
        if state.engine.replicas.has_unsynced:
            raise StateError(
                "the gradients are those of one replica, from calls of forward_backward within no_sync(): clip behind "
                "the call that sums them over the replicas"
            )
        # By the names in the model, so that a tied weight on several ranks counts once.
        names = {id(parameter): name for name, parameter in pipe._fxpipe_model.named_parameters()}
        gradients = {names[id(p)]: p.grad for p in pipe.parameters() if p.grad is not None}
        own = {name: torch.linalg.vector_norm(g, norm_type).cpu() for name, g in gradients.items()}
        everybody = connection.all_gather(own, "the norms of gradients")
    norms = {name: norm for of_rank in everybody for name, norm in of_rank.items()}
    ordered = [norms[name] for name in names.values() if name in norms]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients of all ranks is {float(total)}, so that they cannot be "
            "clipped; error_if_nonfinite=False scales them all the same"
        )
    total = total.to(state.group.device)
    torch.nn.utils.clip_grads_with_norm_(pipe.parameters(), max_norm, total)
    return total
