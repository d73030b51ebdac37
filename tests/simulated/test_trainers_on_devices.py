"""Trainers that place a model on their device leave a pipe on its own: Trainer, Accelerate, Lightning, Fabric."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.letter_sentences import be_quiet_and_offline
from torch import nn

import fxpipe

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:the pipe was not moved", "ignore:.*does not have many workers"),
]

DEVICES = ["sim:1", "sim:0"]  # the last stage is on the device of the trainers, who have targets and losses there
CLOSE = {"atol": 5e-6, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def _quiet_and_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quiet_and_offline(monkeypatch)


@pytest.fixture
def of_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Libraries on top of Accelerate choose "cuda:0" if there is CUDA, and any other device by this variable."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install fxpipe[dev]")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "sim:0")
    yield monkeypatch
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))


def piped(model: nn.Module, devices: list[str] | None = None, **options: Any) -> Any:
    return fxpipe.pipeline(model, devices or DEVICES, chunks=4, progress=False, profile_budget=0.01, **options)


def loader(samples: int = 40, batch: int = 12) -> Any:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(samples, 8, generator=generator), torch.randint(3, (samples,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, target), batch_size=batch)


def places(module: nn.Module) -> set[str]:
    return {str(parameter.device) for parameter in module.parameters()}


def on_cpu(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in module.state_dict().items()}


# -- moves -------------------------------------------------------------------------------------------------------------


def test_a_move_to_a_device_of_the_pipe_does_nothing_and_says_so_once() -> None:
    pipe, plain = piped(net()), net()
    x, target = torch.randn(8, 8), torch.randint(3, (8,))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert pipe.to("sim:0") is pipe  # before there is a plan, and after
        assert places(pipe) == {"cpu"}
        for device in ("sim:1", "sim:0", "sim", "cpu"):
            for model, where in ((pipe, "sim:0"), (plain, "cpu")):
                model.zero_grad()
                F.cross_entropy(model(x), target.to(where)).backward()
            for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
            graphs = len(pipe._fxpipe.graphs)
            nn.ModuleList([pipe]).to(device)
            assert places(pipe) == {"sim:0", "sim:1"}
            assert len(pipe._fxpipe.graphs) == graphs  # nothing is recorded again
    moves = [str(warning.message) for warning in seen if "moved" in str(warning.message)]
    (move,) = moves
    assert "the pipe was not moved to sim:0: it places its own stages on [sim:1, sim:0]" in move
    with pytest.raises(fxpipe.errors.StateError, match=r"cannot be moved to sim:2.*devices=\[...\]"):
        pipe.to("sim:2")
    pipe.to("sim:0", torch.float64)
    assert places(pipe) == {"sim:0", "sim:1"}
    assert pipe(x.double()).dtype == torch.float64


def test_a_pipe_over_several_accelerators_has_a_device_map() -> None:
    pipe = piped(net())
    assert {*pipe.hf_device_map.values()} == {torch.device("sim:0"), torch.device("sim:1")}
    assert "hf_device_map" not in {*dir(pipe), *pipe.__dict__, *pipe.state_dict()}
    for devices in (["sim:0", "sim:0"], ["cpu", "sim:0"], ["cpu", "cpu"]):
        assert not hasattr(piped(net(), devices), "hf_device_map")


# -- Hugging Face's Trainer --------------------------------------------------------------------------------------------


def trainer_of(kind: Any, model: nn.Module, folder: Path, **options: Any) -> Any:
    import transformers

    rows = [{"input_ids": (ids := torch.randint(3, 32, (12,))), "labels": ids} for _ in range(16)]
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, logging_steps=1, seed=3, learning_rate=1e-3, max_steps=4,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=2, **options,
    )  # fmt: skip
    if not arguments.use_cpu:
        assert arguments.device == torch.device("sim:0")
        arguments._n_gpu = 2  # as with two GPUs, for which a model is wrapped in DataParallel
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows[:7])


def losses(trainer: Any) -> torch.Tensor:
    return torch.tensor([row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row])


@pytest.mark.parametrize("accumulated", [False, True])
def test_the_trainer_of_transformers(accumulated: bool, of_accelerate: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[dev]")
    from helpers.transformers_models import gpt2

    from fxpipe.integrations.transformers import PipelineTrainer

    kind = PipelineTrainer if accumulated else transformers.Trainer
    devices = DEVICES[::-1] if accumulated else DEVICES  # PipelineTrainer brings the loss to the trainer's device
    options = {"label_smoothing_factor": 0.1 if accumulated else 0.0}  # a loss outside the model
    torch.manual_seed(1)
    pipe = piped(gpt2(), devices, balance=["transformer.h.1"])  # both stages have parameters
    ours = trainer_of(kind, pipe, tmp_path / "ours", **options)
    ours.train()
    assert places(pipe) == {"sim:0", "sim:1"}
    assert pipe.last_step is not None
    again = trainer_of(kind, piped(gpt2(), devices), tmp_path / "ours", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    torch.manual_seed(1)
    of_accelerate.delenv("ACCELERATE_TORCH_DEVICE")
    plain = trainer_of(transformers.Trainer, gpt2(), tmp_path / "plain", use_cpu=True, **options)
    plain.train()
    for trainer in () if accumulated else (ours, plain):  # evaluation calls the pipe, whose last stage is elsewhere
        trainer.evaluate()
    torch.testing.assert_close(losses(ours), losses(plain), **CLOSE)
    torch.testing.assert_close(on_cpu(pipe), on_cpu(plain.model), **CLOSE)
    torch.testing.assert_close(on_cpu(again.model), on_cpu(plain.model), **CLOSE)


# -- Accelerate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [DEVICES, ["sim:0", "sim:0"]], ids=str)
def test_accelerate(devices: list[str], of_accelerate: pytest.MonkeyPatch) -> None:
    import accelerate

    results = []
    for model, options in ((piped(net(), devices), {}), (net(), {"cpu": True})):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        if options:
            of_accelerate.delenv("ACCELERATE_TORCH_DEVICE")
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, optimizer, data = accelerator.prepare(model, optimizer, loader())
        history = []
        for _ in range(2):
            for x, target in data:
                with accelerator.accumulate(prepared):
                    loss = F.cross_entropy(prepared(x), target)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                    history.append(loss.item())
        results.append((history, on_cpu(model)))
        if not options:
            assert prepared is model
            assert places(model) == {*devices}
    torch.testing.assert_close(*results, **CLOSE)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def simulated_accelerator() -> Any:
    """Lightning knows accelerators by name. This is the least that it asks of an accelerator."""
    from lightning.pytorch.accelerators import Accelerator

    class Simulated(Accelerator):
        setup_device = teardown = get_device_stats = lambda self, *args: None
        parse_devices = staticmethod(lambda devices: devices)
        get_parallel_devices = staticmethod(lambda devices: [torch.device("sim:0")])
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: "sim")

    return Simulated()


@pytest.mark.parametrize("whole", [False, True])
def test_lightning(whole: bool, tmp_path: Path) -> None:
    L = pytest.importorskip("lightning", reason="lightning is not installed: pip install fxpipe[trainers]")
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Classifier(L.LightningModule):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.net = inner

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, target = batch
            return F.cross_entropy(self(x), target)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
    quiet["inference_mode"] = False  # in which the simulated devices run no Linear
    options = {**quiet, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    weights = {}
    for name, own in (
        ("pipe", {"strategy": SingleDeviceStrategy("sim:0", simulated_accelerator())}),
        ("plain", {"accelerator": "cpu"}),
    ):
        for epochs, kept in ((1, None), (2, tmp_path / f"{name}.ckpt")):  # the second goes on where the first ended
            module = Classifier(piped(net()) if name == "pipe" and not whole else net())
            module = piped(module) if name == "pipe" and whole else module
            trainer = L.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **options, **own)
            trainer.fit(module, loader(), loader(), ckpt_path=kept, weights_only=False)
            trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            trainer.validate(module, loader(), verbose=False)
        weights[name] = on_cpu(copy.deepcopy(module))
    torch.testing.assert_close(weights["pipe"], weights["plain"], **CLOSE)
