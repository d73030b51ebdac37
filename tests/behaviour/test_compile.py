"""Compiled stages: the same steps as without, few compilations, and none for each new size."""

import copy
import math
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared_steps import assert_trains
from helpers.layered import Layered
from helpers.models import GPT, UNet
from helpers.oracle import accumulate_gradients, assert_same_gradients
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError

BATCH = 7  # uneven over three micro-batches

# torch hides these warnings while it compiles, by a way that does not heed what pytest makes of warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Normed(Layered, one=(6, 8), norm=lambda: nn.BatchNorm1d(8), two=8):
    """Buffers that change, a parameter that is used as a view, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.two.bias.requires_grad_(False)

    def forward(self, x):
        h = F.relu(self.norm(self.one(x)))
        return self.two(h) @ self.one.weight


CASES = {
    "normed": (Normed, lambda: (torch.randn(BATCH, 6),)),
    "gpt": (lambda: GPT(layers=2, dropout=0.0), lambda: (torch.randint(17, (BATCH, 8)),)),
    "unet": (UNet, lambda: (torch.randn(BATCH, 3, 16, 16),)),
}


def square(y):
    return y.float().square().mean()


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [*zip(CASES, ("1f1b", "gpipe", "zero_bubble"), ("never", "always", "except_last"), strict=True)],
)
def test_compiled_stages_make_the_steps_of_plain_ones(name, schedule, checkpoint):
    make, inputs = CASES[name]
    options = {"schedule": schedule, "checkpoint": checkpoint, "compile": {"backend": "aot_eager"}}
    assert_trains(make(), [inputs()] * 3, 3, lr=0.1, **options)


class Compilations(list[Any]):
    """A backend that runs what it is given as it is, and notes the thread."""

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.append(threading.current_thread().name)
        return graph.forward


def test_the_drop_in_and_evaluation_are_compiled_too():
    counts = []
    for evaluates in (False, True):
        compilations = Compilations()
        assert_trains(Normed(), [torch.randn(BATCH, 6)], 3, evaluates=evaluates, compile={"backend": compilations})
        counts.append(len(compilations))
    assert 0 < counts[0] < counts[1]


def test_a_stage_is_compiled_in_its_worker_and_again_for_uneven_micro_batches_only():
    model, x, threads = (
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)),
        torch.randn(BATCH, 6),
        Compilations(),
    )
    with fxpipe.pipeline(model, ["cpu", "cpu"], 3, example_args=(x,), compile={"backend": threads}) as pipe:
        for batch in (BATCH, BATCH - 1, BATCH, BATCH + 4):
            pipe.forward_backward(torch.randn(batch, 6), loss_fn=square)
    # The first micro-batch's part of an input starts where the input does; torch tells that apart.
    assert Counter(threads) == {"fxpipe-0-cpu": 3, "fxpipe-1-cpu": 2}


class Dropping(Layered, one=(6, 8), two=8):
    """Dropout of three kinds, once in place; the last one draws nothing."""

    def forward(self, x):
        h = F.dropout(self.one(x), 0.3)
        h = torch.relu(F.dropout(self.two(h), 0.5, inplace=True))
        return F.dropout(h, 0.5, training=False)


def test_dropout_is_compiled_in_one_piece_and_draws_the_same():
    plain, args = Dropping(), (torch.randn(BATCH - 1, 6),)
    ours = copy.deepcopy(plain)
    threads = Compilations()
    for checkpoint, backend in (("never", threads), ("always", "aot_eager")):
        how = {"chunks": 3, "example_args": args, "checkpoint": checkpoint}
        with (
            fxpipe.pipeline(plain, ["cpu", "cpu"], **how) as eager,
            fxpipe.pipeline(ours, ["cpu", "cpu"], compile={"backend": backend, "fullgraph": True}, **how) as compiled,
        ):
            for seed in (1, 2):
                for pipe in (eager, compiled):
                    torch.manual_seed(seed)
                    pipe.forward_backward(*args, loss_fn=square)
                assert_same_gradients(ours, plain)
    assert sorted(set(threads)) == ["fxpipe-0-cpu", "fxpipe-1-cpu"]


def test_deferred_batch_norm_in_modules_kept_whole():
    """It was an AttributeError: torch.compile breaks off where statistics are caught, and had lost who catches them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x, found = torch.randn(8, 4), []
    for options in ({}, {"compile": {"backend": "eager"}}):
        mine = copy.deepcopy(model)
        with fxpipe.pipeline(mine, ["cpu", "cpu"], 2, deferred_batch_norm=True, leaf_modules=["1"], **options) as pipe:
            for _ in range(2):
                pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
        found.append([*mine.state_dict().values(), *(p.grad for p in mine.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_what_a_backend_raises_reaches_the_caller_with_the_stage_and_changes_nothing():
    def backend(graph, example_inputs):
        raise ValueError("no such luck")

    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(4, 6)
    with (
        fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), compile={"backend": backend}) as pipe,
        pytest.raises(Exception, match="no such luck") as caught,
    ):
        pipe.forward_backward(x, loss_fn=square)
    assert any("fxpipe: stage 0 of 2" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("inductor", ArgumentTypeError, "compile='inductor': expected True, False or a dict"),
        ({"beckend": "inductor"}, ArgumentError, "no keyword 'beckend'; it has fullgraph"),
        ({"mode": "fastest"}, ArgumentError, "compile={'mode': 'fastest'}: torch.compile does not accept it.*default"),
        ({"backend": "inducter"}, ArgumentError, "compile={'backend': 'inducter'}: torch.compile does not.*Invalid"),
        ({"options": {"triton.cudagraphs": True}}, ArgumentError, "CUDA graphs"),
    ],
)
def test_what_cannot_be_compiled_so_is_refused(given, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        fxpipe.pipeline(nn.Linear(2, 2), ["cpu", "cpu"], 2, compile=given)


D = 8
LENGTHS = (7, 12, 5, 16, 9, 33, 8)


class Attention(Layered, first=D, second=D, last=D, positions=lambda: nn.Embedding(64, D)):
    """Its mask and positions go by the length; a size is sent from stage to stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        h = self.first(x) + self.positions(torch.arange(length))
        mask = torch.full((length, length), -math.inf).triu(1)
        h = (h @ h.transpose(1, 2) / D**0.5 + mask).softmax(-1) @ h
        return self.last(torch.relu(self.second(h)))


def train(pipe: Any, plain: nn.Module, lengths: Sequence[int], compilations: Compilations) -> list[int]:
    """Steps of these lengths are those of the plain model. Returns how much was compiled after each."""
    counts = []
    for length in lengths:
        x, target = torch.randn(4, length, D), torch.randn(4, length, D)
        for one in (pipe, plain):
            one.zero_grad()
        have = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
        want = F.mse_loss(plain(x), target)
        want.backward()
        torch.testing.assert_close(have, want.detach())
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
        counts.append(len(compilations))
    return counts


@pytest.mark.parametrize("options", [{"schedule": "gpipe", "checkpoint": "always"}, {"schedule": "zbv"}], ids=str)
def test_nothing_is_compiled_from_the_third_size_on(options: dict[str, Any]) -> None:
    model, compilations = Attention(), Compilations()
    plain = copy.deepcopy(model)
    x = torch.randn(4, LENGTHS[0], D)
    with fxpipe.pipeline(
        model, ["cpu", "cpu"], chunks=2, example_args=(x,), compile={"backend": compilations}, **options
    ) as pipe:
        _, second, third, *others = train(pipe, plain, LENGTHS, compilations)
        assert {*others} == {third}
        # A size as a number is one that torch sees with a second value first: in those stages that are sent one.
        assert third - second < len(pipe.plan.stages)


def test_dynamic_shapes_compile_once_for_all_sizes() -> None:
    class Rows(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.second(self.first(x))))

    model, compilations = Rows(), Compilations()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(
        model,
        ["cpu", "cpu"],
        chunks=2,
        example_args=(torch.randn(4, 7, D),),
        dynamic_shapes={"x": {1: "length"}},
        compile={"backend": compilations},
        schedule="zero_bubble",
    ) as pipe:
        assert {*train(pipe, plain, LENGTHS, compilations)} == {2}  # one for each stage


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_backward_is_compiled_for_any_size(schedule: str) -> None:
    batches = [torch.randn(4, length, D) for length in LENGTHS[:4]]
    assert_trains(Attention(), batches, compile={"backend": "aot_eager"}, schedule=schedule)


def test_micro_batches_of_their_own_lengths_run_compiled() -> None:
    model, compilations = Attention(), Compilations()
    plain = copy.deepcopy(model)
    counts = []
    with fxpipe.pipeline(model, ["cpu", "cpu"], schedule="zero_bubble", compile={"backend": compilations}) as pipe:
        for lengths in ((7, 12, 5), (16, 9), (33, 8, 7, 12, 4), (5,)):
            micro_batches = [(torch.randn(2, length, D), torch.randn(2, length, D)) for length in lengths]
            for one in (pipe, plain):
                one.zero_grad()
            pipe.forward_backward(micro_batches=micro_batches, loss_fn=F.mse_loss)
            accumulate_gradients(plain, micro_batches, F.mse_loss)
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
            counts.append(len(compilations))
    assert len({*counts}) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler for CPUs calls g++, which is not there")
def test_the_compiler_of_torch_itself_takes_any_size() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    batches = [torch.randn(4, length, D) for length in (7, 9, 12, 5)]
    assert_trains(model, batches, schedule="zero_bubble", compile=True)
