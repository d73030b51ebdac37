"""The class of a pipe, derived from the class of its model, so that the pipe is an instance of that class.

    class GPT2LMHeadModel(Pipeline, transformers.GPT2LMHeadModel): ...      # what `pipeline_class` makes, once

A pipe shares the `__dict__` of its model. Properties and methods of the model's class run with the pipe as `self`, so
that their calls (`self(...)` in `generate`) run the pipeline. Hooks and a replaced `forward` belong to the pipe: if
shared, they would also run around each recording of the model. `pipe.__class__` is the model's class, as for a proxy:
code that changes it changes the class of the model. (FSDP2 derives classes in the same way.)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import CALL_NAMES, new_call_state
from fxpipe.errors import StateError

NOT_COMPILED = (
    "the stages of a pipe run in worker threads, and compile there: pipe.compile(); to export, give the model: "
    "fxpipe.unwrap(pipe)"
)
SLOTS = ("_fxpipe", "_fxpipe_model", "_fxpipe_call")  # state of a pipe, its model, attributes of its own calls

_classes: weakref.WeakValueDictionary[tuple[type, type], type[Any]] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def pipeline_class(base: type[nn.Module], kind: type[Any]) -> type[Any]:
    """Returns the class of pipes of models of class `kind`, a subclass of both; `base` is the class of pipes."""
    result: type[Any] | None = _classes.get((base, kind))
    if result is not None:
        return result
    names: dict[str, Any] = {
        name: _of_model(name)
        for parent in kind.__mro__
        for name, member in vars(parent).items()
        if isinstance(member, types.MemberDescriptorType)
    }
    names |= {name: _of_call(name) for name in CALL_NAMES}
    names |= {
        "forward": _Forward(_with_signature_of(kind.forward)),
        "__slots__": SLOTS,
        "_fxpipe_class_of_model": kind,
        "__class__": property(lambda pipe: type(pipe._fxpipe_model), _change_class),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,  # transformers writes it into files: `architectures` of a config
    }
    if any(parent.__name__ == "GenerationMixin" for parent in kind.__mro__):
        names["generate"] = _without_cache(kind.generate)
    bases = (base,) if kind is nn.Module else (base, kind)
    try:
        result = types.new_class(kind.__name__, bases, {}, lambda namespace: namespace.update(names))
    except Exception:  # a metaclass with requirements on its classes
        result = type.__new__(type(kind), kind.__name__, bases, names)
    with _lock:
        return _classes.setdefault((base, kind), result)


def set_up(pipe: nn.Module, model: nn.Module) -> None:
    """Shares the attributes of a model with a new pipe."""
    call = new_call_state()
    if "forward" in model.__dict__:
        call["forward_of_model"] = types.MethodType(_with_signature_of(model.__dict__["forward"]), pipe)
    # `__setattr__` of a pipe sets attributes of the model, but not these.
    object.__setattr__(pipe, "__dict__", model.__dict__)
    object.__setattr__(pipe, "_fxpipe_model", model)
    object.__setattr__(pipe, "_fxpipe_call", call)


def _of_model(name: str) -> property:
    """Returns a property for an attribute of the model outside its `__dict__`."""
    return property(
        lambda pipe: getattr(pipe._fxpipe_model, name),
        lambda pipe, value: setattr(pipe._fxpipe_model, name, value),
        lambda pipe: delattr(pipe._fxpipe_model, name),
    )


def _of_call(name: str) -> property:
    """Returns a property for an attribute that pipe and model have separately."""
    return property(
        lambda pipe: pipe._fxpipe_call[name], lambda pipe, value: operator.setitem(pipe._fxpipe_call, name, value)
    )


def _without_cache(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `generate` of a transformers model to run without a cache, which a pipe does not support."""

    @functools.wraps(generate)
    def run(pipe: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        config = pipe.generation_config if generation_config is None else generation_config
        if kwargs.get("use_cache", getattr(config, "use_cache", None)) is not False and "past_key_values" not in kwargs:
            kwargs["use_cache"] = False
            pipe._fxpipe.warn_once(
                "generate",
                "generate: a pipe cannot take a cache of keys and values, so each token runs the whole text again "
                "(use_cache=False, which you can pass yourself). For long texts, generate with the plain model",
            )
        return generate(pipe, inputs, generation_config, *args, **kwargs)

    return run


def _change_class(pipe: Any, kind: type) -> None:
    """Gives the model a class derived from its own alone, for parametrizations, or raises `StateError`."""
    model = pipe._fxpipe_model
    if kind.__bases__ != (type(model),) and kind not in type(model).__mro__:
        raise StateError(
            f"the class of a pipe cannot become {kind.__name__}, which is not made of the model's alone: what calls "
            "the model would run around each stage. fully_shard and replicate cannot have a pipe; over processes it "
            "has replicas by data_parallel= (fxpipe.pipeline)"
        )
    model.__class__ = kind


class _Forward:
    """The `forward` of a pipe: the pipeline, or a replacement; on the class, a function like the model's."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __get__(self, pipe: Any, owner: type) -> Any:
        if pipe is None:
            return self.function
        call = pipe._fxpipe_call
        return call.get("forward") or call.get("forward_of_model") or types.MethodType(self.function, pipe)

    def __set__(self, pipe: Any, value: Any) -> None:
        pipe._fxpipe_call["forward"] = value

    def __delete__(self, pipe: Any) -> None:
        del pipe._fxpipe_call["forward"]


def _with_signature_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the pipe's forward with the signature of the model's, by which trainers choose columns of data."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    run.__name__, run.__qualname__, run.__doc__ = "forward", "Pipeline.forward", forward.__doc__
    run.__annotations__ = dict(getattr(forward, "__annotations__", {}))
    with contextlib.suppress(TypeError, ValueError):  # functions in C have none
        signature = inspect.signature(forward)
        parameters = list(signature.parameters.values())
        if inspect.ismethod(forward) or not parameters or parameters[0].name != "self":
            parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    # Excluded from compiled code: stages compile separately, in their workers.
    disabled: Callable[..., Any] = torch.compiler.disable(run, reason=NOT_COMPILED)
    return disabled
