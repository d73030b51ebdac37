"""Outputs of micro-batches with sizes of their own: put together as the model gives them, or refused by name."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import workers
from helpers.oracle import assert_same_gradients, assert_same_state, closing
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxpipe
from fxpipe.errors import ArgumentError, UnequalOutputsError

D = 4
EVEN, UNEVEN = torch.tensor([7, 7, 7, 5]), torch.tensor([5, 3, 2, 7])
MESSAGE = (
    r"the output 1 \(.*\) comes out of micro-batches with the shapes \(2, 5, 4\), \(2, 7, 4\), which cannot be put "
    r"together along dimension 0: .* total_length=.* or use chunks=1; or give micro-batches yourself"
)


class Reader(nn.Module):
    """Its output is as long as the longest sample of those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D, batch_first=True)

    def forward(self, h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.reader, self.last = nn.Linear(D, D), Reader(), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x)
        return h.mean(1), self.last(self.reader(h, lengths))


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, int]:
    means, states = outputs
    return states.square().sum() + F.mse_loss(means, target, reduction="sum"), len(means)


def pipe_of(model: nn.Module) -> Any:
    example = torch.randn(4, 7, D), EVEN
    return closing(fxpipe.pipeline(model, workers(2), chunks=2, example_args=example, leaf_modules=["reader"]))


@pytest.mark.anywhere
def test_equal_sizes_are_put_together_as_the_model_gives_them() -> None:
    plain = copy.deepcopy(model := Packed())
    with pipe_of(model) as pipe:
        for lengths in (EVEN, torch.tensor([2, 6, 6, 1]), torch.tensor([3, 1, 3, 3])):
            for length in (7, 9):
                x = torch.randn(4, length, D)
                outputs = [output.cpu() for output in pipe(x, lengths)]
                torch.testing.assert_close(outputs, [*plain(x, lengths)])


@pytest.mark.parametrize("is_training", [True, False])
def test_unequal_sizes_are_refused_and_change_nothing(is_training: bool) -> None:
    model = Packed().train(is_training)
    x, target, before = torch.randn(4, 7, D), torch.randn(4, D), copy.deepcopy(model)
    with pipe_of(model) as pipe, torch.set_grad_enabled(is_training):
        pipe(x, EVEN)
        with pytest.raises(UnequalOutputsError, match=MESSAGE):
            pipe(x, UNEVEN)
        if is_training:
            with pytest.raises(UnequalOutputsError, match=MESSAGE):
                pipe.forward_backward(x, UNEVEN, target=target, loss_fn=loss_of, return_outputs=True)
        pipe(x, EVEN)
        assert_same_gradients(pipe, before)
        assert_same_state(pipe, before)


@pytest.mark.anywhere
def test_a_step_needs_no_output_of_the_mini_batch() -> None:
    plain = copy.deepcopy(model := Packed())
    x, target = torch.randn(4, 7, D), torch.randn(4, D)
    with pipe_of(model) as pipe:
        have = pipe.forward_backward(x, UNEVEN, target=target, loss_fn=loss_of)
    parts = zip(x.split(2), UNEVEN.split(2), target.split(2), strict=True)
    want = sum(loss_of(plain(part, lengths), wanted)[0] for part, lengths, wanted in parts) / 4
    want.backward()
    torch.testing.assert_close(have.cpu(), want.detach())
    assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])


def test_micro_batches_that_are_handed_over_give_a_list() -> None:
    plain = copy.deepcopy(model := Packed())
    x, target = torch.randn(4, 7, D), torch.randn(4, D)
    calls = [*zip(zip(x.split(2), UNEVEN.split(2), strict=True), target.split(2), strict=True)]
    with pipe_of(model) as pipe:
        _, outputs = pipe.forward_backward(micro_batches=calls, loss_fn=loss_of, return_outputs=True)
        torch.testing.assert_close(outputs, [plain(*inputs) for inputs, _ in calls])


# -- rows that a mask selects ----------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """Encodes the pictures that are not empty, and puts them into a text where a mask says, as SmolVLM does."""

    def __init__(self, change: Any = lambda rows: rows) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.embed, self.encode, self.last = change, *(nn.Linear(D, D).double() for _ in range(3))

    def forward(self, text: torch.Tensor, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = pictures.flatten(0, 1)
        rows = rows[(rows != 0).any(-1)]
        n = rows.shape[0]
        keys, values = (self.encode(rows).view(n, 2, -1) for _ in range(2))  # two equal calls
        rows = self.change((keys + values).transpose(1, 2).reshape(n, -1))
        h, places = self.embed(text), (text[..., :1] > 0).expand_as(text)
        torch._check_tensor_all(places.sum() == n * D)
        if h[places].numel() < rows.numel():
            raise ValueError("fewer places than pictures")
        return self.last(h.masked_scatter(places, rows)), rows


def text_and_pictures(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with this number of pictures in each sample, at most 4."""
    text, pictures = torch.rand(2, len(counts), 4, D, dtype=torch.float64) + 0.1
    for sample, count in enumerate(counts):
        text[sample, count:] *= -1
        pictures[sample, : 4 - count] = 0
    return text, pictures


def assert_same_rows(model: nn.Module, chunks: int, *batches: tuple[int, ...]) -> None:
    plain, example = copy.deepcopy(model), text_and_pictures(2, 3, 1, 4, 0, 2)
    with closing(fxpipe.pipeline(model, workers(2), chunks=chunks, example_args=example)) as pipe:
        for counts in batches:
            inputs = text_and_pictures(*counts)
            outputs, expected = ([*map(torch.Tensor.cpu, one(*inputs))] for one in (pipe, plain))
            torch.testing.assert_close(outputs, expected)
            for each in (outputs, expected):
                sum(output.square().sum() for output in each).backward()
            assert_same_gradients(model, plain, exact=False)


def test_rows_that_a_mask_selects_are_rows_of_samples() -> None:
    assert_same_rows(Pictures(), 3, (2, 3, 1, 4, 0, 2), (0, 0, 0, 4, 2, 1), (3, 1, 2), (1, 1, 1, 4, 4, 4, 4))


class Pieces(Pictures):
    """Splits the rows by their numbers, concatenates them again, and returns them sample by sample."""

    def forward(self, text: torch.Tensor, pictures: torch.Tensor) -> Any:
        rows, places = pictures.flatten(0, 1), (text[..., :1] > 0).expand_as(text)
        is_real = (rows != 0).any(-1)
        is_real[0] |= ~torch.any(is_real)
        pieces = self.encode(rows)[is_real].view(-1, 2).split([2 * n for n in places[..., 0].sum(1).tolist()])
        return self.last(self.embed(text).masked_scatter(places, torch.cat(self.change(pieces)))), *pieces


@pytest.mark.parametrize("change", [list, lambda pieces: [p.reshape(-1, p.shape[-1]).to(p.dtype) for p in pieces]])
def test_pieces_of_samples_that_are_concatenated_again_are_rows_of_samples(change: Any) -> None:
    assert_same_rows(Pieces(change), 2, (2, 3, 1, 4, 0, 2), (0, 0, 0, 4, 2, 1), (3, 1, 2))


def test_pieces_whose_numbers_are_not_those_of_the_rows_are_an_error_as_in_the_model() -> None:
    (text, pictures), (_, others) = text_and_pictures(2, 3, 1, 4), text_and_pictures(2, 3, 2, 4)
    pipe = fxpipe.pipeline(Pieces(), workers(2), 2, example_args=(text, pictures))
    with closing(pipe), pytest.raises(RuntimeError, match=r"sum exactly to 22 .* split_sizes=\[4, 6, 2, 8\]"):
        pipe(text, others)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((Pictures, change) for change in (Tensor.softmax, Tensor.flip, lambda rows, _: rows / rows.shape[0])),
        (Pieces, lambda pieces, _: pieces[::-1]),
        (Pieces, lambda pieces, _: [pieces[0].flip(0).flip(0), *pieces[1:]]),
    ],
)
def test_selected_rows_that_act_on_each_other_are_refused(kind: Any, change: Any) -> None:
    with pytest.raises(ArgumentError, match="samples act on each other"):
        assert_same_rows(kind(lambda rows: change(rows, 0)), 2)


@pytest.mark.parametrize("planned", [(0, 0, 0, 0), (0, 0, 1, 0)])
def test_an_example_without_selected_rows_shows_nothing(planned: tuple[int, ...]) -> None:
    class Sorted(Pictures):
        def forward(self, text: torch.Tensor, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.last(self.embed(text)), self.encode(pictures[(pictures != 0).any(-1)]).sort(0)[0]

    with pytest.raises(ArgumentError, match="an example with few selected rows"):
        fxpipe.trace(Sorted(), text_and_pictures(*planned), chunks=2)


def test_selected_rows_that_are_cut_by_their_number_are_cut_once() -> None:
    class First(Pictures):
        def forward(self, text: torch.Tensor, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h, rows = super().forward(text, pictures)
            return h, rows[:14]

    assert_same_rows(First(), 2, (2, 3, 1, 4, 0, 2), (4, 4, 4, 4, 4, 4))


def test_python_that_decides_by_the_number_of_selected_rows_is_refused() -> None:
    class Deciding(Pictures):
        def forward(self, text: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
            rows = self.encode(pictures[(pictures != 0).any(-1)])
            return self.last(text) if len(rows) < 14 else self.last(text) * 2

    with pytest.raises(ArgumentError, match=r"samples act on each other .* cannot be told"):
        fxpipe.trace(Deciding(), text_and_pictures(2, 3, 1, 4, 0, 2), chunks=2)
