"""Backward in two, B of inputs and W of weights: the same bits as in one."""

import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.every_cut import EveryCut, loss_of
from helpers.kernels import Ops
from helpers.layered import Layered
from helpers.models import BY_NAME
from helpers.tried_orders import InterleavedExecutor
from torch import nn

import fxpipe
from fxpipe.rewriting.program import WeightGradientTape
from fxpipe.rewriting.split_backward import (
    ADDMM,
    BMM,
    LINEAR,
    MATMUL,
    convolution_kind,
    split_embedding,
    split_node,
    split_stage_backward,
)
from fxpipe.runtime.run import Run
from fxpipe.scheduling import CHECKPOINTS
from fxpipe.scheduling.actions import Action, ActionKind, Schedule


def with_weights(schedule: Schedule, late: int = 1) -> Schedule:
    """The schedule with each W `late` micro-batches behind its B."""
    rows = []
    for row in schedule.rows:
        found: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            found.append(action)
            if action.kind is ActionKind.BACKWARD:
                waiting.append(Action(ActionKind.WEIGHT, action.stage, action.micro_batch))
                found += [waiting.pop(0) for _ in range(len(waiting) - late)]
        rows.append((*found, *waiting))
    return Schedule(schedule.name, schedule.stages, schedule.micro_batches, tuple(rows))


class EverySplit(EveryCut):
    """Runs every schedule with W."""

    late = 1

    def schedule(self, name, stages, m, checkpoint):
        return with_weights(super().schedule(name, stages, m, checkpoint), self.late)

    def split_parameters(self, *starts):
        """By stage, the parameters that W computes the gradients of."""
        return [set(split_stage_backward(stage, stage.run)[1]) for stage in self.program((0, *starts)).stages]


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

    tape = WeightGradientTape()
    node = split_node(kind, ("w", None if b is None else "b"), casts)
    have_y, _ = _gradients(lambda *args: node(tape, *args, *options), x, [w, b])
    asked = [t for t in (x,) if t.requires_grad]
    found = torch.autograd.grad(have_y, [*asked, *tape.edges], upstream)
    tape.arrived(found[len(asked) :])
    named = dict(tape.weight_gradients())
    have = [
        *found[: len(asked)],
        *(named[name] for name, t in (("w", w), ("b", b)) if t is not None and t.requires_grad),
    ]

    assert torch.equal(have_y, y)
    assert have_y.stride() == y.stride()
    for h, g in zip(have, want, strict=True):
        assert h.dtype == g.dtype
        assert torch.equal(h, g)
        assert _steps(h) == _steps(g)


def _steps(tensor):
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _tensor(*shape, dtype=torch.float32, grad=True):
    return (
        torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype).requires_grad_(grad)
    )


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
    kind = convolution_kind(function, transposed)

    def plain(stride, padding, dilation, output_padding, groups):
        more = (
            (stride, padding, output_padding, groups, dilation) if transposed else (stride, padding, dilation, groups)
        )
        return lambda x, w, b=None: function(x, w, b, *more)

    for batch, stride, padding, dilation, groups in ((4, 1, 0, 1, 1), (3, 2, 1, 1, 2), (1, 1, 2, 2, 1)):
        size = [stride] * dims, [padding] * dims, [dilation] * dims, [0] * dims, groups
        w = _tensor(4, 4 // groups, *[3] * dims, dtype=dtype)
        shape = (batch, 4, *[9, 8, 7][:dims])
        b = _tensor(4 // groups * groups, dtype=dtype)
        xs = [_tensor(*shape, dtype=dtype), _tensor(*shape, dtype=dtype, grad=False)]
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
            x = LAYOUTS[layout](6)
            _assert_node(LINEAR, F.linear, x, _tensor(4, 6), _tensor(4), casts=True)
            _assert_node(MATMUL, torch.matmul, x, _tensor(6, 4), casts=True)
        kind, size = convolution_kind(F.conv2d, False), ([1, 1], [0, 0], [1, 1], [0, 0], 1)
        _assert_node(kind, F.conv2d, _tensor(2, 3, 5, 5), _tensor(4, 3, 3, 3), _tensor(4), size, casts=True)
        x, w = _tensor(3, 6, dtype=torch.float64), _tensor(4, 6, dtype=torch.float64)
        _assert_node(LINEAR, F.linear, x, w, casts=True)


def test_what_b_frees_and_what_w_frees():
    """Between B and W the tape holds the inputs of split nodes and the gradients of their outputs, nothing else."""

    class Saved:
        pass

    x, w = _tensor(5, 6), _tensor(4, 6)
    tape = WeightGradientTape()
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
    assert [name for name, _ in tape.weight_gradients()] == ["w"]
    assert not tape.uses
    assert not tape.gradients


def test_an_input_changed_in_place_is_refused():
    x, w = _tensor(5, 6), _tensor(4, 6)
    tape = WeightGradientTape()
    hidden = x * 1
    y = split_node(LINEAR, ("w", None), False)(tape, hidden, w)
    hidden.add_(1)
    tape.arrived(torch.autograd.grad(y.sum(), tape.edges))
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the input that w was applied to"):
        list(tape.weight_gradients())


def test_sparse_gradients_of_an_embedding():
    w, ids = _tensor(7, 4), torch.tensor([[1, 5, 1], [0, 2, 5]])
    look_up = split_embedding(F.embedding, "w", 1)
    for options in ({"sparse": True}, {"padding_idx": 5}, {"scale_grad_by_freq": True}):
        tape = WeightGradientTape()
        y = look_up(tape, ids, w, **options)
        z = split_node(LINEAR, ("w", None), False)(tape, y, w)
        tape.arrived(torch.autograd.grad(z.square().sum(), tape.edges))
        ((_, have),) = tape.weight_gradients()
        (want,) = torch.autograd.grad(F.linear(F.embedding(ids, w, **options), w).square().sum(), [w])
        assert torch.equal(have.to_dense(), want.to_dense())


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
            scale = self.first(y).mean((1, 2), keepdim=True)
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
    "right bias narrow.weight narrow.bias wide.weight wide.bias tokens.weight unused.weight unused.bias".split()
)


def test_which_parameters_are_left_to_w(uses):
    (found,) = uses.split_parameters()
    assert found == set(WEIGHED)


@pytest.mark.parametrize(("checkpoint", "schedule"), each_once(CHECKPOINTS, ["1f1b", "gpipe"]))
def test_every_use_as_the_plain_model(uses, schedule, checkpoint):
    for stages, every in ((1, 1), (2, 6), (3, 197)):
        for k, starts in enumerate(uses.cuts(stages, every)):
            uses.late = k % 4
            uses.check(starts, 3, schedule, checkpoint, seed=k)


def test_transposed_weights_stay_with_b():
    class Turned(Layered, w=lambda: nn.Parameter(torch.randn(6, 6) * 0.4)):
        def forward(self, x):
            return self.function(x, self.w)

    def shared(x, w):
        turned = w.t()
        return (x @ turned).tanh() @ turned

    for function in (
        lambda x, w: (x @ w.t()).tanh() @ w,
        lambda x, w: F.linear((x @ w.T).tanh(), w.transpose(0, 1)),
        lambda x, w: F.linear((x @ w.mT).tanh() @ w, w),
        shared,
        lambda x, w: (x @ w.t()).tanh() @ w + w.mean(),
    ):
        every = EverySplit(Turned(function=function), torch.randn(6, 6))
        assert every.split_parameters() == [set()]
        every.check((0,), 3, "1f1b")


class Take(Layered, table=lambda: nn.Embedding(5, 4), linear=4):
    def forward(self, k):
        return self.linear(self.table(k))


def test_an_error_in_a_split_stage_names_its_node():
    k = torch.zeros(4, dtype=torch.int64)
    with fxpipe.pipeline(Take(), ["cpu"], 2, example_args=(k,), schedule="zero_bubble") as pipe:
        k[3] = 9
        with pytest.raises(IndexError, match="out of range") as caught:
            pipe.forward_backward(k, loss_fn=loss_of)
    assert "stage 0 of 1 on cpu, micro-batch 1, forward, node table, module table" in caught.value.__notes__[0]


def _thirds(every):
    places = every.allowed
    return 0, places[len(places) // 3], places[2 * len(places) // 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = Uses()
    with torch.autocast("cpu", dtype, cache_enabled=False):
        every = EverySplit(model, torch.randn(6, 4, 6), torch.randint(0, 11, (6, 4)))
        want = every._have(every.program((0,)), 3, "1f1b", "never", 0)
        for starts in ((0,), _thirds(every)):
            assert any(every.split_parameters(*starts[1:]))
            every.check(starts, 3, "1f1b")
            every.check(starts, 3, "1f1b", "always")
    assert want.gradients["first.weight"].dtype == torch.float32


def test_complex():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = (nn.Linear(6, 6, dtype=torch.complex64) for _ in range(2))
            self.conv = nn.Conv1d(4, 4, 3, padding=1, dtype=torch.complex64)  # made of three real ones: stays with B

        def forward(self, x):
            return torch.view_as_real(self.outer(self.conv(self.inner(torch.complex(x, x.sin())).tanh())))

    every = EverySplit(Complex(), torch.randn(6, 4, 6))
    assert every.split_parameters()[0] == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}
    for starts in ((0,), _thirds(every)):
        every.check(starts, 3, "1f1b")


def test_inputs_that_require_grad():
    every = EverySplit(BY_NAME["gpt"].make().blocks[0], torch.randn(6, 5, 16, requires_grad=True))
    for starts in ((0,), _thirds(every)):
        every.check(starts, 3, "1f1b")


def test_outputs_and_branches_that_no_gradient_reaches():
    class Branches(Layered, left=6, right=6, cut=6, join=6):
        def forward(self, x):
            a, b = self.left(x).split(3, -1)
            with torch.no_grad():
                gate = self.right(x)
            return self.join(torch.cat([a, b.detach()], -1) * gate), self.cut(x).detach()

    every = EverySplit(Branches(), torch.randn(6, 6))
    for starts in ((0,), *every.cuts(2)):
        every.check(starts, 3, "1f1b")
    assert every._have(every.program((0,)), 3, "1f1b", "never", 0).gradients["cut.weight"] is None


def test_operators_as_in_a_graph_of_export():
    aten = torch.ops.aten

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.inner = nn.Embedding(5, 6), nn.Linear(6, 6)
            self.matrix, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
            self.conv, self.wide = nn.Conv1d(6, 6, 3), nn.ConvTranspose2d(6, 6, 3)

        def forward(self, ids):
            tokens = aten.embedding.default(self.tokens.weight, ids)
            x = aten.matmul.default(aten.linear.default(tokens, self.inner.weight, self.inner.bias), self.matrix)
            flat = aten.addmm.default(self.bias, x.flatten(0, 1), self.matrix)
            x = flat.view_as(x) + aten.matmul.default(x, self.inner.weight.t())
            x = aten.conv1d.default(x.mT, self.conv.weight, self.conv.bias).unsqueeze(-1)
            return aten.conv_transpose2d.input(x, self.wide.weight, self.wide.bias)

    every = EverySplit(Model(), torch.randint(0, 5, (6, 5)))
    # `inner.weight` is also transposed, and its bias stays with it.
    assert every.split_parameters()[0] == {n for n, _ in every.model.named_parameters() if not n.startswith("inner")}
    for starts in ((0,), _thirds(every)):
        every.check(starts, 3, "1f1b")


def test_frozen_after_planning():
    every = EverySplit(
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(6, 6)
    )
    for frozen in (["2.weight"], ["0.weight", "0.bias", "2.weight"], ["4.bias", "4.weight"], ["2.bias", "0.bias"]):
        for name, parameter in every.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        every._wanted.clear()
        for starts in ((0,), (0, 2), (0, 1, 3)):
            every.check(starts, 3, "1f1b")


def _counted(every, starts, monkeypatch):
    """What each kind of action has run, in one micro-batch."""
    counts = {kind: Counter() for kind in ActionKind}
    perform = Run.perform

    def counting(step, action):
        with Ops(counts[action.kind]):
            perform(step, action)

    monkeypatch.setattr(Run, "perform", counting)
    every._have(every.program(starts), 1, "1f1b", "never", 0)
    monkeypatch.undo()
    return counts


def test_w_carries_the_weights(monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 6)
            self.conv1, self.conv2 = nn.Conv1d(6, 6, 3), nn.Conv1d(6, 6, 3)

        def forward(self, ids):
            x = self.second(F.gelu(self.first(self.tokens(ids))))
            return self.conv2(self.conv1(x.mT))

    every = EverySplit(Model(), torch.randint(0, 11, (6, 9)))
    for starts in ((0,), (0, 3)):
        counts = _counted(every, starts, monkeypatch)
        assert counts[ActionKind.BACKWARD] == {"mm": 2, "conv x": 2, "conv w": 0}
        assert counts[ActionKind.WEIGHT] == {"mm": 2, "conv x": 0, "conv w": 2, "embedding_dense_backward": 1}
        assert counts[ActionKind.FORWARD] == {}  # nothing is computed twice: here linear is addmm


def test_nothing_is_left_of_a_step(monkeypatch):
    """No tape outlives its W, and none is made by a forward that will be run again."""
    runs, tapes = [], []

    class Watching(InterleavedExecutor):
        def run(self, run, rows):
            runs.append(run)
            super().run(run, rows)

    def made(**options):
        tapes.append(WeightGradientTape(**options))
        return tapes[-1]

    monkeypatch.setattr("fxpipe.runtime.stage_instance.WeightGradientTape", made)
    case, options = BY_NAME["gpt"], {"schedule": "zero_bubble", "checkpoint": "always"}
    (ids,) = case.inputs(6)[0]
    with fxpipe.pipeline(case.make(), ["cpu"] * 3, 3, example_args=(ids,), **options) as pipe:
        pipe._fxpipe.engine.executor = Watching(0)
        pipe.forward_backward(ids, loss_fn=loss_of)
    (run,) = runs
    one = run.mini_batches[0]
    assert (one.tapes, one.pending, one.saved) == ({}, {}, {})
    assert len(tapes) == 3 * 3
    assert all((tape.uses, tape.edges, tape.gradients) == ([], [], []) for tape in tapes)


class Spoils(Layered, inner=6, outer=6):
    def forward(self, x):
        hidden = torch.tanh(self.inner(x)) * 2
        y = self.outer(hidden)
        hidden.add_(1)
        return y + hidden


def test_a_failure_in_w_is_noted():
    x = torch.randn(6, 6)
    with (
        fxpipe.pipeline(Spoils(), ["cpu"], 3, schedule="zero_bubble", check=False) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation") as caught,
    ):
        pipe.forward_backward(x, loss_fn=loss_of)
    assert caught.value.__notes__[0] == "fxpipe: stage 0 of 1 on cpu, micro-batch 0, backward of weights"
