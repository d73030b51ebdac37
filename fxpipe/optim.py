"""Optimizers whose stages update their weights themselves: each in its worker, on its device.

Source: PipeDream updates the weights of a stage where the stage is (Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpipe._torch.optimizers import has_step_hooks, part_of_optimizer, step_without_hooks
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.planning.options.parse import parse_switch
from fxpipe.runtime.losses import are_bitwise_equal
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.utils import accelerator
from fxpipe.utils.python_objects import equal_values
from fxpipe.utils.units import names_text, with_article

__all__ = ["StageOptimizer"]

GroupFunction: TypeAlias = Callable[[str, nn.Parameter], "Mapping[str, Any] | None"]
ParameterGroups: TypeAlias = "Iterable[Any] | GroupFunction | None"

_WrittenOptions = dict[tuple[int | None, str], Any]  # by group, None for the optimizer itself, and name


class StageOptimizer(StagewiseOptimizer):
    """An optimizer of a pipe's parameters. All stages step their parameters at the same time.

        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)

    It is an instance of the class that you pass, with its `state`, `param_groups` and `defaults`; only `step` differs:
    it passes the parameters of each stage to the stage's worker. On CPUs weights and state are bitwise equal to
    `torch.optim.AdamW(pipe.parameters(), lr=1e-3, weight_decay=0.1)`, and `state_dict` of either can be loaded into the
    other. Learning rate schedulers, `GradScaler`, hooks, `add_param_group`, `foreach` and `fused` work as in torch.

    A weight that several stages use is updated once, by the first of them. Clip by the norm of all gradients between
    the backward and the step:

        loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()

    Without code between them, `pipe.forward_backward(x, target=t, loss_fn=loss_fn, optimizer=optimizer)` also steps;
    `overlap=True` makes this faster. Before the pipe has planned, and once it is closed, parameters are stepped in the
    calling thread. Over processes each rank steps the parameters that it holds.

    Args:
        pipe: made by `fxpipe.pipeline`.
        optimizer_class: a class of `torch.optim`, or another class that updates each parameter independently.
        param_groups: groups with separate options. A list of dicts: "params" is a name, a pattern of names ("*.bias",
            as in `fnmatch`), a list of these, or the parameters themselves; a parameter goes to the first group that
            matches it, so "*" in the last group is for all others. Or a function from the name of a parameter and the
            parameter to a dict of options, or None to leave the parameter out. Default: one group of all.
        overlap: `pipe.forward_backward(..., optimizer=optimizer)` updates each stage as soon as its device has ended
            the backward of its stages, while others still run. A step that fails then leaves the weights of some stages
            updated, and its exception names them; without `overlap` a failed step changes nothing. The first step with
            a loss, the tenth, the hundredth and so on verify the loss before they update.
        options: the arguments of the class, defaults of all groups.

    Raises:
        ArgumentError: the class needs a closure (`LBFGS`), names match nothing, a parameter is passed twice, is in no
            group, or is not the pipe's, or groups split a tied weight.
        ArgumentTypeError: `pipe` is not a pipe, or `optimizer_class` is not a class of optimizers.
        StateError: the pipe is closed.

    Warns:
        UserWarning: another optimizer steps the same parameters alternately with this one.
    """

    optimizer_class: type[torch.optim.Optimizer]
    _written: list[_WrittenOptions]  # by each part of a step
    _rival: str | None = None  # the class of another optimizer that steps the same parameters
    _is_updated = _has_stepped = _is_of_stream = False
    _tried: frozenset[Any] = frozenset()  # sizes of stages and types of options for which a trial has passed

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
        if not isinstance(pipe, Pipeline):
            raise ArgumentTypeError(
                f"pipe is {with_article(pipe)}; expected what fxpipe.pipeline(model, ...) returns. A model without a "
                "pipe has no stages: use the optimizer itself"
            )
        pipe._fxpipe.check_open()
        self.pipe, self.overlap, self._arguments = pipe, parse_switch("overlap", overlap), options
        if overlap and not pipe._fxpipe.can_overlap_updates:
            raise ArgumentError(
                "overlap=True over processes: a step is settled by all ranks together when it has ended, and no rank "
                "may update before that; leave overlap=True out, each rank steps its own parameters"
            )
        # Of the full model, so that groups are equal on all processes.
        named = NamedParameters(pipe._fxpipe_model.named_parameters(remove_duplicate=False))
        super().__init__(make_parameter_groups(param_groups, named), **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. "params" are parameters of the pipe or, as for `StageOptimizer`, names and patterns.

        Raises:
            StateError: a stream is open, whose stages train the parameters of its start.
        """
        if self._is_of_stream and self.pipe._fxpipe.engine.is_streaming:
            raise StateError(
                "add_param_group in the middle of a stream (train_stream), which trains the parameters that the "
                "optimizer had at its start: let the stream end, or close it (stream.close()), and then add the group"
            )
        taken, held = {id(p) for p in self.parameters()}, {id(p) for p in self.pipe.parameters()}
        named = NamedParameters(self.pipe._fxpipe_model.named_parameters(remove_duplicate=False))
        super().add_param_group(resolve_group(param_group, named, taken, held))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights of all stages at the same time, in their workers. `closure`: as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_updated:
            self._begin()
            self.pipe._fxpipe.update(self)
        self._has_stepped = True
        written, self._written = self._written, []
        for place, name in {key for of_part in written for key in of_part}:
            values = [of_part[place, name] for of_part in written if (place, name) in of_part]
            is_common = place is not None or len(values) == len(written)  # a group may be in few stages
            if not is_common or not all(equal_values(values[0], value) for value in values):
                raise StateError(
                    f"{self.optimizer_class.__name__} writes {name!r} while it steps, and comes to different values in "
                    "different stages: it computes something of all its parameters, and stages would each train "
                    f"another way; use it by itself: {self.optimizer_class.__name__}(pipe.parameters(), ...)"
                )
            options = self.__dict__ if place is None else self.param_groups[place]
            options[name] = values[0]
        return loss

    def count_step(self) -> None:
        self._is_updated = True
        try:
            self.step()
        finally:
            self._is_updated = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as in torch. Does nothing in a stream, where stages drop their gradients."""
        if not self.pipe._fxpipe.engine.is_streaming:
            super().zero_grad(set_to_none)

    def begin_updates(self, in_stream: bool) -> None:
        where = "in a stream" if in_stream else "with overlap=True"
        for when in ("pre", "post") if in_stream else ("pre",):
            if has_step_hooks(self, when):
                raise StateError(
                    f"the optimizer has hooks (register_step_{when}_hook), which see all gradients and weights of a "
                    f"step; {where} stages are updated at different times: remove the hooks, or train with "
                    "forward_backward without overlap=True"
                )
        self._is_of_stream = in_stream
        self._begin()

    def _begin(self) -> None:
        self._written = []
        if self._rival is not None:
            self.pipe._fxpipe.warn_once(
                f"rival {id(self)}",
                f"{self._rival} and this StageOptimizer of {self.optimizer_class.__name__} step the same parameters in "
                "turn: each update is made twice, unless that is meant; keep one of them",
            )

    def step_parameters(
        self, parameters: Collection[torch.Tensor], options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        chosen = {id(parameter) for parameter in parameters}
        own = [{}] * len(self.param_groups) if options is None else options
        every = [{**group, **more} for group, more in zip(self.param_groups, own, strict=True)]
        groups = {k: {**g, "params": [p for p in g["params"] if id(p) in chosen]} for k, g in enumerate(every)}
        groups = {k: group for k, group in groups.items() if group["params"]}
        part = part_of_optimizer(self, self.optimizer_class, [*groups.values()])
        attributes = dict(part.__dict__)
        step_without_hooks(part)
        written: _WrittenOptions = {
            (None, name): value for name, value in part.__dict__.items() if attributes.get(name, part) is not value
        }
        for k, group in groups.items():
            written |= {(k, key): v for key, v in group.items() if key != "params" and every[k].get(key, part) is not v}
        if options is None:
            self._written.append(written)
        elif written:  # the next mini-batch would start from the values before this step
            names = ", ".join(sorted(repr(name) for _, name in written))
            raise StateError(
                f"{self.optimizer_class.__name__} writes {names} while it steps, to its groups or to itself, and "
                "updates of several mini-batches are under way in a stream: use it with forward_backward"
            )

    def check_parts(self, parts: Sequence[Collection[torch.Tensor]]) -> None:
        key: tuple[Any, ...] = tuple(map(len, parts))
        for name, value in (option for group in self.param_groups for option in group.items()):
            is_kind = value is None or isinstance(value, (str, bool))
            is_used = isinstance(value, (int, float)) and value != 0
            key += (name, value if is_kind else (type(value), is_used))
        if len(parts) > 1 and key not in self._tried:
            _try_parts(self, parts)
            self._tried |= {key}

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's `state_dict`, with the state in the order of parameters, not of the stages' updates.

        The class, and hooks of `state_dict`, may return another form, which stays as it is.
        """
        result: dict[str, Any] = super().state_dict()
        state = result.get("state") if isinstance(result, dict) else None
        if not isinstance(state, dict):
            return result
        entries = sorted(state.items(), key=lambda entry: entry[0] if isinstance(entry[0], int) else math.inf)
        return {**result, "state": dict(entries)}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "pipe": self.pipe, "overlap": self.overlap, "_arguments": self._arguments}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank_optimizer, (self.optimizer_class,), self.__getstate__()


@functools.cache
def _stage_class(optimizer_class: Any) -> type[StageOptimizer]:
    """Creates the subclass of `StageOptimizer` and `optimizer_class`."""
    attributes = {"__module__": __name__, "__doc__": StageOptimizer.__doc__, "optimizer_class": optimizer_class}
    return type(f"Stage{optimizer_class.__name__}", (StageOptimizer, optimizer_class), attributes)


def _blank_optimizer(optimizer_class: Any) -> StageOptimizer:
    """Creates an uninitialized optimizer, which notices when another optimizer steps parameters that it has stepped."""
    optimizer = object.__new__(_stage_class(optimizer_class))
    known = weakref.ref(optimizer)

    def before_step(other: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ours = known()
        if ours is None or ours is other or ours._rival is not None or not ours._has_stepped:
            return
        if other.__dict__.get("_arguments") is not ours._arguments:  # else a part of ours, which calls super().step
            own = {id(parameter) for parameter in ours.parameters()}
            if any(id(parameter) in own for group in other.param_groups for parameter in group["params"]):
                ours._rival = type(other).__name__

    weakref.finalize(optimizer, register_optimizer_step_pre_hook(before_step).remove)
    return optimizer


def _try_parts(optimizer: StageOptimizer, parts: Sequence[Collection[torch.Tensor]]) -> None:
    """Steps small copies of the parameters, all together and stage by stage; raises `StateError` if bits differ."""
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
    """Takes three steps with an optimizer for each part. Returns the copies after each step, by step and parameter."""
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


def _checked_class(optimizer_class: Any) -> type[torch.optim.Optimizer]:
    """Returns `optimizer_class`; raises if it is not a class of optimizers, or cannot step stage by stage."""
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


# -- Parameter groups, by names of parameters --------------------------------------------------------------------------
#
#     None                                                           one group of all
#     [{"params": "*.bias", "weight_decay": 0.0}, {"params": "*"}]   by name or pattern; the first group that matches
#     [{"params": model.head.parameters()}]                          by tensors, as in torch
#     lambda name, parameter: {"weight_decay": 0.0} if ...           by a function, which returns options
#
# All names of a tied weight must give the same group.


class NamedParameters:
    """The parameters of a model with all of their names, in order."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self.names: dict[int, list[str]] = {}
        self.tensors: dict[int, nn.Parameter] = {}
        for name, parameter in named:
            self.names.setdefault(id(parameter), []).append(name)
            self.tensors[id(parameter)] = parameter


def make_parameter_groups(asked: ParameterGroups, named: NamedParameters) -> list[dict[str, Any]]:
    """Returns groups for torch's optimizers, with the parameters of a model instead of names."""
    if asked is None:
        return [{"params": [*named.tensors.values()]}]
    if callable(asked):
        return _groups_of_function(asked, named)
    if isinstance(asked, str | torch.Tensor | Mapping) or not isinstance(asked, Iterable):
        raise ArgumentTypeError(
            f"param_groups is {with_article(asked)}; expected a list of groups, "
            '[{"params": "*.bias", "weight_decay": 0.0}, {"params": "*"}], a function (name, parameter) -> options, '
            "or parameters"
        )
    items = [*asked]
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    groups = [_as_group(f"param_groups[{k}]", item) for k, item in enumerate(items)]
    patterns = [_patterns_of(f"param_groups[{k}]", group) for k, group in enumerate(groups)]
    if not any(patterns):
        return groups
    if not all(patterns):
        raise ArgumentTypeError(
            f"param_groups[{patterns.index([])}] has tensors, and others have names: give names in all groups, or "
            "tensors in all"
        )
    chosen, others = _choose_by_name(patterns, named)
    if others:
        raise ArgumentError(
            f"param_groups leave out {names_text(others)}: add {{'params': '*'}} as the last group for the rest; or to "
            "leave them untrained, give tensors, or a function that returns None for them"
        )
    for k, parameters in enumerate(chosen):
        if not parameters:
            raise ArgumentError(
                f"param_groups[{k}]: groups before it have taken all that {patterns[k]} match; put it before them, or "
                "leave it out"
            )
    return [group | {"params": parameters} for group, parameters in zip(groups, chosen, strict=True)]


def resolve_group(asked: Any, named: NamedParameters, taken: Collection[int], held: Collection[int]) -> dict[str, Any]:
    """Returns an additional group, with the matching parameters that are in no other group."""
    # `taken`, `held`: identities of the parameters in other groups, and in this process. Others have the same groups.
    group = _as_group("param_group", asked)
    patterns = _patterns_of("param_group", group)
    if patterns:
        (chosen,), _ = _choose_by_name([patterns], named)
        group["params"] = [parameter for parameter in chosen if id(parameter) not in taken]
        if not group["params"]:
            raise ArgumentError(f"param_group: the parameters that {patterns} match are all in other groups")
    seen, params = set(taken), []
    for item in group["params"]:
        tensor = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if id(tensor) in held or id(tensor) not in named.names:
            params.append(item)
        if not isinstance(tensor, torch.Tensor):
            continue  # torch raises with a message
        if id(tensor) not in named.names:
            raise ArgumentError(
                f"param_groups has a tensor of shape {tuple(tensor.shape)} that is no parameter of the pipe, so that "
                "no stage would update it; give it an optimizer of its own"
            )
        if id(tensor) in seen:
            name = named.names[id(tensor)][0]
            raise ArgumentError(f"the parameter {name!r} is given twice to the optimizer: keep it in one place")
        seen.add(id(tensor))
    return group | {"params": params}


def _as_group(what: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ArgumentTypeError(f"{what} is {with_article(item)}; expected a dict with 'params' and options")
    if "params" not in item:
        raise ArgumentError(f"{what} has no 'params': give names, patterns (\"*\" for the rest) or parameters")
    params = item["params"]
    if isinstance(params, set | frozenset):
        raise ArgumentTypeError(f"{what}['params'] is a set, whose order changes from run to run; give a list")
    return {**item, "params": [params] if isinstance(params, str | torch.Tensor) else list(params)}


def _patterns_of(what: str, group: Mapping[str, Any]) -> list[str]:
    """Returns the names and patterns of a group; empty if it has tensors."""
    patterns = [entry for entry in group["params"] if isinstance(entry, str)]
    if patterns and len(patterns) < len(group["params"]):
        raise ArgumentTypeError(f"{what} has both names and tensors: give names only, or tensors only")
    return patterns


def _choose_by_name(
    patterns: Sequence[Sequence[str]], named: NamedParameters
) -> tuple[list[list[nn.Parameter]], list[str]]:
    """Returns the parameters of each group, each in the first that matches, and the names of the remaining ones."""
    names = [name for of_one in named.names.values() for name in of_one]
    for pattern in (pattern for of_group in patterns for pattern in of_group):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"param_groups: no parameter has a name like {pattern!r}; there are {names_text(names)}"
            )

    def group_of(name: str, parameter: nn.Parameter) -> str | None:
        matching = (k for k, of_group in enumerate(patterns) if any(fnmatch.fnmatchcase(name, one) for one in of_group))
        return next((f"group {k}" for k in matching), None)

    group = {key: _same_for_all_names(group_of, key, named) for key in named.tensors}
    chosen = [[p for key, p in named.tensors.items() if group[key] == f"group {k}"] for k in range(len(patterns))]
    return chosen, [named.names[key][0] for key in group if group[key] is None]


def _same_for_all_names(choose: Callable[[str, nn.Parameter], Any], key: int, named: NamedParameters) -> Any:
    """Returns the choice for a parameter, in which all of its names must agree."""
    first, *others = named.names[key]
    chosen = choose(first, named.tensors[key])
    for name in others:
        other = choose(name, named.tensors[key])
        if not equal_values(chosen, other):
            texts = ["no group" if choice is None else str(choice) for choice in (chosen, other)]
            raise ArgumentError(
                f"{first!r} and {name!r} are one tied weight, which param_groups split: {texts[0]} by the one name, "
                f"{texts[1]} by the other; give both the same"
            )
    return chosen


def _groups_of_function(function: GroupFunction, named: NamedParameters) -> list[dict[str, Any]]:
    """Groups all parameters by the options that the function returns, in order of first occurrence."""

    def options_of(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        options = function(name, parameter)
        if options is not None and not isinstance(options, Mapping):
            raise ArgumentTypeError(
                f"param_groups returns {with_article(options)} for {name!r}; expected a dict of options, {{}} for the "
                "defaults, or None to leave the parameter out"
            )
        return None if options is None else dict(options)

    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    for key, parameter in named.tensors.items():
        options = _same_for_all_names(options_of, key, named)
        if options is not None:
            asked = sorted(options.items())
            members = next((members for own, members in groups if equal_values(sorted(own.items()), asked)), None)
            if members is None:
                groups.append((options, members := []))
            members.append(parameter)
    if not groups:
        raise ArgumentError("param_groups returns None for every parameter, which leaves nothing to train")
    return [{"params": members, **options} for options, members in groups]
