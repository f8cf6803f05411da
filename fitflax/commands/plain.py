"""Formats values for printing."""

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["aligned", "without_nan"]


def without_nan(value: Any) -> Any:
    """Returns `value` with NaN and infinities, which JSON does not have, as strings.

    >>> without_nan({"loss": float("nan"), "step": 3})
    {'loss': 'nan', 'step': 3}
    """
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as text with aligned columns.

    >>> print(aligned([("step", "loss"), ("1000", "0.5")]))
    step  loss
    1000  0.5
    """
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
