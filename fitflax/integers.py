"""Integers that users pass: Python and NumPy integers are accepted, booleans are not."""

from typing import Any

import numpy as np

__all__ = ["is_integer"]


def is_integer(value: Any, at_least: int | None = None) -> bool:
    """Returns whether a value is an integer, and not less than `at_least` if given; callers convert it with `int(value)`.

    >>> is_integer(3, 1), is_integer(np.int64(3), 1), is_integer(True), is_integer(0, 1), is_integer(3.0)
    (True, True, False, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and (at_least is None or bool(value >= at_least))
