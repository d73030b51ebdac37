"""What forward computes of inputs alone, and samples share, is computed once for the mini-batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6))
        self.function = forward

    def forward(self, x, y):
        return self.function(self.body, x, y)


def scale_of_all_series(body, x, mask):
    """The scaler of transformers' time series: series without observations have the scale of the batch."""
    observed = mask.sum(1, keepdim=True)
    total = (x * mask).abs().sum(1, keepdim=True)
    common = total.sum(0) / observed.sum(0).clamp(min=1)
    scale = torch.where(observed > 0, total / observed.clamp(min=1), common)
    return F.mse_loss(body(x / scale) * scale, x), scale


def scaled_loss(body, x, y):
    largest = y.abs().max()
    return F.mse_loss(body(x), y / largest) * largest.square()


def scaled_features(body, x, y):
    spread, offset = x.std(0, keepdim=True), y.mean()
    return body((x - x.mean(0)) / spread) + offset


MODELS = [scale_of_all_series, scaled_loss, scaled_features]


def batch(samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return x, (torch.rand(samples, 6, generator=generator) > 0.3).float() * torch.tensor([0.0, *[1.0] * (samples - 1)])[
        :, None
    ]


def loss_of(output):
    return output[0] if isinstance(output, tuple) else output if output.dim() == 0 else output.square().mean()


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("function", MODELS)
def test_training_is_the_plain_models(function, chunks):
    torch.manual_seed(0)
    plain = Model(function)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], chunks, example_args=batch(8)) as pipe:
        for step, samples in enumerate((8, 6, 8)):
            inputs = batch(samples, step)
            expected = plain(*inputs)
            loss_of(expected).backward()
            if step:
                loss = pipe.forward_backward(*inputs, loss_fn=loss_of)
            else:
                loss = loss_of(pipe(*inputs))
                loss.backward()
            torch.testing.assert_close(loss.detach(), loss_of(expected).detach())
            for (name, own), parameter in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own.grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(*inputs), plain.eval()(*inputs))
        assert fxpipe.verify(pipe, *batch(6, 9))


def test_micro_batches_of_the_caller_and_mini_batches_of_a_stream_have_their_own():
    plain = Model(scaled_loss)
    parts = [batch(4, 1), batch(4, 2)]
    losses = torch.stack([plain(*part) for part in parts])
    losses.mean().backward()
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 2, example_args=batch(8)) as pipe:
        pipe.forward_backward(micro_batches=[(part, {}, None) for part in parts])
        for own, parameter in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, parameter.grad)
    options = {"schedule": "pipedream", "example_args": batch(4)}
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 2, **options) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.0)
        stream = pipe.train_stream([(part, {}, None) for part in parts], optimizer=optimizer)
        torch.testing.assert_close(torch.stack([*stream]), losses.detach())


def test_what_an_input_with_a_gradient_gives_is_refused():
    x, y = batch(8)
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.pipeline(Model(scaled_features), ["cpu", "cpu"], 2, example_args=(x.requires_grad_(), y))
