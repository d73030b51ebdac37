"""From a request to the plan: the model, its example inputs, the plan that they have."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError, FxpipeError
from fxpipe.inspect.devices import planned_devices, resolve_devices
from fxpipe.inspect.hugging_face import ModelType, example_inputs, load_shipped, vocabulary
from fxpipe.inspect.inputs import Arguments, Input, make_arguments
from fxpipe.inspect.request import Request
from fxpipe.inspect.subjects import PlanFile
from fxpipe.inspect.target import load_model
from fxpipe.inspect.words import describe

if TYPE_CHECKING:
    from torch import nn

    from fxpipe.planning import Studied
    from fxpipe.plans import Plan
    from fxpipe.settings import Settings

# Seconds, about: somebody waits, all nodes of one kind are measured together, and what more would tell is less than a
# machine differs by from one second to the next.
MEASURING = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and a mini-batch for it."""

    model: nn.Module
    arguments: Arguments
    drawn: tuple[Input, ...]  # inputs that nobody asked for


def devices_of(request: Request) -> tuple[str, ...]:
    """For each worker its device."""
    hardware = request.options.get("hardware")
    return resolve_devices(request.devices) if hardware is None else planned_devices(request.devices, hardware)


def load(request: Request) -> Loaded:
    """The model in the mode that was asked for, and its inputs."""
    import torch

    assert not isinstance(request.subject, PlanFile)
    is_shipped = isinstance(request.subject, ModelType)
    with torch.device("meta") if request.on_meta else contextlib.nullcontext():
        if isinstance(request.subject, ModelType):
            model = load_shipped(request.subject, request.kwargs)
        else:
            model = load_model(request.subject, request.kwargs)
    if request.evaluating:
        model.eval()
    drawn: tuple[Input, ...] = ()
    if is_shipped and not request.inputs:
        drawn = example_inputs(model, request.options.get("chunks", 1))
    below = vocabulary(model) if is_shipped else 2
    arguments = make_arguments(request.inputs or drawn, integers_below=below, on_meta=request.on_meta)
    return Loaded(model, arguments, drawn)


def settings_of(request: Request, devices: tuple[str, ...], **others: Any) -> Settings:
    """What `fxpipe.plan` would make of the request for these devices; `others` go before it."""
    from fxpipe.options import Options
    from fxpipe.settings import make_settings

    given = {
        "devices": devices,
        "stages_per_device": request.stages_per_device,
        "profile_budget": MEASURING,
        **request.options,
    }
    settings = make_settings(Options(**given | others), anywhere="hardware" in request.options)
    return replace(settings, operations=any(output.option == "save" for output in request.outputs))


def look_at(loaded: Loaded, settings: Settings) -> Studied:
    """Trace and profile what was loaded."""
    from fxpipe import planning

    arguments = loaded.arguments
    try:
        return planning.study(loaded.model, arguments.args, arguments.kwargs, settings)
    except FxpipeError:
        raise
    except Exception:
        _raise_if_model_fails(loaded.model, arguments)
        raise


def plan_again(loaded: Loaded, studied: Studied, settings: Settings) -> Plan:
    """A plan for other settings, of what is known; measures again where workers are others."""
    from fxpipe import planning

    again = planning.studied_again(studied, loaded.arguments.args, loaded.arguments.kwargs, settings)
    return planning.planned(again, settings).plan


def _raise_if_model_fails(model: nn.Module, arguments: Arguments) -> None:
    """Ask the plain model, so that its exceptions are told from those of a bug in fxpipe."""
    from fxpipe.tracing.source import UNKNOWN, line_of_error

    try:
        model(*arguments.args, **arguments.kwargs)
    except Exception as error:
        line = line_of_error(error)
        place = "" if line == UNKNOWN else f" ({line})"
        given = "on these inputs" if arguments.args or arguments.kwargs else "without inputs; give them with --input"
        raise ArgumentError(f"the model raises {describe(error)}{place} {given}") from error
