"""Optimizers whose update of one parameter depends on others: stages cannot step them by themselves."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, StateError
from fxpipe.optim import StageOptimizer

CHUNKS = 2


class Step(torch.optim.Optimizer):
    """Gradient descent; `change` may change the gradients of all parameters first."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    def trained(self):
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]

    def change(self, pairs):
        return [p.grad for _, p in pairs]

    @torch.no_grad()
    def step(self, closure=None):
        pairs = self.trained()
        for (group, p), update in zip(pairs, self.change(pairs), strict=True):
            p.sub_(group["lr"] * update)


def norm_of(gradients):
    return torch.stack([g.norm() for g in gradients]).norm()


class Lamb(Step):
    """As timm has it: gradients are clipped by the norm of all, then each update is scaled to its weight."""

    def __init__(self, params, lr=0.1, max_grad_norm=1.0):
        super().__init__(params, lr, max_grad_norm=max_grad_norm)

    def change(self, pairs):
        most = self.param_groups[0]["max_grad_norm"]
        clip = 1.0 if most is None else (norm_of([p.grad for _, p in pairs]) / most).clamp(min=1.0)
        updates = []
        for _, p in pairs:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad / clip, 0.1)
            update = momentum + 0.01 * p
            updates.append(update * (p.norm() / update.norm().clamp(min=1e-6)))
        return updates


class ClippedInside(torch.optim.AdamW):
    most = 1e-3

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.most)
        return super().step(closure)


def stepping(change):
    """A class whose update is what `change` makes of the gradients of all parameters."""

    class Changed(Step):
        def change(self, pairs):
            return change(pairs, [p.grad for _, p in pairs])

    return Changed


def clipped_if_large(pairs, gradients):
    norm = norm_of(gradients)
    return [g / norm if norm > 1e5 else g for g in gradients]


def mean_of_group(pairs, gradients):
    return [p.grad - torch.stack([q.grad.mean() for h, q in pairs if h is group]).mean() for group, p in pairs]


class DistanceFromStart(Step):
    """The step size follows from how far all parameters have come, as D-adaptation estimates it."""

    def change(self, pairs):
        starts = [self.state[p].setdefault("start", p.clone()) for _, p in pairs]
        distance = norm_of([p - start for (_, p), start in zip(pairs, starts, strict=True)])
        return [p.grad * (1 + distance) for _, p in pairs]


class MovingNorm(Step):
    """Nothing in the first step; then the norm of the gradients before."""

    def change(self, pairs):
        factor = self.__dict__.get("norm", 1.0)
        self.norm = float(norm_of([p.grad for _, p in pairs]))
        return [p.grad / (1 + factor) for _, p in pairs]


class QuasiNewton(Step):
    def step(self, closure=None):
        if closure is None:
            raise TypeError("QuasiNewton.step needs a closure")
        return closure()


WAYS = {
    "Lamb": (Lamb, {}),
    "Lamb without clipping": (Lamb, {"max_grad_norm": None}),
    "clipped inside": (ClippedInside, {"lr": 0.01}),
    "clipped if large": (stepping(clipped_if_large), {}),
    "mean of a group": (stepping(mean_of_group), {}),
    "distance from the start": (DistanceFromStart, {}),
    "moving norm": (MovingNorm, {}),
    "by place": (stepping(lambda pairs, gradients: [g / (1 + k) for k, g in enumerate(gradients)]), {}),
    "noisy": (stepping(lambda pairs, gradients: [g + 0.1 * torch.randn_like(g) for g in gradients]), {}),
    "quasi-Newton": (QuasiNewton, {}),
    "LBFGS": (torch.optim.LBFGS, {}),
    "each by itself": (Step, {}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
}
RIGHT = {"Lamb without clipping", "clipped if large", "each by itself", "AdamW", "Muon"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3, False))


@contextmanager
def pipe_of(schedule):
    options = {"progress": False, "check": False, "hardware": "cpu", "balance": ["2"]}
    example = (torch.ones(4, 4),)
    with fxpipe.pipeline(model(), ["cpu"] * 2, CHUNKS, schedule=schedule, example_args=example, **options) as made:
        made.forward_backward(*example, loss_fn=torch.mean)
        yield made


@pytest.fixture(scope="module")
def pipe():
    with pipe_of("1f1b") as made:
        yield made


@pytest.fixture(scope="module")
def stream_pipe():
    with pipe_of("pipedream_2bw") as made:
        yield made


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("how", ["step", "overlap", "stream"])
@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_couples_parameters_is_right_or_refused(way, how, pipe, stream_pipe):
    pipe = stream_pipe if how == "stream" else pipe
    optimizer_class, options = WAYS[way]
    plain = model()
    pipe.load_state_dict(copy.deepcopy(plain.state_dict()))
    pipe.zero_grad()
    before = copy.deepcopy(pipe.state_dict())
    torch.manual_seed(3)
    try:
        optimizer = StageOptimizer(pipe, optimizer_class, **options, overlap=how == "overlap")
        if how == "stream":
            losses = list(pipe.train_stream(batches(4), loss_fn=F.mse_loss, optimizer=optimizer))
            assert len(losses) == 4
            assert way in RIGHT
            return
        for x, target in batches(3):
            with_optimizer = {} if how == "step" else {"optimizer": optimizer}
            pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, **with_optimizer)
            if how == "step":
                optimizer.step()
                optimizer.zero_grad()
    except (StateError, ArgumentError) as error:
        refusal = str(error)
        assert optimizer_class.__name__ in refusal
        assert "use it " in refusal
        plain.load_state_dict(before)
        oracle.assert_same_state(pipe, plain)
        assert way not in RIGHT - {"clipped if large"}, refusal
        return
    torch.manual_seed(3)
    by_itself = optimizer_class(plain.parameters(), **options)
    for x, target in batches(3):
        oracle.train_step(plain, (x,), {}, target, F.mse_loss, chunks=CHUNKS, order="1f1b", seed=0, batch=4)
        by_itself.step()
        by_itself.zero_grad()
    oracle.assert_same_state(pipe, plain)


def test_clipping_that_is_switched_on_between_two_steps_is_refused(pipe):
    x, target = batches(1)[0]
    optimizer = StageOptimizer(pipe, Lamb, max_grad_norm=None)
    for _ in range(2):
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, optimizer=optimizer)
    optimizer.param_groups[0]["max_grad_norm"] = 0.01
    with pytest.raises(StateError, match="Lamb takes another update"):
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, optimizer=optimizer)


def test_a_trial_leaves_generators_state_and_options_alone(pipe):
    x, target = batches(1)[0]
    optimizer = StageOptimizer(pipe, torch.optim.AdamW, lr=torch.tensor(0.01))
    pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
    drawn = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert {id(p) for p in optimizer.state} == {id(p) for p in pipe.parameters()}
    assert all(state["step"] == 1 for state in optimizer.state.values())
