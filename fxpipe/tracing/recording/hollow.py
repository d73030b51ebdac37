"""Recording without arithmetic: tensors that have memory and no values.

What a recording wants of a large mini-batch is which functions run, with which numbers. Fake tensors would tell that
without arithmetic, but libraries see that they are fake and take other ways, and nobody can read one. So here tensors
are real, and just not computed:

    ids ──▶ ids > 0 ──▶ .all()            hangs on inputs and buffers alone: computed, and may be read
     └────▶ embedding(weight, ids) ──▶ …  hangs on a parameter: *hollow*, memory that nobody has written to

Shapes and strides of a hollow tensor are those that fake tensors say. A view is the real one, and so is memory that two
tensors share; what is written in place stays as it was. Memory that is not touched takes none of a CPU's. What forward
reads of a mini-batch is therefore what it would read, and that is all that a graph may hang on (`guards`): to read a
hollow tensor is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import TraceError
from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.recording.fake import is_off


class _Current(threading.local):
    mode: Hollow | None = None


_current = _Current()


class Hollow(TorchDispatchMode):
    """The mode under which what hangs on the parameters of a model on the CPU is not computed."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._fakes = FakeTensorMode()
        self._outer: Hollow | None = None
        self._storages: dict[int, torch.UntypedStorage] = {}  # hollow ones, kept: no other shall get their names
        for parameter in model.parameters():
            self._hollow_out(parameter)

    def __enter__(self) -> Hollow:
        self._outer, _current.mode = _current.mode, self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _current.mode = self._outer

    def has(self, tensor: torch.Tensor) -> bool:
        """Is it hollow?"""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self.has, tensors_in((args, kwargs)))) or _is_view(func):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if torch.Tag.nondeterministic_seeded in func.tags and not is_off(func._schema, args, kwargs):
                torch.rand(())  # it would have moved the generator
            written = _written(func._schema, args, kwargs)
            if written:
                for tensor in written:
                    self._hollow_out(tensor)
                return _returned(func._schema, written)
            fakes = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
            with self._fakes:
                made = func(*fakes[0], **fakes[1])
            return pytree.tree_map_only(FakeTensor, self._like, made)

    def _hollow_out(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same layout in memory."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise _refused(f"a {type(tensor).__name__} is used")
        _refuse_layout(tensor)
        bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._fakes, bare, tensor.device)

    def _like(self, fake: torch.Tensor) -> torch.Tensor:
        _refuse_layout(fake)
        tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        self._hollow_out(tensor)
        return tensor


def is_hollow(tensor: torch.Tensor) -> bool:
    return _current.mode is not None and _current.mode.has(tensor)


def refuse_hollow(tensors: Iterable[torch.Tensor]) -> None:
    """To be called before values are read in a way that no mode sees.

    Raises:
        DataDependentOutputException: one of them has none.
    """
    if any(map(is_hollow, tensors)):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def _refused(what: str) -> TraceError:
    return TraceError(f"forward cannot be recorded without arithmetic, since {what}; record it with values")


def _refuse_layout(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise _refused(f"a tensor of the layout {tensor.layout} is used")


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    is_another = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return is_another or torch.Tag.inplace_view in func.tags


def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a function writes to, in order."""
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    named = (given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [tensor for value in named for tensor in tensors_in(value)]


def _returned(schema: Any, written: list[torch.Tensor]) -> Any:
    """What a function returns that returns, if anything, what it has written to."""
    if not schema.returns:
        return None
    if not all(r.alias_info is not None for r in schema.returns) or len(schema.returns) != len(written):
        raise _refused(f"{schema.name} returns other tensors than those that it writes to")
    return written[0] if len(written) == 1 else tuple(written)
