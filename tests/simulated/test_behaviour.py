"""Whole training steps of the models that behaviour tests use, on devices: schedules, recompute, split backward.

Cases that draw random numbers skip: those of a device are not those of the plain model, which is on the CPU.
"""

from __future__ import annotations

import pytest
from helpers.case_steps import assert_drop_in_step, assert_training_steps, case_and_pipe, optimizer_of, set_options
from helpers.models import CASES
from helpers.oracle import assert_same_state

from fxpipe.scheduling import CHECKPOINTS

pytestmark = pytest.mark.simulated
CHUNKS = 4
NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_the_plain_model(name):
    case, plain, pipe = case_and_pipe(name, 3, CHUNKS)
    with pipe:
        assert_training_steps(case, plain, pipe, [("1f1b", mode) for mode in CHECKPOINTS], CHUNKS)


@pytest.mark.parametrize("name", NAMES)
def test_drop_in_steps_equal_the_plain_model(name):
    case, plain, pipe = case_and_pipe(name, 3, CHUNKS)
    optimizers = [optimizer_of(plain), optimizer_of(pipe)]
    with pipe:
        for step, checkpoint in enumerate(CHECKPOINTS):
            set_options(pipe, checkpoint=checkpoint)
            for optimizer in optimizers:
                optimizer.zero_grad()
            assert_drop_in_step(case, plain, pipe, step, CHUNKS)
            for optimizer in optimizers:
                optimizer.step()
            assert_same_state(pipe, plain, exact=False)


@pytest.mark.parametrize(
    "schedules",
    [("zero_bubble", "zero_bubble_2p"), ("interleaved_1f1b", "interleaved_zero_bubble"), ("zbv", "dualpipev")],
)
def test_schedules_of_several_stages_and_split_backwards_equal_the_plain_model(schedules):
    case, plain, pipe = case_and_pipe("unet", 2, CHUNKS, schedule=schedules[0])
    with pipe:
        for schedule in schedules:
            modes = [(schedule, "never"), (schedule, "always")]
            assert_training_steps(case, plain, pipe, modes, CHUNKS)
