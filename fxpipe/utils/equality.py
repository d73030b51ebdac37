"""Equality of values of any type, for comparisons of runs."""

from __future__ import annotations

from typing import Any


def equal_values(left: Any, right: Any) -> bool:
    """Returns True if two values have the same type and are equal, lists and tuples item by item; NaN equals NaN.

    >>> equal_values([1.0, float("nan")], [1.0, float("nan")]), equal_values(1, True), equal_values([1], [1.0])
    (True, False, False)
    """
    if left is right or ((left != left) is True and (right != right) is True):  # NaN
        return True
    if type(left) is not type(right) or getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    if isinstance(left, (float, complex)):
        return left == right and repr(left) == repr(right)  # 0.0 is not -0.0
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal_values, left, right))
    same: Any = left == right
    return bool(same.all() if hasattr(same, "all") else same)  # an array of numpy compares its items
