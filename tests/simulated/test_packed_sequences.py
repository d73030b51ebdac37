"""Lengths of packed sequences, and what else torch takes from the CPU only, while stages run on devices."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxpipe

pytestmark = pytest.mark.simulated
STEPS, WIDTH, WORDS = 5, 6, 99


def make_rnn():
    return nn.GRU(WIDTH, WIDTH, batch_first=True)


class Reader(Layered, rnn=make_rnn, seen=set):
    """Kept whole: the sizes of what it packs depend on values."""

    def forward(self, x, lengths):
        self.seen.add((x.device.type, lengths.device.type))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class MaskedReader(Reader):
    """Uses the lengths with other tensors, too, as only works where all are on one device."""

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return super().forward(x * mask[..., None], lengths)


class MovingReader(Reader):
    """Moves what it uses on the device, as code for GPUs does."""

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
        return super().forward(x * mask[..., None], lengths.to(torch.int64))


class CountingReader(Reader):
    """Finds the lengths itself."""

    def forward(self, x, lengths):
        return super().forward(x, 1 + (x.detach()[..., 0] > 0).sum(1))


class Tagger(nn.Module):
    def __init__(self, reader, in_forward=lambda lengths: lengths):
        super().__init__()
        self.embed, self.reader, self.head = nn.Embedding(WORDS, WIDTH), reader, nn.Linear(WIDTH, 3)
        self.in_forward = in_forward

    def forward(self, ids, lengths):
        return self.head(self.reader(torch.tanh(self.embed(ids)), self.in_forward(lengths)))


READERS = (Reader, MaskedReader, MovingReader, CountingReader)


def _batch():
    return torch.randint(WORDS, (6, STEPS)), torch.randint(1, STEPS + 1, (6,))


def _assert_trains_like_plain(plain, devices, on="cpu", **options):
    model = copy.deepcopy(plain).to(on)
    with fxpipe.pipeline(model, devices, 3, example_args=_batch(), checkpoint="never", **options) as pipe:
        if isinstance(model, Tagger):
            model.reader.seen.clear()
        for _ in range(2):
            ids, lengths = _batch()
            for module in (plain, pipe):
                module.zero_grad()
            F.mse_loss(plain(ids, lengths), torch.ones(6, STEPS, 3)).backward()
            pipe.forward_backward(ids, lengths, target=torch.ones(6, STEPS, 3), loss_fn=F.mse_loss)
            for (name, want), have in zip(plain.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(have.grad.cpu(), want.grad, msg=name)
        seen = set(model.reader.seen) if isinstance(model, Tagger) else set()
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(ids, lengths).cpu(), plain(ids, lengths))
        return seen


@pytest.mark.parametrize(("kind", "devices"), each_once(READERS, [["cpu", "sim:2"], ["sim:0", "sim:1"]]), ids=str)
def test_lengths_are_on_the_device_and_are_packed_from_the_cpu(kind, devices):
    seen = _assert_trains_like_plain(Tagger(kind()), devices, balance=["embed"])
    assert seen == {("sim", "sim")}


@pytest.mark.parametrize("kind", READERS)
def test_a_model_that_is_on_a_device_is_planned_there(kind):
    _assert_trains_like_plain(Tagger(kind()), ["sim:0", "sim:1"], on="sim:0", balance=["embed"])


def test_a_forward_that_packs_by_itself_is_cut_around_the_recurrent_modules():
    class TopLevel(Layered, embed=lambda: nn.Embedding(WORDS, WIDTH), low=make_rnn, top=make_rnn, head=(WIDTH, 3)):
        def forward(self, ids, lengths):
            packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
            states, counts = pad_packed_sequence(self.top(self.low(packed)[0])[0], batch_first=True)
            padding = ids.shape[1] - states.shape[1]
            return self.head(F.pad(states / counts[:, None, None].to(states.device), (0, 0, 0, padding)))

    _assert_trains_like_plain(TopLevel(), ["sim:0", "sim:1"], balance=["low"])


def test_lengths_may_be_made_in_another_stage():
    plain = Tagger(Reader(), lambda lengths: lengths.clamp(min=2))
    _assert_trains_like_plain(plain, ["sim:0", "sim:1"], pin={"embed": 0, "reader": 1})


def test_a_leaf_function_that_splits_at_places_of_a_tensor():
    @fxpipe.leaf
    def halves_swapped(x, places):
        return torch.cat(x.tensor_split(places[:1], dim=1)[::-1], dim=1)

    class Swapping(Layered, embed=lambda: nn.Embedding(WORDS, WIDTH), head=(WIDTH, 3)):
        def forward(self, ids, lengths):
            return self.head(halves_swapped(self.embed(ids), lengths * 0 + 2))

    _assert_trains_like_plain(Swapping(), ["sim:0", "sim:1"])
