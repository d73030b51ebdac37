"""The request of a command line as data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxpipe.errors import ArgumentError
from fxpipe.inspect.cli_options import DevicesOption, DynamicOption, PlanFile, Subject, cluster_hardware, make_parser
from fxpipe.inspect.inputs import InputOption
from fxpipe.inspect.save_timeline import TIMELINE_FORMATS
from fxpipe.inspect.targets import Target
from fxpipe.utils.files import check_output_path

OUTPUT_FORMATS = {"timeline": TIMELINE_FORMATS, "graph": ("svg",), "report": ("html",), "save": ("json",)}
OUTPUT_NAMES = {"timeline": "a timeline", "graph": "a graph", "report": "a report", "save": "a plan"}


def check_outputs(outputs: Mapping[str, Path]) -> None:
    """Raises `ArgumentError` if an output file cannot be written, or two options name the same file."""
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ArgumentError(f"--{option} {path}: --{other} is to be written there; give another path")
        check_output_path(path, OUTPUT_FORMATS[option], f"--{option}: {OUTPUT_NAMES[option]}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request. Options that were not given are None or empty, and use the defaults of `fxpipe.plan`."""

    target: Subject
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the factory, or fields of the configuration
    inputs: tuple[InputOption, ...] = ()
    loss: Target | None = None
    loss_target: InputOption | None = None
    meta: bool = False  # build the model without memory
    eval: bool = False
    devices: DevicesOption | None = None
    stages_per_device: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # given options of `fxpipe.plan`
    dynamic: tuple[DynamicOption, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)  # dynamic sizes at which figures are shown
    json: bool = False
    code: int | None = None  # the stage whose code is printed
    sweep: bool = False
    tune: bool = False
    all: bool = False  # every row of --tune
    outputs: dict[str, Path] = field(default_factory=dict)  # by option
    no_progress: bool = False
    data_parallel: int | str | None = None  # replicas; None: not given
    is_cluster: bool = False  # the number of nodes was given

    @property
    def chooses_replicas(self) -> bool:
        """Returns True if the tuner chooses the number of replicas."""
        is_open = self.data_parallel is None and self.is_cluster and self.options.get("balance") != "pipedream"
        return self.data_parallel == "auto" or is_open

    @property
    def needs_plan(self) -> bool:
        """Returns True if a requested output needs a plan that fits."""
        return bool(self.json or self.code is not None or self.outputs)


PLAN_OPTIONS = (
    *("chunks", "schedule", "checkpoint", "balance"),
    *("memory_limit", "optimizer_state", "hardware", "mesh", "processes"),
)
STEP_OPTIONS = ("chunks", "schedule", "checkpoint", "hardware", "mesh", "processes")


PLAIN_OPTIONS = (
    *("target", "loss", "loss_target", "meta", "eval", "devices", "stages_per_device", "data_parallel"),
    *("json", "code", "sweep", "tune", "all", "no_progress"),
)
OPTION_ARGUMENTS = (*PLAN_OPTIONS, "devices", "stages_per_device", "pin", "data_parallel")


def parse_request(argv: Sequence[str]) -> Request:
    """Parses a command line, without loading any user code."""
    arguments = make_parser().parse_args(argv)
    options = {name: getattr(arguments, name) for name in PLAN_OPTIONS}
    options["processes"] = arguments.processes or None
    options["hardware"] = cluster_hardware(
        arguments.hardware, arguments.nodes, arguments.devices_per_node, arguments.devices
    )
    if arguments.data_parallel not in (None, "auto"):
        options["data_parallel"] = arguments.data_parallel
    options["leaf_modules"] = tuple(arguments.leaf) or None
    options["pin"] = _dict_without_repeats(arguments.pin, "--pin") or None
    request = Request(
        kwargs=_dict_without_repeats(arguments.kwargs, "--kwargs"),
        inputs=tuple(arguments.input),
        options={name: value for name, value in options.items() if value is not None},
        dynamic=tuple(arguments.dynamic),
        sizes=_dict_without_repeats(arguments.sizes, "--sizes"),
        outputs={name: path for name in OUTPUT_FORMATS if (path := getattr(arguments, name)) is not None},
        is_cluster=arguments.nodes is not None,
        **{name: getattr(arguments, name) for name in PLAIN_OPTIONS},
    )
    _check_option_combination(request)
    return request


OPTION_OF_ARGUMENT = {
    "leaf_modules": "--leaf",
    "batch_size": "--input",
    **{name: f"--{name.replace('_', '-')}" for name in OPTION_ARGUMENTS},
}
_GIVEN_ARGUMENT = re.compile(rf"(?<![\w.-])({'|'.join(OPTION_OF_ARGUMENT)})=('[^']*'|\[[^\]]*\]|\w[\w.]*)")
_NAMED_ARGUMENT = re.compile(rf"\(({'|'.join(OPTION_OF_ARGUMENT)})\)")


def with_option_name(message: str) -> str:
    """Replaces argument names in a message of planning by options of the command line."""
    match = re.match(r"(\w+)['\w\[\].]*(=|: )", message)
    if match is None or match[1] not in OPTION_OF_ARGUMENT:
        return as_options(message)
    return f"{OPTION_OF_ARGUMENT[match[1]]}: {match[0]}{as_options(message[match.end() :])}"


def as_options(text: str) -> str:
    """Replaces `stages_per_device=2` by `--stages-per-device 2`, and so on, in a text of planning."""

    def option(match: re.Match[str]) -> str:
        value = match[2].strip("[]").replace("'", "").replace(", ", ",")
        return f"{OPTION_OF_ARGUMENT[match[1]]} {value}"

    text = _GIVEN_ARGUMENT.sub(option, text)
    return _NAMED_ARGUMENT.sub(lambda match: f"({OPTION_OF_ARGUMENT[match[1]]})", text)


def _dict_without_repeats(pairs: Sequence[tuple[str, Any]], option: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ArgumentError(f"{option}: {name!r} is given twice")
        values[name] = value
    return values


def _check_option_combination(request: Request) -> None:
    """Raises `ArgumentError` for options that exclude each other, or that a saved plan does not allow."""
    if request.code is not None and (request.json or request.sweep or request.tune):
        other = "json" if request.json else "sweep" if request.sweep else "tune"
        raise ArgumentError(f"--code prints the code of a stage and nothing else; leave --{other} out")
    if request.chooses_replicas and request.sweep:
        raise ArgumentError("--sweep compares numbers of devices, and a cluster has as many as it has: leave one out")
    is_plan = isinstance(request.target, PlanFile)
    if request.data_parallel is not None and "hardware" not in request.options and not is_plan:
        raise ArgumentError("--data-parallel without --hardware: the links between replicas are not known; give it")
    if request.sweep and request.tune:
        raise ArgumentError("--sweep and --tune are two questions: ask one after the other")
    if request.all and not request.tune:
        raise ArgumentError("--all shows every row of --tune; give that, or leave --all out")
    if request.loss_target is not None and request.loss is None:
        raise ArgumentError("--target without --loss: give both, or neither where the model returns its loss")
    if not isinstance(request.target, PlanFile):
        return
    if request.data_parallel == "auto":
        raise ArgumentError("--data-parallel auto needs the model: a plan has its devices; give a number of replicas")
    of_the_model = {
        "--kwargs": request.kwargs,
        "--input": request.inputs,
        "--loss": request.loss,
        "--target": request.loss_target,
        "--meta": request.meta,
        "--eval": request.eval,
        "--dynamic": request.dynamic,
        "--devices": request.devices,
        "--stages-per-device": request.stages_per_device,
        "--sweep": request.sweep,
        **{f"--{name.replace('_', '-')}": name in request.options for name in PLAN_OPTIONS if name not in STEP_OPTIONS},
        "--leaf": "leaf_modules" in request.options,
        "--pin": "pin" in request.options,
    }
    for name, is_given in of_the_model.items():
        if is_given:
            raise ArgumentError(
                f"{name} needs the model, and {request.target} is a plan that is made already; give the factory"
            )
