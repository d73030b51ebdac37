"""Whole numbers as users give them."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(given: Any) -> int | None:
    """As an int, so that there is one form of whatever stands for an integer (numpy's, too); None if nothing does.

    True stands for none: it is given by mistake.

    >>> whole_number(3), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None
