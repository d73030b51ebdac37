"""Micro-batches that are handed over to a pipe over processes: their number and sizes may be others in each step."""

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.rank_models import MIXED_CUTS, Mixed, padded_loss, token_loss, tokens
from helpers.ranks import square_mesh
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError

QUICK = {"progress": False, "check": False, "hardware": "cpu"}
# By step, the (samples, length, seed) of micro-batches.
STEPS = [
    [(3, 5, 1), (2, 5, 2)],
    [(1, 5, 3), (4, 5, 4), (2, 5, 5)],
    [(3, 7, 6), (2, 5, 7)],
    [(2, 9, 8), (3, 6, 9), (2, 7, 10)],
    [(4, 5, 11)],
    [(3, 5, 12), (2, 5, 13)],
]


class Winding(Layered, first=4, second=4, third=4, drop=lambda: nn.Dropout(0.3)):
    """Takes the way that a micro-batch asks for: a weight is used in another stage, and more values cross the cut."""

    def forward(self, x, way=0):
        y = torch.tanh(self.first(x))
        z = self.drop(torch.tanh(self.second(y)))
        z = torch.tanh(self.third(z))
        return torch.tanh(self.first(z)) + y if way else z


class Meeting(Layered, first=4, last=4):
    """Takes the mean of all samples."""

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.last(y - y.mean(0))


def trained(pipe, steps, loss_fn, is_over_ranks=True):
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(5)
    losses, outputs = [], []
    for step in steps:
        optimizer.zero_grad()
        if is_over_ranks:  # nobody is given what it does not need
            step = [(x if pipe.needs_inputs else (), t if pipe.needs_target else None) for x, t in step]
        step = step if not is_over_ranks or pipe.needs_inputs or pipe.needs_target else ()
        loss, out = pipe.forward_backward(micro_batches=iter(step), loss_fn=loss_fn, return_outputs=True)
        losses.append(loss)
        outputs.append(out)
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
        optimizer.step()
    return losses, outputs, gradients, {key: value.clone() for key, value in pipe.state_dict().items()}


def work(kind):
    torch.manual_seed(0)
    if kind == "mixed":
        return Mixed(), [[tokens(*batch) for batch in step] for step in STEPS], {"balance": MIXED_CUTS[2]}
    if kind == "meeting":
        steps = [[(torch.randn(b, 4), torch.randn(b, 4)) for b in sizes] for sizes in ((3, 2), (4, 3, 1))]
        return Meeting(), steps, {"chunks": 1}
    steps = [[(0, 3), (1, 2)], [(1, 1), (0, 4), (1, 2)], [(0, 2), (0, 3)]]
    batches = [[((torch.randn(b, 4), way), torch.randn(b, 4)) for way, b in step] for step in steps]
    return Winding(), batches, {"balance": ["second"]}


def pipe_of(kind, devices, options):
    model, steps, own = work(kind)
    x, _ = steps[0][0]
    example = x if isinstance(x, tuple) else (x,)
    return fxpipe.pipeline(model, devices, example_args=example, **QUICK | own | options), steps


def train_on_rank(mesh, kind, loss_fn, options):
    return trained(*pipe_of(kind, mesh, options), loss_fn)


@pytest.mark.parametrize(
    ("kind", "loss_fn", "options"),
    [
        ("mixed", token_loss, {}),
        ("mixed", padded_loss, {"schedule": "zero_bubble"}),
        ("winding", F.mse_loss, {}),
        ("meeting", F.mse_loss, {}),
    ],
)
def test_micro_batches_have_the_bits_of_one_process(two_ranks, kind, loss_fn, options):
    results = two_ranks.run(train_on_rank, kind, loss_fn, options)
    losses, outputs, gradients, state = trained(*pipe_of(kind, ["cpu"] * 2, options), loss_fn, is_over_ranks=False)
    names, keys = set(), set()
    for own_losses, own_outputs, own_gradients, own_state in results:
        assert all(map(torch.equal, own_losses, losses))
        for name, gradient in own_gradients.items():
            assert torch.equal(gradient, gradients[name]), name
        for key, value in own_state.items():
            assert torch.equal(value, state[key]), key
        names |= own_gradients.keys()
        keys |= own_state.keys()
        if own_outputs[0] is not None:
            for ours, theirs in zip(own_outputs, outputs, strict=True):
                assert all(map(torch.equal, ours, theirs))
    assert [one[1][0] is None for one in results] == [True, False]
    assert names == gradients.keys()
    assert keys == state.keys()


def train_replica(mesh, loss_fn):
    mesh = square_mesh()
    replica = mesh["data"].get_local_rank()
    torch.manual_seed(0)
    pipe = fxpipe.pipeline(
        Mixed(0.0), mesh["pipe"], 2, data_parallel=mesh["data"], balance=MIXED_CUTS[2],
        example_args=(tokens(4, 5, 0)[0],), **QUICK,
    )  # fmt: skip
    results = []
    for step in range(2):
        parts = [tokens(*batch) for batch in STEPS[2 * step + replica]]
        pipe.zero_grad()
        loss = pipe.forward_backward(micro_batches=parts, loss_fn=loss_fn)
        results.append((loss, {name: p.grad.clone() for name, p in pipe.named_parameters()}))
    return results


@pytest.mark.parametrize("loss_fn", [token_loss, padded_loss])
def test_micro_batches_of_replicas_count_by_their_samples_or_weights(four_ranks, loss_fn):
    results = four_ranks.run(train_replica, loss_fn)
    torch.manual_seed(0)
    model = Mixed(0.0)
    for step in range(2):
        model.zero_grad()
        pairs = []
        for x, t in (tokens(*batch) for replica in range(2) for batch in STEPS[2 * step + replica]):
            value = loss_fn(model(x), t)
            pairs.append(value if isinstance(value, tuple) else (value * len(x), len(x)))
        loss = sum(total for total, _ in pairs) / sum(weight for _, weight in pairs)
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        for of_rank in results:
            own, gradients = of_rank[step]
            torch.testing.assert_close(own, loss.detach())
            torch.testing.assert_close(gradients, {name: expected[name] for name in gradients})


def plan_late(mesh):
    torch.manual_seed(0)
    pipe = fxpipe.pipeline(Mixed(), mesh, 2, balance=MIXED_CUTS[2], **QUICK)
    rank = mesh.get_rank()
    parts = [tokens(*batch) for batch in STEPS[3]]
    loss = pipe.forward_backward(micro_batches=parts, loss_fn=token_loss).item()

    def text_of(**arguments):
        with pytest.raises(FxpipeError) as caught:
            pipe.forward_backward(**{"loss_fn": token_loss} | arguments)
        return str(caught.value)

    texts = [
        text_of(micro_batches=()),
        text_of(micro_batches=parts[: 2 + rank]),
        text_of(micro_batches=parts, target=parts[0][1]),
        text_of(micro_batches=3),
    ]
    if rank:
        with pytest.raises(FxpipeError) as caught:
            pipe.forward_backward(target=parts[0][1], loss_fn=token_loss)
        texts.append(str(caught.value))
    else:
        texts.append(text_of(micro_batches=parts))
    assert pipe.forward_backward(micro_batches=parts, loss_fn=token_loss) > 0
    return loss, texts


def test_the_first_micro_batches_make_the_plan_and_misuse_is_an_error_on_all_ranks(two_ranks):
    results = two_ranks.run(plan_late)
    assert results[0][0] == results[1][0]
    words = [
        "has the first stage and needs the micro_batches",
        "was given 3 micro_batches, and rank 0, of the first stage, 2",
        "micro_batches and inputs or a target beside them",
        "micro_batches is an int",
        "with micro_batches",
    ]
    for _, texts in results:
        for text, word in zip(texts, words, strict=True):
            assert word in text
