"""Recognizes Grain's datasets and loaders and finds their lengths. Their iterators save states like any other iterator.

Grain is never imported here: a user who passes one of its objects has imported it.
"""

import sys
from typing import Any

__all__ = ["grain_length", "is_grain", "start_workers"]

# `repeat()` without a count reports a length near the largest integer, which batching divides.
_ENDLESS = 2**48


def _is_a(data: Any, *names: str) -> bool:
    module = sys.modules.get("grain.python") or sys.modules.get("grain")
    kinds = tuple(getattr(module, name) for name in names if hasattr(module, name))
    return bool(kinds) and isinstance(data, kinds)


def is_grain(data: Any) -> bool:
    """Returns whether `data` is a Grain dataset or loader."""
    return _is_a(data, "MapDataset", "IterDataset", "DataLoader")


def start_workers(iterator: Any) -> None:
    """Starts all worker processes of a Grain iterator; does nothing for other iterators.

    Otherwise, an iterator whose state was read or set would start its workers one by one, each when its first batch is requested.
    """
    is_grains = any(base.__module__.partition(".")[0] == "grain" for base in type(iterator).__mro__)  # A loader's iterator class is not public.
    if is_grains and hasattr(iterator, "start_prefetch"):
        iterator.start_prefetch()


def grain_length(data: Any) -> tuple[int | None, bool]:
    """Returns the number of batches (`None` if unknown), and whether the data is known to be endless."""
    if _is_a(data, "MapDataset"):
        return (None, True) if len(data) > _ENDLESS else (len(data), False)
    if _is_a(data, "IterDataset"):
        # A limit makes data finite; a transformation with several parents ends with the first of them.
        parents = () if "Limit" in type(data).__name__ else getattr(data, "parents", ())
        return None, bool(parents) and all(grain_length(parent)[1] for parent in parents)
    # A loader is endless if its sampler has no number of epochs. The attribute is private, so it may be missing.
    return None, getattr(getattr(data, "_sampler", None), "_num_epochs", 1) is None
