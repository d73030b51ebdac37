"""The options of the command, the functions that parse them, and the request that they make."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from fxpipe.errors import ArgumentError
from fxpipe.inspect import targets
from fxpipe.inspect.gantt import TIMELINE_FORMATS
from fxpipe.scheduling import CHECKPOINTS, SCHEDULES
from fxpipe.scheduling.factory import refuse_bidirectional

if TYPE_CHECKING:
    from fxpipe.hardware import Hardware


Subject: TypeAlias = targets.Target | targets.ModelType | Path  # the path of a saved plan


def parse_subject(text: str) -> Subject:
    """Parses `hf:gpt2`, `plan.json`, or a factory."""
    if text.startswith(targets.HUGGING_FACE_PREFIX):
        return targets.parse_model_type(text)
    if text.endswith(".json"):
        return Path(text)
    try:
        return targets.parse_target(text)
    except ArgumentError:
        raise ArgumentError(
            f"{text!r}: expected {targets.TARGET_FORMS}, hf:gpt2 or another type, or a saved plan.json"
        ) from None


@dataclass(frozen=True, slots=True)
class DynamicOption:
    """A dimension of an input whose size may differ from batch to batch."""

    input: str
    dim: int
    name: str = ""  # name of the size
    least: int | None = None
    most: int | None = None


_DYNAMIC_TEXT = re.compile(
    r"(?P<input>[^=]+):(?P<dim>\d{1,2})(=(?P<name>[^\W\d]\w*)(:(?P<least>\d{1,12})?-(?P<most>\d{1,12})?)?)?"
)


def parse_dynamic_option(text: str) -> DynamicOption:
    """Parses `ids:1=s` (dimension 1 of ids has size s) and `ids:1=s:2-512` (from 2 to 512)."""
    match = _DYNAMIC_TEXT.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{text!r}: expected an input, a dimension and a name, as in ids:1=s or ids:1=s:2-512")
    least, most = (None if match[key] is None else int(match[key]) for key in ("least", "most"))
    if least is not None and most is not None and least > most:
        raise ArgumentError(f"{text!r}: the least size, {least}, is more than the largest, {most}")
    return DynamicOption(match["input"], int(match["dim"]), match["name"] or "", least, most)


def dynamic_shapes_of(options: Sequence[DynamicOption]) -> dict[str, dict[int, Any]]:
    from torch.export import Dim

    shapes: dict[str, dict[int, Any]] = {}
    for option in options:
        bounds = {key: size for key, size in (("min", option.least), ("max", option.most)) if size is not None}
        dim: Any = Dim(option.name, **bounds) if option.name else Dim.DYNAMIC
        shapes.setdefault(option.input, {})[option.dim] = dim
    return shapes


def parse_size_option(text: str) -> tuple[str, int]:
    """Parses `s=512` -> ("s", 512)."""
    match = re.fullmatch(r"([^\W\d]\w*)=(0*[1-9]\d{0,11})", text.strip())
    if match is None:
        raise ArgumentError(f"{text!r}: expected the name of a size and a whole number, as in s=512")
    return match[1], int(match[2])


def parse_schedule_option(text: str) -> str:
    """Returns the name of a schedule, not yet looked up. Raises `ArgumentError` for bidirectional schedules."""
    refuse_bidirectional(text)
    return text


DevicesOption: TypeAlias = "int | tuple[str, ...]"  # the number of devices, or their names


def parse_devices_option(text: str) -> DevicesOption:
    """Parses `4` -> 4; `cuda:0,cuda:1` -> ("cuda:0", "cuda:1")."""
    names = tuple(name.strip() for name in text.split(","))
    if len(names) == 1 and re.fullmatch(r"0*[1-9]\d{0,3}", text.strip()):
        return int(text)
    if not all(re.fullmatch(r"[a-z]+(:\d+)?", name) for name in names):
        raise ArgumentError(f"{text!r}: expected a number (4) or a list of devices (cpu,cpu or cuda:0,cuda:1)")
    return names


def devices_of_option(devices: DevicesOption | None, hardware: str | Hardware | None) -> tuple[str, ...]:
    """Returns device names. A number means devices of `hardware`, which need not be present; else see `fxpipe.plan`."""
    from fxpipe.hardware import device_names, parse_hardware
    from fxpipe.planning.options.parse import parse_devices

    if hardware is None:
        return tuple(map(str, parse_devices(devices)))
    if isinstance(devices, tuple):
        return devices
    own = parse_hardware(hardware)
    return tuple(device_names(own, devices or own.devices or 2))


def _parse_hardware_option(text: str) -> str | Hardware:
    from fxpipe.hardware import load_hardware, parse_hardware

    if text.endswith(".json"):
        return load_hardware(text)
    parse_hardware(text)
    return text.lower()


def cluster_hardware(
    name: str | Hardware | None, nodes: int | None, devices_per_node: int | None, devices: DevicesOption | None
) -> str | Hardware | None:
    from fxpipe.hardware import parse_hardware

    if nodes is None and devices_per_node is None:
        return name
    if name is None:
        option = "--nodes" if nodes is not None else "--devices-per-node"
        raise ArgumentError(f"{option} without --hardware: what is here is one machine; give --hardware, as in h100")
    own = parse_hardware(name)
    size = own.devices_per_node if devices_per_node is None else devices_per_node
    shared = None if own.adapters_per_node is None else min(size, own.adapters_per_node)
    own = replace(own, nodes=nodes, devices_per_node=size, adapters_per_node=shared)
    count = len(devices) if isinstance(devices, tuple) else devices
    if count is not None and own.devices is not None and count != own.devices:
        raise ArgumentError(
            f"--devices {count}: --nodes {nodes} of {size} devices have {own.devices}; give that, or leave it out"
        )
    return own


def first_devices(devices: tuple[str, ...], count: int, hardware: str | Hardware | None) -> tuple[str, ...]:
    """Returns the first `count` devices, extended by more of their kind, which need not be present."""
    if count <= len(devices):
        return devices[:count]
    return ("cpu",) * count if hardware is None else devices_of_option(count, hardware)


def most_devices(devices: tuple[str, ...], usual: int, hardware: str | Hardware | None) -> int:
    """Returns the largest number of devices in a sweep; for CPU shares and `hardware`, `usual` or more."""
    are_here = hardware is None and any(name != "cpu" for name in devices)
    return len(devices) if are_here else max(len(devices), usual)


# Repeated from planning, which imports torch. Any other word is the name of a node or module.
BALANCE_CHOICES = ("auto", "block", "optimal", "pipedream")
DESCRIPTION = """\
Plan the pipeline of a model and see it before it runs: its stages, what they
take and send, how long a step is, how much of it the devices idle, whether it
fits. Nothing is trained, and the devices need not be here (--hardware).
"""
# In 80 columns, like the wrapped rest.
EXAMPLES = """\
examples:
  a factory of yours, on four devices
    python -m fxpipe.inspect models:resnet --input 32x3x224x224 --devices 4
  with arguments, and two inputs, the second of them integers
    python -m fxpipe.inspect models/gpt.py:build --kwargs depth=4 name=small \\
        --input image=8x3x64x64 --input text=8x128:int64
  a type of transformers, with random weights; nothing is downloaded
    python -m fxpipe.inspect hf:gpt2 --kwargs n_layer=4 --devices 4 \\
        --schedule zero_bubble
  batches of any length up to 512: what each needs and takes
    python -m fxpipe.inspect hf:gpt2 --input input_ids=8x128:int64 \\
        --dynamic input_ids:1=s:2-512 --sizes s=512
  70 G parameters on a laptop, for hardware that is elsewhere
    python -m fxpipe.inspect hf:llama --meta --hardware h200 --devices 8 \\
        --chunks 32 --input input_ids=64x2048:int64 --kwargs hidden_size=8192 \\
        intermediate_size=28672 num_hidden_layers=80 num_attention_heads=64 \\
        num_key_value_heads=8 vocab_size=128256 dtype=bfloat16
  how many devices? which schedule? how many micro-batches?
    python -m fxpipe.inspect models:resnet --input 64x3x224x224 \\
        --hardware h100 --sweep
    python -m fxpipe.inspect models:resnet --input 64x3x224x224 \\
        --hardware h100 --devices 4 --tune
  a cluster: four nodes of eight, pipeline x data as it is fastest; the step,
  what crosses nodes, the reduction
    python -m fxpipe.inspect models:gpt --input 512x1024:int64 \\
        --hardware h100 --nodes 4 --devices-per-node 8
  pictures, and one page with everything
    python -m fxpipe.inspect models:resnet --input 32x3x224x224 \\
        --timeline t.svg --graph g.svg --report report.html
  save a plan, look at it again without the model
    python -m fxpipe.inspect models:resnet --input 32x3x224x224 --devices 4 \\
        --save plan.json
    python -m fxpipe.inspect plan.json --schedule gpipe

exit status: 0, or 2 with a one-line message on standard error if an argument or
the model needs fixing, or 130 if interrupted
"""


# Groups and options, in the order of `--help`.
OPTIONS_TEXT = """\
# the model
--kwargs NAME=VALUE
    arguments of the factory, or fields of the configuration of hf:TYPE; values as in JSON or Python, anything
    else is text: depth=4 rate=0.1 flag=true sizes=[8,16] name=small
--input INPUT
    an example input, a whole mini-batch; repeat it for more arguments. {inputs} which returns a tensor, a tuple
    of positional arguments or a dict of keyword arguments. Integers are drawn from 0 and 1, those of hf:TYPE
    from its vocabulary; there, inputs are drawn if none are given
--loss LOSS
    the loss that steps take of the output, whose cost is then a part of the plan: a function (output, target)
    -> loss, or a class to make one (torch.nn.functional:cross_entropy, losses.py:FocalLoss)
--target TARGET
    the target of --loss for the mini-batch: sizes and a dtype (8:int64), or a function that makes it
--meta
    build the model without memory for its weights, under torch.device('meta'); seconds are estimates
--eval
    call model.eval() first
--dynamic INPUT:DIM=NAME
    a dimension besides the batch whose size differs from batch to batch, with the name that formulas have for
    it (input_ids:1=s) and, if known, its least and its largest size (input_ids:1=s:2-512), of which memory
    limits are asked; repeat it for more
--leaf MODULE
    name of a module to keep whole, as one node; repeat it for more
# the pipeline
--devices N|LIST
    how many devices, or their names: 2, or cpu,cpu, or cuda:0,cuda:1. A number takes devices of the
    accelerator, or shares of the CPU where there is none. Default: all of them, or two shares of the CPU
--hardware NAME|FILE
    plan for this hardware, which need not be here: seconds, memory and links are estimates for it. A name
    (h100, 4090, cpu, ...) or a .json file with the figures of your own
--nodes N
    plan for all devices of a cluster of such nodes of --hardware, joined by its network; pipeline x data is
    then chosen by simulation, unless --data-parallel says it
--devices-per-node K
    devices in a node of --hardware. Default: 8, and 2 of cpu
--data-parallel D|auto
    share the devices and the mini-batch among so many replicas of the pipeline, or among as many as make the
    shortest step; needs --hardware. Default: 1, with --nodes auto
--processes
    a process for each device, as over a DeviceMesh: what they send each other, values that are relayed among
    it, and no host in common. So it is with replicas and where devices stand in several nodes
--mesh ORDER
    how replicas stand in the nodes: data,pipe keeps each pipeline in as few nodes as can be, pipe,data the
    devices that reduce gradients together. Default: data,pipe, or the better one where replicas are chosen
--chunks M|auto
    number of micro-batches. Default: auto, the number with the shortest simulated step that fits into memory;
    with --sweep for each row
--schedule NAME
    order of forward and backward: {schedules}
--checkpoint MODE
    which micro-batches are recomputed in backward: auto, {checkpoints}
--stages-per-device K
    number of stages of each device, in loops over them. Default: what the schedule wants, 1 or 2
--balance HOW
    block (by time), optimal (by time, transfers and memory) or auto, which takes what fits the case; pipedream,
    which with --hardware also chooses how many replicas each stage has, unless --data-parallel says; or by
    hand: each stage's count of nodes (10,12,9), or the names of nodes or modules after which a stage ends
    (layer2,layer3)
--pin NAME=DEVICE
    put a module or node on a device, by its number or name (lm_head=0); repeat it for more
--memory-limit SIZE
    what stages may take on each device: 70GiB, bytes, or one for each (70GiB,40GiB)
--optimizer-state X
    bytes of the optimizer's state for each byte of a parameter: 2 for Adam (the default), 0 for SGD
# what to show
--sizes NAME=SIZE
    show all figures at these sizes of dynamic dimensions, not those of the example; the stages stay: s=512
--sweep
    compare 1, 2, 4 ... devices, up to --devices (8), and schedules: step, speed-up, bubble, memory
--tune
    search schedule, micro-batches and checkpointing; print what was compared
--all
    with --tune: print every row, not the first ones alone
--json
    print it all as JSON; python -m pydoc fxpipe.inspect.json_document says what its keys are
--code N
    print the code of stage N
--save PLAN.json
    write the plan to a file
--timeline FILE
    draw a step: .svg, or .json for Perfetto
--graph FILE
    draw the stages and what goes between them: .svg
--report FILE
    write one page with all of it, for a browser: .html
--no-progress
    show no progress bars
"""


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, without usage."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if unknown != message.split() and all(map(targets.SHAPE_TEXT.search, unknown)):
            raise ArgumentError(f"{message}; an input has an --input of its own: --input 8x3x64x64 --input y=8:int64")
        raise ArgumentError(f"{message} (see --help)")


class _AddPairs(argparse.Action):
    """Adds pairs to a dict. Refuses names that it has already."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        pairs = dict(getattr(namespace, self.dest))
        for name, value in values:
            if name in pairs:
                raise argparse.ArgumentError(self, f"{name!r} is given twice")
            pairs[name] = value
        setattr(namespace, self.dest, pairs)


def parse_pin_option(text: str) -> tuple[str, int | str]:
    """Parses `lm_head=0` -> ("lm_head", 0); `encoder=cuda:1` -> ("encoder", "cuda:1")."""
    name, equals, device = (part.strip() for part in text.rpartition("="))
    if not name or not equals or not device:
        raise ArgumentError(f"{text!r}: expected the name of a module or node and a device, as in lm_head=0")
    return name, int(device) if device.isdecimal() else device


def parse_balance_option(text: str) -> str | tuple[int, ...] | tuple[str, ...]:
    """Parses a word such as `block`, numbers of nodes (`10,12,9`), or names."""
    if text in BALANCE_CHOICES:
        return text
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ArgumentError(f"{text!r}: expected block, counts of nodes (10,12,9), or names (layer2,layer3)")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else parts


def _parse_mesh_option(text: str) -> tuple[str, ...]:
    """Parses `data,pipe` -> ("data", "pipe")."""
    names = tuple(name.strip() for name in text.split(","))
    if sorted(names) != ["data", "pipe"]:
        raise ArgumentError(f"{text!r}: expected data,pipe or pipe,data, the outer dimension first")
    return names


def parse_whole_number(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,5}", text):
        raise ArgumentError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def _argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Adapts `parse` to argparse, which would replace the message of a ValueError, as it should for `int`."""

    if isinstance(parse, type):
        return parse

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


PARSERS: dict[str, Callable[[str], Any]] = {  # of option values; values of other options stay text
    "--kwargs": targets.parse_keyword,
    "--input": targets.parse_input,
    "--loss": targets.parse_target,
    "--target": targets.parse_input,
    "--dynamic": parse_dynamic_option,
    "--devices": parse_devices_option,
    "--hardware": _parse_hardware_option,
    "--mesh": _parse_mesh_option,
    "--schedule": parse_schedule_option,
    "--balance": parse_balance_option,
    "--pin": parse_pin_option,
    "--memory-limit": lambda text: text.split(",") if "," in text else text,
    "--optimizer-state": float,
    "--sizes": parse_size_option,
    "--code": int,
    **dict.fromkeys(("--nodes", "--devices-per-node", "--stages-per-device"), parse_whole_number),
    **dict.fromkeys(("--data-parallel", "--chunks"), lambda text: text if text == "auto" else parse_whole_number(text)),
    **dict.fromkeys(("--save", "--timeline", "--graph", "--report"), Path),
}
REPEATED: dict[str, Any] = {"action": "append", "default": []}
SPECIAL_KEYWORDS: dict[str, dict[str, Any]] = {
    **{name: {"action": _AddPairs, "nargs": "+", "default": {}} for name in ("--kwargs", "--sizes")},
    "--pin": {"action": _AddPairs, "nargs": 1, "default": {}},
    "--input": {"dest": "inputs", **REPEATED},
    "--dynamic": REPEATED,
    "--leaf": {"dest": "leaf_modules", **REPEATED},
    "--target": {"dest": "loss_target"},
    "--schedule": {"choices": [name for name in SCHEDULES if name != "inference"]},
    "--checkpoint": {"choices": ["auto", *CHECKPOINTS]},
}


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fxpipe.inspect",
        usage="python -m fxpipe.inspect TARGET [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        type=_argparse_type(parse_subject),
        metavar="TARGET",
        help=f"{targets.TARGET_FORMS}, which returns the nn.Module (the current directory is searched); hf:TYPE, a "
        "model type of the installed transformers, as in hf:gpt2; or plan.json, a plan that was saved",
    )
    group = parser.add_argument_group()
    text = OPTIONS_TEXT.format(
        inputs=targets.ACCEPTED_INPUTS.capitalize(),
        schedules=", ".join(SPECIAL_KEYWORDS["--schedule"]["choices"]),
        checkpoints=", ".join(CHECKPOINTS),
    )
    for block in re.split(r"\n(?=\S)", text.rstrip()):
        head, *lines = block.splitlines()
        name, _, metavar = head.partition(" ")
        if name == "#":
            group = parser.add_argument_group(metavar)
            continue
        keywords: dict[str, Any] = {"help": " ".join(map(str.strip, lines)).replace("%", "%%")}
        if metavar:
            parse = _argparse_type(PARSERS.get(name, str))
            keywords |= {"type": parse, "metavar": metavar} | SPECIAL_KEYWORDS.get(name, {})
        else:
            keywords["action"] = "store_true"
        group.add_argument(name, **keywords)
    return parser


OUTPUTS = {  # by option: its name and its formats
    "timeline": ("a timeline", TIMELINE_FORMATS),
    "graph": ("a graph", ("svg",)),
    "report": ("a report", ("html",)),
    "save": ("a plan", ("json",)),
}


class Request(argparse.Namespace):
    """A request: the options as attributes; those that were not given are None, False or empty."""

    # `options` has the given options of `fxpipe.plan`, except devices, stages_per_device and dynamic_shapes. `hardware`
    # has the numbers of nodes and devices.
    target: Subject
    inputs: list[targets.InputOption]
    loss: targets.Target | None
    loss_target: targets.InputOption | None
    options: dict[str, Any]
    code: int | None  # the stage whose code is printed

    @property
    def outputs(self) -> dict[str, Path]:
        return {name: path for name in OUTPUTS if (path := getattr(self, name)) is not None}

    @property
    def chooses_replicas(self) -> bool:
        is_open = self.data_parallel is None and self.nodes is not None and self.options.get("balance") != "pipedream"
        return self.data_parallel == "auto" or is_open


PLAN_OPTIONS = (
    *("chunks", "schedule", "checkpoint", "balance", "memory_limit", "optimizer_state", "hardware", "mesh"),
    *("processes", "data_parallel", "leaf_modules", "pin"),
)
MODEL_OPTIONS = (  # a saved plan does not take them
    *("kwargs", "inputs", "loss", "loss_target", "meta", "eval", "dynamic", "devices", "stages_per_device"),
    *("balance", "memory_limit", "optimizer_state", "leaf_modules", "pin", "sweep"),
)


def parse_request(argv: Sequence[str]) -> Request:
    """Parses a command line, without loading any user code."""
    parser = make_parser()
    request = parser.parse_args(argv, namespace=Request())
    chosen = {name: value for name, value in vars(request).items() if value != parser.get_default(name)}
    if isinstance(request.target, Path):
        for name in MODEL_OPTIONS:
            if name in chosen:
                raise ArgumentError(
                    f"{_option_name(name)} needs the model, and {request.target} is a plan that is made already; "
                    "give the factory"
                )
    request.hardware = cluster_hardware(request.hardware, request.nodes, request.devices_per_node, request.devices)
    chosen["hardware"] = request.hardware
    request.options = {name: chosen[name] for name in PLAN_OPTIONS if chosen.get(name) is not None}
    for name in ("chunks", "data_parallel"):
        if request.options.get(name) == "auto":
            del request.options[name]
    is_plan = isinstance(request.target, Path)
    other = "json" if request.json else "sweep" if request.sweep else "tune" if request.tune else ""
    if request.code is not None and other:
        raise ArgumentError(f"--code prints the code of a stage and nothing else; leave --{other} out")
    if request.chooses_replicas and request.sweep:
        raise ArgumentError("--sweep compares numbers of devices, and a cluster has as many as it has: leave one out")
    if request.data_parallel is not None and request.hardware is None and not is_plan:
        raise ArgumentError("--data-parallel without --hardware: the links between replicas are not known; give it")
    if request.sweep and request.tune:
        raise ArgumentError("--sweep and --tune are two questions: ask one after the other")
    if request.all and not request.tune:
        raise ArgumentError("--all shows every row of --tune; give that, or leave --all out")
    if request.loss_target is not None and request.loss is None:
        raise ArgumentError("--target without --loss: give both, or neither where the model returns its loss")
    if is_plan and request.data_parallel == "auto":
        raise ArgumentError("--data-parallel auto needs the model: a plan has its devices; give a number of replicas")
    return request


def _option_name(argument: str) -> str:
    others = {"leaf_modules": "leaf", "batch_size": "input", "inputs": "input", "loss_target": "target"}
    return f"--{others.get(argument, argument).replace('_', '-')}"


_REPLACED = "|".join((*PLAN_OPTIONS, "devices", "stages_per_device", "batch_size"))
_GIVEN_ARGUMENT = re.compile(rf"(?<![\w.-])({_REPLACED})=('[^']*'|\[[^\]]*\]|\w[\w.]*)")
# At the beginning, or in brackets.
_NAMED_ARGUMENT = re.compile(rf"(?:^(?=\w+(?:: |\[))|(?<=\()(?=\w+\)))({_REPLACED})\b")


def as_options(text: str) -> str:
    """Replaces arguments by options in a text of planning: `stages_per_device=2` by `--stages-per-device 2`."""

    def option(match: re.Match[str]) -> str:
        value = match[2].strip("[]").replace("'", "").replace(", ", ",")
        return f"{_option_name(match[1])} {value}"

    text = _GIVEN_ARGUMENT.sub(option, text)
    return _NAMED_ARGUMENT.sub(lambda match: _option_name(match[0]), text)
