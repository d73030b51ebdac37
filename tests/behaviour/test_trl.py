"""SFTTrainer of trl trains a pipe as it trains the model, where the pipe is made of the model that it has prepared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.letter_sentences import LETTERS, be_quiet_and_offline, letter_sentences
from helpers.transformers_models import gpt2

import fxpipe

trl = pytest.importorskip("trl", reason="trl is not installed: pip install fxpipe[trainers]")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install fxpipe[trainers]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[trainers]")
from fxpipe.integrations.transformers import PipelineTrainer  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of its own
]

CLOSE = {"atol": 2e-6, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def _quiet_and_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quiet_and_offline(monkeypatch)


def tokenizer() -> Any:
    """A token for each letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<bos>", "<eos>", "<pad>", *LETTERS]
    letters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def rows(kind: str) -> Any:
    if kind == "text":
        return datasets.Dataset.from_dict({"text": letter_sentences(1)})
    texts = letter_sentences(1)
    return datasets.Dataset.from_dict({"prompt": [t[:5] for t in texts], "completion": [t[5:] for t in texts]})


class PipelineSFTTrainer(PipelineTrainer, trl.SFTTrainer):
    """Its accumulation steps are the micro-batches of one step of the pipe."""


def trainer_of(
    model: Any, folder: Path, kind: str = "text", adapter: Any = None, trainer: Any = trl.SFTTrainer, **options: Any
) -> Any:
    settings = trl.SFTConfig(
        str(folder), num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        save_strategy="no", learning_rate=1e-3, seed=3,
        **({"per_device_train_batch_size": 8, "bf16": False} | options),
    )  # fmt: skip
    data = rows(kind)
    return trainer(
        model=model, args=settings, train_dataset=data, eval_dataset=data.select(range(7)),
        processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip


def logged(trainer: Any, folder: Path) -> list[dict[str, float]]:
    """What training, evaluation and saving leave in the log, but for times."""
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    return [
        {name: float(value) for name, value in entry.items() if not name.endswith(("runtime", "second"))}
        for entry in trainer.state.log_history
    ]


def give_pipe(trainer: Any) -> Any:
    """Puts a pipe in the place of the trainer's model, which has its fused head by then, and adapters."""
    trainer.model = trainer.model_wrapped = fxpipe.pipeline(trainer.model, ["cpu", "cpu"], chunks=4, progress=False)
    return trainer.model


class Record(transformers.TrainerCallback):
    """Records the schedule and the number of micro-batches of each update."""

    def __init__(self, pipe: Any, steps: list[tuple[str, int]]):
        self.pipe, self.steps = pipe, steps

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append((self.pipe.last_step.schedule, len(self.pipe.last_step.losses)))


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2, "gradient_checkpointing": False},
    "prompts": {"kind": "prompts"},
    "packing": {"packing": True, "max_length": 16},
    "dynamic fine-tuning": {"loss_type": "dft"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_sft_trainer_logs_with_a_pipe_what_it_logs_with_the_model(setting, tmp_path):
    options = SETTINGS[setting]
    plain = logged(trainer_of(gpt2(), tmp_path / "plain", **options), tmp_path / "plain")
    trainer = trainer_of(gpt2(), tmp_path / "pipe", **options)
    with give_pipe(trainer) as pipe:
        ours = logged(trainer, tmp_path / "pipe")
        assert pipe.last_step is not None  # the pipeline has run
        assert [*map(dict.keys, ours)] == [*map(dict.keys, plain)]
        torch.testing.assert_close(ours, plain, **CLOSE)
        saved = type(pipe).from_pretrained(tmp_path / "pipe" / "saved").state_dict()
        for name, value in type(pipe).from_pretrained(tmp_path / "plain" / "saved").state_dict().items():
            torch.testing.assert_close(saved[name], value, atol=5e-5, rtol=1e-4)


def test_adapters_are_trained(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install fxpipe[trainers]")
    histories = {}
    for kind in ("plain", "pipe"):
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        trainer = trainer_of(gpt2(), tmp_path / kind, adapter=adapter)
        if kind == "pipe":
            give_pipe(trainer)
        histories[kind] = logged(trainer, tmp_path / kind)
        assert {path.name for path in (tmp_path / kind / "saved").iterdir()} >= {"adapter_config.json"}
        if kind == "pipe":
            assert trainer.model.last_step is not None
    torch.testing.assert_close(histories["pipe"], histories["plain"], **CLOSE)


def test_accumulation_steps_of_sft_trainer_are_micro_batches(tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 5}  # of 12 batches
    plain = logged(trainer_of(gpt2(), tmp_path / "plain", **options), tmp_path / "plain")
    trainer = trainer_of(gpt2(), tmp_path / "pipe", trainer=PipelineSFTTrainer, **options)
    with give_pipe(trainer) as pipe:
        steps = []
        trainer.add_callback(Record(pipe, steps))
        torch.testing.assert_close(logged(trainer, tmp_path / "pipe"), plain, **CLOSE)
        assert steps == [("1f1b", 5), ("1f1b", 5), ("1f1b", 2)]


def dpo_trainer_of(model: Any, folder: Path) -> Any:
    texts = letter_sentences(1)
    columns = {"prompt": [t[:5] for t in texts], "chosen": [t[5:] for t in texts], "rejected": [t[6:] for t in texts]}
    settings = trl.DPOConfig(
        str(folder), per_device_train_batch_size=8, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", bf16=False,
    )  # fmt: skip
    data = datasets.Dataset.from_dict(columns)
    return trl.DPOTrainer(
        model=model, ref_model=gpt2(), args=settings, train_dataset=data, processing_class=tokenizer()
    )  # fmt: skip


@pytest.mark.parametrize("make_trainer", [trainer_of, dpo_trainer_of])
def test_a_pipe_that_the_trainer_reaches_past_is_warned_of(make_trainer, tmp_path):
    """It replaces the forward of the model that it is given by one that calls backbone and head."""
    line = r"_fused_forward \(.*trl.trainer.utils\.py:\d+\), which was put in the place of the pipe's forward"
    with fxpipe.pipeline(gpt2(), ["cpu", "cpu"], chunks=4, progress=False) as pipe:
        trainer = make_trainer(pipe, tmp_path)
        with pytest.warns(UserWarning, match=rf"{line}.*trainer\.model = trainer\.model_wrapped = "):
            trainer.train()
