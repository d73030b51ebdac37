"""Forwards that seed their own draws: the same numbers in each step, where a step would draw others."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.compared_steps import WAYS, refusal_of
from torch import nn

import fxpipe

WIDTH = 6
REFUSED = "seeds torch's random generator"


class Draws(nn.Module):
    """A module that draws what `draw(module, h)` returns."""

    def __init__(self, draw, add=False):
        super().__init__()
        self.draw, self.add = draw, add
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("number", torch.tensor(5))
        self.generator = torch.Generator()

    def forward(self, h):
        drawn = self.draw(self, h)
        return h @ self.weight + drawn if self.add else h @ self.weight @ drawn


class Between(nn.Module):
    """What draws stands between two layers."""

    def __init__(self, *drawing):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drawing = nn.ModuleList(drawing)

    def forward(self, x):
        h = self.first(x)
        for module in self.drawing:
            h = module(h)
        return self.last(h)


def inputs(step):
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)),)


def fork_and_seed(module, h, seed=7):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.rand(WIDTH, WIDTH)


def seed_of_the_caller(module, h):
    return fork_and_seed(module, h, seed=0)  # which the test has set, too


def seed_in_a_buffer(module, h):
    return fork_and_seed(module, h, seed=int(module.number))


def forked(draw):
    def seeded(module, h):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return draw(h)

    return seeded


def state_is_put_back(module, h):
    before = torch.get_rng_state()
    torch.manual_seed(0)
    drawn = torch.rand(WIDTH, WIDTH)
    torch.set_rng_state(before)
    return drawn


def default_generator(module, h):
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    drawn = torch.rand(WIDTH, WIDTH)
    torch.default_generator.set_state(before)
    return drawn


def never_put_back(module, h):
    torch.manual_seed(0)
    return torch.rand(WIDTH, WIDTH)


def seeded_after_the_draw(module, h):
    drawn = torch.rand(WIDTH, WIDTH)
    torch.manual_seed(3)
    return drawn


def fork_alone(module, h):
    with torch.random.fork_rng():
        return torch.rand(WIDTH, WIDTH)


def torch_seed(module, h):
    with torch.random.fork_rng():
        torch.seed()
        return torch.rand(WIDTH, WIDTH)


SEEDED = {
    "in place": forked(lambda h: torch.empty(WIDTH, WIDTH).uniform_()),
    "a number that is read": forked(lambda h: torch.eye(WIDTH) * torch.rand(()).item()),
    "a decision": forked(lambda h: torch.eye(WIDTH) * (2 if torch.rand(()) < 0.5 else 3)),
    "dropout": forked(lambda h: F.dropout(torch.ones(WIDTH, WIDTH), 0.5)),
    "for each sample": forked(lambda h: torch.rand_like(h) @ torch.eye(WIDTH)),
} | {
    draw.__name__: draw
    for draw in (
        fork_and_seed, seed_of_the_caller, seed_in_a_buffer, state_is_put_back, default_generator, never_put_back,
        seeded_after_the_draw, fork_alone, torch_seed,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_a_forward_that_seeds_is_refused_with_its_line(name):
    refusal = refusal_of(lambda: Between(Draws(SEEDED[name], name == "for each sample")), inputs)
    assert REFUSED in refusal
    assert "test_seeded_forward.py:" in refusal


@pytest.mark.parametrize("way", WAYS)
def test_in_every_way_of_running(way):
    assert REFUSED in refusal_of(lambda: Between(Draws(seed_of_the_caller)), inputs, way)


def test_a_model_without_values_is_refused_too():
    with torch.device("meta"):
        model = Between(Draws(seed_of_the_caller))
    with pytest.raises(fxpipe.errors.TraceError, match=REFUSED):
        fxpipe.plan(model, 2, example_args=(torch.empty(4, WIDTH, device="meta"),), chunks=2)


OWN_GENERATORS = {
    "seeded": lambda module, h: torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)),
    "fresh": lambda module, h: torch.randn(WIDTH, WIDTH, generator=torch.Generator()),
    "of the module": lambda module, h: torch.empty(WIDTH, WIDTH).normal_(generator=module.generator.manual_seed(3)),
}


@pytest.mark.parametrize("draw", OWN_GENERATORS.values(), ids=OWN_GENERATORS)
def test_a_generator_of_its_own_is_refused_with_its_line(draw):
    refusal = refusal_of(lambda: Between(Draws(draw)), inputs)
    assert "random generator of its own at " in refusal
    assert "test_seeded_forward.py:" in refusal


def of_python(module, h):
    return torch.eye(WIDTH) * random.Random(3).random()


def of_numpy(module, h):
    return torch.from_numpy(np.random.default_rng(3).random((WIDTH, WIDTH))).float()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", [of_python, of_numpy])
def test_a_generator_of_pythons_made_in_forward_is_right(draw, way):
    assert refusal_of(lambda: Between(Draws(draw)), inputs, way) == ""


def rows_of_python(module, h):
    generator = random.Random(3)
    return torch.tensor([[generator.random()] for _ in range(len(h))])


def rows_of_numpy(module, h):
    return torch.from_numpy(np.random.default_rng(3).random((len(h), WIDTH))).float()


@pytest.mark.parametrize("draw", [rows_of_python, rows_of_numpy])
def test_numbers_for_each_sample_are_refused(draw):
    assert refusal_of(lambda: Between(Draws(draw, add=True)), inputs) != ""


# -- in modules that are kept whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("way", ["drop-in", "forward_backward", "micro_batches"])
def test_a_module_kept_whole_may_seed_within_fork_rng(way, checkpoint):
    """Two of them, in two stages, whose draws from torch's generator do not disturb each other."""

    def build():
        return Between(Draws(fork_and_seed), Draws(seed_of_the_caller))

    assert refusal_of(build, inputs, way, leaf_modules=[Draws], checkpoint=checkpoint) == ""


def test_a_module_kept_whole_may_not_leave_another_seed():
    assert REFUSED in refusal_of(lambda: Between(Draws(never_put_back)), inputs, leaf_modules=[Draws])


def test_a_module_kept_whole_may_not_seed_for_each_sample():
    assert refusal_of(lambda: Between(Draws(SEEDED["for each sample"], add=True)), inputs, leaf_modules=[Draws]) != ""
