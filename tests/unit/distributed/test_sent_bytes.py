"""The bytes that ranks send are those that the plan says, relays among them."""

import torch
from helpers.skipping_models import SKIPPING_CUTS, Skipping

import fxpipe
from fxpipe.distributed.connection import Connection
from fxpipe.distributed.packets import CONTROL_BYTES
from fxpipe.scheduling import ActionKind


def counted(mesh):
    """By cut and direction, the messages of a step from this rank, their bytes, and what the plan says."""
    torch.manual_seed(0)
    x, messages = torch.randn(8, 16), []
    with fxpipe.pipeline(
        Skipping(), mesh, 2, example_args=(x,), balance=SKIPPING_CUTS, hardware="cpu", progress=False, check=False
    ) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=torch.nn.functional.mse_loss)  # ranks get to know the layouts
        plain = Connection.send

        def send(self, key, peer, tag, memory):
            if isinstance(key[-4], ActionKind):
                messages.append((key[-4], key[-3], memory.numel()))
            plain(self, key, peer, tag, memory)

        Connection.send = send
        try:
            pipe.forward_backward(x, target=x, loss_fn=torch.nn.functional.mse_loss)
        finally:
            Connection.send = plain
        return messages, [(one.source, one.target, one.bytes) for one in pipe.plan.packets]


def test_packets_are_as_large_as_planned(four_ranks):
    answers = four_ranks.run(counted)
    sent = {}
    for messages, _ in answers:
        for kind, cut, size in messages:
            ends = (cut, cut + 1) if kind is ActionKind.FORWARD else (cut + 1, cut)
            sent.setdefault(ends, []).append(size)
    planned = {(source, target): size for source, target, size in answers[0][1]}
    assert planned.keys() == sent.keys()
    for ends, size in planned.items():
        controls = [one for one in sent[ends] if one == CONTROL_BYTES]
        assert len(controls) == 2  # one for each micro-batch, and a payload
        assert sum(sent[ends]) - 2 * CONTROL_BYTES == 2 * size
