"""Inputs with several rows for each sample: tiles of images, boxes. Whether they are cut is tried, or in `in_dims`."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import on_cpu, workers
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, TraceError

D = 6


class Tiles(nn.Module):
    """Each sample has a row of `x` and some tiles, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tile, self.sample, self.last, self.rows = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.tile(tiles))
        y = self.sample(x) + self.pooled(h, len(x.unbind(1)[0]) if self.goes_by_length else x.shape[0])
        return self.last(y), self.rows(h) + y.repeat_interleave(tiles.shape[0] // x.shape[0], 0)

    goes_by_length = False

    def pooled(self, h: torch.Tensor, samples: int) -> torch.Tensor:
        return h.view(samples, -1, D).mean(1)


class Counting(Tiles):
    """Takes the number of samples as a plain number."""

    goes_by_length = True


def inputs_of(samples: int, rows: int, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, D), torch.randn(samples * rows, *sizes, D)


def assert_steps(model: nn.Module, batches: list[tuple[int, int]], **options: Any) -> int:
    """Calls and steps of these (samples, rows) are the plain model's. Returns how many graphs they took."""
    plain = copy.deepcopy(model)
    names = [name for name, _ in plain.named_parameters()]
    x, tiles = inputs_of(*batches[0])
    options = {"in_dims": 0, "example_kwargs": {"tiles": tiles, "x": x}} | options
    with fxpipe.pipeline(model, workers(2), 2, **options) as pipe:
        for samples, rows in batches:
            x, tiles = inputs_of(samples, rows)
            target = torch.randn(samples * rows, D)
            inputs = {"tiles": tiles, "x": x}  # the one with the samples is not the first
            for one in (pipe, plain):
                one.zero_grad()
            have, want = on_cpu(pipe(**inputs)), plain(**inputs)
            torch.testing.assert_close(have, want)
            for outputs in (have, want):
                sum(output.square().mean() for output in outputs).backward()
            loss = pipe.forward_backward(**inputs, target=target, loss_fn=lambda y, t: F.mse_loss(y[1], t))
            wanted = F.mse_loss(plain(**inputs)[1], target)
            wanted.backward()
            torch.testing.assert_close(on_cpu(loss), wanted.detach())
            assert_same_gradients(pipe, plain, loose=names)
        graphs = len(pipe._fxpipe.graphs)
        pipe.eval()
        with torch.no_grad():
            for samples, rows in batches:
                inputs = inputs_of(samples, rows)
                torch.testing.assert_close(on_cpu(pipe(*inputs)), plain(*inputs))
        return graphs


BATCHES = [(4, 3), (5, 3), (6, 3), (1, 3)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Tiles, {}, marks=pytest.mark.anywhere),
        pytest.param(Tiles, {"in_dims": None}, marks=pytest.mark.anywhere),
        pytest.param(Tiles, {"schedule": "zero_bubble", "checkpoint": "always"}, marks=pytest.mark.anywhere),
        (Tiles, {"schedule": "zero_bubble", "compile": {"backend": "eager"}}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*should not be instantiated")
def test_a_micro_batch_has_the_rows_of_its_samples(kind: type[nn.Module], options: dict[str, Any]) -> None:
    assert assert_steps(kind(), BATCHES, **options) == 1


@pytest.mark.parametrize(
    ("kind", "batches", "graphs"),
    [(Counting, [(4, 3), (6, 3), (4, 3)], 3), (Tiles, [(4, 3), (4, 2), (3, 6), (4, 3), (2, 1), (5, 2)], 4)],
)
def test_other_numbers_of_rows_and_samples_are_right(kind: type[nn.Module], batches: Any, graphs: int) -> None:
    assert assert_steps(kind(), batches) <= graphs


@pytest.mark.parametrize("rows", [8, 2, 3])
def test_a_table_of_another_size_is_kept_whole(rows: int) -> None:
    class Table(Tiles):
        def forward(self, x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.sample(x))) @ self.rows(tiles).T

    with fxpipe.pipeline(Table(), workers(2), 2, example_args=(torch.randn(4, D), torch.randn(rows, D))) as pipe:
        for samples in (4, 7, 8):
            x, table, target = torch.randn(samples, D), torch.randn(rows, D), torch.randn(samples, rows)
            assert fxpipe.verify(pipe, x, table, target=target, loss_fn=F.mse_loss)


def test_positions_of_tokens_are_whole_if_their_number_divides_by_the_samples() -> None:
    """Flux 2 computes its rotary embedding of `img_ids` and `txt_ids`, which no sample has a part of."""

    class Rotary(Tiles):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            angles = torch.cat([more, ids]).float() * 0.01
            return self.last(torch.relu(self.sample(x)) * angles.cos() + self.rows(x) * angles.sin())

    ids, more = torch.arange(16 * D).view(16, D), torch.arange(8 * D).view(8, D)
    with fxpipe.pipeline(Rotary(), workers(2), 2, example_args=(torch.randn(4, 24, D), ids, more)) as pipe:
        for samples in (4, 3, 2):
            assert fxpipe.verify(pipe, torch.randn(samples, 24, D), ids, more)


@pytest.mark.anywhere
def test_gradients_of_rows_go_to_their_input() -> None:
    x, tiles = inputs_of(5, 3)
    with fxpipe.pipeline(Tiles(), workers(2), 2, in_dims=0) as pipe:
        assert fxpipe.verify(pipe, x, tiles.requires_grad_())


@pytest.mark.anywhere
def test_rows_along_another_dimension_and_a_length_that_changes() -> None:
    class Along(Tiles):
        def forward(self, x: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x, tiles.mean(0))

    with fxpipe.pipeline(Along(), workers(2), 2, in_dims={"x": 0, "tiles": 1}) as pipe:
        for length in (5, 7, 4, 9):
            x, tiles = inputs_of(4, 2)
            tiles = tiles.expand(length, -1, -1) * torch.randn(length, 1, 1)
            assert fxpipe.verify(pipe, x, tiles)
        assert len(pipe._fxpipe.graphs) == 2


@pytest.mark.anywhere
def test_micro_batches_that_are_handed_over_may_have_other_numbers_of_rows() -> None:
    plain = copy.deepcopy(model := Tiles())
    calls = [(inputs_of(samples, rows), torch.randn(samples * rows, D)) for samples, rows in ((4, 3), (2, 3), (3, 2))]

    def loss_fn(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs[1], target)

    with fxpipe.pipeline(model, workers(2), in_dims=0) as pipe:
        have = pipe.forward_backward(micro_batches=calls, loss_fn=loss_fn)
    want = sum(loss_fn(plain(*inputs), target) * (len(inputs[0]) / 9) for inputs, target in calls)
    want.backward()
    torch.testing.assert_close(on_cpu(have), want.detach())
    assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])


def test_a_plan_needs_no_values() -> None:
    with torch.device("meta"):
        plan = fxpipe.plan(Tiles(), 2, example_args=inputs_of(8, 3), in_dims=0, chunks=2)
    assert plan.micro_batch == 4


class OtherOrder(Tiles):
    """The first tiles of all samples, then the second ones."""

    def pooled(self, h: torch.Tensor, samples: int) -> torch.Tensor:
        return h.view(-1, samples, D).mean(0)


@pytest.mark.parametrize(
    ("kind", "options", "rows", "message"),
    [
        (OtherOrder, {}, 12, r"disagree on the batch size \(x: 4, tiles: 12\).* say with in_dims \(in_dims=0\)"),
        (Tiles, {"in_dims": {"tiles": None}}, 12, "depends on the batch but has no dimension for it"),
        (OtherOrder, {"in_dims": 0}, 12, "samples act on each other at .*keep rows in the order of the samples"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind: type[nn.Module], options: Any, rows: int, message: str) -> None:
    with pytest.raises(fxpipe.errors.FxpipeError, match=message):
        fxpipe.pipeline(kind(), workers(2), 2, example_args=(torch.randn(4, D), torch.randn(rows, D)), **options)


def test_rows_that_are_no_whole_number_are_refused_by_a_pipe_that_has_run() -> None:
    with fxpipe.pipeline(Tiles(), workers(2), 2, in_dims=0, example_args=inputs_of(4, 3)) as pipe:
        with pytest.raises(ArgumentError, match="its 11 rows are no whole number"):
            pipe(torch.randn(4, D), torch.randn(11, D))
        with pytest.raises(ArgumentError, match="its dimension 0 must be 4 or 12"):
            pipe.forward_backward(*inputs_of(4, 3), target=torch.randn(8, D), loss_fn=lambda y, t: F.mse_loss(y[1], t))
        pipe(*inputs_of(4, 3))


# -- Python over the samples of a batch: the graph of a micro-batch, for the values that each of them reads -----------


class Pictures(nn.Module):
    """Text with a picture in each sample, at positions that Python computes sample by sample (Qwen2.5-VL)."""

    def __init__(self, threshold: float = 1e6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.embed, self.positions = nn.Linear(D, D), nn.Embedding(20, D), nn.Embedding(50, D)
        self.threshold = threshold

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, grid: torch.Tensor, labels: torch.Tensor) -> Any:
        pieces = torch.split(self.patch(pixels), grid.prod(-1).tolist())
        h = torch.cat([torch.softmax(piece @ piece.t(), -1) @ piece for piece in pieces])
        x, positions = self.embed(ids).masked_scatter((ids == 0).unsqueeze(-1), h), torch.zeros_like(ids)
        for i, row in enumerate(ids):
            first = (row == 0).tolist().index(True)
            positions[i] = torch.cat([torch.arange(first), torch.arange(len(row) - first) + 10])
        x = torch.tanh(x + self.positions(positions))
        logits = (-x if pixels.sum() > self.threshold else x) @ self.embed.weight.t()
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pictures(*starts: int) -> dict[str, torch.Tensor]:
    """Samples with a picture of four patches at these positions."""
    ids = torch.randint(1, 20, (len(starts), 8))
    for row, start in zip(ids, starts, strict=True):
        row[start : start + 4] = 0
    grid, labels = torch.tensor([[1, 2, 2]] * len(starts)), ids.masked_fill(ids < 3, -100)
    return {"ids": ids, "pixels": torch.ones(len(ids) * 4, D) / 10, "grid": grid, "labels": labels}


@pytest.mark.parametrize(("chunks", "starts"), [(2, (1, 2, 1, 2)), (4, (1, 1, 1, 1))])
def test_forward_may_loop_over_the_samples_of_a_micro_batch(chunks: int, starts: tuple[int, ...]) -> None:
    with fxpipe.pipeline(Pictures(), workers(2), chunks, example_kwargs=pictures(2, 2, 2, 2)) as pipe:
        for places in ((2, 2, 2, 2), starts, (2, 2, 2, 2)):
            assert fxpipe.verify(pipe, **pictures(*places) | {"pixels": torch.randn(16, D)})
        assert [graph.traced.in_dims for graph in pipe._fxpipe.graphs] == [(0, 0, 0, 0)] * 2
        with pytest.raises(fxpipe.errors.TraceError, match="reads values that differ between micro-batches"):
            pipe(**pictures(1, 1, 2, 2))


def test_a_value_of_the_mini_batch_decides_also_for_the_graph_of_a_micro_batch() -> None:
    refused = pytest.raises(fxpipe.errors.TraceError, match=r"forward goes by the batch size|runs other functions")
    with fxpipe.pipeline(Pictures(30), workers(2), 2, example_kwargs=pictures(2, 2, 2, 2)) as pipe, refused:
        pipe(**pictures(2, 2, 2, 2) | {"pixels": torch.ones(16, D) / 2})  # 48: more than 30; and 24 in each micro-batch


class Together(Layered, first=D, last=D):
    """A loop over the samples finds their least value, and only a least value above zero changes what is made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        least = torch.stack([row.min() for row in h]).min()
        return torch.where(least > 0, torch.relu(self.last(h)), self.last(h))


def test_what_a_loop_makes_of_all_samples_decides_in_no_micro_batch() -> None:
    """In the batch of planning it decides nothing, so all values are right."""
    with pytest.raises(TraceError, match="do not make what the model makes of the mini-batch"):
        fxpipe.pipeline(Together(), workers(2), 2, example_args=(torch.randn(4, D),))


class Looping(Layered, first=D, last=D):
    """Forward goes over its samples in Python."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.scales = name, nn.Parameter(torch.ones(8))

    def rows(self, x: torch.Tensor) -> Any:
        if self.name == "by index":
            self.count = x.shape[0]  # set before it is read: each number of samples has its graph
            return [self.first(x[i]).tanh() for i in range(self.count)]
        return [self.first(row[0]).tanh() for row in x.split(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        for i, row in enumerate(self.rows(x)):
            h[i] = row * self.scales[i if self.name == "a scale of each place" else 0]
        if self.name == "a table written by rows":
            table = torch.arange(2.0 * D).view(2, D)
            table[0] += 1  # of no sample (Qwen2.5-VL's positions)
            h = h + table[0]
        elif self.name == "a gate of one sample":
            h = torch.where(h[0] > 2, -h, h)
        elif self.name == "ranks":
            h = h * (h.sum(1).argsort().argsort() >= 1)[:, None]
        return self.last(h)


@pytest.mark.parametrize(("name", "chunks"), [("by index", 1), ("by index", 2), ("a table written by rows", 2)])
def test_a_loop_over_samples_has_a_graph_for_each_size_of_micro_batches(name: str, chunks: int) -> None:
    with fxpipe.pipeline(Looping(name), workers(2), chunks, example_args=(torch.randn(4, D),)) as pipe:
        refused = pytest.raises(TraceError, match=r"micro-batches of 2.*a number of samples that chunks divides")
        with refused if chunks > 1 else contextlib.nullcontext():
            pipe(torch.randn(5, D))
        for samples in (6, 4):
            assert fxpipe.verify(pipe, torch.randn(samples, D))


@pytest.mark.parametrize("name", ["a gate of one sample", "ranks", "a scale of each place"])
def test_samples_that_may_meet_after_a_loop_are_refused(name: str) -> None:
    """Each batch is tried: in some, micro-batches make the same as the mini-batch."""
    for _ in range(3):
        with pytest.raises(TraceError, match="do not make what the model makes of the mini-batch"):
            fxpipe.pipeline(Looping(name), workers(2), 2, example_args=(torch.randn(4, D) / 10,))


@pytest.mark.parametrize(
    "change",
    [
        lambda h, lengths: h / lengths.max(),
        lambda h, lengths: h * (lengths.max() == lengths.min()),
        lambda h, lengths: h * torch.where((lengths > 3).any(), 1, 2),
        lambda h, lengths: h * (1 + (lengths > 8).nonzero().sum()),
        lambda h, _: torch.where((h > -2).any(), h, -h),
    ],
    ids=["largest", "equal", "any", "indices", "any of floats"],
)
def test_what_all_lengths_decide_after_a_loop_is_refused(change: Any) -> None:
    """All lengths of the example are equal, so that micro-batches make the same as the mini-batch."""

    class Lengths(Looping):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.last(change(torch.stack(self.rows(x)), lengths))

    with pytest.raises(TraceError, match="do not make what the model makes of the mini-batch"):
        fxpipe.pipeline(Lengths(""), workers(2), 2, example_args=(torch.randn(4, D), torch.full((4,), 5)))


# -- Lists with an entry for each sample -------------------------------------------------------------------------------


class Detector(Layered, first=D, boxes=lambda: nn.Linear(D, 4)):
    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        found = self.boxes(torch.stack([self.first(image).tanh().mean(0) for image in images]))
        return torch.stack(
            [F.l1_loss(b.expand_as(t["boxes"]), t["boxes"]) for b, t in zip(found, targets, strict=True)]
        ).mean()


def detections(*sizes: int) -> tuple[Any, Any]:
    return [torch.randn(size, D) for size in sizes], [{"boxes": torch.randn(1 + size % 3, 4)} for size in sizes]


def test_lists_are_micro_batches_of_their_own() -> None:
    plain = copy.deepcopy(model := Detector())
    refused = pytest.raises(ArgumentError, match=r"a list in images or targets.*micro_batches.*\(images, targets,\)")
    with fxpipe.pipeline(model, workers(2), 2) as pipe, refused:
        pipe.forward_backward(*detections(5, 3, 4, 2))
    parts = [detections(5, 3), detections(4)]
    with fxpipe.pipeline(model, workers(2), 2) as pipe:
        have = pipe.forward_backward(micro_batches=[(part, {}, None) for part in parts])
    want = sum(plain(*part) / 2 for part in parts)
    want.backward()
    torch.testing.assert_close(on_cpu(have), want.detach())
    assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])


def test_rows_of_a_tuple_are_samples() -> None:
    class Sum(Layered, first=D):
        def forward(self, pair: Any) -> torch.Tensor:
            return self.first(pair[0]) + pair[1]

    parts, model = [(torch.randn(rows, D), torch.randn(rows, D)) for rows in (3, 2)], Sum()
    with fxpipe.pipeline(model, workers(2)) as pipe:
        calls = [((pair,), {}, None) for pair in parts]
        have = pipe.forward_backward(micro_batches=calls, loss_fn=lambda y: y.square().mean())
    want = model(tuple(map(torch.cat, zip(*parts, strict=True)))).square().mean()
    torch.testing.assert_close(on_cpu(have), want.detach())


@pytest.mark.parametrize(("in_dims", "weights"), [({"xs": None}, (0.5, 0.5)), (0, (7 / 12, 5 / 12))])
def test_rows_of_the_only_entry_of_a_list_are_samples_if_in_dims_says_so(in_dims: Any, weights: Any) -> None:
    class Means(Layered, first=D):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([self.first(x).tanh().mean(0) for x in xs])

    calls, model = [(([torch.randn(rows, D)],), {}, None) for rows in (7, 5)], Means()
    want = sum(model(*args).square().mean() * weight for (args, _, _), weight in zip(calls, weights, strict=True))
    with (
        fxpipe.pipeline(model, workers(2)) as pipe,
        pytest.raises(ArgumentError, match=r"whether xs has a row.*in_dims"),
    ):
        pipe.forward_backward(micro_batches=calls, loss_fn=lambda y: y.square().mean())
    with fxpipe.pipeline(model, workers(2), in_dims=in_dims) as pipe:
        have = pipe.forward_backward(micro_batches=calls, loss_fn=lambda y: y.square().mean())
    torch.testing.assert_close(on_cpu(have), want.detach())
