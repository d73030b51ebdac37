"""Models that cannot be recorded as they are, found before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fxpipe.tracing.recording.refusals import CannotRecord

_GLOBAL_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def refuse_model(model: nn.Module) -> None:
    """Raises, with everything about `model` that stands in the way."""
    found = [f"- {line}" for line in (*_global_hooks(), *_wrong_modules(model), *_wrong_tensors(model))]
    if found:
        raise CannotRecord(f"{type(model).__name__} cannot be traced as it is:\n" + "\n".join(found), final=True)


def _global_hooks() -> Iterator[str]:
    for kind in _GLOBAL_HOOKS:
        for hook in getattr(torch_module, f"_global_{kind}").values():
            yield f"the hook {hook!r}, put on all modules, would not run in the pipeline; remove it (handle.remove())"


def _wrong_modules(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        kind = type(module)
        name = f"module {path!r} ({kind.__name__})" if path else f"the model ({kind.__name__})"
        if not path.isascii() and path.encode(errors="replace").decode() != path:
            yield f"{name} has a lone surrogate in its name, which no file and no code can hold; give it another name"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{name} is TorchScript, whose functions cannot be seen; use the Python module it was made from"
        elif kind.__module__ == "fxpipe.pipes":
            yield f"{name} is a pipe itself; use the module it was made from (pipe.model)"
        elif kind.__module__.startswith(("torch.nn.parallel.", "torch.distributed.")):
            yield f"{name} is a wrapper for several processes or devices; use the module inside (wrapped.module)"


def _wrong_tensors(model: nn.Module) -> Iterator[str]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            yield f"{name!r} is not initialized; call the model once on example inputs first"
        elif tensor.is_inference():
            yield f"{name!r} was made in inference mode and cannot be changed any more; make the model outside of it"
