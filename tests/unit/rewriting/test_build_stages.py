"""Rewriting: stage code, devices, the state of the thread, random nodes, where no cut may stand."""

import re
import time

import pytest
import torch
from helpers.every_cut import CPU, EveryCut
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import PartitionError
from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.rewriting.program import clone
from fxpipe.tracing import trace

CUDA = torch.device("cuda", 0)


def nodes_of(program, stage, name):
    """The nodes of a stage's graph that call a function or method of this name."""
    graph = program.stages[stage].run.graph
    return [n for n in graph.nodes if n.target == name or getattr(n.target, "__name__", "") == name]


class Tiny(Layered, encoder=4, blocks=lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])):
    def forward(self, x):
        skip = self.encoder(x)
        h = torch.relu(self.blocks[0](skip))
        h += 1
        h = self.blocks[1](h)
        return h * skip


def lines_of(code):
    """Stage code with the comments close by, and the user's lines counted from `Tiny.forward` on."""
    first = Tiny.forward.__code__.co_firstlineno
    text = re.sub(r"\.py:(\d+)$", lambda found: f".py:{int(found[1]) - first}", code, flags=re.MULTILINE)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_stage_code_reads_like_the_model():
    model = EveryCut(Tiny(), torch.randn(3, 4))
    assert [n.name for n in model.traced.nodes] == ["encoder", "blocks_0", "relu", "add", "blocks_1", "mul"]
    program = model.program((0, 3, 4))
    assert [lines_of(stage.code) for stage in program.stages] == [
        [
            "def stage0(in_0):",
            "encoder = F.linear(in_0, encoder.weight, encoder.bias) # encoder test_build_stages.py:1",
            "blocks_0 = F.linear(encoder, blocks.0.weight, blocks.0.bias) # blocks.0 test_build_stages.py:2",
            "relu = torch.relu(blocks_0) # test_build_stages.py:2",
            "encoder_stashed = stash(encoder, 'encoder')",
            "return relu, encoder_stashed",
        ],
        [
            "def stage1(relu):",
            "relu_copy = clone(relu)",
            "add = relu_copy.add_(1) # test_build_stages.py:3",
            "return add",
        ],
        [
            "def stage2(add, encoder):",
            "encoder_popped = pop(encoder, 'encoder')",
            "blocks_1 = F.linear(add, blocks.1.weight, blocks.1.bias) # blocks.1 test_build_stages.py:4",
            "mul = blocks_1 * encoder_popped # test_build_stages.py:5",
            "return mul",
        ],
    ]


class ReturnsAll(Layered, one=4, two=4, count=lambda: torch.zeros(4), last=lambda: torch.zeros(4)):
    """Outputs that are constants, inputs, parameters and buffers."""

    def forward(self, x):
        h = self.one(x)
        self.count += 1
        self.last = h.detach().sum(0)
        h = self.two(h)
        return {"h": h, "x": x, "w": self.one.weight, "count": self.count, "none": None, "three": 3}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_returned_buffer_is_that_of_the_first_micro_batch(stages):
    model, x = ReturnsAll(), torch.randn(3, 4)
    with fxpipe.pipeline(model, ["cpu"] * stages, 3, example_args=(x,)) as pipe:
        output = pipe(x)
        assert torch.equal(output["count"], torch.ones(4))
        assert torch.equal(model.count, torch.full((4,), 3.0))
        assert torch.equal(output["x"], x)
        assert torch.equal(output["w"], model.one.weight)
        assert output["none"] is None
        assert output["three"] == 3
        output["w"].sum().backward()
        assert torch.equal(model.one.weight.grad, torch.ones(4, 4))


class Assigns(nn.Module):
    """Tensors set anew: to what a later node changes, to an input, to each other."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        for name in ("cache", "given", "left", "right"):
            self.register_buffer(name, torch.zeros(4))
        self.left.fill_(1)

    def forward(self, x):
        h = self.one(x).detach()
        self.cache = h
        y = self.two(x) + self.left
        h.mul_(2)
        self.given = x
        self.left, self.right = self.right, self.left
        return y + h


def test_buffers_get_what_the_model_sets_them_to():
    x = torch.randn(4, 4)
    model = EveryCut(Assigns(), x, chunks=1)
    plain = Assigns()
    plain.load_state_dict(model.model.state_dict())
    plain(x)
    for starts in (*model.cuts(2), *model.cuts(3)):
        model.check(starts, 1, "1f1b")
        program = model.program(starts)
        assert {name for stage in program.stages for name in stage.assigns} == {"left", "right"}
        assert set(program.left) == {"cache", "given"}  # which hold samples: those of the mini-batch


class Split(Layered, one=4):
    def forward(self, x):
        a, b = self.one(x).split(2, 1)
        return a * b


class Counts(Layered, one=4, seen=lambda: torch.zeros(()), mean=lambda: torch.zeros(4)):
    def forward(self, x):
        self.seen += 1
        h = self.one(x) + self.mean
        h = h / self.seen.clone()
        self.mean = h.detach().mean(0)
        return torch.relu(h)


class ReshapedBetween(Layered, one=4):
    def forward(self, x):
        h = self.one(x)
        r = h.reshape(-1)
        y = torch.relu(x)
        h.mul_(2)
        return y + h + r.view(-1, 4)


def test_parts_stay_with_what_returned_them():
    traced = EveryCut(Split(), torch.randn(3, 4)).traced
    assert forbidden_cuts(traced) == {2: "split_0 is a part of split", 3: "split_1 is a part of split"}


def test_nodes_that_share_a_changed_buffer_share_a_stage():
    traced = trace(Counts(), (torch.randn(3, 4),), out_dims=0)
    assert len(traced.nodes) == 8  # add_, linear, add, clone, div, detach, mean, relu
    first = dict.fromkeys(range(1, 4), "the buffer 'seen' is changed here and there")
    assert forbidden_cuts(traced) == first | dict.fromkeys(range(4, 7), "the buffer 'mean' is read and set anew")


def test_what_views_cannot_make_again_stays_together():
    model = EveryCut(ReshapedBetween(), torch.randn(3, 4))
    assert [n.name for n in model.traced.nodes][:4] == ["one", "reshape", "relu", "mul"]
    assert model.forbidden_cuts == dict.fromkeys((2, 3), "one, reshape share memory that is changed later")


def test_a_forbidden_cut_is_refused_with_its_reason():
    words = "no cut can stand before .*: the buffer 'seen' is changed here and there; the nearest allowed"
    with pytest.raises(PartitionError, match=words):
        fxpipe.pipeline(Counts(), ["cpu", "cpu"], 1, example_args=(torch.randn(3, 4),), balance=[2, 6])


class Deep(Layered, weight=lambda: nn.Parameter(torch.eye(4))):
    def forward(self, x):
        x = x * 1
        first = x.view(-1)
        for _ in range(self.depth):
            x += torch.relu_((x * 1) @ self.weight).t().t()
        return x * first.sum()


@pytest.mark.slow
def test_a_graph_of_thousands_of_nodes_is_cut_in_seconds():
    traced = trace(Deep(depth=400), (torch.randn(2, 4),), out_dims=0)  # all samples are multiplied with a sum of them
    assert len(traced.nodes) > 2400
    start = time.process_time()
    assert forbidden_cuts(traced) == {}
    count = len(traced.nodes)
    split_into_stages(traced, [count * k // 8 for k in range(8)], [CPU] * 8)
    assert time.process_time() - start < 5


class MakesTensors(Layered, one=4):
    def forward(self, x):
        h = self.one(x)
        h = h + torch.arange(4, device=x.device)
        h = h + torch.zeros(4)
        h = h + torch.ones(4, device="cpu").to("cpu").to(x.device, torch.float32).cpu()
        h = h + torch.einsum("ij->i", torch.full((4, 2), 2.0))
        h = h.to(device=torch.device("cpu"), dtype=torch.float64)
        return h + h.new_zeros(4) + torch.rand(4, device=None)


def test_devices_in_a_graph_are_those_of_the_stage():
    model = EveryCut(MakesTensors(), torch.randn(3, 4))
    program = split_into_stages(model.traced, (0, 1), (CPU, CUDA))
    for name in ("arange", "zeros", "ones", "full", "seeded_rand"):
        (node,) = nodes_of(program, 1, name)
        assert node.kwargs["device"] == CUDA, name
    casts = nodes_of(program, 1, "to")
    assert len(casts) == 4
    assert [n.args[1] for n in casts[:3]] == [CUDA] * 3
    assert casts[1].args[2] is torch.float32
    assert casts[3].kwargs == {"device": CUDA, "dtype": torch.float64}
    assert not nodes_of(program, 1, "cpu")
    (einsum,) = nodes_of(program, 1, "einsum")
    assert einsum.args[0] == "ij->i"
    assert nodes_of(program, 1, "new_zeros")[0].kwargs == {}


class Blocks(Layered, one=4, two=4):
    def forward(self, x):
        with torch.no_grad():
            h = self.one(x)
            w = self.two.weight.t()
            h = h @ w
        with torch.autocast("cpu", torch.bfloat16):
            y = self.two(x)
            z = self.one(y)
        return h + z


def test_a_stage_sets_the_state_of_its_nodes_and_restores_the_callers():
    model = EveryCut(Blocks(), torch.randn(3, 4))
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    for place in model.allowed:
        for stage in model.program((0, place)).stages:
            calls = [n for n in stage.run.graph.nodes if n.op == "call_function"]
            grads = [n.args[0] for n in calls if n.target.__name__ == "set_grad"]
            autocasts = [n.args[:2] for n in calls if n.target.__name__ == "set_autocast"]
            assert grads in ([], [False, True])
            assert autocasts in ([], [("cpu", True), ("cpu", False)])
        model.check((0, place), 1, "1f1b", "always")
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before


class ParameterLeavesNoGrad(Layered, one=4, two=4):
    """The view of a weight was made with gradients, and a cut stands in a block without."""

    def forward(self, x):
        w = self.two.weight.t()
        with torch.no_grad():
            a = x.abs()
            b = a * 2
        return self.one(x) @ w + b


def test_a_weight_that_crosses_in_a_no_grad_block_keeps_its_gradient():
    model = EveryCut(ParameterLeavesNoGrad(), torch.randn(3, 4))
    for starts in (*model.cuts(2), *model.cuts(3)):
        model.check(starts, 3, "1f1b")


def test_a_clone_has_the_strides_of_the_value():
    whole = torch.randn(4, 6, requires_grad=True)
    for value in (whole, whole.t(), whole[:, :3], whole[::2, 1::2].t(), whole.unfold(1, 3, 1)):
        copy = clone(value)
        assert torch.equal(copy, value)
        assert copy.stride() == value.stride()
        assert copy.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        (gradient,) = torch.autograd.grad(copy.sum(), value)
        assert torch.equal(gradient, torch.ones_like(value))
    assert torch.equal(clone(whole[:, :1].expand(4, 6)), whole[:, :1].expand(4, 6))
