"""`transformers.Trainer` trains a pipe as it trains the model: what it logs, saves and loads is the model's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.letter_sentences import be_quiet_and_offline
from helpers.transformers_models import gpt2
from torch import nn

import fxpipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[dev]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install fxpipe[dev]")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers' own

Rows = list[dict[str, Any]]
CLOSE = {"atol": 2e-6, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def _quiet_and_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quiet_and_offline(monkeypatch)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts(count: int = 16) -> Rows:
    """Rows for a causal language model: more or fewer tokens count in each, and a column is of no use to it."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for k in range(count):
        ids = torch.randint(3, 32, (12,), generator=generator)
        labels = ids.clone()
        labels[: 2 + k % 7] = -100
        rows.append({"input_ids": ids, "labels": labels, "title": f"text {k}"})
    return rows


def sentences(count: int = 16) -> Rows:
    """Rows for a classifier, padded."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(3, 32, (12,), generator=generator),
            "attention_mask": (torch.arange(12) < 6 + k % 7).long(),
            "label": k % 3,
        }
        for k in range(count)
    ]


def trainer_of(
    model: Any, rows: Rows, folder: Path, callbacks: list[Any] | None = None, data_collator: Any = None, **options: Any
) -> Any:
    options = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "save_strategy": "no"} | options
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, seed=3, learning_rate=1e-3,
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, data_collator, train_dataset=rows, eval_dataset=rows[:7], callbacks=callbacks or []
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def losses(trainer: Any) -> torch.Tensor:
    return torch.tensor([row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row])


def compare(make: Any, rows: Rows, folder: Path, chunks: int = 2, **options: Any) -> None:
    """The same training of a model and of a pipe of it: losses, evaluation, predictions, weights."""
    plain = trainer_of(make(), rows, folder / "plain", **options)
    plain.train()
    with fxpipe.pipeline(make(), ["cpu", "cpu"], chunks, progress=False) as pipe:
        ours = trainer_of(pipe, rows, folder / "ours", **options)
        ours.train()
        for trainer in (plain, ours):
            trainer.evaluate()
        torch.testing.assert_close(losses(ours), losses(plain), **CLOSE)
        have, want = (trainer.predict(rows[:5]).predictions for trainer in (ours, plain))
        torch.testing.assert_close(torch.tensor(have), torch.tensor(want), atol=1e-4, rtol=1e-4)
        assert len(losses(ours)) > 2
        for (name, theirs), own in zip(plain.model.named_parameters(), pipe.parameters(), strict=True):
            # Adam divides by the size of a gradient: where that is nearly nothing, so is what it tells.
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("make", "rows", "options"),
    [
        (gpt2, texts, {}),
        (gpt2, texts, {"gradient_accumulation_steps": 2}),  # tokens of all steps together: num_items_in_batch
        (gpt2, texts, {"label_smoothing_factor": 0.1}),  # which shifts labels where the name of the class says so
        (gpt2, texts, {"gradient_checkpointing": True}),
        (bert, sentences, {"max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    ],
)
def test_a_model_trains_as_it_does_without_a_pipe(make, rows, options, tmp_path):
    compare(make, rows(), tmp_path, **options)


def test_one_micro_batch_has_the_bits_of_the_model(tmp_path):
    rows = sentences()
    plain = trainer_of(bert(), rows, tmp_path / "plain")
    with fxpipe.pipeline(bert(), ["cpu", "cpu"], 1, progress=False) as pipe:
        ours = trainer_of(pipe, rows, tmp_path / "ours")
        for trainer in (plain, ours):
            trainer.train()
        assert torch.equal(losses(ours), losses(plain))
        for (name, theirs), own in zip(plain.model.named_parameters(), pipe.parameters(), strict=True):
            assert torch.equal(own, theirs), name


def test_what_is_saved_is_the_models(tmp_path):
    model = gpt2()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        trainer = trainer_of(pipe, texts(8), tmp_path)
        trainer.train()
        trainer.save_model()
        pipe.save_pretrained(tmp_path / "pipe")
        for folder in (tmp_path, tmp_path / "pipe"):
            assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
            assert type(loaded) is transformers.GPT2LMHeadModel
            for (name, theirs), own in zip(loaded.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(own, theirs), name


def test_training_goes_on_from_a_checkpoint(tmp_path):
    rows, options = texts(), {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    with fxpipe.pipeline(gpt2(), ["cpu", "cpu"], 2, progress=False) as pipe:
        whole = trainer_of(pipe, rows, tmp_path, **options)
        whole.train()
        want, log = {name: p.detach().clone() for name, p in pipe.named_parameters()}, losses(whole)
    with fxpipe.pipeline(gpt2(), ["cpu", "cpu"], 2, progress=False) as pipe:
        resumed = trainer_of(pipe, rows, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert torch.equal(losses(resumed), log)
        for name, p in pipe.named_parameters():
            assert torch.equal(p, want[name]), name
    resumed = trainer_of(gpt2(), rows, tmp_path, **options)  # a checkpoint of a pipe is one of the model
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(losses(resumed), log, **CLOSE)


def test_the_best_checkpoint_is_loaded_and_training_ends_early(tmp_path):
    class Worse(transformers.TrainerCallback):
        """Lets no evaluation after the first be better."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                with torch.no_grad():
                    model.get_input_embeddings().weight.normal_(std=3.0)

    model = gpt2()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        trainer = trainer_of(
            pipe, texts(), tmp_path, [transformers.EarlyStoppingCallback(1), Worse()], num_train_epochs=4,
            eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == 4
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
        for (name, theirs), own in zip(best.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(own, theirs), name
        assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
