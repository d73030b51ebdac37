"""Bad input is refused before anything runs, by an error that names the argument, what was given, and the remedy."""

import copy
import traceback

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


def _pipe(model=None, chunks=4, **options):
    options.setdefault("example_args", (_x(),))
    return fxpipe.pipeline(model or _chain(), ["cpu", "cpu"], chunks, **options)


# -- arguments of `pipeline` -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ([], ArgumentError, ["devices", "empty", "'cpu', 'cpu'"]),
        ("cpu", ArgumentTypeError, ["devices='cpu'", "list", "['cpu', 'cpu']"]),
        (torch.device("cpu"), ArgumentTypeError, ["devices", "list"]),
        ({"cpu"}, ArgumentTypeError, ["devices", "list"]),
        (2.0, ArgumentTypeError, ["devices=2.0", "number", "list"]),
        (True, ArgumentTypeError, ["devices=True", "number", "list"]),
        (0, ArgumentError, ["devices=0"]),
        (["cpu", "gpu"], ArgumentError, ["devices", "'gpu'", "'cuda:0'"]),
        (["cpu", "nonsense:x"], ArgumentError, ["devices", "'nonsense:x'"]),
        (["cpu", None], ArgumentError, ["devices", "None"]),
        (["cpu", "meta"], ArgumentError, ["devices", "'meta'", "not supported", "'cpu'"]),
        (["cpu", "cuda:99"], ArgumentError, ["devices", "'cuda:99'", "not available", "CUDA devices", "'cpu'"]),
    ],
)
def test_devices(devices, error, words):
    with pytest.raises(error) as caught:
        fxpipe.pipeline(_chain(), devices)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_devices_are_a_number_or_a_list_everywhere():
    x, two = (_x(),), ["cpu", "cpu"]
    options = {"example_args": x, "hardware": None, "profile_budget": 0.05, "progress": False}
    with fxpipe.pipeline(_chain(), 3, 2, example_args=x, progress=False) as pipe:
        assert pipe.devices == [torch.device("cpu")] * 3
    for plan in (
        fxpipe.plan(_chain(), 2, **options),
        fxpipe.plan(_chain(), two, **options),
        fxpipe.plan(_chain(), devices=2, **options),
        fxpipe.plan(_chain(), devices=two, **options),
        fxpipe.tune(_chain(), 2, chunks=[2], schedules=["1f1b"], **options).best.plan,
        fxpipe.tune(_chain(), two, chunks=[2], schedules=["1f1b"], **options).best.plan,
    ):
        assert plan.row_devices == ("cpu", "cpu")
    on_gpus = fxpipe.plan(_chain(), devices=2, **options | {"hardware": "h100"})
    assert on_gpus.row_devices == ("cuda:0", "cuda:1")
    with pytest.raises(ArgumentError, match="give the devices once"):
        fxpipe.plan(_chain(), two, devices=two, **options)


def test_inputs_as_devices_and_the_class_as_a_function_are_refused_with_the_remedy():
    with pytest.raises(ArgumentError, match=r"devices has a tensor; .* example_args=\(x,\)"):
        fxpipe.pipeline(_chain(), (_x(),))
    with pytest.raises(ArgumentTypeError, match=r"call fxpipe\.pipeline\(model, devices\)"):
        fxpipe.Pipeline(_chain(), ["cpu", "cpu"])


class ChangesList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []

    def forward(self, x):
        self.seen.append(float(x.sum()))
        return self.layer(x)


def test_the_traceback_names_an_error_that_can_be_caught():
    with pytest.raises(fxpipe.errors.TraceError) as caught:
        fxpipe.pipeline(nn.Sequential(ChangesList()), 2, tracer="record", example_args=(_x(),))
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


def test_unavailable_devices_are_counted(monkeypatch):
    monkeypatch.setattr("fxpipe.utils.accelerator.device_count", lambda kind: 2)
    monkeypatch.setattr("fxpipe.utils.accelerator.missing_support", lambda device: None)
    with pytest.raises(ArgumentError, match="'cuda:2' is not available: there are 2 CUDA devices"):
        fxpipe.pipeline(_chain(), ["cuda:0", "cuda:1", "cuda:2"])


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        (0, ArgumentError),
        (-1, ArgumentError),
        (2.5, ArgumentTypeError),
        (2.0, ArgumentTypeError),
        ("4", ArgumentTypeError),
        (True, ArgumentTypeError),
        (None, ArgumentTypeError),
        (np.array([2, 3]), ArgumentTypeError),
        (np.bool_(True), ArgumentTypeError),
    ],
)
def test_chunks(chunks, error):
    with pytest.raises(error) as caught:
        fxpipe.pipeline(_chain(), ["cpu"], chunks)
    assert f"chunks={chunks!r}" in str(caught.value)
    assert "'auto'" in str(caught.value)
    assert "1" in str(caught.value)


def test_chunks_may_be_any_integer_type():
    assert fxpipe.pipeline(_chain(), ["cpu"], np.int64(3))._fxpipe.settings.chunks == 3
    assert type(fxpipe.pipeline(_chain(), ["cpu"], np.int64(3))._fxpipe.settings.chunks) is int


@pytest.mark.parametrize(
    ("argument", "given", "known"),
    [
        ("balance", "optimum", ["'block'", "number of", "names"]),
        ("schedule", "pipedream2", ["'gpipe'", "'1f1b'"]),
        ("schedule", "inference", ["'gpipe'", "'1f1b'"]),
        ("schedule", None, ["'gpipe'", "'1f1b'"]),
        ("checkpoint", "sometimes", ["'auto'", "'never'", "'except_last'", "'always'"]),
        ("checkpoint", True, ["'auto'", "'never'", "'except_last'", "'always'"]),
        ("tracer", "magic", ["'record'", "a function from the model to a torch.fx.GraphModule"]),
    ],
)
def test_an_unknown_choice_lists_what_there_is(argument, given, known):
    with pytest.raises(ArgumentError) as caught:
        fxpipe.pipeline(_chain(), ["cpu"], 2, **{argument: given})
    assert f"{argument}={given!r} is unknown" in str(caught.value)
    assert all(word in str(caught.value) for word in known), str(caught.value)


def test_checkpoint_modes_may_stand_in_a_list():
    with _pipe(checkpoint=["always", "never"]) as pipe:
        assert pipe._fxpipe.asked.checkpoint == ("always", "never")
    with pytest.raises(ArgumentError, match=r"checkpoint=\['never'\] has 1 modes for 2 stages: give one for each"):
        _pipe(checkpoint=["never"])
    with pytest.raises(ArgumentError, match="or a list with one of the last three for each stage"):
        _pipe(checkpoint="sometimes")


def test_what_a_schedule_function_raises_says_where():
    with pytest.raises(ZeroDivisionError) as caught:
        _pipe(schedule=lambda m, n: m // 0)
    assert (
        "raised by the schedule function '<lambda>', called with micro_batches=4, stages=2" in caught.value.__notes__[0]
    )


@pytest.mark.parametrize("given", ["no", 1, None])
def test_switches_are_true_or_false(given):
    for name in ("check", "deferred_batch_norm"):
        with pytest.raises(ArgumentTypeError, match=rf"{name}=.*expected True or False"):
            _pipe(**{name: given})
    with _pipe() as pipe, pytest.raises(ArgumentTypeError, match=r"return_outputs=.*expected True or False"):
        pipe.forward_backward(_x(), target=_x(), loss_fn=F.mse_loss, return_outputs=given)


@pytest.mark.parametrize(
    ("balance", "error", "words"),
    [
        ([1, 1, 1], ArgumentError, ["[1, 1, 1]", "3 entries", "2 stages", "give 2"]),
        ([], ArgumentError, ["0 entries", "2 stages"]),
        (["1", "2"], ArgumentError, ["2 names", "2 stages", "give 1 or fewer"]),
        (None, ArgumentTypeError, ["balance=None", "'block'", "list"]),
        (3, ArgumentTypeError, ["balance=3", "'block'", "list"]),
        ([1, 1], PartitionError, ["[1, 1]", "sums to 2", "3 nodes", "must sum to 3"]),
        ([3, 0], ArgumentError, ["at least 1 node"]),
        ([1.5, 1.5], ArgumentTypeError, ["1.5"]),
        (["nowhere"], PartitionError, ["'nowhere'"]),
    ],
)
def test_balance(balance, error, words):
    with pytest.raises(error) as caught:
        _pipe(balance=balance)
    assert isinstance(caught.value, FxpipeError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_stages_than_nodes_says_how_many_are_possible():
    with pytest.raises(PartitionError, match=r"3 nodes can be cut into 3 at most.*Use stages=3 or fewer"):
        fxpipe.pipeline(_chain(), ["cpu"] * 5, 2, example_args=(_x(),))


def test_too_many_stages_per_device_are_named():
    with pytest.raises(PartitionError, match="Use stages_per_device=1, not 2 devices with 4 stages each"):
        fxpipe.pipeline(_chain(), ["cpu"] * 2, 2, stages_per_device=4, example_args=(_x(),))


def test_not_a_module():
    with pytest.raises(ArgumentTypeError, match=r"model is a function; expected a torch\.nn\.Module"):
        fxpipe.pipeline(F.relu, ["cpu"])


def test_a_pipeline_already():
    with pytest.raises(ArgumentTypeError, match=r"Pipeline already.*fxpipe\.unwrap\(pipe\)"):
        fxpipe.pipeline(fxpipe.pipeline(_chain(), ["cpu"]), ["cpu"])


def test_example_args_that_are_no_tuple():
    with pytest.raises(ArgumentTypeError, match=r"example_args is a Tensor; expected a tuple.*\(x,\)"):
        _pipe(example_args=_x())
    with pytest.raises(ArgumentTypeError, match="example_kwargs is a list; expected a dict"):
        _pipe(example_args=(), example_kwargs=[_x()])


def test_example_inputs_that_the_model_refuses_are_its_own_error_with_a_note():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        _pipe(example_args=(_x(width=5),))
    assert any("run on the inputs" in note and "'0'" in note for note in caught.value.__notes__)


def test_missing_inputs():
    with pytest.raises(TypeError, match="'y'") as caught:
        _pipe(Sum(), example_args=(_x(),))
    assert any("run on the inputs" in note for note in caught.value.__notes__)


# -- the batch -------------------------------------------------------------------------------------------------------


class Scale(Layered, weight=lambda: nn.Parameter(torch.ones(3))):
    def forward(self, x):
        return (self.weight * x).tanh()


@pytest.mark.parametrize("planned", [False, True])
def test_no_batch_dimension(planned):
    pipe = _pipe(Scale(), example_args=(_x(8, 3),) if planned else ())
    with pytest.raises(ArgumentError, match=r"no input has a batch dimension.*in_dims"):
        pipe(torch.tensor(2.0))


def test_a_fixed_size_is_no_batch_dimension():
    with pytest.raises(ArgumentError, match=r"batch size cannot vary.*size 4.*in_dims"):
        _pipe(example_args=(_x()[0],))


@pytest.mark.parametrize("planned", [False, True])
def test_inputs_that_disagree_are_named_with_their_sizes(planned):
    pipe = _pipe(Apart(), in_dims=0, example_args=(_x(), _x()) if planned else ())
    with pytest.raises(ArgumentError, match=r"x holds the batch, but its 8 rows .*6 samples of y"):
        pipe(_x(8), _x(6))


@pytest.mark.parametrize("planned", [False, True])
def test_inputs_that_the_model_itself_refuses_together_are_named_with_their_sizes(planned):
    pipe = _pipe(Sum(), example_args=(_x(), _x()) if planned else ())
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        pipe(_x(8), _x(6))
    assert any("x: 8" in note and "y: 6" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("planned", [False, True])
def test_no_samples(planned):
    pipe = _pipe(example_args=(_x(),) if planned else ())
    with pytest.raises(ArgumentError, match=r"no samples.*at least one"):
        pipe(_x(0))
    with pytest.raises(ArgumentError, match=r"no samples.*at least one"):
        pipe.forward_backward(_x(0), target=_x(0), loss_fn=F.mse_loss)


def test_a_refused_call_leaves_the_pipe_usable():
    pipe = _pipe(Sum(), example_args=(_x(), _x()))
    x, y = _x(), _x()
    want = pipe(x, y)
    with pytest.raises(RuntimeError):
        pipe(x, y[:5])
    assert torch.equal(pipe(x, y), want)


# -- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda y, t: 3.0, ["float", "0-dim"]),
        (lambda y, t: None, ["NoneType", "0-dim"]),
        (lambda y, t: {"loss": y.mean()}, ["dict", "0-dim"]),
        (lambda y, t: (y - t).pow(2), ["(2, 4)", "0-dim", ".mean()", ".sum()", "(total, weight)"]),
        (lambda y, t: (y - t).mean(0, keepdim=True)[0, :1], ["(1,)", "0-dim"]),
        (lambda y, t: y.argmax(), ["torch.int64", "floating point"]),
        (lambda y, t: (y - t).pow(2).mean().detach(), ["does not require grad", "detached"]),
    ],
)
def test_a_loss_that_is_no_scalar_with_gradient(loss_fn, words):
    pipe = _pipe()
    with pytest.raises(LossError) as caught:
        pipe.forward_backward(_x(), target=_x(), loss_fn=loss_fn)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(p.grad is None for p in pipe.parameters())


def test_a_loss_and_a_pair_by_turns():
    calls = []

    def loss_fn(y, t):
        calls.append(1)
        return (F.mse_loss(y, t), 1) if len(calls) % 2 else F.mse_loss(y, t)

    with _pipe() as pipe, pytest.raises(LossError, match=r"\(total, weight\) for some micro-batches.*one kind"):
        pipe.forward_backward(_x(), target=_x(), loss_fn=loss_fn)


def test_unknown_reduction():
    with pytest.raises(
        ArgumentError, match=r"reduction='average' is unknown.*'mean', 'sum' and 'batch'.*\(total, weight\)"
    ):
        _pipe().forward_backward(_x(), target=_x(), loss_fn=F.mse_loss, reduction="average")


def test_loss_fn_that_cannot_be_called():
    with pytest.raises(ArgumentTypeError, match=r"loss_fn is a str; expected a function \(output, target\)"):
        _pipe().forward_backward(_x(), target=_x(), loss_fn="mse")


def test_loss_fn_that_is_a_class():
    with (
        _pipe() as pipe,
        pytest.raises(ArgumentTypeError, match=r"loss_fn is the class MSELoss; give an .*MSELoss\(\)"),
    ):
        pipe.forward_backward(_x(), target=_x(), loss_fn=nn.MSELoss)


def test_target_without_loss_fn():
    with pytest.raises(ArgumentError, match=r"target without loss_fn.*loss_fn="):
        _pipe().forward_backward(_x(), target=_x())


def test_without_loss_fn_the_output_must_be_a_loss():
    with pytest.raises(LossError, match=r"\(2, 4\).*0-dim"):
        _pipe().forward_backward(_x())


@pytest.mark.parametrize("target", [_x(7), torch.tensor(3.0), [_x(8), _x(9)]])
def test_target_of_another_size(target):
    pipe = _pipe()
    shape = (9, 4) if isinstance(target, list) else tuple(target.shape)
    with pytest.raises(ArgumentError) as caught:
        pipe.forward_backward(_x(), target=target, loss_fn=F.mse_loss)
    assert all(word in str(caught.value) for word in ("target", str(shape), "8 samples", "must be 8"))


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_backward_without_gradients(mode):
    pipe = _pipe()
    with mode(), pytest.raises(StateError, match=r"needs gradients.*no_grad.*call the pipe itself"):
        pipe.forward_backward(_x(), target=_x(), loss_fn=F.mse_loss)


def test_moving_is_refused_and_casting_is_not():
    pipe = _pipe(_norms())
    x = _x()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    for move in (lambda: pipe.to("meta"), lambda: pipe.to_empty(device="meta"), lambda: pipe.to("meta", torch.float64)):
        with pytest.raises(StateError, match=r"cannot be moved to meta.*devices=\[...\].*\.half\(\)"):
            move()
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
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


def test_double_backward_is_refused():
    pipe = _pipe()
    x = _x().requires_grad_()
    (gradient,) = torch.autograd.grad(pipe(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|differentiat"):
        gradient.sum().backward()


def test_inside_a_transform():
    pipe = _pipe()
    with pytest.raises(StateError, match=r"torch\.func"):
        torch.func.grad(lambda x: pipe(x).sum())(_x())


def test_a_plan_that_is_not_there_yet():
    with pytest.raises(StateError, match=r"no plan yet.*example_args"):
        _ = fxpipe.pipeline(_chain(), ["cpu"]).plan


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[]",
        "null",
        "3",
        '"plan"',
        '{"stages": 3}',
        '{"stages": [3], "portals": [], "devices": []}',
        '{"stages": [], "portals": [], "devices": []}',
        '{"stages": [], "portals": [], "devices": [], "surprise": 1}',
        "\x00\x01",
    ],
)
def test_a_file_that_is_no_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"plan\.json is no plan of fxpipe.*plan\.save\(path\)"):
        fxpipe.Plan.load(path)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        fxpipe.Plan.load(tmp_path / "none.json")


def test_a_plan_of_another_graph():
    plan = fxpipe.plan(_chain(layers=4), 2, example_args=(_x(),))
    with pytest.raises(ArgumentError, match=rf"another graph.*{plan.fingerprint}.*fxpipe\.plan"):
        _pipe(plan=plan)


def test_a_plan_for_another_number_of_devices():
    plan = fxpipe.plan(_chain(), 3, example_args=(_x(),))
    with pytest.raises(ArgumentError, match="plan has 3 stages, but devices has 2 entries"):
        _pipe(plan=plan)


def test_a_plan_and_defaults_written_out():
    plan = fxpipe.plan(_chain(), 2, example_args=(_x(),), hardware="cpu")
    defaults = {"balance": "auto", "pin": {}, "memory_limit": None, "optimizer_state": 2, "hardware": None}
    assert _pipe(plan=plan, **defaults).plan.fingerprint == plan.fingerprint


@pytest.mark.parametrize("stages", [0, -1, 2.0, True, "2"])
def test_plan_with_a_bad_number_of_stages(stages):
    with pytest.raises(FxpipeError, match=f"stages={stages!r}"):
        fxpipe.plan(_chain(), stages, example_args=(_x(),))


# -- nothing happened ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"balance": [1, 1]}, {"balance": ["nowhere"]}, {"in_dims": 5}, {"out_dims": "median"}, {"in_dims": "x"}]
)
def test_a_refused_pipe_leaves_the_model_as_it_was(options):
    model = _norms()
    before = copy.deepcopy(model)
    places = [p.data_ptr() for p in model.parameters()]
    x = _x()
    state = torch.random.get_rng_state()
    with pytest.raises(FxpipeError):
        fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(x,), **options)
    assert_same_state(model, before)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
