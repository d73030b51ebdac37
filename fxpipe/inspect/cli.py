"""The command `python -m fxpipe.inspect`: make a model, plan its pipeline, print the plan.

Standard output has the plan and nothing else: what the user's code prints goes to standard error. Whatever the user can
mend ends in one line there and exit status 2. A traceback is a bug in fxpipe.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fxpipe.errors import ArgumentError, FxpipeError, MemoryLimitError
from fxpipe.inspect.inputs import ACCEPTED, Arguments, Shape, make_arguments, parse_input
from fxpipe.inspect.target import FORMS, Target, describe, load_model, parse_target
from fxpipe.scheduling import SCHEDULES

# Neither torch nor anything that imports it is imported above: --help answers at once.
if TYPE_CHECKING:
    from torch import nn

    from fxpipe.plans import Plan

T = TypeVar("T")

CHECKPOINTS = ("never", "except_last", "always")
TRACERS = ("auto", "record", "export", "fx")
BALANCES = ("auto", "block", "optimal")  # any other word is the name of a node or module
HARDWARE = ("a100-80gb", "h100", "h200", "cpu")
OPTIONS = ("chunks", "schedule", "checkpoint", "balance", "tracer", "memory_limit", "optimizer_state", "hardware")

EXAMPLES = """\
examples:
  python -m fxpipe.inspect models:resnet --input 32x3x224x224 --devices 4 --chunks 8
  python -m fxpipe.inspect models/gpt.py:small --input 8x128:int64 --devices 2 --schedule gpipe --checkpoint always
  python -m fxpipe.inspect torchvision.models:resnet18 --input 8x3x64x64 --devices cuda:0,cuda:1 --json > plan.json
  python -m fxpipe.inspect model.py:make --input model.py:make_inputs --devices 3 --balance 10,12,9
  python -m fxpipe.inspect model.py:make --input 8x64 --devices 2 --stages-per-device 2 --code 3
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for. An option that was not given is None, and fxpipe.plan has the say."""

    model: Target
    inputs: tuple[Shape | Target, ...]
    devices: int | tuple[str, ...] | None
    stages_per_device: int | None
    options: dict[str, Any]  # of `fxpipe.plan`: those that were given
    evaluating: bool
    json: bool
    code: int | None  # the stage whose code is to be printed


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` says and return the exit status: 0, or 2 where the user has something to mend."""
    try:
        request = parse_request(sys.argv[1:] if argv is None else argv)
        with contextlib.redirect_stdout(sys.stderr):
            plan = make_plan(request)
        print(render(plan, request))
    except FxpipeError as error:
        text = str(error) if isinstance(error, MemoryLimitError) else " ".join(str(error).split())  # that has a table
        print(f"fxpipe.inspect: {text}", file=sys.stderr)
        return 2
    return 0


def parse_request(argv: Sequence[str]) -> Request:
    """The command line as data; nothing of the user's has been looked at yet."""
    found = _parser().parse_args(argv)
    given = {name: getattr(found, name) for name in OPTIONS}
    given["leaf_modules"] = tuple(found.leaf) or None
    given["pin"] = dict(found.pin) or None
    return Request(
        model=found.model,
        inputs=tuple(found.input),
        devices=found.devices,
        stages_per_device=found.stages_per_device,
        options={name: value for name, value in given.items() if value is not None},
        evaluating=found.eval,
        json=found.json,
        code=found.code,
    )


def make_plan(request: Request) -> Plan:
    """Load what the request names, and plan it."""
    planned_for = request.options.get("hardware")
    devices = resolve_devices(request.devices) if planned_for is None else _named(request.devices)
    count = devices if isinstance(devices, int) else len(devices)
    usual = SCHEDULES[request.options.get("schedule", "1f1b")].per_device
    stages = count * (request.stages_per_device or usual)
    if request.code is not None and not 0 <= request.code < stages:
        raise ArgumentError(f"--code {request.code}: no such stage; stages are 0 to {stages - 1}")
    model = load_model(request.model)
    if request.evaluating:
        model.eval()
    arguments = make_arguments(request.inputs)
    options = request.options
    if request.stages_per_device:
        options = options | {"stages_per_device": request.stages_per_device}
    try:
        return _plan(model, stages, arguments, devices, options)
    except FxpipeError:
        raise
    except Exception:
        _raise_if_model_fails(model, arguments)
        raise


def render(plan: Plan, request: Request) -> str:
    """What goes to standard output."""
    if request.code is not None:
        return plan.stages[request.code].code
    if request.json:
        from fxpipe.inspect.document import plan_document

        return json.dumps(plan_document(plan), indent=2)
    from fxpipe.inspect.tables import plan_table

    return plan_table(plan)


def parse_devices(text: str) -> int | tuple[str, ...]:
    """`4` -> 4; `cuda:0,cuda:1` -> ("cuda:0", "cuda:1")."""
    names = tuple(name.strip() for name in text.split(","))
    if len(names) == 1 and re.fullmatch(r"0*[1-9]\d{0,3}", text.strip()):
        return int(text)
    if not all(re.fullmatch(r"[a-z]+(:\d+)?", name) for name in names):
        raise ArgumentError(f"{text!r}: expected a number (4) or a list of devices (cpu,cpu or cuda:0,cuda:1)")
    return names


def resolve_devices(devices: int | tuple[str, ...] | None) -> tuple[str, ...]:
    """The name of each stage's device; a number means so many CUDA devices, or CPU workers where CUDA is absent."""
    import torch

    if isinstance(devices, tuple):
        for name in devices:
            try:
                torch.device(name)
            except RuntimeError:
                raise ArgumentError(f"--devices: {name!r} is no device of torch's; cpu and cuda:0 are") from None
        return devices
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not present:
        return ("cpu",) * (2 if devices is None else devices)
    if devices is not None and devices > present:
        workers = "cpu" if devices == 1 else "cpu,cpu" if devices == 2 else "cpu,cpu,..."
        raise ArgumentError(f"--devices {devices}: CUDA has {present} here; for CPU workers give a list: {workers}")
    return tuple(f"cuda:{index}" for index in range(present if devices is None else devices))


def _named(devices: int | tuple[str, ...] | None) -> int | tuple[str, ...]:
    """Devices that need not be here: their number, or names."""
    return 2 if devices is None else devices


def parse_pin(text: str) -> tuple[str, int | str]:
    """`lm_head=0` -> ("lm_head", 0); `encoder=cuda:1` -> ("encoder", "cuda:1")."""
    name, equals, device = (part.strip() for part in text.rpartition("="))
    if not name or not equals or not device:
        raise ArgumentError(f"{text!r}: expected the name of a module or node and a device, as in lm_head=0")
    return name, int(device) if device.isdecimal() else device


def parse_balance(text: str) -> str | tuple[int, ...] | tuple[str, ...]:
    """`block` and the like are themselves; `10,12,9` are numbers of nodes; any other list has names."""
    if text in BALANCES:
        return text
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ArgumentError(f"{text!r}: expected block, counts of nodes (10,12,9), or names (layer2,layer3)")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else parts


def _plan(
    model: nn.Module, stages: int, arguments: Arguments, devices: int | tuple[str, ...], options: dict[str, Any]
) -> Plan:
    from fxpipe import planning

    if not isinstance(devices, int):
        options = options | {"devices": devices}
    return planning.plan(model, stages, example_args=arguments.args, example_kwargs=arguments.kwargs, **options)


def _raise_if_model_fails(model: nn.Module, arguments: Arguments) -> None:
    """Ask the plain model, so that its exceptions are told from those of a bug in fxpipe."""
    try:
        model(*arguments.args, **arguments.kwargs)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        given = "on these inputs" if arguments.args or arguments.kwargs else "without inputs; give them with --input"
        raise ArgumentError(f"the model raises {describe(error)} ({place.filename}:{place.lineno}) {given}") from error


class _Parser(argparse.ArgumentParser):
    """argparse, with this command's way of refusing: one line and no usage."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fxpipe.inspect",
        description="Plan the pipeline of a model and print its stages: nodes, time, memory, what is sent where.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        type=_value(parse_target),
        metavar="TARGET",
        help=f"{FORMS}: called without arguments, it returns the nn.Module; the current directory is searched",
    )
    add(
        "--input",
        action="append",
        default=[],
        type=_value(parse_input),
        metavar="INPUT",
        help=f"an example input; repeat it for more arguments. {ACCEPTED.capitalize()} which returns a tensor, a tuple "
        "of positional arguments or a dict of keyword arguments. Integers are drawn from 0 and 1",
    )
    add(
        "--devices",
        type=_value(parse_devices),
        metavar="N|LIST",
        help="number of workers, or the device of each: 2, or cpu,cpu, or cuda:0,cuda:1. A number takes CUDA devices, "
        "or CPU workers where CUDA is absent. Default: all CUDA devices, or two CPU workers",
    )
    add(
        "--stages-per-device",
        type=_value(_parse_stages_per_device),
        metavar="K",
        help="number of stages of each worker, in loops over them. Default: 2 for interleaved_1f1b and zbv, else 1",
    )
    add("--chunks", type=_value(_parse_chunks), metavar="M", help="number of micro-batches")
    add("--schedule", choices=[name for name in SCHEDULES if name != "inference"], help="order of forward and backward")
    add("--checkpoint", choices=CHECKPOINTS, help="which micro-batches are recomputed in backward")
    add(
        "--balance",
        type=_value(parse_balance),
        metavar="HOW",
        help="block (by time), optimal (by time, transfers and memory) or auto, which takes what fits the case; or by "
        "hand: each stage's count of nodes (10,12,9), or the names of nodes or modules behind which a stage ends "
        "(layer2,layer3)",
    )
    add(
        "--pin",
        action="append",
        default=[],
        type=_value(parse_pin),
        metavar="NAME=DEVICE",
        help="put a module or node on a device, by its number or name (lm_head=0); repeat it for more",
    )
    add("--memory-limit", metavar="SIZE", help="what stages may take on each device, as in 70GiB")
    add(
        "--optimizer-state",
        type=_value(_parse_optimizer_state),
        metavar="X",
        help="bytes of the optimizer's state for each byte of a parameter: 2 for Adam (the default), 0 for SGD",
    )
    add("--hardware", choices=HARDWARE, help="plan for this hardware, which need not be here")
    add("--tracer", choices=TRACERS, help="how the graph is made; auto takes the first way that is right")
    add(
        "--leaf",
        action="append",
        default=[],
        metavar="MODULE",
        help="name of a module to keep whole, as one node; repeat it for more",
    )
    add("--eval", action="store_true", help="call model.eval() first")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the plan as JSON")
    output.add_argument("--code", type=int, metavar="N", help="print the code of stage N")
    return parser


def _parse_optimizer_state(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"{text!r}: expected a number, as in 2") from None


def _parse_chunks(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,5}", text):
        raise ArgumentError(f"{text!r}: expected the number of micro-batches, at least 1")
    return int(text)


def _parse_stages_per_device(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,3}", text):
        raise ArgumentError(f"{text!r}: expected the number of stages of a device, at least 1")
    return int(text)


def _value(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse, which would hide the message of a ValueError behind one of its own."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
