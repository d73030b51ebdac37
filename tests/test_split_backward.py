"""Backward in two, B of inputs and W of weights: the same bits as in one."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from every_cut import EveryCut, loss_of
from models import BY_NAME
from oracle import closing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.rewriting.splitting import split_weights
from fxpipe.rewriting.tape import ADDMM, BMM, LINEAR, MATMUL, Tape, convolution, looked_up, split_node
from fxpipe.runtime import Interleaved, Workers
from fxpipe.runtime.step import Step
from fxpipe.runtime.weighing import weighed
from fxpipe.scheduling import CHECKPOINTS, make_schedule, parse_schedule
from fxpipe.scheduling.actions import Action, Kind, Schedule

CPU = torch.device("cpu")


def with_weights(schedule: Schedule, late: int = 1, stages: set[int] | None = None) -> Schedule:
    """The schedule with W for `stages`, each `late` micro-batches behind its B."""
    rows = []
    for row in schedule.rows:
        found: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            found.append(action)
            if action.kind is Kind.BACKWARD and (stages is None or action.stage in stages):
                waiting.append(Action(Kind.WEIGHT, action.stage, action.micro_batch))
                found += [waiting.pop(0) for _ in range(len(waiting) - late)]
        rows.append((*found, *waiting))
    return Schedule(schedule.name, schedule.stages, schedule.micro_batches, tuple(rows))


class EverySplit(EveryCut):
    """Runs every schedule with W."""

    stages: set[int] | None = None
    late = 1

    def schedule(self, name, stages, m, checkpoint):
        return with_weights(super().schedule(name, stages, m, checkpoint), self.late, self.stages)

    def weighed(self, *starts):
        """By stage, the parameters that W computes the gradients of."""
        return [set(split_weights(stage).weighed) for stage in self.program((0, *starts)).stages]


# -- one node ----------------------------------------------------------------------------------------------------------


def _gradients(function, x, weights):
    """Output and gradients of one node that has neighbours; of the plain node, and split."""
    inputs = x * 1 if x.requires_grad else x
    y = function(inputs, *weights)
    upstream = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)
    return y, upstream


def _assert_node(kind, plain, x, w, b=None, options=(), casts=False):
    """Forward, gradient of x and of weights: the same bits and the same strides."""
    leaves = [t for t in (x, w, b) if t is not None and t.requires_grad]
    y, upstream = _gradients(plain, x, [w] if b is None else [w, b])
    want = torch.autograd.grad(y, leaves, upstream)

    tape = Tape()
    node = split_node(kind, ("w", None if b is None else "b"), casts)
    have_y, _ = _gradients(lambda *args: node(tape, *args, *options), x, [w, b])
    asked = [t for t in (x,) if t.requires_grad]
    found = torch.autograd.grad(have_y, [*asked, *tape.edges], upstream)
    tape.arrived(found[len(asked) :])
    named = dict(weighed(tape))
    have = [*found[: len(asked)], *(named[name] for name, t in (("w", w), ("b", b)) if t is not None and t.requires_grad)]

    assert torch.equal(have_y, y)
    assert have_y.stride() == y.stride()
    for h, g in zip(have, want, strict=True):
        assert h.dtype == g.dtype
        assert torch.equal(h, g)
        assert _steps(h) == _steps(g)


def _steps(tensor):
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _tensor(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype).requires_grad_(grad)


LAYOUTS = {
    "vector": lambda k, **o: _tensor(k, **o),
    "matrix": lambda k, **o: _tensor(5, k, **o),
    "dense": lambda k, **o: _tensor(3, 5, k, **o),
    "four": lambda k, **o: _tensor(2, 3, 5, k, **o),
    "column": lambda k, **o: _tensor(k, 5, **o).detach().t().requires_grad_(o.get("grad", True)),
    "gaps": lambda k, **o: _tensor(3, 5, 2 * k, **o).detach()[..., ::2].requires_grad_(o.get("grad", True)),
    "slice": lambda k, **o: _tensor(3, 5, 2 * k, **o).detach()[..., :k].requires_grad_(o.get("grad", True)),
    "transposed": lambda k, **o: _tensor(3, k, 5, **o).detach().mT.requires_grad_(o.get("grad", True)),
    "expanded": lambda k, **o: _tensor(1, 5, k, **o).detach().expand(3, 5, k).requires_grad_(o.get("grad", True)),
    "empty": lambda k, **o: _tensor(0, 5, k, **o),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(layout, dtype):
    for grad in (True, False):
        x = LAYOUTS[layout](6, dtype=dtype, grad=grad)
        for w in (_tensor(4, 6, dtype=dtype), _tensor(6, 4, dtype=dtype).detach().t().requires_grad_()):
            _assert_node(LINEAR, F.linear, x, w)
            _assert_node(LINEAR, F.linear, x, w, _tensor(4, dtype=dtype))
            _assert_node(LINEAR, F.linear, x, w, _tensor(4, dtype=dtype, grad=False))
            _assert_node(MATMUL, torch.matmul, x, w.detach().t().requires_grad_())
            frozen = w.detach()
            _assert_node(LINEAR, F.linear, x, frozen, _tensor(4, dtype=dtype))
        w = _tensor(6, 4, dtype=dtype)
        if x.dim() == 2:
            _assert_node(ADDMM, lambda x, w, b: torch.addmm(b, x, w), x, w, _tensor(4, dtype=dtype))
        if x.dim() == 3:
            _assert_node(BMM, torch.bmm, x, _tensor(x.shape[0], 6, 4, dtype=dtype))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 1, 5), (7, 5, 1), (1, 6, 9), (33, 64, 96)])
def test_products_of_every_size(sizes):
    n, k, out = sizes
    for x in (_tensor(n, k), _tensor(2, n, k), _tensor(k, n, 2).detach().transpose(0, 2).requires_grad_()):
        _assert_node(LINEAR, F.linear, x, _tensor(out, k), _tensor(out))
        _assert_node(MATMUL, torch.matmul, x, _tensor(k, out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims, transposed, dtype):
    names = ("conv_transpose" if transposed else "conv") + f"{dims}d"
    function = getattr(F, names)
    kind = convolution(function, dims, transposed)

    def plain(stride, padding, dilation, output_padding, groups):
        more = (stride, padding, output_padding, groups, dilation) if transposed else (stride, padding, dilation, groups)
        return lambda x, w, b=None: function(x, w, b, *more)

    for batch, stride, padding, dilation, groups in ((4, 1, 0, 1, 1), (3, 2, 1, 1, 2), (1, 1, 2, 2, 1)):
        size = [stride] * dims, [padding] * dims, [dilation] * dims, [0] * dims, groups
        w = _tensor(4, 4 // groups, *[3] * dims, dtype=dtype)
        shape = (batch, 4, *[9, 8, 7][:dims])
        b = _tensor(4 // groups * groups, dtype=dtype)
        xs = [_tensor(*shape, dtype=dtype), _tensor(*shape, dtype=dtype, grad=False), _tensor(*shape[1:], dtype=dtype)]
        xs.append(_tensor(*shape, dtype=dtype).detach().transpose(-1, 1).contiguous().transpose(-1, 1).requires_grad_())
        if dims == 2:
            last = torch.channels_last
            xs.append(_tensor(*shape, dtype=dtype).detach().to(memory_format=last).requires_grad_())
        for x in xs:
            _assert_node(kind, plain(*size), x, w, b, size)
            _assert_node(kind, plain(*size), x, w, None, size)
        if dims == 2:
            _assert_node(kind, plain(*size), xs[-1], w.detach().to(memory_format=last).requires_grad_(), b, size)


def test_casts_of_autocast():
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for layout in ("vector", "matrix", "dense", "transposed"):
            for grad in (True, False):
                x = LAYOUTS[layout](6, grad=grad)
                _assert_node(LINEAR, F.linear, x, _tensor(4, 6), _tensor(4), casts=True)
                _assert_node(MATMUL, torch.matmul, x, _tensor(6, 4), casts=True)
        size = [1, 1], [0, 0], [1, 1], [0, 0], 1
        _assert_node(convolution(F.conv2d, 2, False), F.conv2d, _tensor(2, 3, 5, 5), _tensor(4, 3, 3, 3), _tensor(4), size, True)
        _assert_node(LINEAR, F.linear, _tensor(3, 6, dtype=torch.float64), _tensor(4, 6, dtype=torch.float64), casts=True)


def test_what_b_frees_and_what_w_frees():
    """Between B and W the tape holds the inputs of split nodes and the gradients of their outputs, nothing else."""

    class Saved:
        pass

    x, w = _tensor(5, 6), _tensor(4, 6)
    tape = Tape()
    hidden = x.exp()
    y = split_node(LINEAR, ("w", None), False)(tape, hidden, w)
    z = y.sin()
    graph, kept = Saved(), weakref.ref(hidden)
    hidden.grad_fn.metadata["graph"] = graph
    z.grad_fn.metadata["graph"] = graph
    alive = weakref.ref(graph)
    del graph
    found = torch.autograd.grad(z, [x, *tape.edges], torch.ones_like(z))
    tape.arrived(found[1:])
    del hidden, y, z, found
    assert alive() is None
    assert kept() is None  # what is on the tape is a detached one
    assert len(tape.uses) == len(tape.gradients) == 1
    assert [name for name, _ in weighed(tape)] == ["w"]
    assert not tape.uses
    assert not tape.gradients


def test_an_input_changed_in_place_is_refused():
    x, w = _tensor(5, 6), _tensor(4, 6)
    tape = Tape()
    hidden = x * 1
    y = split_node(LINEAR, ("w", None), False)(tape, hidden, w)
    hidden.add_(1)
    tape.arrived(torch.autograd.grad(y.sum(), tape.edges))
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the input that w was applied to"):
        list(weighed(tape))


def test_sparse_gradients_of_an_embedding():
    w, ids = _tensor(7, 4), torch.tensor([[1, 5, 1], [0, 2, 5]])
    look_up = looked_up(F.embedding, "w", 1)
    for options in ({"sparse": True}, {"padding_idx": 5}, {"scale_grad_by_freq": True}):
        tape = Tape()
        y = look_up(tape, ids, w, **options)
        z = split_node(LINEAR, ("w", None), False)(tape, y, w)
        tape.arrived(torch.autograd.grad(z.square().sum(), tape.edges))
        ((_, have),) = weighed(tape)
        (want,) = torch.autograd.grad(F.linear(F.embedding(ids, w, **options), w).square().sum(), [w])
        assert torch.equal(have.to_dense(), want.to_dense())


# -- stages ------------------------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """Every kind of node, and every kind of parameter that stays with B."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.first, self.again, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.only_bias = nn.Linear(6, 6)
        self.only_bias.weight.requires_grad_(False)
        self.right, self.turned, self.mixed, self.bias = (
            nn.Parameter(torch.randn(*size) * 0.3) for size in ((6, 6), (5, 6), (6, 6), (6,))
        )
        self.narrow = nn.Conv1d(6, 6, 3, padding="same", groups=2)
        self.wide = nn.ConvTranspose1d(6, 6, 3, padding=1)
        self.whitened = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.norm, self.lstm = nn.LayerNorm(6), nn.LSTM(6, 6, batch_first=True)
        self.unused = nn.Linear(6, 6)

    def forward(self, x, ids):
        y = F.relu_(self.first(x)) + self.tokens(ids)
        y = y + F.relu_(self.again(y))
        y = self.again(y) + self.again(y.roll(1, 1)) @ self.right
        y = y + torch.addmm(self.bias, y.flatten(0, 1), self.right).view_as(y) + self.frozen(y) + self.only_bias(y)
        with torch.no_grad():
            scale = self.first(y).mean()
        y = y * (1 + 0.01 * scale) + (y @ self.turned.t() @ self.turned)
        y = y + F.linear(y, self.mixed) * self.mixed.mean()
        self.unused(y)
        y = y + self.wide(self.narrow(y.transpose(1, 2))).transpose(1, 2)
        y = self.lstm(self.norm(self.whitened(y.transpose(0, 1)).transpose(0, 1)))[0]
        return F.linear(y, self.tokens.weight)


@pytest.fixture(scope="module")
def uses():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    return EverySplit(Uses(), torch.randn(7, 4, 6), torch.randint(0, 11, (7, 4)))


WEIGHED = (
    "first.weight first.bias again.weight again.bias frozen.weight frozen.bias only_bias.weight only_bias.bias "
    "right turned bias narrow.weight narrow.bias wide.weight wide.bias tokens.weight unused.weight unused.bias".split()
)


def test_which_parameters_are_left_to_w(uses):
    (found,) = uses.weighed()
    assert found == {name for name in WEIGHED if not name.startswith("unused")}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_use_as_the_plain_model(uses, schedule, checkpoint):
    for stages, every in ((1, 1), (2, 6), (3, 197)):
        for k, starts in enumerate(uses.cuts(stages, every)):
            uses.late = k % 4
            uses.check(starts, 3, schedule, checkpoint, seed=k)


def test_some_stages_have_w(uses):
    (starts,) = uses.cuts(3, 10**6)
    for stages in ({0}, {1}, {2}, {0, 2}):
        uses.stages = stages
        try:
            uses.check(starts, 3, "1f1b")
        finally:
            uses.stages = None
