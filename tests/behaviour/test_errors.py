"""Bad input is refused before anything runs, by an error that names the argument, what was given, and the remedy."""

import copy
import traceback
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_state
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, FxpipeError, LossError, PartitionError, StateError


class Sum(Layered, a=4, b=4, c=(4, 3)):
    """Two inputs that meet."""

    def forward(self, x, y):
        return self.c(torch.relu(self.a(x)) + self.b(y))


class Apart(Layered, a=(4, 2), b=(4, 2)):
    def forward(self, x, y):
        return self.a(x), self.b(y)


def _chain(width=4, layers=3):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _norms():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def _x(batch=8, width=4):
    return torch.randn(batch, width)


def _pipe(model=None, chunks=4, devices=("cpu", "cpu"), **options):
    options.setdefault("example_args", (_x(),))
    return fxpipe.pipeline(model or _chain(), devices, chunks, **options)


# -- arguments of `pipeline` -----------------------------------------------------------------------------------------

CHUNKS = ["'auto'", "1"]
MODES = ["'auto'", "'never'", "'except_last'", "'always'"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"devices": []}, ArgumentError, ["devices", "empty", "'cpu', 'cpu'"]),
        ({"devices": "cpu"}, ArgumentTypeError, ["devices='cpu'", "list", "['cpu', 'cpu']"]),
        ({"devices": {"cpu"}}, ArgumentTypeError, ["devices", "list"]),
        ({"devices": True}, ArgumentTypeError, ["devices=True", "number", "list"]),
        ({"devices": 0}, ArgumentError, ["devices=0"]),
        ({"devices": ["cpu", "gpu"]}, ArgumentError, ["devices", "'gpu'", "'cuda:0'"]),
        ({"devices": ["cpu", None]}, ArgumentError, ["devices", "None"]),
        ({"devices": ["cpu", "meta"]}, ArgumentError, ["devices", "'meta'", "not supported", "'cpu'"]),
        ({"devices": ["cpu", "cuda:99"]}, ArgumentError, ["'cuda:99'", "not available", "CUDA devices", "'cpu'"]),
        ({"devices": (_x(),)}, ArgumentError, ["devices has a tensor; ", "example_args=(x,)"]),
        ({"devices": ["cpu"] * 5}, PartitionError, ["3 nodes can be cut into 3 at most", "Use stages=3 or fewer"]),
        ({"stages_per_device": 4}, PartitionError, ["Use stages_per_device=1, not 2 devices with 4 stages each"]),
        ({"stages_per_device": 0}, ArgumentError, ["stages_per_device=0: expected a whole number, at least 1"]),
        ({"stages_per_device": True}, ArgumentTypeError, ["stages_per_device=True: expected a whole number"]),
        ({"chunks": 0}, ArgumentError, ["chunks=0", *CHUNKS]),
        ({"chunks": 2.0}, ArgumentTypeError, ["chunks=2.0", *CHUNKS]),
        ({"chunks": True}, ArgumentTypeError, ["chunks=True", *CHUNKS]),
        ({"chunks": None}, ArgumentTypeError, ["chunks=None", *CHUNKS]),
        ({"chunks": np.array([2, 3])}, ArgumentTypeError, ["chunks=array([2, 3])", *CHUNKS]),
        ({"balance": "optimum"}, ArgumentError, ["balance='optimum' is unknown", "'block'", "number of", "names"]),
        ({"balance": None}, ArgumentTypeError, ["balance=None", "'block'", "list"]),
        ({"balance": [1, 1, 1]}, ArgumentError, ["[1, 1, 1]", "3 entries", "2 stages", "give 2"]),
        ({"balance": ["1", "2"]}, ArgumentError, ["2 names", "2 stages", "give 1 or fewer"]),
        ({"balance": [1, 1]}, PartitionError, ["[1, 1]", "sums to 2", "3 nodes", "must sum to 3"]),
        ({"balance": [3, 0]}, ArgumentError, ["at least 1 node"]),
        ({"balance": [1.5, 1.5]}, ArgumentTypeError, ["1.5"]),
        ({"balance": ["nowhere"]}, PartitionError, ["'nowhere'"]),
        ({"schedule": "inference"}, ArgumentError, ["schedule='inference' is unknown", "'gpipe'", "'1f1b'"]),
        ({"schedule": None}, ArgumentError, ["schedule=None is unknown", "'gpipe'", "'1f1b'"]),
        ({"checkpoint": "sometimes"}, ArgumentError, ["checkpoint='sometimes' is unknown", *MODES]),
        ({"checkpoint": "sometimes"}, ArgumentError, ["or a list with one of the last three for each stage"]),
        ({"checkpoint": True}, ArgumentError, ["checkpoint=True is unknown", *MODES]),
        ({"checkpoint": ["never"]}, ArgumentError, ["checkpoint=['never'] has 1 modes for 2 stages", "one for each"]),
        ({"check": "no"}, ArgumentTypeError, ["check='no'", "expected True or False"]),
        ({"deferred_batch_norm": 1}, ArgumentTypeError, ["deferred_batch_norm=1", "expected True or False"]),
        ({"example_args": _x()}, ArgumentTypeError, ["example_args is a Tensor; expected a tuple", "(x,)"]),
        ({"example_args": (), "example_kwargs": [_x()]}, ArgumentTypeError, ["example_kwargs is a list", "a dict"]),
        ({"example_args": (_x()[0],)}, ArgumentError, ["batch size cannot vary", "size 4", "in_dims"]),
        ({"model": F.relu}, ArgumentTypeError, ["model is a function; expected a torch.nn.Module"]),
    ],
)
def test_a_bad_argument_is_named_with_what_is_accepted(options, error, words):
    with pytest.raises(error) as caught:
        _pipe(**options)
    assert isinstance(caught.value, FxpipeError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_devices_are_a_number_or_a_list_everywhere():
    x, two = (_x(),), ["cpu", "cpu"]
    options = {"example_args": x, "hardware": None, "profile_budget": 0.05, "progress": False}
    with fxpipe.pipeline(_chain(), 3, 2, example_args=x, progress=False) as pipe:
        assert pipe.devices == [torch.device("cpu")] * 3
    for plan in (
        fxpipe.plan(_chain(), 2, **options),
        fxpipe.plan(_chain(), devices=two, **options),
        fxpipe.tune(_chain(), 2, chunks=[2], schedules=["1f1b"], **options).best.plan,
        fxpipe.tune(_chain(), two, chunks=[2], schedules=["1f1b"], **options).best.plan,
    ):
        assert plan.row_devices == ("cpu", "cpu")
    on_gpus = fxpipe.plan(_chain(), devices=2, **options | {"hardware": "h100"})
    assert on_gpus.row_devices == ("cuda:0", "cuda:1")
    with pytest.raises(ArgumentError, match="give the devices once"):
        fxpipe.plan(_chain(), two, devices=two, **options)


def test_what_is_no_model_is_refused_with_the_remedy():
    with pytest.raises(ArgumentTypeError, match=r"call fxpipe\.pipeline\(model, devices\)"):
        fxpipe.Pipeline(_chain(), ["cpu", "cpu"])
    with pytest.raises(ArgumentTypeError, match=r"Pipeline already.*fxpipe\.unwrap\(pipe\)"):
        fxpipe.pipeline(fxpipe.pipeline(_chain(), ["cpu"]), ["cpu"])


class ChangesList(Layered, layer=4, seen=lambda: []):
    def forward(self, x):
        self.seen.append(float(x.sum()))
        return self.layer(x)


def test_the_traceback_names_an_error_that_can_be_caught():
    with pytest.raises(fxpipe.errors.TraceError) as caught:
        fxpipe.pipeline(nn.Sequential(ChangesList()), 2, example_args=(_x(),))
    assert traceback.format_exception_only(caught.value)[0].startswith("fxpipe.errors.TraceError: ")


@pytest.mark.parametrize(
    ("chunks", "hint"),
    [
        (1, "one micro-batch: the devices work one after another"),
        (100, "chunks=100, but the mini-batch has 8 samples"),
        (2, ""),
    ],
)
def test_a_plan_says_that_it_has_no_or_fewer_micro_batches(chunks, hint):
    text = str(fxpipe.plan(_chain(), 2, example_args=(_x(),), chunks=chunks, hardware="cpu"))
    assert ("micro-batch: the" in text or "chunks=100" in text) == bool(hint)
    assert hint in text


def test_chunks_may_be_any_integer_type():
    chunks = fxpipe.pipeline(_chain(), ["cpu"], np.int64(3))._fxpipe.settings.chunks
    assert (chunks, type(chunks)) == (3, int)


def test_what_a_schedule_function_raises_says_where():
    with pytest.raises(ZeroDivisionError) as caught:
        _pipe(schedule=lambda m, n: m // 0)
    words = "raised by the schedule function '<lambda>', called with micro_batches=4, stages=2"
    assert words in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("model", "error", "message", "note"),
    [(_chain(5), RuntimeError, "shapes cannot be multiplied", "'0'"), (Sum(), TypeError, "'y'", "")],
)
def test_example_inputs_that_the_model_refuses_are_its_own_error_with_a_note(model, error, message, note):
    with pytest.raises(error, match=message) as caught:
        _pipe(model)
    assert any("run on the inputs" in text and note in text for text in caught.value.__notes__)


# -- the batch -------------------------------------------------------------------------------------------------------


class Scale(Layered, weight=lambda: nn.Parameter(torch.ones(3))):
    def forward(self, x):
        return (self.weight * x).tanh()


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    ("model", "example", "given", "options", "message"),
    [
        (Scale, (_x(8, 3),), (torch.tensor(2.0),), {}, r"no input has a batch dimension.*in_dims"),
        (Apart, (_x(), _x()), (_x(8), _x(6)), {"in_dims": 0}, r"x holds the batch, but its 8 rows .*6 samples of y"),
        (_chain, (_x(),), (_x(0),), {}, r"no samples.*at least one"),
    ],
)
def test_inputs_without_a_batch_are_refused(model, example, given, options, message, planned):
    pipe = _pipe(model(), example_args=example if planned else (), **options)
    with pytest.raises(ArgumentError, match=message):
        pipe(*given)
    with pytest.raises(ArgumentError, match=message):
        pipe.forward_backward(*given, loss_fn=torch.sum)


@pytest.mark.parametrize("planned", [False, True])
def test_inputs_that_the_model_itself_refuses_together_are_named_with_their_sizes(planned):
    pipe = _pipe(Sum(), example_args=(_x(), _x()) if planned else ())
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        pipe(_x(8), _x(6))
    assert any("x: 8" in note and "y: 6" in note for note in caught.value.__notes__)
    x, y = _x(), _x()
    torch.testing.assert_close(pipe(x, y), fxpipe.unwrap(pipe)(x, y))  # a refused call leaves it usable


# -- the loss --------------------------------------------------------------------------------------------------------


def _pair_every_other_time():
    calls = []

    def loss_fn(y, t):
        calls.append(1)
        return (F.mse_loss(y, t), 1) if len(calls) % 2 else F.mse_loss(y, t)

    return loss_fn


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss_fn": lambda y, t: 3.0}, LossError, ["float", "0-dim"]),
        ({"loss_fn": lambda y, t: None}, LossError, ["NoneType", "0-dim"]),
        ({"loss_fn": lambda y, t: {"loss": y.mean()}}, LossError, ["dict", "0-dim"]),
        ({"loss_fn": torch.sub}, LossError, ["(2, 4)", "0-dim", ".mean()", ".sum()", "(total, weight)"]),
        ({"loss_fn": lambda y, t: y.argmax()}, LossError, ["torch.int64", "floating point"]),
        ({"loss_fn": lambda y, t: y.mean().detach()}, LossError, ["does not require grad", "detached"]),
        ({"loss_fn": _pair_every_other_time()}, LossError, ["(total, weight) for some micro-batches", "one kind"]),
        ({"loss_fn": None, "target": None}, LossError, ["(2, 4)", "0-dim"]),
        ({"loss_fn": "mse"}, ArgumentTypeError, ["loss_fn is a str; expected a function (output, target)"]),
        ({"loss_fn": nn.MSELoss}, ArgumentTypeError, ["loss_fn is the class MSELoss; give an ", "MSELoss()"]),
        (
            {"reduction": "average"},
            ArgumentError,
            ["reduction='average' is unknown", "'mean', 'sum' and 'batch'", "(total, weight)"],
        ),
        ({"return_outputs": None}, ArgumentTypeError, ["return_outputs=", "expected True or False"]),
        ({"target": _x(7)}, ArgumentError, ["target", "(7, 4)", "8 samples", "must be 8"]),
        ({"target": torch.tensor(3.0)}, ArgumentError, ["target", "()", "8 samples", "must be 8"]),
        ({"target": [_x(8), _x(9)]}, ArgumentError, ["target", "(9, 4)", "8 samples", "must be 8"]),
    ],
)
def test_a_bad_loss_is_refused_and_leaves_no_gradient(options, error, words):
    with _pipe() as pipe, pytest.raises(error) as caught:
        pipe.forward_backward(_x(), **{"target": _x(), "loss_fn": F.mse_loss} | options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(p.grad is None for p in pipe.parameters())


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_backward_without_gradients(mode):
    pipe = _pipe()
    with mode(), pytest.raises(StateError, match=r"needs gradients.*no_grad.*call the pipe itself"):
        pipe.forward_backward(_x(), target=_x(), loss_fn=F.mse_loss)


def test_moving_is_refused_and_casting_is_not():
    pipe = _pipe(_norms())
    x = _x()
    before = copy.deepcopy(pipe.model)
    for move in (lambda: pipe.to("meta"), lambda: pipe.to_empty(device="meta"), lambda: pipe.to("meta", torch.float64)):
        with pytest.raises(StateError, match=r"cannot be moved to meta.*devices=\[...\].*\.half\(\)"):
            move()
    assert_same_state(pipe, before)
    pipe(x).sum().backward()
    pipe.zero_grad()
    assert pipe.to("cpu") is pipe
    assert pipe.double() is pipe
    assert next(pipe.model.parameters()).dtype == torch.float64
    plain = copy.deepcopy(pipe.model)
    pipe.eval()
    torch.testing.assert_close(pipe(x.double()), plain.eval()(x.double()))
    pipe.to(torch.bfloat16).train()
    pipe(x.bfloat16()).sum().backward()
    assert next(pipe.parameters()).grad.dtype == torch.bfloat16


def test_backward_twice_through_one_forward():
    pipe = _pipe()
    loss = pipe(_x()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match=r"already run.*\(loss1 \+ loss2\)\.backward\(\)"):
        loss.backward()
    loss = pipe(_x()).pow(2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):  # torch's own comes first, and says the same
        loss.backward()


def test_a_plan_that_is_not_there_yet():
    with pytest.raises(StateError, match=r"no plan yet.*example_args"):
        _ = fxpipe.pipeline(_chain(), ["cpu"]).plan


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"plan"', '{"stages": [3], "portals": [], "devices": []}', "\x00\x01"]
)
def test_a_file_that_is_no_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"plan\.json is no plan of fxpipe.*plan\.save\(path\)"):
        fxpipe.Plan.load(path)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        fxpipe.Plan.load(tmp_path / "none.json")


def test_a_plan_for_something_else_is_refused():
    plan_of = partial(fxpipe.plan, example_args=(_x(),))
    plan = plan_of(_chain(layers=4), 2)
    with pytest.raises(ArgumentError, match=rf"another graph.*{plan.fingerprint}.*fxpipe\.plan"):
        _pipe(plan=plan)
    with pytest.raises(ArgumentError, match="plan has 3 stages, but devices has 2 entries"):
        _pipe(plan=plan_of(_chain(), 3))
    with pytest.raises(FxpipeError, match="stages='2'"):
        plan_of(_chain(), "2")


def test_a_plan_and_defaults_written_out():
    plan = fxpipe.plan(_chain(), 2, example_args=(_x(),), hardware="cpu")
    defaults = {"balance": "auto", "pin": {}, "memory_limit": None, "optimizer_state": 2, "hardware": None}
    assert _pipe(plan=plan, **defaults).plan.fingerprint == plan.fingerprint


# -- nothing happened ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"balance": [1, 1]}, {"balance": ["nowhere"]}, {"in_dims": 5}, {"out_dims": "median"}, {"in_dims": "x"}]
)
def test_a_refused_pipe_leaves_the_model_as_it_was(options):
    before = copy.deepcopy(model := _norms())
    places = [p.data_ptr() for p in model.parameters()]
    x = _x()
    state = torch.random.get_rng_state()
    with pytest.raises(FxpipeError):
        fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(x,), **options)
    assert_same_state(model, before)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
