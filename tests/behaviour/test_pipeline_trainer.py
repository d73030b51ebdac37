"""`PipelineTrainer` trains as transformers' Trainer does, with accumulation steps as micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contrastive import nt_xent
from helpers.layered import Layered
from helpers.letter_sentences import be_quiet_and_offline
from helpers.transformers_models import gpt2
from torch import nn

import fxpipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[dev]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install fxpipe[dev]")
from fxpipe.integrations.transformers import PipelineTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers' own

CLOSE = {"atol": 2e-6, "rtol": 2e-5}
WEIGHTS = {"atol": 1e-4, "rtol": 1e-4}  # Adam divides by the size of a gradient, which may be nearly nothing


@pytest.fixture(autouse=True)
def _quiet_and_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quiet_and_offline(monkeypatch)


def texts(count: int = 22) -> list[dict[str, Any]]:
    """In batches of two, the tokens that count differ from 4 to 20: a mean of means is another loss."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for k in range(count):
        ids = torch.randint(3, 32, (12,), generator=generator)
        labels = ids.clone()
        labels[: 2 + (3 * k) % 9] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trainer_of(kind: Any, model: Any, rows: Any, folder: Path, arguments: Any = None, **options: Any) -> Any:
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "save_strategy": "no"} | options
    settings = transformers.TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, seed=3, learning_rate=1e-3,
        **{"gradient_accumulation_steps": 4} | options,
    )  # fmt: skip
    return kind(model, settings, train_dataset=rows, eval_dataset=rows[:7], **arguments or {})


def losses(trainer: Any) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])


def compare(make: Any, rows: Any, folder: Path, kinds: Any = (PipelineTrainer, None), **options: Any) -> Any:
    """The same training by Trainer and by PipelineTrainer: losses, norms of gradients, weights."""
    ours_kind, plain_kind = kinds[0], kinds[1] or transformers.Trainer
    plain = trainer_of(plain_kind, make(), rows, folder / "plain", **options)
    plain.train()
    with fxpipe.pipeline(make(), ["cpu", "cpu"], schedule="1f1b", progress=False) as pipe:
        ours = trainer_of(ours_kind, pipe, rows, folder / "ours", **options)
        ours.train()
        assert len(losses(ours)) == ours.state.global_step > 2
        torch.testing.assert_close(losses(ours), losses(plain), **CLOSE)
        norms = [[row["grad_norm"] for row in trainer.state.log_history if "loss" in row] for trainer in (ours, plain)]
        torch.testing.assert_close(*map(torch.tensor, norms), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.model.state_dict()), **WEIGHTS)
        assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
        return ours


def test_accumulation_steps_are_micro_batches_of_one_step(tmp_path):
    with fxpipe.pipeline(gpt2(), ["cpu", "cpu"], schedule="zero_bubble", progress=False) as pipe:
        steps = []

        class Record(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                steps.append((pipe.last_step.schedule, len(pipe.last_step.losses)))

        trainer_of(PipelineTrainer, pipe, texts(), tmp_path, {"callbacks": [Record()]}).train()
        # 11 batches are an epoch: the last update of it has the 3 that are left.
        assert steps == [("zero_bubble", count) for count in (4, 4, 3)] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"label_smoothing_factor": 0.1},  # a loss outside the model, whose labels the model does not get
        {"gradient_accumulation_steps": 5},  # an epoch ends with one batch alone
        {"gradient_accumulation_steps": 1},
    ],
    ids=lambda options: next(iter(options), "defaults"),
)
def test_it_trains_as_the_trainer_does(options, tmp_path):
    compare(gpt2, texts(), tmp_path, **options)


class Contrasting(Layered, one=8, other=8):
    """Compares the samples of a batch, which cannot be cut. Its loss is a mean over the batch, as CLIP's."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nt_xent(self.one(a).tanh(), self.other(b).tanh()) * labels.float().mean()}


def test_means_over_batches_whose_samples_are_compared_are_divided_by_their_number(tmp_path):
    generator = torch.Generator().manual_seed(1)
    rows = [{"labels": k % 3 + 1} | {key: torch.randn(8, generator=generator) for key in "ab"} for k in range(22)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Contrasting()

    compare(make, rows, tmp_path, per_device_train_batch_size=3)


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length: the trainer learns of the end of an epoch in the middle of an update."""

    def __iter__(self) -> Any:
        return iter(texts())

    def __getitem__(self, index: Any) -> Any:  # for evaluation
        return texts()[index]


def test_an_epoch_of_unknown_length_ends_within_an_update(tmp_path):
    compare(gpt2, Stream(), tmp_path, max_steps=5)


class Weighing(transformers.Trainer):
    """As people write it, with a loss that needs more than the labels."""

    loss_is_scaled_for_ga: bool | None = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(input_ids=inputs["input_ids"])
        weights = 1.0 + (inputs["input_ids"][:, 1:] % 3)
        nll = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        loss = (nll * weights).mean()
        return (loss, outputs) if return_outputs else loss


def test_compute_loss_of_the_users_own(tmp_path):
    class Ours(PipelineTrainer, Weighing):
        pass

    for is_scaled in (None, False):
        Weighing.loss_is_scaled_for_ga = is_scaled
        compare(gpt2, texts(), tmp_path, (Ours, Weighing))


def squared_means(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A matrix product, in float32 outside the model, would be one of bfloat16 under its autocast."""
    means = outputs.logits.flatten(0, 1).T @ nn.functional.one_hot(labels.flatten() % 3, 3).float()
    return (means * means).sum() / num_items_in_batch / 100


@pytest.mark.parametrize("loss", [None, squared_means], ids=["loss of the model", "own loss"])
def test_bfloat16_is_that_of_the_trainer(loss, tmp_path):
    compare(gpt2, texts(), tmp_path, arguments={"compute_loss_func": loss}, bf16=True)


class Scaling(transformers.Trainer):
    """Scales losses, as with fp16=True on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)


def test_the_scaler_of_the_trainer_scales_the_loss(tmp_path):
    class Ours(PipelineTrainer, Scaling):
        pass

    compare(gpt2, texts(), tmp_path, (Ours, Scaling), max_grad_norm=0)


def test_batches_have_their_own_length_and_adapters_train(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install fxpipe[dev]")

    def make() -> nn.Module:
        model = gpt2()
        torch.manual_seed(4)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        )

    def padded(rows: Any) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        ids = torch.stack(
            [nn.functional.pad(row["input_ids"], (0, length - len(row["input_ids"])), value=2) for row in rows]
        )
        return {"input_ids": ids, "attention_mask": (ids != 2).long(), "labels": ids.masked_fill(ids == 2, -100)}

    rows = [{"input_ids": row["input_ids"][: 6 + k % 5]} for k, row in enumerate(texts(14))]
    ours = compare(make, rows, tmp_path, arguments={"data_collator": padded}, label_smoothing_factor=0.1)
    assert isinstance(ours.model, peft.PeftModel)


def test_a_stop_between_two_updates_leaves_nothing_to_the_next_training(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 1

    results = []
    for kind, model in ((transformers.Trainer, gpt2()), (PipelineTrainer, fxpipe.pipeline(gpt2(), ["cpu", "cpu"]))):
        trainer = trainer_of(kind, model, texts(), tmp_path, {"callbacks": [Stop()]})
        trainer.train()
        trainer.remove_callback(Stop)
        trainer.train()
        results.append(losses(trainer))
    torch.testing.assert_close(*results, **CLOSE)


def test_a_model_that_is_no_pipe_is_named(tmp_path):
    trainer = trainer_of(PipelineTrainer, gpt2(), texts(), tmp_path)
    with pytest.raises(fxpipe.errors.ArgumentTypeError, match=r"model is a GPT2LMHeadModel; expected a pipe.*pipeline"):
        trainer.train()


class Twice(PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


class Noisy(PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        weights = torch.rand(())
        return model(**inputs).loss * weights


class Never(PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return next(model.parameters()).sum()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, "called the model twice"),
        (Noisy, "draws random numbers.*data collator"),
        (Never, "not called the model"),
    ],
)
def test_a_compute_loss_that_cannot_run_in_two_parts_is_refused(kind, message, tmp_path):
    with fxpipe.pipeline(gpt2(), ["cpu", "cpu"], progress=False) as pipe:
        with pytest.raises(fxpipe.errors.StateError, match=message):
            trainer_of(kind, pipe, texts(), tmp_path).train()
        assert all(parameter.grad is None for parameter in pipe.parameters())
