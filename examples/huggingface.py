"""Models of transformers, trained as pipelines and as plain models: in a loop, or by the Trainer.

    python examples/huggingface.py gpt2                           two CPU workers, a small model with random weights
    python examples/huggingface.py gpt2 --pretrained gpt2         the weights of the hub, or of a folder
    python examples/huggingface.py gpt2 --trainer                 transformers' Trainer, with its defaults
    python examples/huggingface.py t5 --devices cuda:0,cuda:1,cuda:2,cuda:3

`gpt2` texts are padded to unequal lengths: the model's loss is a mean over tokens, and so is the pipe's, although
       micro-batches have unequal numbers of tokens.
`t5`   every layer of the decoder uses the encoder's output: portals send it to each stage.
`vit`  images.
`moe`  a mixture of experts, Mixtral: the choice of an expert for a token is a value that only a stage has. An expert
       processes tokens of all samples, so the graph does not show how a loss inside the model is combined: the loss is
       computed from the scores, as a sum and a count.

The script prints the plan, the losses of the pipeline and of the plain model (same initial weights, same data), and
the files that `save_pretrained` saved.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import fxpipe

BATCH, LENGTH, TOKENS, IMAGE = 16, 48, 259, 32  # a token is a byte; the first three have a meaning of their own
PAD, BEGIN, END = 0, 1, 2
TOLERANCE = 1e-3  # micro-batches sum gradients in another order, and every step starts from where the last one ended
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END, "vocab_size": TOKENS}

Batch = dict[str, Tensor]


# ---- the models, without dropout, so that two of them can be compared ----


def make_gpt2() -> PreTrainedModel:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=64, n_positions=LENGTH, **SPECIAL, **dropout))


def make_t5() -> PreTrainedModel:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=BEGIN, **SPECIAL, **sizes))


def make_vit() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=IMAGE, patch_size=8, num_labels=4, **sizes))


def make_moe() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(use_cache=False, **SPECIAL, **sizes, **experts))


# ---- the data ----

TEXT = torch.tensor(list("\n".join(topics.values()).encode())) + 3


def pieces(generator: torch.Generator, length: int) -> Tensor:
    """Pieces of the reference of the Python language from random places, BATCH x length."""
    start = torch.randint(len(TEXT) - length, (BATCH, 1), generator=generator)
    return TEXT[start + torch.arange(length)]


def padded_texts(generator: torch.Generator) -> Batch:
    """Texts of unequal lengths: padding has a mask, and no loss."""
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (BATCH, 1), generator=generator)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = pieces(generator, LENGTH).where(mask == 1, PAD)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def even_texts(generator: torch.Generator) -> Batch:
    ids = pieces(generator, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def reversed_texts(generator: torch.Generator) -> Batch:
    ids = pieces(generator, LENGTH // 2)
    return {"input_ids": ids, "labels": ids.flip(1)}


def bright_quarters(generator: torch.Generator) -> Batch:
    """Noise with one brighter quarter, and the number of this quarter."""
    images = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
    labels = torch.randint(4, (BATCH,), generator=generator)
    half = torch.arange(IMAGE) // (IMAGE // 2)
    quarter = 2 * half[:, None] + half[None, :]
    return {"pixel_values": images + (quarter == labels[:, None, None])[:, None], "labels": labels}


# ---- the losses, of a micro-batch as of a mini-batch ----


def own_loss(output: Any) -> Tensor:
    return output.loss


def loss_of_scores(output: Any, labels: Tensor) -> tuple[Tensor, int]:
    """The sum over tokens and their number: the mean covers all tokens of the mini-batch."""
    scores, following = output.logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum"), following.numel()


class Task(NamedTuple):
    make_model: Callable[[], PreTrainedModel]
    make_batch: Callable[[torch.Generator], Batch]
    loss_fn: Callable[..., Any] = own_loss


TASKS = {
    "gpt2": Task(make_gpt2, padded_texts),
    "t5": Task(make_t5, reversed_texts),
    "vit": Task(make_vit, bright_quarters),
    "moe": Task(make_moe, even_texts, loss_of_scores),
}


# ---- two ways to train ----

Losses = list[tuple[int, float, float]]  # step, loss of the pipeline, loss of the plain model
MakeInputs = Callable[[], tuple[Batch, Tensor | None]]


def train_in_a_loop(pipe: Any, plain: Any, make_inputs: MakeInputs, loss_fn: Any, steps: int) -> Losses:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    rows = []
    for step in range(steps):
        inputs, target = make_inputs()
        loss = pipe.forward_backward(**inputs, target=target, loss_fn=loss_fn)
        optimizer.step()
        optimizer.zero_grad()

        output = plain(**{name: tensor.to(plain.device) for name, tensor in inputs.items()})
        if target is None:
            plain_loss = loss_fn(output)
        else:
            total, count = loss_fn(output, target.to(plain.device))
            plain_loss = total / count
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        rows.append((step, loss.item(), plain_loss.item()))
    return rows


def train_by_trainer(pipe: Any, plain: Any, make_batch: Callable[..., Batch], device: str, steps: int) -> Losses:
    """The Trainer is configured for one device."""
    generator = torch.Generator().manual_seed(1)
    batches = [make_batch(generator) for _ in range(steps)]
    samples = [{name: tensor[i] for name, tensor in batch.items()} for batch in batches for i in range(BATCH)]
    losses = []
    for model in (pipe, plain):
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                folder,
                per_device_train_batch_size=BATCH,
                num_train_epochs=1,
                learning_rate=1e-3,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=device == "cpu",
            )
            trainer = Trainer(model=model, args=settings, train_dataset=samples, eval_dataset=samples[:BATCH])
            trainer.train()
            evaluated = trainer.evaluate()["eval_loss"]
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated])
    return [(step, *row) for step, row in enumerate(zip(*losses, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=TASKS, nargs="?", default="gpt2")
    parser.add_argument("--pretrained", help="a name of the hub, or a folder; default: a small model, random weights")
    parser.add_argument("--trainer", action="store_true", help="train by transformers' Trainer")
    parser.add_argument("--devices", default="cpu,cpu", help="a device for each stage, with commas (default: cpu,cpu)")
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch (default: 4)")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default: 12)")
    parser.add_argument("--schedule", default="1f1b", help="of fxpipe.pipeline (default: 1f1b)")
    options = parser.parse_args()
    devices = options.devices.split(",")
    make_model, make_batch, loss_fn = TASKS[options.model]
    if options.trainer and loss_fn is not own_loss:
        parser.error(f"--trainer takes the loss of the model itself, which {options.model} takes of the scores")

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model() if options.pretrained is None else type(make_model()).from_pretrained(options.pretrained)
    model.config.use_cache = False

    def make_inputs() -> tuple[Batch, Tensor | None]:
        """Inputs of the model, and the target if the loss is computed outside."""
        batch = make_batch(generator)
        return batch, None if loss_fn is own_loss else batch.pop("labels")

    plain = copy.deepcopy(model).to(devices[0])
    inputs, _ = make_inputs()
    pipe = fxpipe.pipeline(model, devices, options.chunks, schedule=options.schedule, example_kwargs=inputs)
    print(f"{pipe.plan}\n")

    if options.trainer:
        rows = train_by_trainer(pipe, plain, make_batch, devices[0], options.steps)
    else:
        rows = train_in_a_loop(pipe, plain, make_inputs, loss_fn, options.steps)
    shown = [row for row in rows if row[0] % 4 == 0 or row is rows[-1]]
    print(tabulate(shown, headers=("step", "loss, fxpipe", "loss, plain"), floatfmt=".6f"))
    difference = max(abs(a - b) for _, a, b in rows)
    print(f"largest difference in {options.steps} steps: {difference:.1e}")
    assert difference < TOLERANCE, "the pipeline does not train as the plain model does"

    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        print("saved:", ", ".join(sorted(path.name for path in Path(folder).iterdir())))
        again = type(plain).from_pretrained(folder)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(pipe.parameters(), again.parameters(), strict=True))
    pipe.close()


if __name__ == "__main__":
    main()
