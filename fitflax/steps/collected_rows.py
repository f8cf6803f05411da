"""Rows of examples for metrics with `collect`, which steps return and the host concatenates.

Rows stay on the device for a few more steps, so that nothing waits for the newest step. They are only appended, so the number of parts defines the
values at one moment.
"""

import collections
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fitflax.errors import MetricError, RestoreError
from fitflax.metrics import Metric
from fitflax.state import PyTree

__all__ = ["Collected"]


class Collected:
    """Rows of an epoch or of an evaluation.

    `empty` are metrics by log key. `join` copies the rows of a call to the host, in the order of the batches; its second argument is the call's number of
    steps, or `None` for a single step. `most_pending` is the maximum number of calls whose rows wait on the devices; more than the calls in flight, so
    that reading the oldest does not wait.
    """

    def __init__(self, empty: Mapping[str, Metric], join: Callable[[PyTree, int | None], PyTree], *, most_pending: int = 16) -> None:
        self._empty, self._join, self._most_pending = dict(empty), join, most_pending
        self._parts: list[dict[str, Metric]] = []
        self._pending: collections.deque[tuple[dict[str, Metric], int | None]] = collections.deque()
        self._lock = threading.Lock()  # A thread that writes logs may read values.
        self._count = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Log keys of the metrics in the order in which they are shown."""
        return tuple(self._empty)

    def add(self, rows: dict[str, Metric], steps: int | None = None) -> None:
        """Appends the rows of a step, or of a call of several `steps`."""
        if not rows:
            return
        self._count += 1  # Not the lengths: they miss a part that another thread is copying to the host.
        with self._lock:
            self._pending.append((rows, steps))
            if len(self._pending) > self._most_pending:
                self._join_oldest(1)

    def _join_oldest(self, count: int) -> None:
        for _ in range(count):
            self._parts.append(self._join(*self._pending.popleft()))

    def now(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that computes the metrics over the current rows, whatever is appended later."""
        count = self._count
        return lambda: {key: _computed(key, metric) for key, metric in self._joined(count).items()}

    def _joined(self, count: int) -> dict[str, Metric]:
        with self._lock:
            self._join_oldest(max(count - len(self._parts), 0))
        if not count:
            return dict(self._empty)
        # `merge` only appends, and appending all parts at once takes linear time.
        return {key: jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part[key] for part in self._parts[:count])) for key in self._empty}

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the rows by log key, for a checkpoint."""
        return {key: jax.tree.leaves(metric) for key, metric in self._joined(self._count).items()} if self._count else {}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Restores what `state_dict` returned; raises `RestoreError` if it is of other metrics, or of none."""
        if set(state) != set(self._empty):
            raise RestoreError(
                f"The checkpoint has collected rows of the metrics {sorted(state)}, but the compiled metrics that collect rows are {sorted(self._empty)}. "
                "Compile with the metrics of the checkpoint."
            )
        structures = {key: jax.tree.structure(metric) for key, metric in self._empty.items()}
        self._parts = [{key: jax.tree.unflatten(structures[key], [np.asarray(leaf) for leaf in state[key]]) for key in self._empty}]
        self._count = 1


def _computed(key: str, metric: Metric) -> Any:
    """Returns a metric's value for logs: a Python float, or an array of float32 or uint8."""
    value = np.asarray(metric.compute())
    if value.dtype.kind not in "fiub":
        raise MetricError(f"The metric {key!r} must compute a number or an array of numbers. Received: {value!r}.")
    if value.ndim == 0:
        return float(value)
    return value if value.dtype == np.uint8 else value.astype(np.float32)  # Images are often uint8.
