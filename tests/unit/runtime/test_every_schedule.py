"""Every schedule, run: the same bits as the plain model over the same micro-batches, whatever the order of actions.

`gpipe` and `1f1b` are in every other test; here are those that split backward, and those that are bound to a placement.
"""

from __future__ import annotations

import copy
from contextlib import closing
from itertools import product

import pytest
import torch
from helpers.case_steps import BATCH, set_options
from helpers.models import BY_NAME, CASES
from helpers.oracle import assert_same_gradients, assert_same_state, draw_seed, train_step

import fxpipe
from fxpipe.runtime import InterleavedExecutor
from fxpipe.scheduling import make_schedule
from fxpipe.scheduling.actions import ActionKind

NAMES = [case.name for case in CASES]
# With stages on the same devices:
ALIKE = [
    ("zero_bubble", "zero_bubble_2p"),
    ("interleaved_1f1b", "interleaved_zero_bubble"),
    ("zbv", "dualpipev", "v_half", "v_min"),
]
WHOLE = ("interleaved_1f1b",)  # in one piece is the backward of it


def _pipe(case, plain, schedule):
    args, kwargs = case.inputs(BATCH)
    return fxpipe.pipeline(
        copy.deepcopy(plain),
        ["cpu"] * 2,
        4,
        schedule=schedule,
        example_args=args,
        example_kwargs=kwargs,
        profile_budget=0.1,
    )


@pytest.mark.parametrize("schedules", ALIKE, ids=lambda names: names[0])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_the_plain_model(name, schedules):
    case = BY_NAME[name]
    torch.manual_seed(1)
    plain = case.make()
    args, kwargs = case.inputs(BATCH)
    target = case.target(BATCH)
    with _pipe(case, plain, schedules[0]) as pipe:
        ways = ((4, "never"), (3, "except_last"), (1, "always"))
        for schedule, (chunks, checkpoint) in product(schedules, ways):
            set_options(pipe, schedule=schedule, chunks=chunks, checkpoint=checkpoint)
            plain.zero_grad()
            pipe.zero_grad()
            torch.manual_seed(2)
            seed = draw_seed(pipe._fxpipe.first.program.is_random)
            want = train_step(
                plain, args, kwargs, target, case.loss, chunks=chunks, order="1f1b", seed=seed, batch=BATCH
            )
            torch.manual_seed(2)
            have = pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
            torch.testing.assert_close(have, want)
            assert_same_gradients(pipe, plain, case.tied)
            assert_same_state(pipe, plain)
            made = make_schedule(schedule, len(pipe.plan.stages), chunks, checkpoint, pipe.plan.placement)
            actions = {r.action for r in pipe.last_step.actions}
            assert actions == {action for row in made.rows for action in row}
            assert (ActionKind.WEIGHT in {action.kind for action in actions}) == (schedule not in WHOLE)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_2p", "zbv", "dualpipev"])
def test_any_interleaving_of_the_workers_comes_to_the_same_bits(schedule):
    case = BY_NAME["dict"]
    torch.manual_seed(1)
    args, kwargs = case.inputs(BATCH)
    target = case.target(BATCH)
    found = []
    with _pipe(case, case.make(), schedule) as pipe:
        set_options(pipe, checkpoint="except_last")
        before = copy.deepcopy(pipe.state_dict())
        for seed in (None, 0, 1, 2):
            pipe.zero_grad()
            pipe.load_state_dict(before)
            with closing(pipe._fxpipe.engine.executor if seed is None else InterleavedExecutor(seed)) as executor:
                pipe._fxpipe.engine.executor = executor
                torch.manual_seed(2)
                pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
            found.append({name: p.grad for name, p in pipe.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(other[name], gradient), name
