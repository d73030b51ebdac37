"""What a user has said takes effect, or fxpipe says that it does not: each option in the ways of running a pipe."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn

import fxpipe
import fxpipe.optim
from fxpipe.errors import ArgumentError


def chain(width=8, count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU())))


def make(model, chunks=4, **options):
    return fxpipe.pipeline(model, ["cpu", "cpu"], chunks, hardware="cpu", progress=False, **options)


# -- options that are set on the pipe --------------------------------------------------------------------------------

SET = {
    "chunks": 2,
    "schedule": "zero_bubble",
    "devices": ["cpu"],
    "checkpoint": "always",
    "balance": [4, 4],
    "memory_limit": "1MiB",
    "stages_per_device": 2,
    "pin": {"0": 0},
    "optimizer_state": 1.0,
    "hardware": "h100",
    "loss_fn": F.mse_loss,
    "deferred_batch_norm": True,
    "compile": True,
    "dynamic_shapes": {0: {1: "s"}},
    "leaf_modules": ["0"],
}


@pytest.fixture(scope="module")
def pipe():
    with make(chain(), example_args=(torch.randn(8, 8),)) as pipe:
        yield pipe


@pytest.mark.parametrize("name", SET)
def test_an_option_set_on_a_pipe_is_refused_with_the_line_that_does_it(pipe, name):
    with pytest.raises(fxpipe.errors.StateError, match=rf"pipe\.{name} = .*fxpipe\.pipeline\(fxpipe\.unwrap\(pipe\), "):
        setattr(pipe, name, SET[name])
    assert not hasattr(fxpipe.unwrap(pipe), name) or name == "compile"


def test_the_line_that_a_refusal_names_does_it(pipe):
    with make(chain(), example_args=(torch.randn(8, 8),)) as pipe:
        again = fxpipe.pipeline(fxpipe.unwrap(pipe), plan=pipe.plan, chunks=2)
        again.forward_backward(torch.randn(8, 8), target=torch.randn(8, 8), loss_fn=F.mse_loss)
        assert (again.plan.chunks, again.plan.schedule) == (2, "1f1b")
        again.close()


class Named(Layered, layers=chain, chunks=lambda: 7):
    schedule = "of the model"

    def forward(self, x):
        return self.layers(x) / self.chunks


def test_options_can_be_read_where_the_model_has_no_such_name(pipe):
    assert (pipe.chunks, pipe.devices, pipe.schedule) == (4, [torch.device("cpu")] * 2, "1f1b")
    assert pipe.checkpoint == pipe.plan.checkpoint
    with make(Named()) as own:
        assert (own.chunks, own.schedule) == (7, "of the model")
    assert not hasattr(pipe, "in_dims")
    assert not hasattr(fxpipe.unwrap(pipe), "chunks")


@pytest.mark.parametrize("inputs", [1, 2], ids=["left out", "as an input"])
def test_a_target_that_is_no_target_is_asked_for(inputs):
    with make(chain()) as pipe, pytest.raises(TypeError) as caught:
        pipe.forward_backward(*torch.randn(inputs, 8, 8), loss_fn=F.mse_loss)
    assert "did you mean pipe.forward_backward(x, target=y, loss_fn=...)?" in caught.value.__notes__[-1]


class TakesLoss(Layered, layers=chain):
    """A model that takes its own loss, as Chronos and Enformer do: its inputs are named like arguments of a loss."""

    def forward(self, x, target, loss_fn=1.0, *, reduction="mean"):
        return loss_fn * F.mse_loss(self.layers(x), target, reduction=reduction)


def loss_itself(output):
    return output


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"target": torch.ones(8, 8), "loss_fn": loss_itself}, r"forward_backward\(x, target, \.\.\.\)"),
        ({"target": torch.ones(8, 8)}, r"forward_backward\(x, target, \.\.\.\)"),
        ({"loss_fn": 2.0}, r"forward_backward\(x, target, loss_fn, \.\.\.\)"),
        ({"reduction": "none"}, "another name"),
    ],
)
def test_inputs_that_are_named_like_arguments_of_the_loss_are_asked_for_by_position(arguments, remedy):
    name = next(iter(arguments))
    with make(TakesLoss()) as pipe:
        for call in (pipe.forward_backward, lambda *args, **kwargs: fxpipe.verify(pipe, *args, **kwargs)):
            with pytest.raises(ArgumentError, match=rf"^{name} is an argument of forward_backward.*{remedy}"):
                call(torch.ones(8, 8), **arguments)
        plain, x, y = copy.deepcopy(fxpipe.unwrap(pipe)), torch.randn(8, 8), torch.randn(8, 8)
        loss = pipe.forward_backward(x, y, loss_fn=loss_itself)
        expected = plain(x, y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.grad, want.grad)
    with make(chain()) as pipe, pytest.raises(ArgumentError, match="target without loss_fn"):
        pipe.forward_backward(torch.ones(8, 8), target=torch.ones(8, 8))


def test_completion_knows_what_a_pipe_and_its_model_have(pipe):
    names = dir(pipe)
    assert {"forward_backward", "train_stream", "plan", "last_step", "close", "chunks", "parameters"} <= {*names}
    assert not [name for name in names if name.startswith("_fxpipe")]
    assert all(hasattr(pipe, name) for name in names if not name.startswith("__"))


def test_names_that_the_model_has_are_the_models(pipe):
    with make(Named()) as own:
        own.chunks, own.schedule = 2, "another"
        assert (own.model.chunks, own.model.schedule) == (2, "another")
        x = torch.randn(8, 8)
        torch.testing.assert_close(own(x), own.model.layers(x) / 2)
    pipe.loss_fn = nn.MSELoss()  # a child of the model
    del pipe.loss_fn


# -- options of a pipe in each way of running ------------------------------------------------------------------------


def call(pipe, x, y):
    F.mse_loss(pipe(x), y).backward()


def forward_backward(pipe, x, y):
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)


def evaluate(pipe, x, y):
    with torch.no_grad():
        pipe(x)


def stream(pipe, x, y, reduction="mean"):
    optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.0)
    list(pipe.train_stream([(x, y)] * 3, optimizer=optimizer, loss_fn=F.mse_loss, reduction=reduction))


RUNS = {"call": call, "forward_backward": forward_backward, "evaluation": evaluate}
BATCH = torch.randn(64, 32), torch.randn(64, 32)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_schedule_runs_or_the_pipe_says_which_one_does(run, schedule):
    with make(chain(), schedule=schedule) as pipe:
        RUNS[run](pipe, torch.randn(8, 8), torch.randn(8, 8))
        if run == "forward_backward":
            assert pipe.last_step.schedule == schedule
        elif run == "call":
            assert pipe.last_step.schedule == "gpipe"
        assert ("run as gpipe" in str(pipe)) == (schedule != "gpipe")


@pytest.mark.parametrize("run", RUNS)
def test_all_runs_have_the_micro_batches_that_were_given(run):
    seen = []
    model = chain()
    with make(model, chunks=4, example_args=(torch.randn(8, 8),)) as pipe:
        pipe.eval() if run == "evaluation" else pipe.train()
        RUNS[run](pipe, torch.randn(8, 8), torch.randn(8, 8))  # records what is not planned yet
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
        RUNS[run](pipe, torch.randn(8, 8), torch.randn(8, 8))
        seen.clear()
        RUNS[run](pipe, torch.randn(8, 8), torch.randn(8, 8))
    assert seen == [2, 2, 2, 2]


def peak(schedule):
    return max(
        memory.peak
        for memory in fxpipe.simulate(
            fxpipe.plan(
                chain(32), 2, chunks=16, checkpoint="never", example_args=BATCH[:1], hardware="cpu", progress=False
            ),
            schedule=schedule,
        ).memory
    )


@pytest.fixture(scope="module")
def limit():
    """Between what a step of 1F1B takes, and what one of GPipe takes."""
    least, most = peak("1f1b"), peak("gpipe")
    assert least < most
    return (least + most) // 2


@pytest.mark.parametrize(
    ("run", "schedule", "warns"),
    [
        ("call", "1f1b", True),
        ("call", "zero_bubble", True),
        ("forward_backward", "1f1b", False),
        ("forward_backward", "zero_bubble", False),
        ("evaluation", "1f1b", False),
        ("stream", "pipedream", True),
    ],
)
def test_a_memory_limit_holds_or_a_warning_says_what_to_do(limit, run, schedule, warns):
    with make(chain(32), 16, schedule=schedule, memory_limit=limit, checkpoint="never", example_args=BATCH[:1]) as pipe:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                RUNS[run](pipe, *BATCH) if run != "stream" else stream(pipe, *BATCH, "batch")
        texts = [str(one.message) for one in caught if "micro-batches: " in str(one.message)]
        assert len(texts) == warns
        remedy = "checkpoint='always'" if run == "stream" else "schedule='gpipe'"
        assert all(remedy in text and "where the limit is" in text for text in texts)


def test_without_a_limit_and_with_one_that_holds_nothing_is_said():
    for options in ({}, {"memory_limit": "1GiB"}):
        with make(chain(32), 16, checkpoint="never", **options) as pipe, warnings.catch_warnings():
            warnings.simplefilter("error")
            call(pipe, *BATCH)


# -- mini-batches of fewer samples than `chunks` micro-batches need ---------------------------------------------------


class Normed(nn.Module):
    """Batch norm that has `values` values of each channel in a sample."""

    def __init__(self, values=1):
        super().__init__()
        torch.manual_seed(0)
        self.values, self.first, self.last = values, nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8 // values)

    def forward(self, x):
        x = self.first(x)
        x = x if self.values == 1 else x.view(len(x), -1, self.values)
        return self.last(torch.relu(self.norm(x)).flatten(1))


def stateful(model):
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return grads | {name: buffer.clone() for name, buffer in model.named_buffers()}


def plainly(model, x, y, sizes):
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        (F.mse_loss(model(part), target) * (len(part) / len(x))).backward()


LAST = {2: [2], 3: [3], 4: [2, 2], 5: [3, 2], 6: [2, 2, 2], 7: [3, 2, 2], 8: [2, 2, 2, 2], 9: [3, 2, 2, 2]}


@pytest.mark.parametrize("run", ["call", "forward_backward"])
@pytest.mark.parametrize("first", [8, 5])
def test_batch_norm_trains_on_a_small_last_batch(run, first):
    model, x = Normed(), torch.randn(9, 8)
    plain = copy.deepcopy(model)
    with make(model, example_args=(x[:first],)) as pipe:
        for batch, sizes in LAST.items():
            RUNS[run](pipe, x[:batch], x[:batch])
            plainly(plain, x[:batch], x[:batch], sizes)
            torch.testing.assert_close(stateful(model), stateful(plain))


def test_batch_norm_trains_on_a_small_batch_in_a_stream():
    model, x = Normed(), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    with make(model, schedule="pipedream_2bw", example_args=(x,)) as pipe:
        stream(pipe, x[:5], x[:5])
        for _ in range(3):
            plainly(plain, x[:5], x[:5], LAST[5])
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_deferred_batch_norm_trains_on_a_small_last_batch():
    model, x = Normed(), torch.randn(5, 8)
    with make(model, deferred_batch_norm=True) as pipe:
        forward_backward(pipe, x, x)
        assert model.norm.num_batches_tracked == 1


def test_micro_batches_of_one_sample_stay_if_it_has_several_values():
    model, x = Normed(values=4), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with make(model) as pipe:
        forward_backward(pipe, x, x)
        plainly(plain, x, x, [1, 1, 1, 1])
        torch.testing.assert_close(stateful(model), stateful(plain))


def test_a_batch_of_one_sample_is_the_plain_models_error():
    with make(Normed()) as pipe, pytest.raises(ValueError, match="more than 1 value per channel"):
        forward_backward(pipe, torch.randn(1, 8), torch.randn(1, 8))
