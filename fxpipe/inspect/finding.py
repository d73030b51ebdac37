"""From a request to all that is to be shown, as data: the plan, a simulated step, comparisons."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError, MemoryLimitError, PartitionError
from fxpipe.inspect.devices import more_like, most_like
from fxpipe.inspect.files import check_outputs
from fxpipe.inspect.inputs import Input
from fxpipe.inspect.making import Loaded, devices_of, load, look_at, plan_again, settings_of
from fxpipe.inspect.request import Request
from fxpipe.inspect.shortage import explained
from fxpipe.inspect.subjects import PlanFile
from fxpipe.inspect.tables.comparing import Run, compare_schedules
from fxpipe.inspect.tables.diff import Difference, difference
from fxpipe.inspect.tables.sweep import USUAL, Row, counts_up_to, sweep

if TYPE_CHECKING:
    from fxpipe.planning import Studied
    from fxpipe.plans import Plan
    from fxpipe.settings import Settings
    from fxpipe.simulation import Simulation
    from fxpipe.tuning.result import Tuning


@dataclass(frozen=True, slots=True)
class Findings:
    """What the command has found out. What was not asked for is None or empty."""

    name: str  # of what is inspected
    plan: Plan | None = None  # None: it does not fit, but other numbers of devices were asked for
    simulation: Simulation | None = None  # of a step of the plan
    schedules: tuple[Run, ...] = ()  # the plan's own, first, and others
    drawn: tuple[Input, ...] = ()  # inputs that nobody gave
    sweep: tuple[Row, ...] = ()
    tuning: Tuning | None = None  # then the plan is the best that it found
    difference: Difference | None = None


def find(request: Request) -> Findings:
    """Do the work. Files are looked at first: a mistake should not show after a minute."""
    check_outputs(request.outputs)
    before = None if request.diff is None else load_plan(request.diff, "--diff")
    if isinstance(request.subject, PlanFile) and request.tune:
        found = _of_tuning(_tune_again(load_plan(request.subject.path), request), request)
    elif isinstance(request.subject, PlanFile):
        from fxpipe.plans.simulating import varied

        found = _of_plan(varied(load_plan(request.subject.path), **request.options), request)
    else:
        with explained(request):
            found = _of_model(request)
    if before is None or found.plan is None:
        return found
    return replace(found, difference=difference(before, found.plan))


def load_plan(path: Path, option: str = "") -> Plan:
    """A saved plan.

    Raises:
        ArgumentError: it cannot be read, or is none.
    """
    from fxpipe.plans import Plan

    try:
        return Plan.load(path)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ArgumentError(f"{option} {path}: cannot be read: {why}".strip()) from None


def _of_model(request: Request) -> Findings:
    devices = devices_of(request)
    settings = settings_of(request, devices)
    _check_code(request, len(settings.placement))
    loaded = load(request)
    if request.tune:
        return replace(_of_tuning(_tune(request, loaded, devices), request), drawn=loaded.drawn)
    studied = look_at(loaded, settings)
    try:
        plan = plan_again(loaded, studied, settings)
    except MemoryLimitError as error:
        if not request.sweep or request.needs_plan:
            raise _with_least_limit(error, settings) from None
        found = Findings(str(request.subject))
    except PartitionError as error:
        if not str(error).startswith("stages="):
            raise
        # The command has no other words for it.
        told = str(error).replace("Use stages=", "Use --devices ").replace("stages_per_device=", "--stages-per-device ")
        raise PartitionError(f"--devices {len(devices)}: {told}") from None
    else:
        found = _of_plan(plan, request)
    rows = _sweep(request, loaded, studied, devices) if request.sweep else ()
    return replace(found, drawn=loaded.drawn, sweep=rows)


def _of_plan(plan: Plan, request: Request) -> Findings:
    import fxpipe

    _check_code(request, len(plan.stages))
    simulation = fxpipe.simulate(plan)
    return Findings(str(request.subject), plan, simulation, compare_schedules(plan, simulation))


def _of_tuning(tuning: Tuning, request: Request) -> Findings:
    """The best that was found, for it is what would be run."""
    assert tuning.best.plan is not None
    return replace(_of_plan(tuning.best.plan, request), tuning=tuning)


def _tune(request: Request, loaded: Loaded, devices: tuple[str, ...]) -> Tuning:
    """The search; what the user has chosen stays."""
    import fxpipe

    balance = request.options.get("balance", "auto")
    if "pin" in request.options or not isinstance(balance, str):
        name = "pin" if "pin" in request.options else f"balance {','.join(map(str, balance))}"
        raise ArgumentError(f"--tune and --{name}: it cuts by itself; leave one of them out")
    arguments = loaded.arguments
    return fxpipe.tune(
        loaded.model,
        devices,
        example_args=arguments.args,
        example_kwargs=arguments.kwargs,
        stages_per_device=None if request.stages_per_device is None else [request.stages_per_device],
        **_chosen(request.options),
    )


def _tune_again(plan: Plan, request: Request) -> Tuning:
    """Of a plan, whose stages stay."""
    import fxpipe
    from fxpipe.plans.simulating import varied

    options = dict(request.options)
    return fxpipe.tune(varied(plan, hardware=options.pop("hardware", None)), **_chosen(options))


def _chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `fxpipe.tune` has them: what it would try is given as the one thing to try."""
    found = {name: value for name, value in options.items() if name not in ("schedule", "chunks", "checkpoint")}
    if "schedule" in options:
        found["schedules"] = [options["schedule"]]
    if "chunks" in options:
        found["chunks"] = [options["chunks"]]
    if options.get("checkpoint", "auto") != "auto":
        found["checkpoint"] = [options["checkpoint"]]
    return found


def _check_code(request: Request, stages: int) -> None:
    """Raises `ArgumentError` if the code of a stage is asked for that there is not."""
    if request.code is not None and not 0 <= request.code < stages:
        raise ArgumentError(f"--code {request.code}: no such stage; stages are 0 to {stages - 1}")


def _with_least_limit(error: MemoryLimitError, settings: Settings) -> MemoryLimitError:
    """The error, and the least limit of a device with which there would be a cut."""
    from fxpipe.deciding.sites import workers_of

    limits = [worker.memory for worker in workers_of(settings) if worker.memory is not None]
    if not (error.over and limits):
        return error
    most = max(settings.placement.count(k) for k in settings.placement)  # stages on a device share its memory
    least = f"The least limit that would do: --memory-limit {size_at_least(max(limits) + most * error.over)}."
    return MemoryLimitError(str(error), f"{error.brief} {least}", error.over)


def size_at_least(number: float) -> str:
    """`40.2KiB`: as `--memory-limit` takes it, and not less than the number."""
    size, units = number / 1024, ["TiB", "GiB", "MiB", "KiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        units.pop()
    return f"{math.ceil(10 * size) / 10:.1f}{units[-1]}"


def _sweep(request: Request, loaded: Loaded, studied: Studied, devices: tuple[str, ...]) -> tuple[Row, ...]:
    from fxpipe.placing import TRAINING_SCHEDULES

    hardware = request.options.get("hardware")

    def plan_for(count: int, schedule: str) -> Plan:
        settings = settings_of(request, more_like(devices, count, hardware), schedule=schedule)
        return plan_again(loaded, studied, settings)

    own = request.options.get("schedule", "1f1b")
    schedules = (own, *(name for name in TRAINING_SCHEDULES if name != own))
    counts = counts_up_to(most_like(devices, USUAL, hardware), len(devices))
    return tuple(sweep(counts, schedules, request.stages_per_device, plan_for))
