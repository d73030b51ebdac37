"""Models of transformers, small and without dropout, made anew with the same weights each time."""

import torch
import transformers
from torch import nn


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)
