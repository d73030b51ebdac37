"""Bytes and seconds as people read them."""

import pytest

from fxpipe.utils.units import human_bytes, human_seconds

MIB = 2**20


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_human_bytes(number: int, text: str) -> None:
    assert human_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.000 ms"), (1.5e-6, "0.002 ms"), (1e-3, "1.00 ms"), (0.0123, "12.3 ms"), (1.5, "1500 ms"), (12, "12.0 s"),
     (119.4, "119.4 s"), (360, "6:00 min"), (7209, "2:00:09 h")],
)  # fmt: skip
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
