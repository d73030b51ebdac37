"""Parameter groups of an optimizer, by names of parameters.

    None                                                           one group of all
    [{"params": "*.bias", "weight_decay": 0.0}, {"params": "*"}]   by name or pattern; the first group that matches
    [{"params": model.head.parameters()}]                          by tensors, as in torch
    lambda name, parameter: {"weight_decay": 0.0} if ...           by a function, which returns options

All names of a tied weight must give the same group.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.utils.python_objects import equal_values
from fxpipe.utils.units import names_text, with_article

GroupFunction: TypeAlias = Callable[[str, nn.Parameter], "Mapping[str, Any] | None"]
ParameterGroups: TypeAlias = "Iterable[Any] | GroupFunction | None"


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
    """Returns an additional group, with the matching parameters that are in no other group.

    Args:
        taken: identities of the parameters in other groups.
        held: identities of the parameters in this process. Other processes have optimizers with the same groups.
    """
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
