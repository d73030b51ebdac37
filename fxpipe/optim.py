"""Optimizers that live with the stages of a pipe: each stage's weights are updated in its worker, on its device.

    optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=1e-3)

    loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)
    optimizer.step()
    optimizer.zero_grad()

Source: PipeDream updates the weights of a stage where the stage is (Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpipe._torch.optimizers import (
    has_step_post_hooks,
    has_step_pre_hooks,
    part_of_optimizer,
    step_without_hooks,
)
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.parameter_groups import NamedParameters, ParameterGroups, make_parameter_groups, resolve_group
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.planning.options.parse import parse_switch
from fxpipe.runtime.losses import are_bitwise_equal
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.utils import accelerator
from fxpipe.utils.equality import equal_values
from fxpipe.utils.units import with_article

__all__ = ["StageOptimizer"]

T = TypeVar("T")


class StageOptimizer(torch.optim.Optimizer, StagewiseOptimizer):
    """An optimizer of a pipe's parameters, of which each stage steps its own, all of them side by side.

        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)

    It is an instance of the class that it is given, with its `state`, `param_groups` and `defaults`; `step` alone is
    another: it hands the parameters of each stage to the stage's worker. On CPUs weights and state are bit for bit
    those of the class itself, `torch.optim.AdamW(pipe.parameters(), lr=1e-3, weight_decay=0.1)`, and `state_dict` of
    either can be loaded into the other. Learning rate schedulers, `GradScaler`, hooks, `add_param_group`, `foreach` and
    `fused` are those of torch.

    A weight that several stages use is updated once, by the first of them. Clipping by the norm of all gradients needs
    all of them, and so stands between the backward and the step, where all stages have ended:

        loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()

    `pipe.forward_backward(x, target=t, loss_fn=loss_fn, optimizer=optimizer)` does all three, where nothing has to
    stand between them; and with `overlap=True` in less time.

    Before the pipe has planned, and once it is closed, parameters are stepped in the thread that calls. Over processes
    each rank steps the parameters that it holds.

    Args:
        pipe: made by `fxpipe.pipeline`.
        optimizer_class: a class of `torch.optim`, or another one that treats each parameter by itself.
        param_groups: groups with options of their own. A list of dicts: "params" is a name, a pattern of names
            ("*.bias", as `fnmatch` has them), a list of these, or the parameters themselves; a parameter goes to the
            first group that matches it, and "*" in the last one stands for the rest. Or a function from the name of a
            parameter and the parameter to a dict of options, or None for one that is left out. Default: one group of
            all.
        overlap: `pipe.forward_backward(..., optimizer=optimizer)` updates each stage as soon as its device has gone
            back through its stages, while others still run. A step that fails then leaves the weights of some stages
            updated, and its exception says of which; without it a failed step changes nothing. The first step with a
            loss, the tenth, the hundredth and so on verify the loss before they update.
        options: the arguments of the class, defaults of all groups.

    Raises:
        ArgumentError: the class needs a closure (`LBFGS`), names fit nothing, a parameter is given twice, is in no
            group, or is not the pipe's, or groups split a tied weight.
        ArgumentTypeError: `pipe` is no pipe, or `optimizer_class` no class of optimizers.
        StateError: the pipe is closed.

    Warns:
        UserWarning: another optimizer steps the same parameters in turn with this one.
    """

    optimizer_class: type[torch.optim.Optimizer]

    def __new__(cls, pipe: Any, optimizer_class: Any, **kwargs: Any) -> StageOptimizer:
        return _blank_optimizer(_checked_class(optimizer_class))

    def __init__(
        self,
        pipe: Pipeline,
        optimizer_class: Any,
        *,
        param_groups: ParameterGroups = None,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        _check_pipe(pipe)
        self.pipe, self.overlap = pipe, parse_switch("overlap", overlap)
        if overlap and not pipe._fxpipe.can_overlap_updates:
            raise ArgumentError(
                "overlap=True over processes: a step is settled by all ranks together when it has ended, and no rank "
                "may update before that; leave overlap=True out, each rank steps its own parameters"
            )
        self._begin()
        self._arguments = options
        groups = make_parameter_groups(param_groups, _named_parameters(pipe))
        super().__init__(groups, **options)  # of the class that was given

    def _begin(self) -> None:
        self._written: list[_WrittenOptions] = []  # by each part of a step
        self._writing = threading.Lock()
        self._rival: str | None = None  # who else steps the same parameters
        self._has_stepped = self._has_warned = False
        self._tried: set[Any] = set()  # sizes of stages and kinds of options that a trial has passed with
        _watch_rivals(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group: "params" are parameters of the pipe or, as for `StageOptimizer`, names and patterns."""
        taken = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        held = {id(parameter) for parameter in self.pipe.parameters()}
        super().add_param_group(resolve_group(param_group, _named_parameters(self.pipe), taken, held))

    # -- Steps -------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights of all stages, in their workers, side by side.

        `closure` runs the model again and returns the loss, as for torch's optimizers.
        """
        if isinstance(closure, _StepWithin):
            result = closure()
            if closure.takes_options:
                self._take_written_options()
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_rival()
        self._written.clear()
        self.pipe._fxpipe.update(self)
        self._take_written_options()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. In the middle of a stream it does nothing: stages take away their gradients themselves."""
        if not self.pipe._fxpipe.engine.is_streaming:
            super().zero_grad(set_to_none)

    def step_within(self, run: Callable[[], T]) -> T:
        if has_step_pre_hooks(self):
            raise StateError(
                "the optimizer has hooks to be called before it steps (register_step_pre_hook), when the gradients of "
                "all stages are there; with overlap=True stages are updated before that: remove them, or leave "
                "overlap=True out"
            )
        self._warn_of_rival()
        self._written.clear()
        result: T = self.step(_StepWithin(run))
        return result

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step_parameters(
        self, parameters: Collection[torch.Tensor], options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        chosen = {id(parameter) for parameter in parameters}
        groups: dict[int, dict[str, Any]] = {}
        begin: dict[int, dict[str, Any]] = {}  # options with which the step begins
        for k, group in enumerate(self.param_groups):
            of_group = [parameter for parameter in group["params"] if id(parameter) in chosen]
            if of_group:
                begin[k] = {**group, **(options[k] if options is not None else {})}
                groups[k] = {**begin[k], "params": of_group}
        part = part_of_optimizer(self, self.optimizer_class, [*groups.values()])
        attributes = dict(part.__dict__)
        step_without_hooks(part)
        written: _WrittenOptions = {
            (None, name): value for name, value in part.__dict__.items() if attributes.get(name, part) is not value
        }
        for k, group in groups.items():
            before = begin[k]
            written |= {(k, key): v for key, v in group.items() if key != "params" and before.get(key, part) is not v}
        if options is not None and written:  # the next mini-batch would begin with what this one has begun with
            names = ", ".join(sorted(repr(name) for _, name in written))
            raise StateError(
                f"{self.optimizer_class.__name__} writes {names} while it steps, to its groups or to itself, and "
                "updates of several mini-batches are under way in a stream: use it with forward_backward"
            )
        with self._writing:
            self._written.append(written)

    def check_parts(self, parts: Sequence[Collection[torch.Tensor]]) -> None:
        options = ((name, value) for group in self.param_groups for name, value in group.items())
        key = (*map(len, parts), *((name, _kind_of_option(value)) for name, value in options))
        if len(parts) > 1 and key not in self._tried:
            _try_parts(self, parts)
            self._tried.add(key)

    # -- Streams -----------------------------------------------------------------------------------------------------

    def begin_stream(self) -> None:
        for has_hooks, when in ((has_step_pre_hooks, "pre"), (has_step_post_hooks, "post")):
            if has_hooks(self):
                raise StateError(
                    f"the optimizer has hooks around its step (register_step_{when}_hook), which see all gradients and "
                    "weights of a step; in a stream stages are at different mini-batches, and there is no such time: "
                    "remove them, or train with forward_backward"
                )
        self._warn_of_rival()
        self._written.clear()

    def options_now(self) -> list[dict[str, Any]]:
        return [
            {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key != "params"}
            for group in self.param_groups
        ]

    def note_step(self) -> None:
        self.step(_StepWithin(lambda: None, takes_options=False))

    def end_stream(self) -> None:
        self._written.clear()
        self._has_stepped = True
        self._keep_state_in_order()

    # -- Options and state ---------------------------------------------------------------------------------------------

    def _take_written_options(self) -> None:
        """Takes over what the parts of a step have written to the options of groups, and to themselves.

        Raises:
            StateError: they differ, since the class computes something of all its parameters.
        """
        self._has_stepped = True
        written, self._written = self._written, []
        for key in {key for of_part in written for key in of_part}:
            values = [of_part[key] for of_part in written if key in of_part]
            place, name = key
            is_common = place is not None or len(values) == len(written)  # a group may be of few stages
            if not is_common or not all(equal_values(values[0], value) for value in values):
                raise StateError(
                    f"{self.optimizer_class.__name__} writes {name!r} while it steps, and comes to different values in "
                    "different stages: it computes something of all its parameters, and stages would each train "
                    f"another way; use it by itself: {self.optimizer_class.__name__}(pipe.parameters(), ...)"
                )
            if place is None:
                self.__dict__[name] = values[0]
            else:
                self.param_groups[place][name] = values[0]
        self._keep_state_in_order()

    def _keep_state_in_order(self) -> None:
        """Keeps the state in the order of the parameters, whichever stage was the first to have some."""
        order = {id(parameter): k for k, parameter in enumerate(self.parameters())}
        keys = [*self.state]
        ordered = sorted(keys, key=lambda key: order.get(id(key), len(order)))
        if any(one is not other for one, other in zip(keys, ordered, strict=True)):
            values = [self.state[key] for key in ordered]
            self.state.clear()
            self.state.update(zip(ordered, values, strict=True))

    def _warn_of_rival(self) -> None:
        if self._rival is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._rival} and this StageOptimizer of {self.optimizer_class.__name__} step the same parameters in "
                "turn: each update is made twice, unless that is meant; keep one of them",
                stacklevel=4,
            )

    # -- Copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "pipe": self.pipe, "overlap": self.overlap, "_arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_written" not in self.__dict__:  # else a state is loaded
            self._begin()
        super().__setstate__(state)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank_optimizer, (self.optimizer_class,), self.__getstate__()


@dataclass(frozen=True, slots=True)
class _StepWithin:
    """The closure of a step that the pipe runs, with the updates of the stages in it."""

    run: Callable[[], Any]
    takes_options: bool = True  # does the optimizer take over what its parts have written

    def __call__(self) -> Any:
        return self.run()


_WrittenOptions = dict[tuple[int | None, str], Any]  # by group, None for the optimizer itself, and name


@functools.cache
def _stage_class(optimizer_class: Any) -> type[StageOptimizer]:
    """The class of stage optimizers that are of this class, too."""
    attributes = {"__module__": __name__, "__doc__": StageOptimizer.__doc__, "optimizer_class": optimizer_class}
    return types.new_class(
        f"Stage{optimizer_class.__name__}",
        (StageOptimizer, optimizer_class),
        exec_body=lambda own: own.update(attributes),
    )


def _blank_optimizer(optimizer_class: Any) -> StageOptimizer:
    """An optimizer that is not initialised yet."""
    return object.__new__(_stage_class(optimizer_class))


def _named_parameters(pipe: Pipeline) -> NamedParameters:
    """The parameters of the whole model: groups are the same on all processes."""
    return NamedParameters(pipe._fxpipe_model.named_parameters(remove_duplicate=False))


def _watch_rivals(optimizer: StageOptimizer) -> None:
    """Lets an optimizer know, as long as it lives, when another one steps parameters that it has stepped before."""
    known = weakref.ref(optimizer)

    def before_step(other: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ours = known()
        if ours is None or ours is other or ours._rival is not None or not ours._has_stepped:
            return
        if other.__dict__.get("_writing") is not ours._writing:  # else it is a part of ours: its class calls super()
            own = {id(parameter) for parameter in ours.parameters()}
            if any(id(parameter) in own for group in other.param_groups for parameter in group["params"]):
                ours._rival = type(other).__name__

    weakref.finalize(optimizer, register_optimizer_step_pre_hook(before_step).remove)


# -- Trial of an update in parts -------------------------------------------------------------------------------------


def _kind_of_option(value: Any) -> Any:
    """Returns what has to stay as it is of an option, so that no other trial is needed."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return type(value), isinstance(value, (int, float)) and value != 0


def _try_parts(optimizer: StageOptimizer, parts: Sequence[Collection[torch.Tensor]]) -> None:
    """Steps small copies of the parameters, all together and stage by stage, and compares them bit for bit.

    Raises:
        StateError: they differ, or cannot be stepped.
    """
    name, cause = optimizer.optimizer_class.__name__, None
    why = "takes another update where each stage steps its own parameters than where all are stepped together"
    for is_sparse in (False, True):
        try:
            together = _step_copies(optimizer, [[p for part in parts for p in part]], is_sparse)
            in_parts = _step_copies(optimizer, parts[::-1], is_sparse)
        except Exception as error:
            cause = cause or error
            continue
        if are_bitwise_equal([*map(together.get, in_parts)], [*in_parts.values()]):
            return
        cause = None
        break
    if cause is not None:
        why = f"could not be tried with small copies of the parameters ({type(cause).__name__}: {cause})"
    raise StateError(
        f"{name} {why}. A StageOptimizer steps each stage by itself, which is right only if nothing is computed of all "
        "parameters (their norm, to clip by, or a common step size) or drawn at random: switch that off "
        f"(max_grad_norm=None, say), or use it by itself, in one process: {name}(pipe.parameters(), ...)"
    ) from cause


def _step_copies(
    optimizer: StageOptimizer, parts: Sequence[Collection[torch.Tensor]], is_sparse: bool
) -> dict[tuple[int, int], torch.Tensor]:
    """Takes three steps with an optimizer for each part; returns the copies after each, by step and parameter."""
    result, trials = {}, []
    with accelerator.restore_generators([]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        drawn = {
            id(p): torch.randn(4, *(min(size, 2) for size in p.shape), device="cpu").to(p.device, p.dtype)
            for p in optimizer.parameters()
        }
        for part in parts:
            small = {id(p): drawn[id(p)][0].clone().requires_grad_(p.requires_grad) for p in part}
            groups = [
                {**options, "params": [small[id(p)] for p in group["params"] if id(p) in small]}
                for group, options in zip(optimizer.param_groups, optimizer.options_now(), strict=True)
            ]
            used = [group for group in groups if group["params"]]
            trials.append((small, optimizer.optimizer_class(used, **optimizer._arguments)))
        for step in range(3):
            for small, trial in trials:
                for key, p in ((key, p) for key, p in small.items() if p.requires_grad):
                    gradient = drawn[key][step + 1] * (1e-3, 1.0, torch.finfo(p.dtype).max ** 0.25)[step]
                    p.grad = gradient.to_sparse(1) if is_sparse else gradient
                step_without_hooks(trial)
                result.update({(step, key): p.detach().clone() for key, p in small.items()})
    return result


# -- Arguments -------------------------------------------------------------------------------------------------------


def _check_pipe(pipe: Any) -> None:
    if not isinstance(pipe, Pipeline):
        raise ArgumentTypeError(
            f"pipe is {with_article(pipe)}; expected what fxpipe.pipeline(model, ...) returns. A model without a "
            "pipe has no stages: use the optimizer itself"
        )
    if pipe._fxpipe.closed:
        raise StateError("the pipe is closed; make a new one with fxpipe.pipeline(model, ...)")


def _checked_class(optimizer_class: Any) -> type[torch.optim.Optimizer]:
    """The class of the optimizers of the stages.

    Raises:
        ArgumentTypeError: it is no such class.
        ArgumentError: its step cannot be taken stage by stage.
    """
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise ArgumentTypeError(
            f"optimizer_class is an instance of {name}; give the class and its options: "
            f"StageOptimizer(pipe, torch.optim.{name}, lr=...)"
        )
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"optimizer_class is {optimizer_class!r}; expected a class of optimizers, such as torch.optim.AdamW"
        )
    if issubclass(optimizer_class, StageOptimizer):
        raise ArgumentTypeError(f"optimizer_class is {optimizer_class.__name__} itself; give a class of torch.optim")
    arguments = [*inspect.signature(optimizer_class.step).parameters.values()][1:]
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in arguments):
        raise ArgumentError(
            f"{optimizer_class.__name__}.step needs a closure: it takes the loss several times within a step, and "
            "looks at all parameters at once, which stages cannot do by themselves; use it with the drop-in: "
            f"{optimizer_class.__name__}(pipe.parameters(), ...).step(closure)"
        )
    return optimizer_class
