"""Cases of a test with several arguments: each value of each once, in place of all their products."""

from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any


def each_once(*arguments: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns as many cases as the longest argument has values; the others begin again where they end."""
    values = [list(argument) for argument in arguments]
    count = max(map(len, values))
    return list(zip(*(islice(cycle(of_one), count) for of_one in values), strict=True))
