"""Random numbers that forward reads for decisions, as in layer drop (`if torch.rand(()) < p: skip`).

A model draws such a number once for a mini-batch. A pipe draws it before it splits the mini-batch, and the result
selects the graph. The model during recording and the guards of a graph must draw the same numbers, so these come from a
separate stream, which only such draws advance.

A draw is a random function without tensor arguments that returns one number.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from fxpipe._torch.functions import opname
from fxpipe._torch.module_internals import STORE_NAMES
from fxpipe._torch.operators import OpOverloadPacket, schema_of
from fxpipe.tracing.fake_tensors import active_fake_mode, draws_nothing, is_faked
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.tensors import tensors_in
from fxpipe.utils import accelerator


class DrawStream:
    """A separate stream of random numbers."""

    def __init__(self, seed: int):
        self._state = torch.Generator().manual_seed(seed).get_state()

    def take(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, drawn from the stream; torch's generator is restored."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.set_state(self._state)
        try:
            return call()
        finally:
            self._state = generator.get_state()
            generator.set_state(before)


def is_draw_of_numbers(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    is_on_cpu = isinstance(result, torch.Tensor) and result.device.type == "cpu"
    return is_on_cpu and next(tensors_in((args, kwargs)), None) is None


class DrawFromStream(TorchFunctionMode):
    """A mode in which a model takes its draws from the stream, as during recording.

    `draws_from_stream`: for each draw of numbers in order, does it use the stream? Draws inside opaque nodes do not,
    nor a number for each sample, of which a micro-batch of one sample draws one.
    """

    def __init__(self, draws: DrawStream, draws_from_stream: Sequence[bool]):
        super().__init__()
        self.draws, self.draws_from_stream = draws, iter(draws_from_stream)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(True for _ in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        has_drawn = not torch.equal(before, torch.default_generator.get_state())
        if has_drawn and is_draw_of_numbers(args, kwargs, result):
            is_one = result.numel() == 1
            if next(self.draws_from_stream, is_one) and is_one:
                return self.draws.take(lambda: func(*args, **kwargs))
        return result


def python_draws(
    model: nn.Module, is_elsewhere: Callable[[], bool], result_of: Callable[[torch.Tensor], Any]
) -> list[tuple[Any, str, Any]]:
    """Returns replacements of functions of Python and numpy that draw one number: (module, name, function).

    They draw with torch, and return `result_of` the number. `is_elsewhere`: whether Python's function draws instead.
    """

    # A loss times a number of Python's has the dtype of the loss; a tensor with more digits would change it.
    dtypes = {p.dtype for p in model.parameters()}
    dtype = torch.float64 if torch.float64 in dtypes or not dtypes else torch.float32

    def draw(low: Any = 0.0, high: Any = 1.0) -> Any:
        return low + (high - low) * torch.rand((), dtype=dtype)

    def patched(home: Any, name: str, most: int) -> tuple[Any, str, Any]:
        plain = getattr(home, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_one = len(args) <= most and kwargs.keys() <= {"low", "high"} and not is_elsewhere()
            is_beta = name.startswith("beta")
            if not is_one or (is_beta and (len(args) < 2 or not all(type(one) in (int, float) for one in args))):
                return plain(*args, **kwargs)
            return result_of(draw_beta(args[0], args[1], dtype) if is_beta else draw(*args, **kwargs))

        return home, name, call

    library = sys.modules["numpy"].random if "numpy" in sys.modules else None
    names = (("rand", 0), ("random", 0), ("uniform", 2), ("beta", 2)) if library else ()
    of_numpy = [patched(library, name, most) for name, most in names]
    return [patched(random, "random", 0), patched(random, "uniform", 2), patched(random, "betavariate", 2), *of_numpy]


def draw_beta(alpha: float, beta: float, dtype: torch.dtype) -> torch.Tensor:
    """Draws a number from a beta distribution, as mixup does; a function of torch for modes."""
    if has_torch_function(()):
        return handle_torch_function(draw_beta, (), alpha, beta, dtype)
    return torch.distributions.Dirichlet(torch.tensor([alpha, beta], dtype=dtype)).sample()[0]


def generator_states() -> list[Any]:
    if (mode := active_fake_mode()) is not None:
        return [mode.drawn]
    states: list[Any] = [torch.default_generator.get_state()]
    return states + [accelerator.generator_position(generator) for generator in accelerator.used_generators()]


def same_generator_states(left: list[Any], right: list[Any]) -> bool:
    return left == right if is_faked() else torch.equal(left[0], right[0]) and left[1:] == right[1:]


# They draw only for some values: rrelu for negative values, poisson and binomial for nonzero ones; or, on a GPU, from a
# state of cuDNN.
_VALUE_DEPENDENT = frozenset("rrelu rrelu_ poisson binomial lstm gru rnn_tanh rnn_relu".split())


def might_draw(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Returns whether this call, which drew nothing, may draw for other values or sizes.

    An expert without tokens has an empty input, and its dropout draws nothing; neither does `randperm(1)`.
    """
    name = opname(function)
    schemas, switch = _random_schemas(name), None
    if getattr(function, "__module__", None) == "torch.nn.functional" and hasattr(function, "__code__"):
        signature = inspect.signature(function)
        names = signature.parameters.keys()  # of a function that draws in training only
        switch = signature if "training" in names and not names.isdisjoint(("p", "dropout_p", "lower")) else None
    if not schemas and switch is None:
        return False
    if name not in _VALUE_DEPENDENT and all(t.numel() > 1 for t in tensors_in((args, kwargs, result))):
        return False
    if switch is not None:
        bound = switch.bind(*args, **kwargs)
        bound.apply_defaults()
        of = bound.arguments
        return bool(of["training"]) and 0 not in (of.get("p"), of.get("dropout_p"))
    fitting = [s for s in schemas if len(args) <= len(s.arguments)]
    return bool(fitting) and not all(draws_nothing(s, args, kwargs) for s in fitting)


@functools.cache
def _random_schemas(name: str) -> tuple[torch.FunctionSchema, ...]:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return ()
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return tuple(schema_of(o) for o in overloads if torch.Tag.nondeterministic_seeded in o.tags)


# Draws during tracing would repeat the same numbers in every step. Generators of Python or numpy that a model holds
# cannot be seeded for a micro-batch and its recomputation, unlike the global ones in a module kept whole. So a forward
# that draws from one is refused. The search covers attributes of modules, globals of the files of their classes, and
# lists, tuples and dicts in these. It misses generators that forward creates, or that objects of other types hold.

_MAX_ITEMS = 1000  # in a container that is searched


class OwnGenerators:
    def __init__(self, model: nn.Module):
        self._before = [(name, generator, _generator_state(generator)) for name, generator in _generators_of(model)]

    def restore(self) -> None:
        for _, generator, state in self._before:
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif hasattr(generator, "set_state"):
                generator.set_state(state)
            else:
                generator.bit_generator.state = state

    def refuse_drawn(self) -> None:
        for name, generator, before in self._before:
            if _comparable_state(_generator_state(generator)) != _comparable_state(before):
                raise CannotRecord(
                    f"forward draws from {name!r}, a random generator of Python's or numpy's of its own, which would "
                    "give the same numbers in every step; draw with torch (torch.rand, torch.randint) instead",
                    is_final=True,
                )


@contextlib.contextmanager
def preserve_own_generators(model: nn.Module) -> Iterator[None]:
    generators = OwnGenerators(model)
    try:
        yield
    finally:
        generators.restore()


def _generators_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen = set[int]()
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in STORE_NAMES:
                yield from _generators_in(f"{path}.{name}" if path else name, value, seen)
    for home in dict.fromkeys(kind.__module__ for module in model.modules() for kind in type(module).__mro__):
        if not home.startswith(("torch.", "builtins")) and home in sys.modules:
            for name, value in list(vars(sys.modules[home]).items()):
                yield from _generators_in(f"{home}.{name}", value, seen)


def _generators_in(name: str, value: Any, seen: set[int], depth: int = 3) -> Iterator[tuple[str, Any]]:
    if _is_own_generator(value) and id(value) not in seen:
        seen.add(id(value))
        yield name, value
    elif depth and isinstance(value, (list, tuple, dict)) and len(value) <= _MAX_ITEMS:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _generators_in(f"{name}[{key!r}]", item, seen, depth - 1)


def _is_own_generator(value: Any) -> bool:
    """Returns whether a value is a generator with a readable state, and not a global one."""
    if isinstance(value, random.Random):
        return value is not random._inst and not isinstance(value, random.SystemRandom)
    if "numpy" not in sys.modules:
        return False
    library = sys.modules["numpy"].random
    return isinstance(value, (library.RandomState, library.Generator)) and value is not library.mtrand._rand


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state


def _comparable_state(state: Any) -> Any:
    """Converts a state to comparable values: numpy's states are dicts with arrays."""
    if isinstance(state, dict):
        return {key: _comparable_state(item) for key, item in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
