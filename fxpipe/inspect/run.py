"""Runs a request: all that is shown as data (the plan, a simulated step, comparisons), and their output."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxpipe
from fxpipe._torch.error_messages import allocator_error, requested_bytes
from fxpipe.errors import ArgumentError, FxpipeError, MemoryLimitError, TooManyStagesError
from fxpipe.inspect import cli_options, step_summary, targets
from fxpipe.inspect.json_document import Inspection, inspection_document
from fxpipe.inspect.plan_text import plan_text, tuning_text
from fxpipe.inspect.report import save_report
from fxpipe.inspect.stage_graph import save_graph
from fxpipe.planning import entry, passes
from fxpipe.planning.cost_model import planned_workers
from fxpipe.planning.options.parse import COMPARED_SCHEDULES
from fxpipe.planning.options.pipeline_options import Settings, make_settings
from fxpipe.planning.passes import ProfiledModel
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.simulate_plan import vary_plan
from fxpipe.planning.tuning.candidates import Tuning
from fxpipe.profiling.loss_cost import LOSS_NOTE, PlannedLoss
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.source_lines import UNKNOWN_LINE, line_of_error
from fxpipe.utils.files import check_output_path
from fxpipe.utils.text_table import wrap_text
from fxpipe.utils.units import count_text, human_bytes, size_at_least, with_article

# The user waits, and more time would improve accuracy by less than the machine varies.
PROFILE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: nn.Module
    arguments: targets.ModelArguments
    drawn: tuple[targets.InputOption, ...]  # random inputs, if none were given
    loss: PlannedLoss | None  # None: not given


def load_requested_model(request: cli_options.Request) -> LoadedModel:
    assert not isinstance(request.target, Path)
    is_shipped = isinstance(request.target, targets.ModelType)
    with torch.device("meta") if request.meta else contextlib.nullcontext():
        if isinstance(request.target, targets.ModelType):
            model = targets.load_hugging_face_model(request.target, request.kwargs)
        else:
            model = targets.load_model(request.target, request.kwargs)
    if request.eval:
        model.eval()
    drawn: tuple[targets.InputOption, ...] = ()
    if is_shipped and not request.inputs:
        drawn = targets.example_inputs(model, request.options.get("chunks", 1))
    below = targets.vocabulary_size(model) if is_shipped else 2
    arguments = targets.make_arguments(request.inputs or drawn, integers_below=below, on_meta=request.meta)
    if request.loss is None:
        return LoadedModel(model, arguments, drawn, None)
    value = targets.load_target(request.loss)
    loss_fn = targets.call_target(request.loss) if isinstance(value, type) else value
    if not callable(loss_fn):
        kind = with_article(loss_fn)
        raise ArgumentError(f"--loss {request.loss} is {kind}, not a function (output, target) -> loss")
    target = targets.ModelArguments((), {})
    if request.loss_target is not None:
        target = targets.make_arguments([request.loss_target], on_meta=request.meta)
        if target.kwargs or len(target.args) != 1:
            raise ArgumentError(f"--target {request.loss_target}: expected one value, without a name")
    return LoadedModel(model, arguments, drawn, PlannedLoss(loss_fn, target.args))


def settings_for(request: cli_options.Request, devices: tuple[str, ...], **others: Any) -> Settings:
    """Makes the settings of a request for these devices, as `fxpipe.plan` would; `others` override its options."""
    options = {
        "devices": devices,
        "stages_per_device": request.stages_per_device,
        "profile_budget": PROFILE_SECONDS,
        **({"dynamic_shapes": cli_options.dynamic_shapes_of(request.dynamic)} if request.dynamic else {}),
        **request.options,
    }
    return make_settings(options | others, anywhere="hardware" in request.options)


def profile_loaded_model(loaded: LoadedModel, settings: Settings) -> ProfiledModel:
    arguments, settings = loaded.arguments, replace(settings, loss=loaded.loss)
    try:
        return passes.trace_and_profile(loaded.model, *arguments, settings)
    except FxpipeError:
        raise
    except Exception as error:
        if LOSS_NOTE in getattr(error, "__notes__", ()):
            raise ArgumentError(f"--loss raised {targets.describe_error(error)} on the model's output") from error
        try:  # the plain model, to distinguish its exceptions from a bug in fxpipe
            loaded.model(*arguments.args, **arguments.kwargs)
        except Exception as own:
            line = line_of_error(own)
            place = "" if line == UNKNOWN_LINE else f" ({line})"
            advice = inputs_advice(loaded.model, arguments)
            if names_without_values(loaded.model):
                advice += "; if forward reads values there, leave --meta out (fewer layers take less memory)"
            raise ArgumentError(f"the model raises {targets.describe_error(own)}{place} {advice}") from own
        raise


def plan_profiled_model(loaded: LoadedModel, profiled: ProfiledModel, settings: Settings) -> Plan:
    """Plans with other settings; measures again only if the workers differ."""
    inputs, settings = loaded.arguments, replace(settings, loss=loaded.loss)
    return entry.prepare_with_choices(passes.profile_again(profiled, *inputs, settings), *inputs, settings).plan


def inputs_advice(model: nn.Module, arguments: targets.ModelArguments) -> str:
    """Describes the inputs with which a model failed and, if it takes others, how to pass them."""
    circumstance = "on these inputs" if arguments.args or arguments.kwargs else "without inputs"
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*arguments.args, **arguments.kwargs)
    except TypeError:
        names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if len(arguments.args) > len(names):  # Python's message has the number
            return f"{circumstance}; leave one of them out: forward takes {', '.join(names) or 'none'}"
        needed = [name for name in names if signature.parameters[name].default is inspect.Parameter.empty] or names[:1]
        inputs = " ".join(f"--input {name}=8x64" for name in needed)
        return f"{circumstance}; give each an --input of its own, as in {inputs}"
    return circumstance if arguments.args or arguments.kwargs else f"{circumstance}; give them with --input"


def run_request(request: cli_options.Request) -> Inspection:
    """Runs a request. Checks output files first, so that a mistake shows immediately."""
    taken: dict[Path, str] = {}
    for option, path in request.outputs.items():
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ArgumentError(f"--{option} {path}: --{other} is to be written there; give another path")
        name, formats = cli_options.OUTPUTS[option]
        check_output_path(path, formats, f"--{option}: {name}")
    if isinstance(request.target, Path):
        try:
            plan = Plan.load(request.target)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ArgumentError(f"{request.target}: cannot be read: {why}") from None
        if not request.tune:
            return _inspect_plan(vary_plan(plan, **request.options), request)
        options = _tune_options(request)  # its stages stay
        devices = {name: options.pop(name, None) for name in ("hardware", "data_parallel", "mesh", "processes")}
        return _inspect_tuning(fxpipe.tune(vary_plan(plan, **devices), **options), request)
    try:
        return _inspect_model(request)
    except Exception as error:
        cause = None if request.meta else allocator_error(error)
        if cause is None:
            raise
        asked = requested_bytes(cause)
        at_once = "" if asked is None else f", where {human_bytes(asked)} were asked for at once"
        raise ArgumentError(
            f"{request.target}: the memory here does not hold the model and its inputs{at_once}; give --meta to plan "
            "it without values, and --hardware for the devices that are to hold it"
        ) from error


def _inspect_model(request: cli_options.Request) -> Inspection:
    devices = cli_options.devices_of_option(request.devices, request.options.get("hardware"))
    settings = settings_for(request, devices)
    if not request.chooses_replicas:
        _check_code_stage(request, len(settings.placement))
    loaded = load_requested_model(request)
    if request.tune or request.chooses_replicas:
        return replace(_inspect_tuning(_tune_model(request, loaded, devices), request), drawn=loaded.drawn)
    profiled = profile_loaded_model(loaded, settings)
    try:
        plan = plan_profiled_model(loaded, profiled, settings)
    except MemoryLimitError as error:
        needs_plan = request.json or request.code is not None or request.outputs
        if not request.sweep or needs_plan:
            limits = [worker.memory for worker in planned_workers(settings) if worker.memory is not None]
            if not (error.over and limits):
                raise
            most = max(settings.placement.count(k) for k in settings.placement)  # stages of a device share its memory
            least = size_at_least(max(limits) + most * error.over)
            brief = f"{error.brief} The least limit that would do: --memory-limit {least}."
            raise MemoryLimitError(str(error), brief, error.over) from None
        inspection = Inspection(str(request.target))
    except TooManyStagesError as error:
        remedy = error.remedy or f"--devices {error.most} or fewer"
        raise TooManyStagesError(f"--devices {len(devices)}: {error.problem}", error.most, remedy) from None
    else:
        inspection = _inspect_plan(plan, request)
    rows = _sweep_rows(request, loaded, profiled, devices) if request.sweep else ()
    return replace(inspection, drawn=loaded.drawn, sweep=rows)


def _inspect_plan(plan: Plan, request: cli_options.Request) -> Inspection:
    _check_code_stage(request, len(plan.stages))
    plan = _at_sizes(plan, request)
    return Inspection(str(request.target), plan, fxpipe.simulate(plan), step_summary.compare_schedules(plan))


def _at_sizes(plan: Plan, request: cli_options.Request) -> Plan:
    try:
        return plan.at(**request.sizes) if request.sizes else plan
    except ArgumentError as error:
        raise ArgumentError(f"--sizes: {error}") from None


def _inspect_tuning(tuning: Tuning, request: cli_options.Request) -> Inspection:
    assert tuning.best.plan is not None
    return replace(_inspect_plan(tuning.best.plan, request), tuning=tuning)


def _tune_model(request: cli_options.Request, loaded: LoadedModel, devices: tuple[str, ...]) -> Tuning:
    """Tunes a model; options that the user has set stay fixed."""
    balance = request.options.get("balance", "auto")
    if "pin" in request.options or not isinstance(balance, str):
        name = "pin" if "pin" in request.options else f"balance {','.join(map(str, balance))}"
        raise ArgumentError(f"--tune and --{name}: it cuts by itself; leave one of them out")
    options = _tune_options(request)
    if not request.tune:
        options.setdefault("schedules", ["1f1b"])
    if request.chooses_replicas:
        options["data_parallel"] = "auto"
    return fxpipe.tune(
        loaded.model,
        devices,
        example_args=loaded.arguments.args,
        example_kwargs=loaded.arguments.kwargs,
        stages_per_device=None if request.stages_per_device is None else [request.stages_per_device],
        **({} if loaded.loss is None else loaded.loss.arguments()),
        dynamic_shapes=cli_options.dynamic_shapes_of(request.dynamic) or None,
        **options,
    )


def _tune_options(request: cli_options.Request) -> dict[str, Any]:
    """Returns the options of `fxpipe.tune`; each searched option that the user has set has one candidate."""
    options = dict(request.options)
    for name, searched in (("schedule", "schedules"), ("chunks", "chunks"), ("checkpoint", "checkpoint")):
        value = options.pop(name, "auto")
        if value != "auto":
            options[searched] = [value]
    return options


def _check_code_stage(request: cli_options.Request, stages: int) -> None:
    if request.code is not None and not 0 <= request.code < stages:
        raise ArgumentError(f"--code {request.code}: no such stage; stages are 0 to {stages - 1}")


def _sweep_rows(
    request: cli_options.Request, loaded: LoadedModel, profiled: ProfiledModel, devices: tuple[str, ...]
) -> tuple[step_summary.Outcome, ...]:
    hardware = request.options.get("hardware")

    def plan_for(count: int, schedule: str) -> Plan:
        settings = settings_for(request, cli_options.first_devices(devices, count, hardware), schedule=schedule)
        return _at_sizes(plan_profiled_model(loaded, profiled, settings), request)

    own = request.options.get("schedule", "1f1b")
    schedules = (own, *(name for name in COMPARED_SCHEDULES if name != own))
    most = len(devices)
    if request.devices is None:
        most = cli_options.most_devices(devices, step_summary.USUAL_DEVICES, hardware)
    counts = sorted({*(2**power for power in range(most.bit_length())), len(devices)})  # 1, 2, 4 ... and as requested
    return tuple(step_summary.sweep_devices(counts, schedules, plan_for))


def output_text(inspection: Inspection, request: cli_options.Request) -> str:
    """Formats the printed output: the requested results or, by default, the plan and its step."""
    if request.code is not None:
        assert inspection.plan is not None
        return inspection.plan.stages[request.code].code
    if request.json:
        return json.dumps(inspection_document(inspection), indent=2)
    texts = []
    if inspection.drawn:
        inputs = ", ".join(map(str, inspection.drawn))
        texts.append(wrap_text(f"inputs {inputs}, drawn; give others with --input"))
    if inspection.sweep:
        texts.append(step_summary.sweep_text(inspection.sweep))
    if inspection.tuning is not None:
        texts.append(tuning_text(inspection.tuning, is_whole=request.all, remaining="--all shows"))
        texts.append(step_summary.one_device_text(inspection.tuning))
    is_tuning_implicit = request.chooses_replicas and not request.tune
    if is_tuning_implicit or (not inspection.sweep and inspection.tuning is None):
        assert inspection.plan is not None
        assert inspection.simulation is not None
        texts += [
            plan_text(inspection.plan),
            step_summary.step_text(inspection.simulation, inspection.plan),
            step_summary.timeline_text(inspection.simulation),
            step_summary.device_text(inspection.simulation),
            step_summary.packets_text(inspection.plan),
            inspection.plan.compare_sizes() if inspection.plan.sizes else "",
            step_summary.summaries_text(inspection.schedules) if len(inspection.schedules) > 1 else "",
        ]
    return "\n\n".join(filter(None, texts))


def write_outputs(inspection: Inspection, outputs: Mapping[str, Path]) -> list[str]:
    """Writes the requested files. Returns a line for each file, with its content and path."""
    plan, simulation, lines = inspection.plan, inspection.simulation, []
    title = os.path.basename(inspection.name)  # pictures are shared with people who have other folders
    for option, path in outputs.items():
        assert plan is not None
        assert simulation is not None
        if option == "save":
            plan.save(path)
        elif option == "timeline":
            step = f"{simulation.schedule.name}, {count_text(simulation.schedule.micro_batches, 'micro-batch', 'es')}"
            simulation.save_timeline(path, title=f"{title}, {step}")
        elif option == "graph":
            save_graph(plan, path, title=title)
        else:
            own = [row for row in inspection.sweep if row.plan is not None and row.schedule == row.plan.schedule]
            save_report(plan, path, title=title, sweep=own)
        lines.append(f"wrote {cli_options.OUTPUTS[option][0]} to {path}")
    return lines
