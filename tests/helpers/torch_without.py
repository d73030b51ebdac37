"""Trains models in processes in which torch lacks one private name each: `python torch_without.py NAME...`.

Prints a line for each name: `ok`, or what was raised. Each process is forked before fxpipe is imported.
"""

import os
import sys
import traceback
import warnings
from contextlib import nullcontext

import torch
import torch.fx.experimental.symbolic_shapes  # for all children at once, with what else they import
import torch.utils.checkpoint
import torch.utils.flop_counter
from torch import nn
from torch._dynamo.source import LocalSource  # noqa: F401
from torch.nn import functional as F

from helpers.layered import Layered


class Convolutions(Layered, first=lambda: nn.Conv2d(1, 2, 3), second=lambda: nn.Conv2d(2, 2, 3), head=(8, 3)):
    """Has a frozen part, convolutions, a sum of squares and a loss of its own."""

    def forward(self, x, y):
        x = self.second(F.relu(self.first(x))) + 1
        return F.cross_entropy(self.head(x.flatten(1)), y)


class Mapped(Layered, first=4, last=(4, 2)):
    def forward(self, x):
        return self.last(torch.vmap(lambda row: row.sin() * 2)(self.first(x)))


class Attention(Layered, first=4, last=(4, 2)):
    def forward(self, x):
        q = self.first(x)[:, None]
        return self.last(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[:, 0])


class Noise(Layered, weight=lambda: nn.Parameter(torch.ones(4))):
    """Has a part that Python decides, with random numbers in a checkpoint."""

    def forward(self, x):
        scale = 2.0 if float(x.detach().sum()) > 1e9 else 1.0

        def block(x):
            return F.dropout(x * self.weight, 0.5) * scale

        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


class Noisy(nn.Sequential):
    """A model with such a part."""


def model_for(name):
    torch.manual_seed(0)
    if "vmap" in name:
        return Mapped(), (torch.randn(4, 3, 4),)
    if "softmax" in name:
        return Attention(), (torch.randn(4, 3, 4),)
    if "mark_dynamic" in name:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(4, 3, 4),)
    if "checkpoint" in name:
        return Noisy(nn.Linear(4, 4), Noise(), nn.Linear(4, 2)), (torch.randn(4, 4),)
    return Convolutions(), (torch.randn(4, 1, 6, 6), torch.randint(3, (4,)))


def train(name, gone):
    """Two steps; parameters after them."""
    import fxpipe
    from fxpipe._torch import versions

    plain_name, hidden = versions.optional_name, []

    def optional_name(module, part):
        if part not in gone:
            return plain_name(module, part)
        hidden.append(part)
        return None

    versions.optional_name = optional_name
    model, inputs = model_for(name)
    whole = ["1"] if "checkpoint" in name else []
    is_of_compiler = name.startswith("tools:") and "profiler" not in name.lower()
    compiled = {"backend": "eager"} if is_of_compiler else False
    profile = torch.profiler.profile() if "profiler" in name or "KINETO" in name else nullcontext()
    pipe = fxpipe.pipeline(
        model,
        devices=["cpu", "cpu"],
        chunks=2,
        leaf_modules=whole,
        compile=compiled,
        dynamic_shapes={"input": {1: "length"}} if "mark_dynamic" in name else None,
        progress=False,
        profile_budget=0.05,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    with profile:
        for _ in range(2):
            optimizer.zero_grad()
            result = pipe(*inputs)
            (result if result.dim() == 0 else result.square().mean()).backward()
            optimizer.step()
    pipe.close()
    assert {*hidden} == {*gone}, "nobody has asked for it"
    return [p.detach().clone() for p in model.parameters()]


def compare(name):
    """Trains with and without a name; says nothing where both come to the same."""
    gone = {*name.partition(":")[2].split(",")}
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        parameters = train(name, gone)
    expected = torch.load(baseline_file(name))
    for now, before in zip(parameters, expected, strict=True):
        torch.testing.assert_close(now, before)
    for one in raised:
        if "fxpipe" in str(one.message):
            print(f"{name} warns: {one.message}", flush=True)


def baseline_file(name):
    return os.path.join(FOLDER, type(model_for(name)[0]).__name__)


def save_baseline(name):
    parameters = train(name, ())
    if not isinstance(model_for(name)[0], (Attention, Noisy)):  # without random numbers: what plain torch comes to
        for now, plain in zip(parameters, train_plain(name), strict=True):
            torch.testing.assert_close(now, plain)
    torch.save(parameters, baseline_file(name))


def train_plain(name):
    model, inputs = model_for(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        result = model(*inputs)
        (result if result.dim() == 0 else result.square().mean()).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def in_child(function, name):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        torch.manual_seed(0)
        function(name)
    except BaseException as error:
        traceback.print_exc()
        print(f"{name} raised {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    FOLDER, *NAMES = sys.argv[1:]
    torch.set_num_threads(1)
    for one in {type(model_for(name)[0]).__name__: name for name in NAMES}.values():
        in_child(save_baseline, one)
    for name in NAMES:
        if in_child(compare, name):
            print(f"{name} ok", flush=True)
