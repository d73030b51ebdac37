"""A `StageOptimizer` steps the weights of a pipe to the bits of the plain optimizer on the plain model."""

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.layered import Layered
from helpers.optimized_model import CHUNKS, QUICK, assert_same_training, batches, model_of, piped
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.optim import StageOptimizer

CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "lr as a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
}


def plain_backward(model, x, t):
    return oracle.train_step(model, (x,), {}, t, F.mse_loss, chunks=CHUNKS, order="1f1b", seed=0, batch=len(x))


def pipe_backward(pipe, x, t):
    return pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)


def train(pipe, have, plain, want, data, between=lambda model, optimizer: None):
    for x, t in data:
        for backward, model, optimizer in ((plain_backward, plain, want), (pipe_backward, pipe, have)):
            loss = backward(model, x, t)
            between(model, optimizer)
            optimizer.step()
            model.zero_grad()
            assert loss.isfinite()


def both(kind="AdamW", is_tied=False, **options):
    """The plain model with its optimizer, and a copy."""
    optimizer_class, arguments = CLASSES[kind]
    plain = model_of(is_tied)
    return plain, optimizer_class(plain.parameters(), **copy.deepcopy(arguments) | options), copy.deepcopy(plain)


def stage_optimizer(pipe, kind="AdamW", **options):
    optimizer_class, arguments = CLASSES[kind]
    return StageOptimizer(pipe, optimizer_class, **copy.deepcopy(arguments) | options)


# -- Equal to the plain optimizer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_pipe():
    with piped(model_of()) as pipe:
        pipe_backward(pipe, *batches(1)[0])  # its workers are not those of the first test that uses it
        yield pipe


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_comes_to_the_weights_and_state_of_the_plain_optimizer(kind, shared_pipe):
    plain, want, model = both(kind)
    shared_pipe.load_state_dict(model.state_dict())
    shared_pipe.zero_grad()
    have = stage_optimizer(shared_pipe, kind)
    assert isinstance(have, CLASSES[kind][0])
    train(shared_pipe, have, plain, want, batches(3))
    assert_same_training(plain, want, shared_pipe.model, have)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (3, {"schedule": "gpipe"}),
        (2, {"schedule": "zero_bubble"}),
        (2, {"schedule": "interleaved_1f1b", "stages_per_device": 2, "balance": ["a", "b", "norm"]}),
    ],
    ids=["one", "three", "zero bubble", "interleaved"],
)
def test_it_steps_whatever_the_schedule_and_tied_weights_once(devices, options):
    plain, want, model = both(is_tied=True)
    with piped(model, devices, **options) as pipe:
        have = stage_optimizer(pipe)
        train(pipe, have, plain, want, batches(3))
        assert_same_training(plain, want, model, have, loose=True)  # sums over stages, and the order of backward
        assert pipe.last_step.spans[-1].action.kind.value == "U"
        stages = [span.action.stage for span in pipe.last_step.spans if span.action.kind.value == "U"]
        assert sorted(stages) == [*range(len(pipe.plan.stages))]


def test_gradients_of_drop_ins_and_of_several_steps_add_up():
    plain, want, model = both("momentum")
    with piped(model) as pipe:
        have = stage_optimizer(pipe, "momentum")
        for x, t in batches(3):
            plain_backward(plain, x, t)
            pipe_backward(pipe, x, t)
        want.step()
        have.step()
        assert_same_training(plain, want, model, have, loose=True)
        x, t = batches(1, seed=2)[0]
        F.mse_loss(plain(x), t).backward()
        F.mse_loss(pipe(x), t).backward()
        want.step()
        have.step()
        assert_same_training(plain, want, model, have, loose=True)


def test_stages_step_in_their_workers_and_hooks_see_the_optimizer_once(shared_pipe):
    threads, seen = set(), []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            own = {id(p) for p in shared_pipe.parameters()}
            if any(id(p) not in own for group in self.param_groups for p in group["params"]):
                return  # small copies, of which some are tried before the first step
            threads.add(threading.current_thread().name)
            for group in self.param_groups:
                for p in group["params"]:
                    seen.append(("stage", p.shape))

    have = StageOptimizer(shared_pipe, Noting, lr=0.1)
    have.register_step_pre_hook(lambda *given: seen.append(("before", given[0])))
    have.register_step_post_hook(lambda *given: seen.append(("after", given[0])))
    handle = register_optimizer_step_post_hook(lambda *given: seen.append(("all", given[0])))
    have.step()
    handle.remove()
    assert threads == {"fxpipe-0-cpu", "fxpipe-1-cpu"}
    assert [when for when, _ in seen] == ["before", *["stage"] * len([*shared_pipe.parameters()]), "after", "all"]
    assert all(one is have for when, one in seen if when != "stage")


# -- Parameter groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["patterns", "names", "function", "tensors"])
def test_groups_said_by_name_are_those_of_the_plain_optimizer(form):
    plain, _, model = both()
    biases = [p for name, p in plain.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in plain.named_parameters() if not name.endswith("bias")]
    want = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": rest, "lr": 0.03}], lr=1e-2)
    with piped(model) as pipe:
        named = dict(model.named_parameters())
        groups = {
            "patterns": [{"params": "*.bias", "weight_decay": 0.0}, {"params": "*", "lr": 0.03}],
            "names": [
                {"params": ["a.bias", "b.bias", "norm.bias", "c.bias"], "weight_decay": 0.0},
                {"params": ["?.weight", "norm.*", "*head*", "frozen", "unused"], "lr": 0.03},
            ],
            "tensors": [
                {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
                {"params": (p for n, p in named.items() if not n.endswith("bias")), "lr": 0.03},
            ],
            "function": lambda name, p: {"weight_decay": 0.0} if name.endswith("bias") else {"lr": 0.03},
        }[form]
        have = StageOptimizer(pipe, torch.optim.AdamW, param_groups=groups, lr=1e-2)
        if form == "function":  # the group that comes first in the model is the first
            want.param_groups.reverse()
        train(pipe, have, plain, want, batches(2))
        assert_same_training(plain, want, model, have)


def test_what_a_function_leaves_out_is_not_trained_and_a_group_can_be_added():
    plain, _, model = both()
    want = torch.optim.SGD([*plain.a.parameters()], lr=0.1, momentum=0.9)
    with piped(model) as pipe:
        have = StageOptimizer(
            pipe, torch.optim.SGD, lr=0.1, momentum=0.9,
            param_groups=lambda name, p: {} if name.startswith("a.") else None,
        )  # fmt: skip
        train(pipe, have, plain, want, batches(1))
        assert torch.equal(model.c.weight, model_of().c.weight)
        want.add_param_group({"params": [*plain.c.parameters()], "lr": 0.5})
        have.add_param_group({"params": "c.*", "lr": 0.5})
        with pytest.raises(ArgumentError, match=r"'c\.\*'\] match are all in other groups"):
            have.add_param_group({"params": "c.*"})
        train(pipe, have, plain, want, batches(2))
        assert_same_training(plain, want, model, have)


def test_sparse_gradients_have_an_optimizer_of_their_own():
    class Words(Layered, words=lambda: nn.Embedding(9, 4, sparse=True), a=4, b=(4, 2)):
        def forward(self, ids):
            return self.b(F.gelu(self.a(self.words(ids))))

    torch.manual_seed(0)
    plain = Words()
    model, ids = copy.deepcopy(plain), torch.tensor([[1, 2], [3, 1], [5, 5], [2, 7]])
    want = [torch.optim.SparseAdam(plain.words.parameters()), torch.optim.Adam([*plain.a.parameters()])]
    options = {"balance": ["a"], "example_args": (ids,), **QUICK}
    with fxpipe.pipeline(model, ["cpu"] * 2, 1, **options) as pipe:
        have = [
            StageOptimizer(pipe, torch.optim.SparseAdam, param_groups=model.words.parameters()),
            StageOptimizer(pipe, torch.optim.Adam, param_groups=[{"params": model.a.parameters()}]),
        ]
        for _ in range(2):
            F.mse_loss(plain(ids), torch.ones(4, 2, 2)).backward()
            pipe.forward_backward(ids, target=torch.ones(4, 2, 2), loss_fn=F.mse_loss)
            for optimizer in (*want, *have):
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(want, have, strict=True):
            assert_same_training(plain, one, model, other)


# -- What stands around an optimizer ---------------------------------------------------------------------------------


def test_its_state_goes_into_a_plain_optimizer_and_back():
    plain, want, model = both("amsgrad")
    with piped(model) as pipe:
        have = stage_optimizer(pipe, "amsgrad")
        train(pipe, have, plain, want, batches(2))
        saved = io.BytesIO()
        torch.save([have.state_dict(), want.state_dict()], saved)
        saved.seek(0)
        ours, theirs = torch.load(saved)
        plain_again, model_again = copy.deepcopy(plain), copy.deepcopy(model)
        optimizer_class, _ = CLASSES["amsgrad"]
        want_again = optimizer_class(plain_again.parameters(), lr=1.0)
        want_again.load_state_dict(ours)
        with piped(model_again) as pipe_again:
            have_again = StageOptimizer(pipe_again, optimizer_class, lr=1.0)
            have_again.load_state_dict(theirs)
            train(pipe_again, have_again, plain_again, want_again, batches(2, seed=4))
            train(pipe, have, plain, want, batches(2, seed=4))
            assert_same_training(plain, want, model, have)
            assert_same_training(plain, want, model_again, have_again)
            assert_same_training(plain, want, plain_again, want_again)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    ],
    ids=["StepLR", "OneCycleLR", "CosineAnnealingWarmRestarts"],
)
def test_learning_rate_schedulers_drive_it(make):
    plain, want, model = both()
    with piped(model) as pipe:
        have = stage_optimizer(pipe)
        schedulers = {id(want): make(want), id(have): make(have)}
        for data in batches(3):
            train(pipe, have, plain, want, [data])
            for scheduler in schedulers.values():
                scheduler.step()
        assert have.param_groups[0]["lr"] != 1e-2
        assert_same_training(plain, want, model, have)


def test_clipping_by_the_norm_of_all_gradients_stands_between_backward_and_step():
    plain, want, model = both()
    norms = []

    def clip(model, optimizer):
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))

    with piped(model) as pipe:
        have = stage_optimizer(pipe)
        train(pipe, have, plain, want, batches(2), clip)
        assert_same_training(plain, want, model, have)
    assert norms[0] == norms[1] > 0.01


@pytest.mark.parametrize("kind", ["AdamW", "fused"])
def test_a_grad_scaler_unscales_it_and_skips_steps_with_infinite_gradients(kind):
    plain, want, model = both(kind)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    with piped(model) as pipe:
        have = stage_optimizer(pipe, kind)
        for place, (x, t) in enumerate(batches(3)):
            t = t * float("inf") if place == 1 else t
            scalers[0].scale(F.mse_loss(plain(x), t)).backward()
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, grad_scaler=scalers[1])
            for scaler, optimizer in zip(scalers, (want, have), strict=True):
                if place == 2 and kind == "AdamW":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
        assert have.state_dict()["state"][2]["step"] == 2
        assert_same_training(plain, want, model, have, loose=True)


def test_a_closure_returns_the_loss():
    plain, want, model = both()
    with piped(model) as pipe:
        have = stage_optimizer(pipe)
        x, t = batches(1)[0]
        losses = [
            optimizer.step(lambda model=model, backward=backward: backward(model, x, t))
            for optimizer, model, backward in ((want, plain, plain_backward), (have, pipe, pipe_backward))
        ]
        assert losses[0] == losses[1]
        assert_same_training(plain, want, model, have)


class Packed(torch.optim.SGD):
    def state_dict(self):
        return [super().state_dict(), "more"]


def test_a_state_dict_may_have_a_form_of_its_class_or_of_a_hook(shared_pipe):
    assert StageOptimizer(shared_pipe, Packed, lr=0.1).state_dict()[1] == "more"
    have = StageOptimizer(shared_pipe, torch.optim.SGD, lr=0.1)
    have.register_state_dict_post_hook(lambda optimizer, state: {"lr": state["param_groups"][0]["lr"]})
    assert have.state_dict() == {"lr": 0.1}


def test_it_is_copied_and_pickled_together_with_its_pipe():
    plain, want, model = both()
    with piped(model) as pipe:
        have = stage_optimizer(pipe)
        train(pipe, have, plain, want, batches(1))
        copies = [copy.deepcopy((pipe, have)), pickle.loads(pickle.dumps((pipe, have)))]
        train(pipe, have, plain, want, batches(2, seed=4))
        for pipe_again, have_again in copies:
            with oracle.closing(pipe_again):
                assert have_again.pipe is pipe_again
                for x, t in batches(2, seed=4):
                    pipe_backward(pipe_again, x, t)
                    have_again.step()
                    have_again.zero_grad()
                assert_same_training(plain, want, pipe_again.model, have_again)


def test_without_workers_it_steps_in_the_thread_that_calls():
    plain, want, model = both()
    with piped(model, example_args=()) as pipe:
        have = stage_optimizer(pipe)
        x, t = batches(1)[0]
        for one, optimizer in ((plain, want), (model, have)):
            F.mse_loss(one(x), t).backward()
            optimizer.step()  # there is no plan yet
            optimizer.zero_grad()
        train(pipe, have, plain, want, batches(2))
        assert pipe.last_step.spans[-1].action.kind.value == "U"
        pipe_backward(pipe, x, t)
    plain_backward(plain, x, t)
    for optimizer in (want, have):
        optimizer.step()  # the pipe is closed
    assert_same_training(plain, want, model, have)


def test_an_exception_in_a_stage_says_which(shared_pipe):
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            if any(p.shape == (4, 6) and p.grad is not None for p in self.param_groups[0]["params"]):
                raise RuntimeError("no more steps")
            return super().step(closure)

    have = StageOptimizer(shared_pipe, Broken, lr=0.1)
    pipe_backward(shared_pipe, *batches(1)[0])
    with pytest.raises(RuntimeError, match="no more steps") as caught:
        have.step()
    assert caught.value.__notes__[0] == "fxpipe: stage 1 of 2 on cpu, micro-batch 2, update"
    pipe_backward(shared_pipe, *batches(1)[0])  # the pipe works on


def test_an_optimizer_that_computes_something_of_all_parameters_is_refused(shared_pipe):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.steps = getattr(self, "steps", 0) + 1
            self.param_groups[0]["count"] = self.steps
            return super().step(closure)

    class Norm(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["norm"] = sum(
                p.grad.norm() for p in self.param_groups[0]["params"] if p.grad is not None
            )
            return super().step(closure)

    counting = StageOptimizer(shared_pipe, Counting, lr=0.1)
    for _ in range(2):
        pipe_backward(shared_pipe, *batches(1)[0])
        counting.step()
    assert (counting.steps, counting.param_groups[0]["count"]) == (2, 2)
    norm = StageOptimizer(shared_pipe, Norm, lr=0.1)
    with pytest.raises(StateError, match="Norm writes 'norm' while it steps, and comes to different values"):
        norm.step()


def test_who_steps_the_same_parameters_in_turn_is_warned_of(shared_pipe):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        have = StageOptimizer(shared_pipe, torch.optim.SGD, lr=0.1)
        other = torch.optim.Adam(shared_pipe.parameters())
        for _ in range(3):
            pipe_backward(shared_pipe, *batches(1)[0])
            have.step()
            assert not caught or other.state
            other.step()
        own = StageOptimizer(shared_pipe, torch.optim.SGD, lr=0.1)  # in place of them
        own.step()
        own.step()
    (warning,) = caught
    assert "Adam and this StageOptimizer of SGD step the same parameters in turn" in str(warning.message)
    assert warning.filename == __file__


# -- Bad input -------------------------------------------------------------------------------------------------------

Wrong = list[tuple[object, dict[str, object], type[Exception], str]]
WRONG: Wrong = [
    (torch.optim.LBFGS, {}, ArgumentError, "LBFGS.step needs a closure"),
    (torch.optim.SGD([torch.ones(1)], lr=0.1), {}, ArgumentTypeError, "an instance of SGD; give the class"),
    ("AdamW", {}, ArgumentTypeError, "optimizer_class is 'AdamW'; expected a class"),
    (StageOptimizer, {}, ArgumentTypeError, "give a class of torch.optim"),
    (torch.optim.SGD, {"rate": 1}, TypeError, "unexpected keyword argument 'rate'"),
    (torch.optim.SGD, {"lr": -1.0}, ValueError, "Invalid learning rate"),
    (torch.optim.SGD, {"param_groups": "*"}, ArgumentTypeError, "param_groups is a str; expected a list of groups"),
    (torch.optim.SGD, {"param_groups": [{"params": "*.bias"}]}, ArgumentError, "leave out 'frozen', 'unused', 'a.wei"),
    (torch.optim.SGD, {"param_groups": [{"params": "*.gain"}]}, ArgumentError, "no parameter has a name like"),
    (torch.optim.SGD, {"param_groups": [{"lr": 1.0}]}, ArgumentError, r"param_groups\[0\] has no 'params'"),
    (torch.optim.SGD, {"param_groups": [3]}, TypeError, "optimizer can only optimize Tensors"),
    (torch.optim.SGD, {"param_groups": [{"params": "*"}, {"params": "a.*"}]}, ArgumentError, "taken all that"),
    (torch.optim.SGD, {"param_groups": [{"params": "*"}, 3]}, ArgumentTypeError, r"param_groups\[1\] is an int"),
    (torch.optim.SGD, {"param_groups": [{"params": {"a.bias"}}]}, ArgumentTypeError, "is a set, whose order"),
    (torch.optim.SGD, {"param_groups": [torch.ones(2, requires_grad=True)]}, ArgumentError, "no parameter of the pipe"),
    (torch.optim.SGD, {"param_groups": lambda name, p: None}, ArgumentError, "nothing to train"),
    (torch.optim.SGD, {"param_groups": lambda name, p: 1.0}, ArgumentTypeError, "returns a float for 'frozen'"),
    (
        torch.optim.SGD,
        {"param_groups": [{"params": "head.*", "lr": 1.0}, {"params": "*"}]},
        ArgumentError,
        "'a.weight' and 'head.weight' are one tied weight, which param_groups split: group 1 by the one name, group 0",
    ),
    (
        torch.optim.SGD,
        {"param_groups": lambda name, p: None if "head" in name else {}},
        ArgumentError,
        "'a.weight' and 'head.weight' are one tied weight, which param_groups split: {} by the one name, no group by",
    ),
]


@pytest.mark.parametrize(("optimizer_class", "options", "error", "message"), WRONG)
def test_bad_input_is_refused(tied_pipe, optimizer_class, options, error, message):
    with pytest.raises(error, match=message):
        StageOptimizer(tied_pipe, optimizer_class, **{"lr": 0.1} | options)


@pytest.fixture(scope="module")
def tied_pipe():
    with piped(model_of(is_tied=True)) as pipe:
        yield pipe


def test_parameters_given_twice_are_refused(tied_pipe):
    weight = tied_pipe.model.a.weight
    for groups in ([weight, weight], [{"params": [weight]}, {"params": tied_pipe.model.head.parameters()}]):
        with pytest.raises(ArgumentError, match=r"'a\.weight' is given twice to the optimizer"):
            StageOptimizer(tied_pipe, torch.optim.SGD, lr=0.1, param_groups=groups)
    with pytest.raises(ArgumentTypeError, match=r"param_groups\[0\] has both names and tensors"):
        StageOptimizer(tied_pipe, torch.optim.SGD, lr=0.1, param_groups=["a.bias", weight])
    with pytest.raises(ArgumentTypeError, match=r"param_groups\[1\] has tensors, and others have names"):
        StageOptimizer(tied_pipe, torch.optim.SGD, lr=0.1, param_groups=[{"params": "*.bias"}, {"params": [weight]}])


def test_no_pipe_and_a_closed_one_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"pipe is a Net; expected what fxpipe\.pipeline"):
        StageOptimizer(model_of(), torch.optim.SGD, lr=0.1)
    with piped(model_of()) as pipe:
        pass
    with pytest.raises(StateError, match="the pipe is closed"):
        StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
