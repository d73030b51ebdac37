"""Shows which files a value passes on its way through fxpipe: `python tools/walks.py [chunks target ...]`.

Each walk runs a small pipeline and follows one value through the arguments and variables of functions and the
attributes that they read. A file is *entered* where the value comes to it for the first time and *returned to* where it
comes back after another file: what a reader has to open, in the order in which it runs.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import nn

import fxpipe

PACKAGE = Path(fxpipe.__file__).parent
NUMBER = 509  # of micro-batches, or a length
LIMIT = 123_456_789  # bytes

Function = tuple[str, str]  # its file and its name


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def follow(is_value: Callable[[Any], bool], run: Callable[[], Any], until: str = "") -> list[Function]:
    """Calls `run` and returns the functions of fxpipe that have the value, in the order of their calls.

    The walk ends at the first call of the function `until` with the value.
    """

    def things(frame: FrameType) -> Iterator[Any]:
        for local in list(frame.f_locals.values()):
            yield local
            if isinstance(local, tuple):
                yield from local
            slots = getattr(type(local), "__slots__", ())
            for name in frame.f_code.co_names:
                if name in slots or name in getattr(local, "__dict__", ()):
                    yield getattr(local, name, None)

    calls = itertools.count()
    running: dict[FrameType, int] = {}
    passed: dict[int, Function] = {}

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            running.setdefault(frame, next(calls))
        elif event == "return" and frame in running:
            number = running.pop(frame)
            if any(map(is_value, things(frame))):
                passed[number] = (str(file.relative_to(PACKAGE)), frame.f_code.co_name)

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    functions = [passed[number] for number in sorted(passed)]
    ends = [place for place, (_, name) in enumerate(functions, 1) if name == until]
    return functions[: ends[0]] if ends else functions


def chunks() -> list[Function]:
    """From `pipeline` to the schedule of a plan."""
    x = torch.randn(NUMBER, 8)
    return follow(
        lambda v: v is NUMBER,
        lambda: fxpipe.pipeline(model(), 2, NUMBER, example_args=(x,), hardware="cpu"),
        until="make_schedule",
    )


def target() -> list[Function]:
    """From `forward_backward` until each micro-batch has its part."""
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    with fxpipe.pipeline(model(), 2, 4, example_args=(x,), hardware="cpu") as pipe:
        return follow(lambda v: v is y, lambda: pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss))


def memory_limit() -> list[Function]:
    """From `pipeline` to the search for a cut."""
    x, options = torch.randn(8, 8), {"memory_limit": LIMIT, "hardware": "cpu"}
    return follow(
        lambda v: type(v) is int and v == LIMIT, lambda: fxpipe.pipeline(model(), 2, 4, example_args=(x,), **options)
    )


def size() -> list[Function]:
    """A dynamic length, from an input of `trace` to the guards."""
    x, lengths = torch.randn(8, NUMBER, 8), {"input": {1: "length"}}
    return follow(
        lambda v: v is NUMBER or (isinstance(v, sympy.Symbol) and v.name == "length"),
        lambda: fxpipe.trace(model(), (x,), chunks=4, dynamic_shapes=lengths),
    )


WALKS = {walk.__name__: walk for walk in (chunks, target, memory_limit, size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", choices=[[], *WALKS], help="those to show; all without any")
    for name in parser.parse_args().walks or WALKS:
        stays = [
            (file, list(dict.fromkeys(f for _, f in stay)))
            for file, stay in itertools.groupby(WALKS[name](), lambda f: f[0])
        ]
        entered = len({file for file, _ in stays})
        print(f"{name}: {entered} files entered, {len(stays) - entered} times returned to one. {WALKS[name].__doc__}")
        for file, functions in stays:
            print(f"    {file}: {', '.join(f for f in functions if not f.startswith('<')) or 'a loop'}")


if __name__ == "__main__":
    main()
