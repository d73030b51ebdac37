"""A model for which one device has no room is recorded there all the same, parameter by parameter."""

import copy
import functools
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn

import fxpipe

pytestmark = pytest.mark.simulated

DEVICES = ["sim:0", "sim:1", "sim:2", "sim:3"]
WIDTH = 96


@pytest.fixture(autouse=True)
def _all_else_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What planning has of a device beside a model is small, as beside one that is too large for it."""
    monkeypatch.setattr("fxpipe.tracing.verify.equivalence.SMALL_GRADIENT", 64)
    monkeypatch.setattr("fxpipe.profiling.backward_timing._SIDES", (16,))
    gc.collect()  # of the test before


def _there() -> int:
    """The bytes that the tests before have left on the device where they have left the most."""
    return max(map(torch.sim.memory_allocated, range(len(DEVICES))))


@functools.cache
def only_on_devices() -> Any:
    """An operator that the CPU lacks."""

    @torch.library.custom_op("fxpipe_tests::scale_on_devices", mutates_args=(), device_types="sim")
    def operation(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    operation.register_fake(lambda x, scale: torch.empty_like(x))
    operation.register_autograd(
        lambda ctx, gradient: (gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).flatten(0, 1).sum(0)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return operation


def _assert_there(tensor: torch.Tensor) -> None:
    """A kernel that torch knows nothing of takes the memory that it is given."""
    assert type(tensor).__name__ == "FakeTensor" or tensor.data_ptr()


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        _assert_there(weight)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        _assert_there(weight)
        return gradient * weight, (gradient * x).flatten(0, 1).sum(0)


class Block(nn.Module):
    def __init__(self, sign: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale, self.gain = nn.Parameter(sign * torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == self.up.weight.device.type == "sim"
        h = F.gelu(self.up(self.norm(x)))
        h = self.down(h) if bool(self.scale[0] > 0) else self.down(h.sin())  # by a value, which a graph goes by
        return x + only_on_devices()(Unseen.apply(h, self.gain), self.scale)


class Model(nn.Module):
    def __init__(self, blocks: int = 5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(1.0 if place % 2 else -1.0) for place in range(blocks))
        self.again = self.blocks[0].up  # used twice
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(self.again(x).transpose(1, 2)).transpose(1, 2)


def _bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _assert_equal_step(pipe: Any, plain: nn.Module, x: torch.Tensor) -> None:
    loss = pipe.forward_backward(x, loss_fn=lambda out: out.float().square().mean())
    losses = [plain(part).float().square().mean() * len(part) / len(x) for part in x.to("sim:3").tensor_split(2)]
    sum(losses).backward()
    torch.testing.assert_close(loss.to("sim:3"), sum(losses).detach())
    for (name, want), have in zip(plain.named_parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(have.grad.to("sim:3"), want.grad, msg=name)
    for (name, want), have in zip(plain.named_buffers(), pipe.buffers(), strict=True):
        torch.testing.assert_close(have.to("sim:3"), want, msg=name)
    for module in (pipe, plain):
        module.zero_grad()


def _train_and_evaluate(simulated: Any, **options: Any) -> None:
    """Trains and evaluates over devices each of which has room for the model, but not for it to be recorded there."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 2, WIDTH)
    plain, size = copy.deepcopy(model), _bytes(model)
    limit = int(1.25 * size)
    simulated.set_device_bytes(_there() + limit)
    torch.sim.reset_peak_memory_stats(0)
    with fxpipe.pipeline(model, DEVICES, 2, example_args=(x,), optimizer_state=0, **options) as pipe:
        assert len({stage.device for stage in pipe.plan.stages}) == 4
        assert simulated.count("bytes to the host") < size / 50  # values that forward reads
        simulated.set_device_bytes(1 << 30)
        plain.to("sim:3")
        for seed in range(2):
            torch.manual_seed(seed)
            _assert_equal_step(pipe, plain, torch.randn(4, 2, WIDTH))
        if options:
            _assert_equal_step(pipe, plain, torch.randn(4, 3, WIDTH))
        pipe.eval(), plain.eval()
        gc.collect()
        before = simulated.count("bytes to the host")
        there = torch.sim.memory_allocated(0)
        simulated.set_device_bytes(there + size, [0])
        torch.sim.reset_peak_memory_stats(0)
        with torch.no_grad():
            out = pipe(x)
            assert torch.sim.max_memory_allocated(0) < there + 0.8 * size
            assert simulated.count("bytes to the host") - before < size / 50
            simulated.set_device_bytes(1 << 30)
            torch.testing.assert_close(out.to("sim:3"), plain(x.to("sim:3")))


def test_a_model_that_the_first_device_has_no_room_to_record_trains_as_the_plain_one(simulated):
    _train_and_evaluate(simulated)


def test_sizes_may_differ_for_such_a_model(simulated):
    _train_and_evaluate(simulated, dynamic_shapes={"x": {1: "length"}})


def test_a_model_larger_than_a_device_evaluates_over_several(simulated):
    model, x = Model(8).requires_grad_(False).eval(), torch.randn(4, 2, WIDTH)
    plain, limit = copy.deepcopy(model), int(0.8 * _bytes(model))
    simulated.set_device_bytes(_there() + limit)
    with torch.no_grad(), fxpipe.pipeline(model, DEVICES, 2, example_args=(x,)) as pipe:
        assert simulated.count("bytes to the host") < limit / 25
        out, other = pipe(x), pipe(2 * x)
        simulated.set_device_bytes(1 << 30)
        plain.to("sim:3")
        torch.testing.assert_close(out.to("sim:3"), plain(x.to("sim:3")))
        torch.testing.assert_close(other.to("sim:3"), plain(2 * x.to("sim:3")))


class Casts(nn.Module):
    """Layers whose casts autocast keeps, as long as its block lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(12))
        self.rnn = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.rnn(x)[0]


def test_autocast_keeps_no_casts_of_parameters_that_have_left(simulated):
    model, x = Casts(), torch.randn(4, 3, 2 * WIDTH)
    plain, size = copy.deepcopy(model), _bytes(model)
    simulated.set_device_bytes(_there() + int(1.25 * size))
    torch.sim.reset_peak_memory_stats(0)
    with (
        torch.autocast("sim", dtype=torch.bfloat16),
        fxpipe.pipeline(model, DEVICES, 2, example_args=(x,), optimizer_state=0) as pipe,
    ):
        simulated.set_device_bytes(1 << 30)
        torch.testing.assert_close(pipe(x).cpu(), plain.to("sim:0")(x.to("sim:0")).cpu(), atol=2e-2, rtol=2e-2)


def test_planning_alone_gives_back_all_memory_and_leaves_the_model(simulated):
    model, x = Model(), torch.randn(4, 2, WIDTH)
    data = [p.data_ptr() for p in model.parameters()]
    values = copy.deepcopy(model.state_dict())
    before = torch.sim.memory_allocated(0)
    simulated.set_device_bytes(before + int(1.25 * _bytes(model)))
    plan = fxpipe.plan(model, devices=DEVICES, example_args=(x,), chunks=2, optimizer_state=0)
    assert len(plan.stages) == 4
    assert [p.data_ptr() for p in model.parameters()] == data
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    gc.collect()
    assert torch.sim.memory_allocated(0) <= before


def test_nothing_keeps_the_memory_of_a_pipe_that_is_gone(simulated):
    """What is recorded of an `autograd.Function` calls what has fetched parameters meanwhile."""
    model, x = Model(2), torch.randn(4, 2, WIDTH)
    before = [torch.sim.memory_allocated(index) for index in range(4)]
    simulated.set_device_bytes(max(before) + int(1.9 * _bytes(model)))
    with fxpipe.pipeline(model, DEVICES[:2], 2, example_args=(x,), optimizer_state=0) as pipe:
        assert torch.sim.memory_allocated(0) > before[0]
    del model, pipe
    gc.collect()
    assert all(torch.sim.memory_allocated(index) <= size for index, size in enumerate(before))


class MakesTable(
    Layered, layers=lambda: nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(10)), table=lambda: None
):
    """Makes something in its first call, for which it is called a few times before it is recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == "sim"
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], device=x.device)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x * self.table


def test_what_the_first_call_makes_takes_no_copy_of_all_parameters(simulated):
    model, x = MakesTable(), torch.randn(4, 2 * WIDTH)
    plain, size = copy.deepcopy(model), _bytes(model)
    simulated.set_device_bytes(_there() + int(1.25 * size))
    with fxpipe.pipeline(model, DEVICES, 2, example_args=(x,), optimizer_state=0) as pipe:
        simulated.set_device_bytes(1 << 30)
        torch.testing.assert_close(pipe(x).cpu(), plain.to("sim:3")(x.to("sim:3")).cpu())
