"""Forward cuts texts to the longest of the batch: a length that depends on values, and that the loss uses."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients
from torch import Tensor, nn

import fxpipe

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (logits, ids, mask) -> loss


def entropy(y: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), ids, reduction="none")


def contrastive(y: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    z = F.normalize(y.mean(1), dim=1)
    return F.cross_entropy(z @ z.t() * mask.shape[1], torch.arange(len(z)))


LOSSES: dict[str, Loss] = {
    "of tokens that count": lambda y, ids, mask: (entropy(y, ids) * mask).sum() / mask.sum(),
    "of chosen tokens": lambda y, ids, mask: F.cross_entropy(y[mask], ids[mask]),
    "of all tokens": lambda y, ids, mask: F.cross_entropy(y.flatten(0, 1), ids.flatten()),
    "over sizes": lambda y, ids, mask: (entropy(y, ids) * mask).sum() / (mask.shape[0] * mask.shape[1]),
    "times a length": lambda y, ids, mask: (entropy(y, ids) * mask).sum() / mask.sum() * mask.shape[1],
    "weighed by places": lambda y, ids, mask: (entropy(y, ids) * mask).sum() / torch.arange(mask.shape[1]).sum(),
    "times a length of logits": lambda y, ids, mask: y.square().mean() * y.shape[1],
    "of all samples": contrastive,
}


class Trimming(Layered, embed=lambda: nn.Embedding(9, 8), body=8, head=(8, 9)):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        ids = ids[:, : lengths.max()]
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        return self.loss(self.head(self.body(self.embed(ids)).tanh()), ids, mask)


@pytest.mark.parametrize("name", LOSSES)
def test_the_length_is_that_of_each_mini_batch(name: str) -> None:
    model, ids = Trimming(loss=LOSSES[name]), torch.randint(9, (4, 6))
    plain, names = copy.deepcopy(model), [name for name, _ in model.named_parameters()]
    example = ids, torch.tensor([4, 4, 4, 4])  # no part of it is shorter
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=example, profile_budget=0.0) as pipe:
        for lengths in ([2, 3, 4, 4], [2, 3, 6, 5], [3, 1, 2, 3]):
            plain.zero_grad()
            pipe.zero_grad()
            want = plain(ids, torch.tensor(lengths))
            want.backward()
            torch.testing.assert_close(pipe.forward_backward(ids, torch.tensor(lengths)), want.detach())
            assert_same_gradients(pipe, plain, loose=names)
