"""Accelerate's loop around a pipe, a pipe of a model of peft, and adapters of peft put into the model of a pipe."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.transformers_models import gpt2
from torch import nn

import fxpipe

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install fxpipe[dev]")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install fxpipe[dev]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[dev]")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _one_accelerator_for_each_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def with_adapters(model: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )


def pipe_of(model: nn.Module) -> Any:
    return fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False)


def rows(count: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 32, (count, 10), generator=generator)]


def train(model: Any, folder: Path | None = None, steps: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop of Accelerate's documentation. Returns losses and the state that it gathers."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    data = torch.utils.data.DataLoader(rows(), batch_size=4)
    prepared, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.unwrap_model(prepared) is model
    state = {name: value.clone() for name, value in accelerator.get_state_dict(prepared).items()}
    if folder is not None:
        accelerator.save_state(str(folder / "state"))
        accelerator.save_model(prepared, str(folder / "model"))
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).zero_()
        accelerator.load_state(str(folder / "state"))
        for name, value in accelerator.get_state_dict(prepared).items():
            assert torch.equal(value, state[name]), name
    return losses, state


def compare(plain: Any, ours: Any, **options: Any) -> None:
    want, want_state = train(plain, **options)
    have, have_state = train(ours, **options)
    torch.testing.assert_close(torch.tensor(have), torch.tensor(want))
    assert [*have_state] == [*want_state]
    for name, value in want_state.items():
        torch.testing.assert_close(have_state[name], value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("steps", [1, 2])
def test_the_loop_of_accelerate(steps):
    with pipe_of(gpt2()) as pipe:
        compare(gpt2(), pipe, steps=steps)


def test_accelerate_saves_and_loads_a_pipe(tmp_path):
    model = gpt2()
    with pipe_of(model) as pipe:
        train(pipe, tmp_path)
    other = gpt2()
    accelerate.load_checkpoint_in_model(other, str(tmp_path / "model"))
    for (name, theirs), own in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, own), name


def a_pipe_of_adapters() -> Any:
    return pipe_of(with_adapters(gpt2()))


def adapters_of_a_pipe() -> Any:
    return with_adapters(pipe_of(gpt2()))


@pytest.mark.parametrize("make", [a_pipe_of_adapters, adapters_of_a_pipe])
def test_adapters_train_and_the_model_stays(make: Callable[[], Any], tmp_path):
    ours = make()
    pipe = ours if make is a_pipe_of_adapters else ours.base_model.model
    with pipe:
        before = {name: p.detach().clone() for name, p in ours.named_parameters()}
        compare(with_adapters(gpt2()), ours)
        for name, p in ours.named_parameters():
            assert torch.equal(p, before[name]) == ("lora" not in name), name
        ours.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path)
        batch = {"input_ids": rows()[0]["input_ids"][None]}
        with torch.no_grad():
            want = loaded.eval()(**batch).logits
            torch.testing.assert_close(ours.eval()(**batch).logits, want)
            with ours.disable_adapter():
                torch.testing.assert_close(ours(**batch).logits, gpt2().eval()(**batch).logits)
        merged = ours.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, want)
