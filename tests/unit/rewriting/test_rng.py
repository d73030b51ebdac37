"""Random nodes: every random function of torch draws what torch draws, by seed, alone, whatever runs meanwhile."""

import copy
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.every_cut import EveryCut
from helpers.layered import Layered
from torch import _VF, nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.rewriting import rng as random_nodes
from fxpipe.rewriting.program import stage_context
from fxpipe.rewriting.rng import ANY_DEVICE_KERNELS, RNG_KERNELS, seeded_function, takes_generator
from fxpipe.tracing import trace
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.packing import PACKED_FUNCTIONS
from fxpipe.utils.accelerator import generator_lock, mix_seed

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]
CPU = torch.device("cpu")
aten: Any = torch.ops.aten


def x(*sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (5, 7))).requires_grad_()


def p() -> torch.Tensor:
    return torch.rand(6, 5)


def _sizes_of_rnn(gates: int, hidden: int, directions: int, projected: int = 0) -> list[torch.Tensor]:
    """The weights of two layers, for 4 features."""
    out, found = projected or hidden, []
    for features in (4, out * directions):
        for _ in range(directions):
            found += [x(gates * hidden, features), x(gates * hidden, out), x(gates * hidden), x(gates * hidden)]
            found += [x(projected, hidden)] if projected else []
    return found


def _rnn(gates: int, directions: int = 1, batch_first: bool = False, projected: int = 0) -> tuple[Any, ...]:
    hidden = 3
    hx: Any = x(2 * directions, 2, projected or hidden)
    if gates == 4:
        hx = [hx, x(2 * directions, 2, hidden)]
    weights = _sizes_of_rnn(gates, hidden, directions, projected)
    given = x(2, 6, 4) if batch_first else x(6, 2, 4)
    return given, hx, weights, True, 2, 0.4, True, directions == 2, batch_first


def _heads(need_weights: bool, batched: bool = True) -> tuple[Any, ...]:
    q = x(6, 2, 8) if batched else x(6, 8)
    return q, q, q, 8, 2, x(24, 8), x(24), None, None, False, 0.3, x(8, 8), x(8), True, None, need_weights


def _qkv() -> list[torch.Tensor]:
    return [x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 4)]


_MASK = torch.rand(5, 6) > 0.3
_FULL = {"low": 3, "high": 90}
# By the function of aten: what a model calls, in all its ways. (function or method, arguments, keyword arguments)
CASES: dict[str, list[tuple[Any, Callable[[], Any], dict[str, Any]]]] = {
    "_sample_dirichlet": [(torch._sample_dirichlet, lambda: (p(),), {})],
    "_scaled_dot_product_attention_math": [
        (torch._scaled_dot_product_attention_math, _qkv, {"dropout_p": 0.3}),
    ],
    "_standard_gamma": [(torch._standard_gamma, lambda: (p(),), {})],
    "alpha_dropout": [
        (torch.alpha_dropout, lambda: (x(), 0.3, True), {}),
        (F.alpha_dropout, lambda: (x(), 0.3, True), {}),
        (F.alpha_dropout, lambda: (x(4, 3, 2).transpose(0, 1),), {"p": 0.3, "training": True}),
    ],
    "alpha_dropout_": [
        (torch.alpha_dropout_, lambda: (x() * 1, 0.3, True), {}),
        (F.alpha_dropout, lambda: (x() * 1, 0.3, True, True), {}),
    ],
    "bernoulli": [
        (torch.bernoulli, lambda: (p(),), {}),
        (torch.bernoulli, lambda: (p(), 0.3), {}),
        ("bernoulli", lambda: (p(),), {}),
        (torch.bernoulli, lambda: (p(),), {"out": torch.empty(6, 5)}),
    ],
    "bernoulli_": [("bernoulli_", lambda: (x() * 1, 0.3), {}), ("bernoulli_", lambda: (x(6, 5) * 1, p()), {})],
    "binomial": [(torch.binomial, lambda: (torch.full((6, 5), 9.0), p()), {})],
    "cauchy": [(aten.cauchy.default, lambda: (p(),), {})],
    "cauchy_": [("cauchy_", lambda: (p(),), {})],
    "dropout": [
        *[(F.dropout, lambda q=q, d=d: (x(5, 7).to(d).t(), q), {}) for q in (0.1, 0.9) for d in (
            torch.float32, torch.float64, torch.bfloat16
        )],
        (F.dropout, lambda: (x(0, 3), 0.3), {}),
        (torch.dropout, lambda: (x(), 0.3, True), {}),
        (aten.dropout.default, lambda: (x(), 0.3, True), {}),
    ],
    "dropout_": [
        (torch.dropout_, lambda: (x() * 1, 0.3, True), {}),
        (F.dropout, lambda: (x() * 1, 0.3, True, True), {}),
    ],
    "exponential": [(aten.exponential.default, lambda: (p(),), {})],
    "exponential_": [
        ("exponential_", lambda: (p(), 2.0), {}),
        (F.gumbel_softmax, lambda: (x(),), {}),
        (F.gumbel_softmax, lambda: (x(), 0.7), {"hard": True, "dim": 0}),
    ],
    "feature_alpha_dropout": [
        (F.feature_alpha_dropout, lambda: (x(2, 3, 4, 5), 0.3, True), {}),
        (torch.feature_alpha_dropout, lambda: (x(2, 3, 4, 5), 0.3, True), {}),
    ],
    "feature_alpha_dropout_": [
        (torch.feature_alpha_dropout_, lambda: (x(2, 3, 4, 5) * 1, 0.3, True), {}),
        (F.feature_alpha_dropout, lambda: (x(2, 3, 4, 5) * 1, 0.3, True, True), {}),
    ],
    "feature_dropout": [
        (torch.feature_dropout, lambda: (x(2, 3, 4), 0.3, True), {}),
        (F.dropout1d, lambda: (x(2, 3, 4), 0.3), {}),
        (F.dropout1d, lambda: (x(3, 4), 0.3), {}),
        (F.dropout2d, lambda: (x(2, 3, 4, 5), 0.3), {}),
        (F.dropout3d, lambda: (x(2, 3, 4, 5, 2), 0.3), {}),
        (F.dropout3d, lambda: (x(3, 4, 5, 2), 0.3), {}),
    ],
    "feature_dropout_": [
        (torch.feature_dropout_, lambda: (x(2, 3, 4) * 1, 0.3, True), {}),
        (F.dropout2d, lambda: (x(2, 3, 4, 5) * 1, 0.3, True, True), {}),
    ],
    "geometric": [(aten.geometric.default, lambda: (p(), 0.3), {})],
    "geometric_": [("geometric_", lambda: (p(), 0.3), {})],
    "gru": [
        (_VF.gru, lambda: _rnn(3), {}),
        (_VF.gru, lambda: _rnn(3, 2, True), {}),
        (aten.gru.input, lambda: _rnn(3), {}),
    ],
    "log_normal": [(aten.log_normal.default, lambda: (p(),), {})],
    "log_normal_": [("log_normal_", lambda: (p(),), {})],
    "lstm": [
        (aten.lstm.input, lambda: _rnn(4), {}),
        (_VF.lstm, lambda: _rnn(4), {}),
        (_VF.lstm, lambda: _rnn(4, 2, True), {}),
        (_VF.lstm, lambda: _rnn(4, 2, False, 2), {}),
        (_VF.lstm, lambda: tuple(v.bfloat16() if isinstance(v, torch.Tensor) else [t.bfloat16() for t in v]
                                 if isinstance(v, list) else v for v in _rnn(4)), {}),
    ],
    "multinomial": [
        (torch.multinomial, lambda: (p(), 2), {}),
        ("multinomial", lambda: (p(), 9), {"replacement": True}),
    ],
    "native_dropout": [(torch.native_dropout, lambda: (x(), 0.3, True), {})],
    "normal": [
        (torch.normal, lambda: (0.5, 2.0, (3, 4)), {}),
        (torch.normal, lambda: (p(), p()), {}),
        (torch.normal, lambda: (p(), 2.0), {}),
        (torch.normal, lambda: (1.0, p()), {}),
    ],
    "normal_": [
        ("normal_", lambda: (p(),), {"std": 2.0}),
        (nn.init.normal_, lambda: (p(), 1.0, 2.0), {}),
        (nn.init.trunc_normal_, lambda: (p(),), {}),
    ],
    "normal_functional": [(aten.normal_functional.default, lambda: (p(),), {})],
    "poisson": [(torch.poisson, lambda: (p() * 9,), {})],
    "rand": [
        (torch.rand, lambda: (3, 4), {}),
        (torch.rand, lambda: ((3, 4),), {"dtype": torch.float64, "requires_grad": True}),
        (torch.rand, lambda: (3, 4), {"generator": None, "device": CPU}),
        (F.fractional_max_pool2d, lambda: (x(2, 3, 9, 9), 2, (4, 4)), {}),
        (F.fractional_max_pool3d, lambda: (x(1, 3, 9, 9, 9), 2), {"output_ratio": 0.5, "return_indices": True}),
    ],
    "rand_like": [(torch.rand_like, lambda: (x(),), {})],
    "randint": [
        (torch.randint, lambda: (9, (3, 4)), {}),
        (torch.randint, lambda: (3, 90, (3, 4)), {}),
        (torch.randint, lambda: (), {**_FULL, "size": (7,)}),
    ],
    "randint_like": [(torch.randint_like, lambda: (x(), 9), {}), (torch.randint_like, lambda: (x(), 3, 90), {})],
    "randn": [(torch.randn, lambda: (3, 4), {}), (torch.randn, lambda: (20,), {"dtype": torch.complex64})],
    "randn_like": [(torch.randn_like, lambda: (x(),), {})],
    "random": [(aten.random.default, lambda: (p(),), {})],
    "random_": [
        ("random_", lambda: (p(),), {}),
        ("random_", lambda: (p(), 9), {}),
        ("random_", lambda: (p(), 3, 90), {}),
    ],
    "randperm": [(torch.randperm, lambda: (11,), {})],
    "rnn_relu": [(_VF.rnn_relu, lambda: _rnn(1), {}), (aten.rnn_relu.input, lambda: _rnn(1), {})],
    "rnn_tanh": [(_VF.rnn_tanh, lambda: _rnn(1, 2), {}), (aten.rnn_tanh.input, lambda: _rnn(1, 2), {})],
    "rrelu": [
        (torch.rrelu, lambda: (x(),), {"training": True}),
        (F.rrelu, lambda: (x(),), {"training": True}),
    ],
    "rrelu_": [
        (torch.rrelu_, lambda: (x() * 1,), {"training": True}),
        (F.rrelu, lambda: (x() * 1, 0.1, 0.3, True, True), {}),
    ],
    "rrelu_with_noise": [(aten.rrelu_with_noise.default, lambda: (p() - 1, p(), 0.1, 0.3, True), {})],
    "rrelu_with_noise_": [(aten.rrelu_with_noise_.default, lambda: (p() - 1, p(), 0.1, 0.3, True), {})],
    "rrelu_with_noise_functional": [
        (aten.rrelu_with_noise_functional.default, lambda: (p() - 1, p(), 0.1, 0.3, True), {})
    ],
    "scaled_dot_product_attention": [
        (F.scaled_dot_product_attention, _qkv, {"dropout_p": 0.3}),
        (aten.scaled_dot_product_attention.default, lambda: (*_qkv(), None, 0.3), {}),
        (F.scaled_dot_product_attention, lambda: (*_qkv(), _MASK, 0.3), {"scale": 0.2}),
        (F.scaled_dot_product_attention, lambda: (*_qkv(), x(3, 5, 6), 0.3), {}),
        (F.scaled_dot_product_attention, lambda: (*_qkv(), None, 0.3, True), {}),
        (F.scaled_dot_product_attention, lambda: (*[v.bfloat16() for v in _qkv()], None, 0.3, True), {}),
        (F.scaled_dot_product_attention, lambda: (*_qkv(), None, 0.3), {"scale": -0.2}),
        (F.scaled_dot_product_attention, lambda: (x(2, 4, 5, 4), x(2, 2, 5, 4), x(2, 2, 5, 4), None, 0.3),
         {"enable_gqa": True}),
        (F.scaled_dot_product_attention, lambda: [v[0, 0] for v in _qkv()], {"dropout_p": 0.3}),
        (F.multi_head_attention_forward, lambda: _heads(True), {}),
        (F.multi_head_attention_forward, lambda: _heads(False), {}),
        (F.multi_head_attention_forward, lambda: _heads(True, False), {}),
    ],
    "uniform": [(aten.uniform.default, lambda: (p(),), {})],
    "uniform_": [("uniform_", lambda: (p(), -1, 2), {}), (nn.init.uniform_, lambda: (p(), -1, 2), {})],
}  # fmt: skip
# Functions of aten that are said to be random and that no model on a CPU calls, or gets numbers from.
UNREACHABLE = {
    "of a GPU or another device": """_cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn _lstm_mps miopen_rnn
        _efficient_attention_forward _flash_attention_forward _flash_attention_forward_no_dropout_inplace
        _fill_mem_eff_dropout_mask_ _fused_dropout _scaled_dot_product_attention_math_for_mps
        _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_fused_attention_overrideable
        _triton_scaled_dot_attention""",
    "a backward, which has the numbers of its forward": """_cudnn_attention_backward
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward""",
    "a choice, a number": "_fused_sdp_choice",
    "takes no dropout": "_scaled_dot_product_flash_attention_for_cpu",
    "of nested tensors, draws nothing": "_nested_tensor_softmax_with_shape",
}
ONCE = {"_flash_attention_forward_no_dropout_inplace"}  # said to be random by torch 2.13, not by 2.11


def _tagged() -> set[str]:
    """The functions of aten that torch says are random."""
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if (
            space == "aten"
            and torch.Tag.nondeterministic_seeded in getattr(getattr(aten, packet), overload or "default").tags
        ):
            found.add(packet)
    return found


def test_no_random_function_of_torch_is_forgotten():
    left = {name for names in UNREACHABLE.values() for name in names.split()}
    assert not left & CASES.keys()
    assert _tagged() - ONCE == (left | CASES.keys()) - ONCE


def _called(function: Any, args: Any, kwargs: Any) -> Any:
    return getattr(args[0], function)(*args[1:], **kwargs) if isinstance(function, str) else function(*args, **kwargs)


def _run(function: Any, args: Callable[[], Any], kwargs: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """What a function makes of the arguments, and the gradients of these."""
    torch.manual_seed(1)
    given = args()
    torch.manual_seed(mix_seed(11, 3))  # for torch itself
    made = _called(function, given, kwargs)
    made = [made] if isinstance(made, torch.Tensor) else [m for m in made if m is not None]
    flat = [t for v in given for t in (v if isinstance(v, list) else [v])]
    leaves = [t for t in flat if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad]
    roots = [m.sum() * (k + 1) + m.square().sum() for k, m in enumerate(made) if m.requires_grad and not m.is_leaf]
    return made, torch.autograd.grad(sum(roots), leaves, allow_unused=True) if leaves and roots else []


@pytest.mark.parametrize("name", CASES)
def test_a_random_node_draws_what_torch_draws_bit_for_bit(name):
    for function, args, kwargs in CASES[name]:

        def ours(*a, function=function, **k):
            before = torch.get_rng_state()
            try:
                return seeded_function(3, function, CPU)(*a, **k)
            finally:
                assert torch.equal(torch.get_rng_state(), before)
                torch.rand(1)  # torch's generator has nothing to do with it

        stage_context.seed = 11
        want, have = _run(function, args, kwargs), _run(ours, args, kwargs)
        for w, h in zip(itertools.chain(*want), itertools.chain(*have), strict=True):
            assert (w is None) == (h is None)
            if w is not None:
                assert torch.equal(w, h)
                assert w.stride() == h.stride()


@pytest.mark.parametrize("grad", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", ["dropout", "scaled_dot_product_attention", "lstm", "rand"])
def test_so_it_does_without_gradients_and_under_autocast(name, grad):
    stage_context.seed = 11
    for (function, args, kwargs), enabled in itertools.product(CASES[name], (False, True)):
        with getattr(torch, grad)(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            try:
                want = _run(function, args, kwargs)[0]
            except RuntimeError as error:  # torch itself has no LSTM in bfloat16 on processors without such numbers
                if (name, enabled) == ("lstm", True) and "could not create a primitive" in str(error):
                    continue
                raise
            have = _run(seeded_function(3, function, CPU), args, kwargs)[0]
        assert all(torch.equal(w, h) and w.dtype == h.dtype for w, h in zip(want, have, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_numbers_depend_on_seed_and_ordinal(name):
    for function, args, kwargs in CASES[name]:

        def draw(seed, ordinal, function=function, args=args, kwargs=kwargs):
            stage_context.seed = seed
            torch.manual_seed(1)
            made = _called(seeded_function(ordinal, function, CPU), args(), kwargs)
            return [made.clone()] if isinstance(made, torch.Tensor) else [m for m in made if m is not None]

        def same(left, right):
            return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

        first = draw(5, 0)
        assert same(first, draw(5, 0))
        if first[0].numel():
            assert not all(same(first, draw(5, ordinal)) for ordinal in (1, 2, 3))
            assert not all(same(first, draw(seed, 0)) for seed in (6, 7, 8))


def test_the_generator_is_where_it_was_when_the_function_raises():
    before = torch.get_rng_state()
    for function in (torch.rand, F.fractional_max_pool2d, _Own.apply):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            seeded_function(0, function, CPU)(torch.ones(1), -1)
        assert torch.equal(torch.get_rng_state(), before)


class _Own(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx, value):
        return value + torch.rand(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _own(value):
    return _Own.apply(value)


def _ends_without_torchs_generator(patience: float, function: Callable[..., Any], *args: Any, **more: Any) -> bool:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (function(*args, **more), done.set()), daemon=True)
    with generator_lock(CPU):
        thread.start()
        ended = done.wait(patience)
    thread.join(20)
    assert done.is_set()
    return ended


WAITING = """_scaled_dot_product_attention_math scaled_dot_product_attention native_dropout alpha_dropout
    feature_alpha_dropout alpha_dropout_ dropout_ feature_alpha_dropout_ feature_dropout feature_dropout_""".split()


@pytest.mark.parametrize("name", CASES)
def test_functions_of_torch_do_not_wait_for_each_other(name):
    function, args, kwargs = CASES[name][0]
    patience = 0.05 if name in WAITING else 20
    ended = _ends_without_torchs_generator(patience, seeded_function(0, function, CPU), *args(), **kwargs)
    assert ended == (name not in WAITING)


def test_what_is_not_torchs_has_the_generator_to_itself():
    run = seeded_function(0, _own, CPU)
    assert not _ends_without_torchs_generator(0.05, run, torch.ones(2))


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **parts: Any):
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(6, 6), nn.Linear(6, 6), forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, given):
        return self.last(self.inner(self, self.first(given)))


def _chosen(h: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(h[:, 0] > 5)[:, 0]


NOW_AND_THEN = {
    "rrelu": lambda m, h: F.rrelu(h.abs() + 0.1, training=m.training),
    "poisson": lambda m, h: h + torch.poisson(h.detach().abs() * 0),
    "dropout": lambda m, h: h.index_add(0, _chosen(h), F.dropout(h[_chosen(h)], 0.5, m.training)),
    "dropout1d": lambda m, h: h.index_add(0, _chosen(h), F.dropout1d(h[_chosen(h)][:, None], 0.5, m.training)[:, 0]),
    "randperm": lambda m, h: h[torch.randperm(_chosen(h).shape[0] + 1)[:1]].expand_as(h),
}


@pytest.mark.parametrize("name", NOW_AND_THEN)
def test_a_node_that_draws_on_other_values_only_is_random_unless_it_is_switched_off(name):
    """An expert without tokens while it is traced: later its dropout must not draw from torch's generator."""
    model, x = Model(NOW_AND_THEN[name]), torch.zeros(4, 6)
    out_dims = 0 if name == "randperm" else None  # which goes over the samples
    assert [n.name for n in trace(model, (x,), out_dims=out_dims).nodes if info(n).is_random] == [name]
    if name not in ("poisson", "randperm"):
        assert not [n for n in trace(model.eval(), (x,)).nodes if info(n).is_random]


def test_an_rnn_of_one_layer_has_no_dropout():
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        lstm = nn.LSTM(6, 6, 1, dropout=0.5, batch_first=True)
    traced = trace(Model(lambda m, h: m.lstm(h[:, None])[0][:, 0], lstm=lstm), (torch.zeros(4, 6),))
    assert not [n for n in traced.nodes if info(n).is_random]


def test_an_expert_without_tokens_when_traced_draws_by_seed_when_it_has_some():
    found = []
    model = Model(NOW_AND_THEN["dropout"])
    for stages, mode in itertools.product((1, 2), ("never", "always")):
        with fxpipe.pipeline(copy.deepcopy(model), ["cpu"] * stages, 2, checkpoint=mode) as pipe:
            pipe(torch.zeros(4, 6))
            pipe.zero_grad()
            torch.manual_seed(3)
            out = pipe(torch.full((4, 6), 100.0) * model.first.weight[0].detach().sign())
            assert len(pipe._fxpipe.graphs) == 1
            before = torch.get_rng_state()
            out.square().sum().backward()
            assert torch.equal(torch.get_rng_state(), before)
            found.append([out.detach(), *(q.grad for q in pipe.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def _functions(m: Any, h: torch.Tensor) -> torch.Tensor:
    h = F.dropout(h, 0.3, m.training) + torch.rand(6) + torch.randn_like(h)
    h = h.add_(torch.empty_like(h).uniform_()) * torch.bernoulli(torch.full((6,), 0.5))
    h = F.rrelu(F.alpha_dropout(h, 0.2, m.training), training=m.training)
    h = F.dropout1d(h[:, None], 0.2, m.training)[:, 0] + F.gumbel_softmax(h)
    return h[:, torch.randperm(6)] + torch.poisson(h.detach().abs())


def _layers(m: Any, h: torch.Tensor) -> torch.Tensor:
    h = h.view(-1, 3, 2)
    h = m.lstm(m.encoder(h))[0] + m.gru(h)[0] + m.attention(h, h, h)[0]
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.2).flatten(1)


def _distributions(m: Any, h: torch.Tensor) -> torch.Tensor:
    from torch.distributions import Bernoulli, Beta, Categorical, Gamma, MultivariateNormal, Normal, Poisson

    noise = Normal(h, 0.5 + h.square()).rsample() + Gamma(h.abs() + 0.5, 1.0).rsample()
    noise = noise + Beta(h.abs() + 0.5, 2.0).rsample() + Poisson(h.detach().abs()).sample()
    noise = noise + Bernoulli(logits=h.detach()).sample() + Categorical(logits=h.detach()).sample()[:, None]
    return noise + MultivariateNormal(torch.zeros(6), torch.eye(6)).rsample()


def _layer_parts() -> dict[str, nn.Module]:
    return {
        "encoder": nn.TransformerEncoderLayer(2, 1, 4, dropout=0.3, batch_first=True),
        "lstm": nn.LSTM(2, 2, 2, dropout=0.3, batch_first=True),
        "gru": nn.GRU(2, 2, 2, dropout=0.3, batch_first=True),
        "attention": nn.MultiheadAttention(2, 1, dropout=0.3, batch_first=True),
    }


MODELS = {
    "functions": lambda: Model(_functions),
    "layers": lambda: Model(_layers, **_layer_parts()),
    "distributions": lambda: Model(_distributions),
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_hang_neither_on_cut_nor_schedule_nor_recompute(name):
    model = EveryCut(MODELS[name](), torch.randn(5, 6))
    modes = list(itertools.product(("drop-in", "1f1b", "gpipe"), ("never", "except_last", "always")))
    cuts = [(0,), *model.cuts(2, 4), tuple([0, *model.allowed[::2]])]
    for number, starts in enumerate(cuts):
        model.check(starts, 3, *modes[number % len(modes)], seed=number)


class Checkpoints(Layered, lin=6, masks=lambda: []):
    def forward(self, h):
        return checkpoint(self.inner, h, use_reentrant=False)

    def inner(self, h):
        mask = F.dropout(torch.ones(6), 0.5)
        self.masks.append(mask.detach())
        return (checkpoint(self.innermost, self.lin(h), use_reentrant=False) * mask).sin()

    def innermost(self, h):
        mask = F.dropout(torch.ones(6), 0.5)
        self.masks.append(mask.detach())
        return (h.sin() * mask).cos()


def test_checkpoints_in_what_is_kept_whole_are_plain_calls():
    """Torch would put back the generator of the process for the recompute, while another worker draws from it."""
    node = Checkpoints()
    stage_context.seed = 7
    out = seeded_function(0, lambda h: node(h), CPU)(torch.ones(2, 6, requires_grad=True))
    out.sum().backward()
    have, node.masks = node.masks, []
    torch.manual_seed(mix_seed(7, 0))
    want = node.inner(torch.ones(2, 6))
    assert torch.equal(out, want)
    assert len(have) == 2  # nothing was recomputed
    assert all(map(torch.equal, have, node.masks))


def test_pythons_and_numpys_numbers_go_with_torchs():
    def roll():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    found = []
    for seed in (1, 1, 2):
        stage_context.seed = seed
        found.append(seeded_function(0, roll, CPU, python_rng=True)())
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[0], found[2], strict=True))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_the_watch_on_what_drew_nothing_leaves_no_flag_of_the_process(monkeypatch):
    """By these flags torch.compile stands aside; two threads could leave them set for good."""
    monkeypatch.setattr(stage_context, "recomputes", True)
    seen = []
    random_nodes.forbid_random_numbers(lambda: seen.append(_python_dispatch.is_in_torch_dispatch_mode()))()
    assert seen == [False]


def _on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cuda:0")
    return type(value)(map(_on_gpu, value)) if isinstance(value, (list, tuple)) else value


def _listed(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else [m for m in made if m is not None]


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_a_random_node_draws_what_torch_draws(name):
    for function, args, kwargs in CASES[name]:
        device = torch.device("cuda", 0)
        stage_context.seed = 11
        found = []
        for ours in (True, True, False):
            if not ours and function in ANY_DEVICE_KERNELS:
                break  # cuDNN draws from a state of its own
            torch.manual_seed(1)
            given, more = _on_gpu(tuple(args())), {k: _on_gpu(v) for k, v in kwargs.items()}
            if not any(isinstance(v, torch.Tensor) for v in given):
                more["device"] = device
            torch.manual_seed(mix_seed(11, 3))
            before = torch.cuda.get_rng_state(device), torch.get_rng_state()
            found.append(_listed(_called(seeded_function(3, function, device) if ours else function, given, more)))
            if ours:
                assert torch.equal(torch.cuda.get_rng_state(device), before[0])
                assert torch.equal(torch.get_rng_state(), before[1])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_every_function_that_is_written_out_is_compared():
    compared = {function for cases in CASES.values() for function, _, _ in cases}
    # Of packed sequences they draw for the padding, too: no number depends on the lengths of other samples.
    assert RNG_KERNELS.keys() - {*PACKED_FUNCTIONS.values()} <= compared
    assert not [f for f in compared & RNG_KERNELS.keys() if takes_generator(f)]
