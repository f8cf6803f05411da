"""Protects the process's global random generators while an evaluation or the like reads data."""

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np

__all__ = ["undisturbed"]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the global random generators of `random`, `numpy.random` and PyTorch (CPU, if imported) when its block ends.

    A PyTorch `DataLoader` draws a seed from the global generator whenever it is iterated, so without this, validation would change the order of training data.

    >>> np.random.seed(0)
    >>> with undisturbed():
    ...     inside = np.random.rand()
    >>> bool(np.random.rand() == inside)
    True
    """
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_rng_state"):
        torch = None  # Another thread is still importing it.
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
