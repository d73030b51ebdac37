"""Packed sequences in the model's own forward: nodes like others, for any lengths."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import workers
from helpers.layered import Layered
from helpers.oracle import assert_step, closing
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fxpipe
from fxpipe.errors import TraceError

D = 4


def padded(model, sequence, steps):
    """The mean depends on the longest sequence of the mini-batch, so micro-batches have to know it."""
    states, counts = pad_packed_sequence(model.rnn(sequence)[0], batch_first=True)
    return states.mean(1) / counts[:, None].to(states)


def stacked(model, sequence, steps):
    """Forward computes with packed data."""
    first, _ = model.rnn(sequence)
    second, _ = model.top(PackedSequence(first.data.tanh(), *first[1:]))
    return pad_packed_sequence(second, total_length=steps, padding_value=-1.0)[0].mean(0)


def unpadded(model, sequence, steps):
    return pad_packed_sequence(model.rnn(sequence)[0], batch_first=True)[0]


def looped(model, sequence, steps):
    """Python takes the longest length as a number; in the example, all steps of the input."""
    states = pad_packed_sequence(model.rnn(sequence)[0], batch_first=True)[0]
    return sum(states[:, step] * 0.9**step for step in range(states.shape[1]))


def counted(model, sequence, steps):
    return model.rnn(sequence)[1][-1] + sequence.batch_sizes.shape[0]


def last_state(model, sequence, steps):
    return model.rnn(sequence)[1][-1]


def without_indices(model, sequence, steps):
    return pad_packed_sequence(PackedSequence(sequence.data, sequence.batch_sizes))[0]


class Reader(Layered, first=D, rnn=lambda: nn.GRU(D, D, 2), top=lambda: nn.GRU(D, D, batch_first=True), last=D):
    def forward(self, x, counts):
        packed = pack_padded_sequence(input=self.first(x), lengths=counts.cpu(), batch_first=True, enforce_sorted=False)
        return self.last(self.read(self, packed, x.shape[1]))


def batch_of(*lengths, steps=6):
    return torch.randn(len(lengths), steps, D), torch.tensor(lengths)


BATCHES = batch_of(6, 2, 6, 3), batch_of(2, 6, 1, 3), batch_of(5, 1, 1, 2), batch_of(1, 1, 8, 2, steps=9)


def pipe_of(model, **options):
    return closing(fxpipe.pipeline(model, workers(2), 2, example_args=batch_of(6, 6, 6, 6), **options))


@pytest.mark.anywhere
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*be instantiated:DeprecationWarning")
@pytest.mark.parametrize("read", [padded, stacked, unpadded, looped, counted, last_state])
def test_each_call_is_a_node_for_all_lengths(read):
    plain = copy.deepcopy(model := Reader(read=read))
    with pipe_of(model, balance=["rnn"], compile=read is stacked and {"backend": "eager"}) as pipe:
        for x, lengths in BATCHES:
            assert_step(pipe, plain, x, lengths)
            assert_step(pipe, plain, x, lengths, one_pass=True)
        assert len(pipe.plan.guards) == (read in (looped, counted))
        assert not any("kept whole" in why for why in pipe.plan.why)


def test_recomputation_repeats_the_dropout_between_layers():
    gradients, model = [], Reader(read=last_state)
    model.rnn.dropout = 0.5
    for checkpoint in ("never", "always"):
        with pipe_of(model := copy.deepcopy(model), checkpoint=checkpoint) as pipe:
            torch.manual_seed(1)
            pipe.zero_grad()
            pipe.forward_backward(*BATCHES[1], target=torch.ones(4, D), loss_fn=F.mse_loss)
            gradients.append([p.grad for p in model.rnn.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_packed_data_keeps_its_indices():
    with pytest.raises(TraceError, match=r"without the indices .*; keep them"):
        fxpipe.trace(Reader(read=without_indices), BATCHES[0])
