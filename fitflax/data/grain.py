"""What Grain's data sets and loaders tell of their length. Their iterators save states as any iterator may, which needs nothing from here.

Grain is never imported here; whoever has one of its objects has imported it.
"""

import sys
from typing import Any

__all__ = ["grain_length", "is_grain"]

# `repeat()` without a count gives a length near the largest integer, divided by the batch size later on.
_ENDLESS = 2**48


def _is_a(data: Any, *names: str) -> bool:
    module = sys.modules.get("grain.python") or sys.modules.get("grain")
    kinds = tuple(getattr(module, name) for name in names if hasattr(module, name))
    return bool(kinds) and isinstance(data, kinds)


def is_grain(data: Any) -> bool:
    """Returns whether `data` is a data set or a loader of Grain."""
    return _is_a(data, "MapDataset", "IterDataset", "DataLoader")


def grain_length(data: Any) -> tuple[int | None, bool]:
    """Returns the number of batches, `None` if unknown, and whether the data is known to be endless."""
    if _is_a(data, "MapDataset"):
        return (None, True) if len(data) > _ENDLESS else (len(data), False)
    if _is_a(data, "IterDataset"):
        # What limits the number of elements ends the search; a transformation that combines several ends with the first of them.
        parents = () if "Limit" in type(data).__name__ else getattr(data, "parents", ())
        return None, bool(parents) and all(grain_length(parent)[1] for parent in parents)
    # A loader goes on for ever where its sampler has no number of epochs; an attribute that is not public, so its absence says nothing.
    return None, getattr(getattr(data, "_sampler", None), "_num_epochs", 1) is None
