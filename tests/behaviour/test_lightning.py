"""Lightning's Trainer and Fabric train a pipe, or a LightningModule that has one, as they train the model."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

L = pytest.importorskip("lightning", reason="lightning is not installed: pip install fxpipe[trainers]")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning", "ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*has been deprecated in v2", "ignore:Checkpoint directory"),
]

CLOSE = {"atol": 5e-6, "rtol": 2e-5}
Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Lightning sets LOCAL_RANK and others for one process, too; later trainers would take it for one of several."""
    with mock.patch.dict(os.environ):
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))


def piped(model: nn.Module) -> Any:
    return fxpipe.pipeline(model, ["cpu", "cpu"], chunks=4, progress=False)


def loader() -> Any:
    """Mini-batches of 12, 12, 12 and 4 samples."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(40, 8, generator=generator), torch.randint(3, (40,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, target), batch_size=12)


class Classifier(L.LightningModule):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.net = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, target = batch
        loss = F.cross_entropy(self(x), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, target = batch
        self.log("validation", F.cross_entropy(self(x), target))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class ManualClassifier(Classifier):
    """Takes its steps itself: `forward_backward`, where it has a pipe."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        x, target = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if isinstance(self.net, fxpipe.Pipeline):
            loss = self.net.forward_backward(x, target=target, loss_fn=F.cross_entropy)
        else:
            loss = F.cross_entropy(self.net(x), target)
            self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


class AccumulatingClassifier(Classifier):
    """Takes a step for each three batches, which are the micro-batches of one step of the pipe."""

    automatic_optimization = False

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.batches: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.batches.append(batch)
        if len(self.batches) < 3 and not self.trainer.is_last_batch:
            return
        optimizer, batches = self.optimizers(), self.batches
        self.batches = []
        loss = self.net.forward_backward(
            micro_batches=batches,
            loss_fn=lambda output, target: F.cross_entropy(output, target) / 3,  # as Lightning, also for a last one
            reduction="sum",
        )
        self.log("loss", loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class LateClassifier(Classifier):
    """Makes its pipe where Lightning wants large models made."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if not isinstance(self.net, fxpipe.Pipeline):
            self.net = piped(net())


class Record(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"].item())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(trainer.callback_metrics["validation"].item())


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    return L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=list(callbacks), **({"max_epochs": 2} | options),
    )  # fmt: skip


def fitted(make: Make, folder: Path, **options: Any) -> tuple[list[float], torch.Tensor, dict[str, torch.Tensor], Any]:
    """Losses of steps and epochs, what is predicted, weights, and the record of the pipe's last step."""
    record = Record()
    module, trainer = make(), trainer_of(folder, record, **options)
    trainer.fit(module, loader(), loader())
    predicted = torch.cat(trainer.predict(module, loader()))
    pipe = module if isinstance(module, fxpipe.Pipeline) else module.net
    step = getattr(pipe, "last_step", None)
    return record.losses, predicted.float(), dict(module.state_dict()), step


MODULES: dict[str, Make] = {
    "has a pipe": lambda: Classifier(piped(net())),
    "is a pipe": lambda: piped(Classifier(net())),
    "makes a pipe late": LateClassifier,
}


def plainly() -> Any:
    return Classifier(net())


# how a module with a pipe is made, and one without, settings of the trainer, and how close they are
FITS: dict[str, tuple[Make, Make, dict[str, Any], dict[str, float]]] = {
    **{name: (make, plainly, {}, CLOSE) for name, make in MODULES.items()},
    "accumulates": (MODULES["has a pipe"], plainly, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, CLOSE),
    "float64": (MODULES["has a pipe"], plainly, {"precision": "64-true"}, CLOSE),
    "data parallel": (MODULES["has a pipe"], plainly, {"strategy": "ddp"}, CLOSE),
    "mixed precision": (MODULES["has a pipe"], plainly, {"precision": "bf16-mixed"}, {"atol": 0.02, "rtol": 0.02}),
    "forward_backward": (lambda: ManualClassifier(piped(net())), lambda: ManualClassifier(net()), {}, CLOSE),
}


@pytest.mark.parametrize("name", FITS)
def test_the_trainer_fits_a_module_as_without_a_pipe(name, tmp_path):
    make, make_plain, options, close = FITS[name]
    try:
        *ours, step = fitted(make, tmp_path, **options)
        *plain, no_step = fitted(make_plain, tmp_path, **options)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    torch.testing.assert_close(ours, plain, **close)
    assert (step is not None, no_step) == (True, None)  # the pipeline has run


def test_batches_that_a_module_accumulates_are_micro_batches(tmp_path):
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    weights = []
    for module, own in ((AccumulatingClassifier(piped(net())), {}), (Classifier(net()), options)):
        trainer_of(tmp_path, **own).fit(module, loader(), loader())
        weights.append(dict(module.state_dict()))
        assert module.trainer.global_step == 4
    torch.testing.assert_close(*weights, **CLOSE)


def test_a_callback_that_copies_and_averages_weights_has_those_of_the_model(tmp_path):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    results = []
    for make in (MODULES["has a pipe"], plainly):
        module = make()
        averaging = StochasticWeightAveraging(1e-3, swa_epoch_start=1)
        trainer_of(tmp_path, averaging, max_epochs=3).fit(module, loader(), loader())
        results.append(dict(module.state_dict()))
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("first", ["plain", "pipe"])
def test_a_checkpoint_of_one_goes_on_with_the_other(first, tmp_path):
    """One epoch, saved; then it goes on."""
    makes = {"plain": plainly, "pipe": MODULES["has a pipe"]}
    losses = {}
    for second, make in makes.items():
        folder = tmp_path / second
        trainer = trainer_of(folder, max_epochs=1)
        trainer.fit(makes[first](), loader())
        trainer.save_checkpoint(folder / "half.ckpt")
        record = Record()
        trainer_of(folder, record).fit(make(), loader(), ckpt_path=folder / "half.ckpt", weights_only=False)
        losses[second] = record.losses
        assert len(record.losses) == 4
    torch.testing.assert_close(losses["pipe"], losses["plain"], **CLOSE)


# -- Fabric ------------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, folder: Path, at_once: bool = False, precision: str = "32-true") -> Any:
    """Losses of a loop with Fabric, and the weights after its checkpoint was written and read."""
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wrapped, optimizer = fabric.setup(model, optimizer)
    losses = []
    for x, target in fabric.setup_dataloaders(loader()):
        if at_once:
            with fabric.autocast():
                loss = wrapped.forward_backward(x, target=target, loss_fn=F.cross_entropy)
        else:
            loss = F.cross_entropy(wrapped(x), target)
            fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fabric.save(folder / "fabric.ckpt", {"model": wrapped, "optimizer": optimizer})
    fabric.load(folder / "fabric.ckpt", {"model": wrapped, "optimizer": optimizer})
    return losses, dict(wrapped.state_dict())


@pytest.mark.parametrize(("at_once", "precision"), [(False, "32-true"), (True, "bf16-mixed")])
def test_fabric_trains_a_pipe_as_it_trains_the_model(at_once, precision, tmp_path):
    close = CLOSE if precision == "32-true" else {"atol": 0.02, "rtol": 0.02}
    with piped(net()) as pipe:
        ours = trained(pipe, tmp_path, at_once, precision)
        assert pipe.last_step is not None
    torch.testing.assert_close(ours, trained(net(), tmp_path, precision=precision), **close)
