"""Sentences of letters, for tokenizers that know nothing else; and libraries of Hugging Face that keep quiet."""

import sys

import pytest
import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter_sentences(seed: int) -> list[str]:
    """Makes 24 sentences of 4 to 12 letters."""
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(LETTERS[i] for i in torch.randint(len(LETTERS), (4 + (k + seed) % 9,), generator=generator))
        for k in range(24)
    ]


def be_quiet_and_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off downloads, log lines and bars of transformers, and of datasets where it is imported."""
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
