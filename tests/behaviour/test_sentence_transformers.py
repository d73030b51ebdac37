"""sentence-transformers trains a model whose transformer is a pipe as it trains the model: trainer, `fit`, `encode`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.letter_sentences import LETTERS, be_quiet_and_offline, letter_sentences

import fxpipe

HINT = "pip install fxpipe[trainers]"
library = pytest.importorskip("sentence_transformers", reason=f"sentence-transformers is not installed: {HINT}")
datasets = pytest.importorskip("datasets", reason=f"datasets is not installed: {HINT}")
transformers = pytest.importorskip("transformers", reason=f"transformers is not installed: {HINT}")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of its own
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set"),
]

CLOSE = {"atol": 5e-6, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def _quiet_and_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quiet_and_offline(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small BERT and a tokenizer of letters."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel

    folder = str(tmp_path_factory.mktemp("bert"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    letters = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    letters.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=len(words),
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def sentence_model(checkpoint: str) -> Any:
    return SentenceTransformer(modules=[Transformer(checkpoint), Pooling(32)], device="cpu")


def piped(checkpoint: str) -> Any:
    model = sentence_model(checkpoint)
    model[0].model = fxpipe.pipeline(model[0].model, ["cpu", "cpu"], chunks=4, progress=False)
    return model


def rows() -> dict[str, list[Any]]:
    scores = torch.rand(24, generator=torch.Generator().manual_seed(3)).tolist()
    return {"sentence1": letter_sentences(1), "sentence2": letter_sentences(2), "score": scores}


def embeddings(model: Any) -> torch.Tensor:
    return model.encode(letter_sentences(4)[:5], convert_to_tensor=True, show_progress_bar=False)


def trained(model: Any, loss: Any, folder: Path) -> tuple[list[dict[str, float]], torch.Tensor]:
    """What is logged, but for times, and the embeddings after that."""
    names = ("sentence1", "sentence2", "score") if loss is losses.CosineSimilarityLoss else ("sentence1", "sentence2")
    data = datasets.Dataset.from_dict({name: rows()[name] for name in names})
    settings = library.SentenceTransformerTrainingArguments(
        str(folder), per_device_train_batch_size=8, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_steps=1, save_strategy="no", learning_rate=1e-3, seed=3,
    )  # fmt: skip
    trainer = library.SentenceTransformerTrainer(
        model=model, args=settings, train_dataset=data, eval_dataset=data.select(range(8)), loss=loss(model)
    )
    trainer.train()
    trainer.evaluate()
    log = [
        {name: float(value) for name, value in entry.items() if not name.endswith(("runtime", "second"))}
        for entry in trainer.state.log_history
    ]
    return log, embeddings(model)


@pytest.mark.parametrize(
    "loss",
    [losses.CosineSimilarityLoss, losses.MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss],
)
def test_the_trainer_logs_with_a_pipe_what_it_logs_with_the_model(loss, checkpoint, tmp_path):
    """The loss is taken outside of the pipe: in contrastive ones all samples of the mini-batch see each other."""
    plain = trained(sentence_model(checkpoint), loss, tmp_path / "plain")
    model = piped(checkpoint)
    ours = trained(model, loss, tmp_path / "pipe")
    assert model[0].model.last_step is not None  # the pipeline has run
    torch.testing.assert_close(ours, plain, **CLOSE)
    model.save(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert not isinstance(loaded[0].model, fxpipe.Pipeline)
    torch.testing.assert_close(embeddings(loaded), ours[1])


@pytest.mark.parametrize("fit", ["fit", "old_fit"])
def test_fit_trains_to_the_same_embeddings(fit, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes there
    results = []
    for model in (piped(checkpoint), sentence_model(checkpoint)):
        examples = [
            library.InputExample(texts=[a, b], label=score) for a, b, score in zip(*rows().values(), strict=True)
        ]
        data = torch.utils.data.DataLoader(examples, batch_size=8)
        getattr(model, fit)(
            train_objectives=[(data, losses.CosineSimilarityLoss(model))], epochs=1, warmup_steps=0,
            show_progress_bar=False,
        )  # fmt: skip
        results.append(embeddings(model))
    torch.testing.assert_close(*results, **CLOSE)
    assert not torch.allclose(results[0], embeddings(sentence_model(checkpoint)), **CLOSE)


def test_a_pipe_of_the_whole_is_refused_where_its_modules_write_to_the_batch(checkpoint):
    model = fxpipe.pipeline(sentence_model(checkpoint), ["cpu", "cpu"], chunks=4, progress=False)
    with pytest.raises(fxpipe.errors.TraceError, match="forward changes input"):
        embeddings(model)
