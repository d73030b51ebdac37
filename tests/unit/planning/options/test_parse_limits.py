"""Limits of memory: what is accepted, and what is refused how."""

from typing import Any

import pytest

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.planning.options.parse import parse_memory_limit


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("70GiB", 70 * 2**30),
        ("80GB", 80 * 10**9),
        ("512 mib", 512 * 2**20),
        ("1.5kB", 1500),
        ("100B", 100),
        ("4096", 4096),
        (12345, 12345),
        (2e9, 2 * 10**9),
    ],
)
def test_one_limit_for_all(given: Any, expected: int) -> None:
    assert parse_memory_limit(given, 3) == (expected,) * 3


def test_a_limit_for_each_device() -> None:
    assert parse_memory_limit(["1KiB", None, 7], 3) == (1024, None, 7)
    assert parse_memory_limit(None, 3) is None


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("much", ArgumentError, "memory_limit='much' is no number of bytes; expected '70GiB'"),
        ("GiB", ArgumentError, "memory_limit='GiB' is no number of bytes"),
        ("-1GiB", ArgumentError, "memory_limit='-1GiB' is no number of bytes"),
        ("0GiB", ArgumentError, "memory_limit='0GiB': expected at least 1 byte"),
        (0, ArgumentError, "memory_limit=0: expected at least 1 byte"),
        (float("nan"), ArgumentError, "memory_limit=nan: expected at least 1 byte"),
        ("0.4", ArgumentError, "memory_limit='0.4': expected at least 1 byte: '70GiB'"),
        (0.4, ArgumentError, "memory_limit=0.4: expected at least 1 byte"),
        (float("inf"), ArgumentError, "memory_limit=inf: expected at least 1 byte"),
        (True, ArgumentTypeError, "memory_limit=True is a bool; expected '70GiB'"),
        ({}, ArgumentTypeError, "memory_limit={} is a dict"),
        (["1GiB"], ArgumentError, r"memory_limit=\['1GiB'\] has 1 entries for 2 devices: give one for each"),
        (["1GiB", "x"], ArgumentError, "memory_limit='x' is no number of bytes"),
    ],
)
def test_what_is_no_limit_is_refused(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parse_memory_limit(given, 2)
