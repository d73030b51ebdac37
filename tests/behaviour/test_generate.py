"""`generate()` of transformers calls the pipe: token by token, one graph for all lengths."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[dev]")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
IDS = torch.randint(3, 32, (4, 5), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=32, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=32, max_position_embeddings=32, **TOKENS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        num_layers=2, num_decoder_layers=2, d_model=16, d_ff=24, d_kv=8, num_heads=2, vocab_size=32,
        decoder_start_token_id=0, **TOKENS,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def made(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    # With a mask: without one, transformers looks for padding among the tokens, and each answer is another graph.
    "sampled": {"do_sample": True, "attention_mask": torch.ones_like(IDS)},
    "beams": {"num_beams": 3, "attention_mask": torch.ones_like(IDS)},
    "padded": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1], [1] * 5])},
}


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (gpt2, "sampled"),
        pytest.param(gpt2, "beams", marks=pytest.mark.slow),
        pytest.param(llama, "padded", marks=pytest.mark.slow),
        pytest.param(t5, "greedy", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_model_and_one_graph_has_all_lengths(make, way):
    plain = made(make)
    options = {"do_sample": False, "use_cache": False, "min_new_tokens": 8, "max_new_tokens": 8, **WAYS[way]}
    lengths = set()
    with fxpipe.pipeline(made(make), ["cpu", "cpu"], 2, progress=False) as pipe:
        run = pipe.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            lengths.add(
                next(x.shape[1] for x in (kwargs.get("decoder_input_ids"), kwargs.get("input_ids")) if x is not None)
            )
            return run(*args, **kwargs)

        pipe.forward = noted
        for model in (plain, pipe):
            torch.manual_seed(1)
            tokens = model.generate(IDS, **options)
            if model is plain:
                want = tokens
        assert torch.equal(tokens, want)
        assert len(lengths) == 8
        # That of planning, which trains; that of the first length; and one for all others.
        assert len(pipe._fxpipe.graphs) == 3


STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize(
    ("make", "options"), [(gpt2, {}), (gpt2, STATIC), pytest.param(t5, STATIC, marks=pytest.mark.slow)]
)
def test_it_goes_without_a_cache_and_says_so_once(make, options):
    plain = made(make)
    options = {"do_sample": False, "min_new_tokens": 3, "max_new_tokens": 3, **options}
    want = plain.generate(IDS, **options)
    with fxpipe.pipeline(made(make), ["cpu", "cpu"], 2, progress=False) as pipe:
        with pytest.warns(UserWarning, match="use_cache=False"):
            assert torch.equal(pipe.generate(IDS, **options), want)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="generate: a pipe")
            config = transformers.GenerationConfig(**options, **TOKENS, decoder_start_token_id=0)
            assert torch.equal(pipe.generate(IDS, config), want)


@pytest.mark.parametrize("said", ["argument", "config"])
def test_who_has_switched_the_cache_off_is_not_warned(said):
    model = made(gpt2)
    options = {"use_cache": False} if said == "argument" else {}
    model.generation_config.use_cache = said == "argument"
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe, warnings.catch_warnings():
        warnings.filterwarnings("error", message="generate: a pipe")
        pipe.generate(IDS, max_new_tokens=2, do_sample=False, **options)


@pytest.mark.slow
def test_the_trainer_evaluates_with_generated_tokens(tmp_path):
    """`predict_with_generate`: the predictions are those of the plain model."""
    data = [{"input_ids": ids, "labels": ids[:3]} for ids in IDS]
    arguments = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=5, use_cpu=True, report_to=[],
        disable_tqdm=True, per_device_eval_batch_size=4,
    )  # fmt: skip
    with fxpipe.pipeline(made(t5), ["cpu", "cpu"], 2, progress=False) as pipe:
        want, have = (
            transformers.Seq2SeqTrainer(model=model, args=arguments).predict(data) for model in (made(t5), pipe)
        )
    assert (have.predictions == want.predictions).all()
    assert have.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"])


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=16)


def both_caches(model: Any) -> Any:
    """What an encoder-decoder takes: a cache of its own tokens, and one of the encoder's."""
    return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())


def with_tokens(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS, use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("make", "cache_of"),
    [(gpt2, static_cache), (gpt2, lambda model: transformers.DynamicCache()), (gpt2, with_tokens), (t5, both_caches)],
)
def test_each_kind_of_cache_is_refused_as_an_input(make, cache_of):
    model = made(make)
    decoded = {"decoder_input_ids": IDS[:, :1]} if make is t5 else {}
    with (
        fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe,
        pytest.raises(fxpipe.errors.FxpipeError, match=r"past_key_values.*use_cache=False"),
    ):
        pipe(IDS, past_key_values=cache_of(model), use_cache=True, **decoded)


def test_a_cache_that_forward_makes_comes_out():
    plain, model = made(gpt2), made(gpt2)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe, torch.no_grad():
        for length in (5, 4):
            want, have = (one(IDS[:, :length], use_cache=True).past_key_values for one in (plain, pipe))
            assert type(have) is type(want)
            for ours, theirs in zip(have.layers, want.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys)
                torch.testing.assert_close(ours.values, theirs.values)
