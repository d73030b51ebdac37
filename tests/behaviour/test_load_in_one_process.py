"""`fxpipe.distributed.load` of a pipe in one process: a model on the meta device gets its values stage by stage."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError

pytest.importorskip("safetensors")
from safetensors.torch import save_file


class Tied(
    Layered,
    embed=lambda: nn.Embedding(11, 8),
    inner=8,
    norm=lambda: nn.LayerNorm(8),
    head=lambda: nn.Linear(8, 11, bias=False),
    scale=lambda: torch.full((8,), 0.5),
):
    """Tied weights, a buffer that is saved, and a table that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids) * self.scale + self.table
        return self.head(self.norm(torch.relu(self.inner(h))))


def fill_table(module: nn.Module) -> None:
    if isinstance(module, Tied):
        module.table.copy_(torch.arange(8.0))


@pytest.fixture
def plain() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))


def meta_pipe(ids: torch.Tensor, **options: Any) -> fxpipe.Pipeline:
    with torch.device("meta"):
        model = Tied()
    return fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(ids,), progress=False, **options)


def saved(plain: Tied, kind: str, folder: Path) -> Path:
    """A checkpoint of this kind; its path."""
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "index":
        names = sorted(state)
        parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
        for file, own in parts.items():
            save_file({name: state[name] for name in own}, folder / file)
        weight_map = {name: file for file, own in parts.items() for name in own}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder
    dcp.save(plain.state_dict(), checkpoint_id=folder / "shards", no_dist=True)
    return folder / "shards"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "index", "shards"])
def test_a_loaded_pipe_trains_as_the_plain_model(plain: Tied, ids: torch.Tensor, kind: str, tmp_path: Path) -> None:
    path = saved(plain, kind, tmp_path)
    with closing(meta_pipe(ids)) as pipe:
        parameters = dict(pipe.named_parameters())
        fxpipe.distributed.load(pipe, path, init_fn=fill_table)
        assert all(value is parameters[name] for name, value in pipe.named_parameters())
        assert pipe.head.weight is pipe.embed.weight
        for name, value in plain.state_dict().items():
            assert torch.equal(pipe.state_dict()[name], value), name
        assert torch.equal(pipe.table, plain.table)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, pipe)]
        target = ids.flip(1)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(plain(ids).flatten(0, 1), target.flatten())
            loss.backward()
            have = pipe.forward_backward(
                ids, target=target, loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
            )
            torch.testing.assert_close(have, loss.detach())
            for optimizer in optimizers:
                optimizer.step()
        for (name, value), want in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(value, want, msg=lambda text, name=name: f"{name}: {text}")


def test_what_has_no_values_afterwards_is_named(plain: Tied, ids: torch.Tensor, tmp_path: Path) -> None:
    path = saved(plain, "safetensors", tmp_path)
    with (
        closing(meta_pipe(ids)) as pipe,
        pytest.raises(StateError, match=r"(?s)without values after fxpipe.distributed.load: 'table'.*init_fn"),
    ):
        fxpipe.distributed.load(pipe, path)


def test_a_checkpoint_that_does_not_fit_leaves_the_model_without_values(ids: torch.Tensor, tmp_path: Path) -> None:
    save_file({"inner.weight": torch.zeros(3, 3), "other": torch.zeros(1)}, tmp_path / "m.safetensors")
    with closing(meta_pipe(ids)) as pipe:
        with pytest.raises(ArgumentError, match=r"does not fit the model: it lacks .*shapes differ: 'inner.weight'"):
            fxpipe.distributed.load(pipe, tmp_path / "m.safetensors")
        assert all(value.is_meta for value in pipe.parameters())


def test_a_model_with_values_takes_those_of_the_checkpoint(plain: Tied, ids: torch.Tensor, tmp_path: Path) -> None:
    path = saved(plain, "safetensors", tmp_path)
    other = Tied()
    with fxpipe.pipeline(other, ["cpu", "cpu"], 4, example_args=(ids,), progress=False) as pipe:
        fxpipe.distributed.load(pipe, path)
        torch.testing.assert_close(pipe(ids), plain(ids))


def test_a_pipe_without_a_plan_and_what_is_no_pipe_are_refused(plain: Tied, tmp_path: Path) -> None:
    path = saved(plain, "safetensors", tmp_path)
    with torch.device("meta"):
        model = Tied()
    with (
        fxpipe.pipeline(model, ["cpu", "cpu"], 4, progress=False) as pipe,
        pytest.raises(StateError, match=r"the pipe has no plan yet.*give example_args"),
    ):
        fxpipe.distributed.load(pipe, path, init_fn=fill_table)
    with pytest.raises(ArgumentTypeError, match="pipe is a Tied"):
        fxpipe.distributed.load(plain, path)
