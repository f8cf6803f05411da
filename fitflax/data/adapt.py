"""The one place that looks at what kind of data the user has."""

from collections.abc import Iterator
from typing import Any

import jax

from fitflax.data.arrays import ArraySource
from fitflax.data.batch import Selection
from fitflax.data.streams import IterableSource, OneShotSource, Source
from fitflax.errors import ConfigError, DataError

__all__ = ["adapt"]

DEFAULT_BATCH_SIZE = 32


def adapt(
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_remainder: bool = False,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    inputs_only: bool = False,
    name: str = "data",
) -> Source:
    """Returns the source that yields the batches of `data`.

    Args:
        data: An array, or a list, tuple or dict whose leaves are all arrays (in-memory data), an iterable or iterator of batches, a function that makes
            an iterator of batches, or a `Source`.
        y: Targets of in-memory data.
        sample_weight: Weights of in-memory data, `[examples]` or `[examples, ...]`.
        batch_size: Rows of a batch of in-memory data, 32 by default.
        shuffle: Whether in-memory data is taken in another order in each pass.
        seed: What that order follows from.
        drop_remainder: Whether the short last batch of in-memory data is left out.
        selection: Which parts of dicts are inputs and targets.
        inputs_only: Whether only inputs are needed, as for `predict`.
        name: The caller's name for `data`, for errors.

    Raises:
        DataError: `data` is nothing that yields batches, or arrays do not fit together.
        ConfigError: An argument that does not go with this kind of data.

    >>> import numpy as np
    >>> adapt(np.zeros((100, 3)), np.zeros(100), batch_size=32).num_batches
    4
    """
    if isinstance(data, Source):
        return data
    if is_in_memory(data):
        x, targets, weights = _arrays_of(data, y, sample_weight, selection, inputs_only)
        size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        return ArraySource(x, targets, weights, batch_size=size, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder)
    given = [key for key, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)) if value is not None]
    if isinstance(data, str | bytes) or data is None or not (callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DataError(f"`{name}` must be arrays, an iterable of batches, or a function that makes an iterator of batches. Received: a {type(data).__name__}.")
    if given or drop_remainder:
        raise ConfigError(
            f"{', '.join(given or ['drop_remainder'])} can only be given with in-memory arrays; batches of `{name}` (a {type(data).__name__}) hold their own."
        )
    if isinstance(data, Iterator):
        return OneShotSource(data, selection, inputs_only=inputs_only)
    # A class is called like a function.
    if not isinstance(data, type) and (hasattr(data, "__iter__") or not callable(data)):
        length = len(data) if hasattr(data, "__len__") else None
        if length == 0:
            raise DataError(f"`{name}` is an empty {type(data).__name__}.")
        return IterableSource(lambda: data, selection, inputs_only=inputs_only, num_batches=length)
    return IterableSource(data, selection, inputs_only=inputs_only)


def is_in_memory(data: Any) -> bool:
    """Returns whether `data` is an array, or a list, tuple or dict with nothing but arrays in it."""
    if isinstance(data, list | tuple):
        return bool(data) and all(is_in_memory(part) or part is None or (isinstance(part, tuple) and not part) for part in data) and bool(jax.tree.leaves(data))
    if isinstance(data, dict):
        return bool(data) and all(is_in_memory(part) for part in data.values())
    return hasattr(data, "__array__") and hasattr(data, "shape")


def _arrays_of(data: Any, y: Any, weights: Any, selection: Selection, inputs_only: bool) -> tuple[Any, Any, Any]:
    if inputs_only:
        # A tuple is several inputs here: nobody passes targets to predict.
        return (selection.split(data, inputs_only=True).x if isinstance(data, dict) else data), (), weights
    if y is not None:
        x = selection.split(data, inputs_only=True).x if isinstance(data, dict) else data
        return x, y, weights
    if isinstance(data, list) and all(isinstance(part, tuple | dict) for part in data):
        raise DataError(
            f"A list whose elements hold nothing but arrays is in-memory data, so this list of {len(data)} {type(data[0]).__name__}(s) would be the inputs. "
            "For a list of batches give a function, `lambda: batches`."
        )
    triple = selection.split(data)
    if weights is not None and triple.weights is not None:
        raise ConfigError("sample_weight is given twice: as an argument and as the third element of the data.")
    return triple.x, triple.y, triple.weights if weights is None else weights
