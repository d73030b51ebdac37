"""Loaders that fill the same tensors again, where fxpipe reads ahead or holds what it was given."""

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import accumulate_gradients, assert_same_gradients, assert_same_state
from torch import nn

import fxpipe

WIDTH, BATCHES = 6, 5
WRITTEN = "was written to after it was read"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def values(batch):
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def filling(fill):
    """Mini-batches for which `fill` takes a buffer, what it is to hold and the number, and returns what is given."""

    def batches():
        buffer = torch.empty(8, WIDTH)
        for batch in range(BATCHES):
            yield fill(buffer, *values(batch), batch)

    return batches


def both_by_index():
    inputs, targets = torch.empty(4, WIDTH), torch.empty(4, WIDTH)
    for batch in range(BATCHES):
        inputs[:], targets[:] = values(batch)
        yield inputs, targets


def changed_in_place():
    """Adds noise to the tensor that was given before."""
    x, target = values(0)
    for _ in range(BATCHES):
        yield x, target
        x.add_(1)


def under_no_grad(buffer, x, target, batch):
    with torch.no_grad():
        return (buffer[:4].zero_().add_(x),), {}, target


REFILLING = {
    "both by index": both_by_index,
    "changed in place": changed_in_place,
    "targets": filling(lambda buffer, x, target, batch: (x, buffer[:4].copy_(target))),
    "views": filling(lambda buffer, x, target, batch: (buffer[2:6].copy_(x), target)),
    "two in turn": filling(lambda buffer, x, target, batch: (buffer.chunk(2)[batch % 2].copy_(x), target)),
    "named inputs": filling(lambda buffer, x, target, batch: ({"input": buffer[:4].copy_(x)}, target)),
    "targets in a dict": filling(lambda buffer, x, target, batch: (x, {"y": buffer[:4].copy_(target)})),
    "under no_grad": filling(under_no_grad),
}


def loss_fn(output, target):
    return F.mse_loss(output, target["y"] if isinstance(target, dict) else target)


@pytest.mark.parametrize("batches", REFILLING.values(), ids=REFILLING)
def test_micro_batches_that_are_filled_again_are_refused(batches):
    ours = model()
    with fxpipe.pipeline(ours, ["cpu", "cpu"], chunks=2) as pipe:
        with pytest.raises(fxpipe.errors.ArgumentError, match=f"micro-batch 0 {WRITTEN}.*clone"):
            pipe.forward_backward(micro_batches=batches(), loss_fn=loss_fn)
        assert all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("batches", REFILLING.values(), ids=REFILLING)
def test_streams_that_are_filled_again_are_refused(batches, schedule):
    with fxpipe.pipeline(model(), ["cpu", "cpu"], schedule=schedule) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        with pytest.raises(fxpipe.errors.ArgumentError, match=rf"mini-batch \d {WRITTEN}.*clone"):
            list(pipe.train_stream(batches(), optimizer=optimizer, loss_fn=loss_fn))


def views_of_a_dataset():
    """A tensor that is written to before, and read in parts."""
    data, targets = (torch.stack(both) for both in zip(*map(values, range(BATCHES)), strict=True))
    data.add_(1)
    yield from zip(data, targets, strict=True)


ONE = values(0)
RIGHT = {
    "fresh": lambda: map(values, range(BATCHES)),
    "views of a dataset": views_of_a_dataset,
    "one target": lambda: ((values(batch)[0], ONE[1]) for batch in range(BATCHES)),
    "one batch": lambda: [ONE] * BATCHES,
}


@pytest.mark.parametrize("batches", RIGHT.values(), ids=RIGHT)
def test_micro_batches_that_stay_are_right(batches):
    ours, plain = model(), model()
    want, _ = accumulate_gradients(plain, list(batches()), loss_fn)
    with fxpipe.pipeline(ours, ["cpu", "cpu"], chunks=2) as pipe:
        have = pipe.forward_backward(micro_batches=batches(), loss_fn=loss_fn)
    torch.testing.assert_close(have, want)
    assert_same_gradients(ours, plain, loose=[name for name, _ in plain.named_parameters()])


@pytest.mark.parametrize("batches", RIGHT.values(), ids=RIGHT)
def test_streams_of_batches_that_stay_are_right(batches):
    ours, plain = model(), model()
    own, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for x, target in batches():
        own.zero_grad()
        losses.append(loss_fn(plain(x), target))
        losses[-1].backward()
        own.step()
    with fxpipe.pipeline(ours, ["cpu"], schedule="pipedream") as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        have = list(pipe.train_stream(batches(), optimizer=optimizer, loss_fn=loss_fn))
    torch.testing.assert_close(torch.stack(have), torch.stack(losses).detach())
    assert_same_state(ours, plain, exact=False)


@pytest.mark.parametrize("way", ["drop-in", "forward_backward"])
@pytest.mark.parametrize("batches", REFILLING.values(), ids=REFILLING)
def test_a_step_at_a_time_may_fill_them_again(batches, way):
    ours, plain = model(), model()
    with fxpipe.pipeline(ours, ["cpu", "cpu"], chunks=2) as pipe:
        for (x, *_, target), (own_x, *_, own_target) in zip(batches(), batches(), strict=True):
            x, own_x = ((*one.values(),)[0] if isinstance(one, dict) else one for one in (x, own_x))
            x, own_x = (one[0] if isinstance(one, tuple) else one for one in (x, own_x))
            loss_fn(plain(own_x), own_target).backward()
            if way == "drop-in":
                loss_fn(pipe(x), target).backward()
            else:
                pipe.forward_backward(x, target=target, loss_fn=loss_fn)
    assert_same_gradients(ours, plain, loose=[name for name, _ in plain.named_parameters()])
