"""Several stages on a device: the same bits as the plain model, by as many workers as there are devices."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.case_steps import BATCH, assert_training_steps, case_and_pipe, set_options
from helpers.models import TiedAtBothEnds, token_loss, tokens
from helpers.oracle import closing
from helpers.tried_orders import InterleavedExecutor, JitteredExecutor
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.runtime.executors import ThreadedExecutor
from fxpipe.scheduling import CHECKPOINTS, dependencies, make_schedule
from fxpipe.scheduling.actions import ActionKind

MODES = [(schedule, checkpoint) for schedule in ("1f1b", "gpipe") for checkpoint in CHECKPOINTS]


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (1, 0, 0, 2), (0, 0, 1, 1)])
def test_any_placement(placement):
    """As a plan may have it."""
    case, plain, planned = case_and_pipe("unet", 4, 3, stages_per_device=1)
    plan = dataclasses.replace(planned.plan, placement=placement)
    planned.close()
    args, kwargs = case.inputs(BATCH)
    with fxpipe.pipeline(copy.deepcopy(plain), plan=plan, example_args=args, example_kwargs=kwargs) as pipe:
        assert pipe.plan.placement == placement
        assert_training_steps(case, plain, pipe, MODES, 3)


def _run(pipe, executor, drop_in):
    start = copy.deepcopy(pipe.model.state_dict())
    pipe._fxpipe.engine.executor = executor
    pipe.zero_grad()
    torch.manual_seed(8)
    ids, t = tokens(7)
    if drop_in:
        loss = token_loss(pipe(ids), t)
        loss.backward()
    else:
        loss = pipe.forward_backward(ids, target=t, loss_fn=token_loss)
    found = {"loss": loss.detach()} | {name: p.grad for name, p in pipe.named_parameters()}
    found |= {name: b.clone() for name, b in pipe.named_buffers()}
    pipe.load_state_dict(start)
    return found


@pytest.mark.parametrize(
    ("schedule", "workers", "per_device"),
    [
        ("gpipe", 2, 2),
        ("1f1b", 2, 3),
        ("drop-in", 2, 2),
        ("1f1b", 3, 1),
        ("interleaved_1f1b", 2, 2),
        ("zero_bubble_2p", 3, 1),
        ("zbv", 2, 2),
        ("dualpipev", 2, 2),
    ],
)
def test_every_executor_gives_the_same_bits(schedule, workers, per_device):
    torch.manual_seed(4)
    drop_in = schedule == "drop-in"
    schedule = "gpipe" if drop_in else schedule
    modes = tuple(CHECKPOINTS[j % 3] for j in range(workers * per_device))
    # Estimates: a measured cut may leave a stage with a counter alone, whose backward waits for nobody's.
    options = {"schedule": schedule, "stages_per_device": per_device, "hardware": "cpu"}
    options["example_args"] = (tokens(7)[0],)
    pipe = fxpipe.pipeline(TiedAtBothEnds(), ["cpu"] * workers, 4, **options)
    set_options(pipe, checkpoint=modes)
    cpus = pipe._fxpipe.settings.workers
    assert len(cpus) == workers
    with closing(ThreadedExecutor(cpus)) as executor:
        want = _run(pipe, executor, drop_in)
        actions = [r.action for r in pipe.last_step.actions]
        rows = make_schedule(schedule, len(modes), 4, modes, pipe.plan.placement).rows
        assert sorted(map(str, actions)) == sorted(str(a) for row in rows for a in row)
        times = {r.action: r for r in pipe.last_step.actions}
        for action in times:
            for needed in dependencies(action, len(modes)):
                assert needed not in times or times[needed].end <= times[action].start, f"{action} before {needed}"
    executors = [*map(InterleavedExecutor, range(8)), *(JitteredExecutor(cpus, seed) for seed in range(2))]
    for executor in executors:
        with closing(executor):
            have = _run(pipe, executor, drop_in)
        for name, value in want.items():
            assert torch.equal(have[name], value), f"{name} differs by {(have[name] - value).abs().max()}"


def _chain(layers=6):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def test_a_plan_is_used_again_with_its_placement(tmp_path):
    x, model = torch.randn(6, 4), _chain()
    plan = fxpipe.plan(model, 4, example_args=(x,), stages_per_device=2)
    assert (plan.workers, plan.devices, plan.placement) == (("cpu",) * 2, ("cpu",) * 4, (0, 1, 0, 1))
    plan.save(tmp_path / "plan.json")
    plan = fxpipe.Plan.load(tmp_path / "plan.json")
    assert plan.placement == (0, 1, 0, 1)
    for options in ({}, {"devices": ["cpu", "cpu"]}, {"devices": ["cpu", "cpu"], "stages_per_device": 2}):
        with fxpipe.pipeline(model, plan=plan, **options) as pipe:
            torch.testing.assert_close(pipe(x), model(x))
            assert pipe.plan.placement == plan.placement
            assert [stage.nodes for stage in pipe.plan.stages] == [stage.nodes for stage in plan.stages]
    with fxpipe.pipeline(model, ["cpu"], plan=plan, stages_per_device=4) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        assert pipe.plan.placement == (0, 0, 0, 0)


def test_a_checkpoint_mode_for_each_stage_is_saved_and_used_again(tmp_path):
    x, model = torch.randn(6, 4), _chain()
    plan = dataclasses.replace(fxpipe.plan(model, 3, example_args=(x,)), checkpoint=("never", "always", "never"))
    plan.save(tmp_path / "plan.json")
    plan = fxpipe.Plan.load(tmp_path / "plan.json")
    assert "checkpoint never (always in stage 1)" in str(plan)
    with fxpipe.pipeline(model, plan=plan) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        assert {r.action.stage for r in pipe.last_step.actions if r.action.kind is ActionKind.RECOMPUTE} == {1}
        assert pipe.plan.checkpoint == plan.checkpoint


def test_balance_by_hand_speaks_of_stages():
    x = torch.randn(6, 4)
    plan = fxpipe.plan(_chain(), devices=["cpu", "cpu"], stages_per_device=2, balance=[1, 1, 1, 3], example_args=(x,))
    assert [len(stage.nodes) for stage in plan.stages] == [1, 1, 1, 3]
    with pytest.raises(ArgumentError, match="has 2 entries for 4 stages"):
        fxpipe.plan(_chain(), devices=["cpu", "cpu"], stages_per_device=2, balance=[3, 3], example_args=(x,))


def test_numbers_that_do_not_fit_together():
    x = torch.randn(6, 4)
    with pytest.raises(ArgumentError, match="stages=5 cannot be shared out with stages_per_device=2; give a multiple"):
        fxpipe.plan(_chain(), 5, example_args=(x,), stages_per_device=2)
    with pytest.raises(ArgumentError, match="stages=2, but devices has 2 entries of 2 stages; give as many"):
        fxpipe.plan(_chain(), 2, devices=["cpu", "cpu"], example_args=(x,), stages_per_device=2)
    plan = fxpipe.plan(_chain(), 4, example_args=(x,), stages_per_device=2)
    with pytest.raises(ArgumentError, match="plan has 4 stages on 2 devices, but devices has 3 entries; give 2"):
        fxpipe.pipeline(_chain(), ["cpu"] * 3, plan=plan)
    with pytest.raises(
        ArgumentError, match=r"plan has 4 stages, .* 2 entries and stages_per_device=3, which makes 6; "
    ):
        fxpipe.pipeline(_chain(), ["cpu"] * 2, plan=plan, stages_per_device=3)
