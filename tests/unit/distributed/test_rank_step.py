"""What a rank holds of the packets that it has sent."""

import torch
import torch.nn.functional as F
from helpers.rank_models import DENSE_CUTS, Dense
from helpers.ranks import Ranks

import fxpipe
from fxpipe.distributed.connection import Connection


def packets_on_their_way(mesh):
    """The most packets of values, and of gradients, that this rank holds."""
    held = []
    send = Connection.send

    def watched(self, key, *arguments):
        send(self, key, *arguments)
        held.append([sum(kind in one for one in self._sends) for kind in ("values", "gradients")])

    Connection.send = watched
    try:
        torch.manual_seed(0)
        x, t = torch.randn(16, 4), torch.randn(16, 4)
        pipe = fxpipe.pipeline(Dense(), mesh, 16, example_args=(x,), balance=DENSE_CUTS[2], progress=False)
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
    finally:
        Connection.send = send
    return tuple(map(max, zip(*held, strict=True)))


def test_gradients_and_values_are_given_back_when_they_were_taken():
    with Ranks(2) as ranks:
        values, gradients = ranks.run(packets_on_their_way)
    assert values == (2, 0)
    assert gradients == (0, 2)  # of 16
