"""What metrics with `collect` keep of every example: rows that steps hand out, joined and computed on the host.

Rows stay on the device until a few more steps have been made, so that nothing waits for the newest. They are only ever appended; whoever wants the
values of now notes how many parts there are.
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

    Args:
        empty: The metrics over no examples, by log key.
        join: Brings what a call handed out to the host, rows in the order of the batches; takes the number of its steps if they were several.
        most_pending: How many calls' rows may wait on the devices; more than calls may be in flight, so that taking the oldest does not wait.

    >>> from fitflax.metrics import AUC
    >>> auc = AUC(name="auc").empty()
    >>> rows = Collected({"auc": auc}, join=lambda tree, steps: jax.tree.map(np.asarray, tree))
    >>> rows.add({"auc": auc.update(np.array([0.1, 0.9]), np.array([0, 1]), np.ones(2))})
    >>> rows.now()()
    {'auc': 1.0}
    """

    def __init__(self, empty: Mapping[str, Metric], join: Callable[[PyTree, int | None], PyTree], *, most_pending: int = 16) -> None:
        self._most_pending = most_pending
        self._empty = dict(empty)
        self._join = join
        self._parts: list[dict[str, Metric]] = []
        self._pending: collections.deque[tuple[dict[str, Metric], int | None]] = collections.deque()
        self._lock = threading.Lock()  # Values may be read by a thread that writes logs.
        self._count = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The metrics' log keys, in the order in which they are shown."""
        return tuple(self._empty)

    def add(self, rows: dict[str, Metric], steps: int | None = None) -> None:
        """Appends what a step handed out, or a call that made several `steps`."""
        if not rows:
            return
        self._count += 1  # Here and not the lengths: a part that another thread brings to the host is in neither.
        with self._lock:
            self._pending.append((rows, steps))
            if len(self._pending) > self._most_pending:
                self._settle(1)

    def _settle(self, count: int) -> None:
        for _ in range(count):
            self._parts.append(self._join(*self._pending.popleft()))

    def now(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that computes the metrics over the rows so far, whatever is appended later."""
        count = self._count
        return lambda: {key: _computed(key, metric) for key, metric in self._joined(count).items()}

    def _joined(self, count: int) -> dict[str, Metric]:
        with self._lock:
            self._settle(max(count - len(self._parts), 0))
        if not count:
            return dict(self._empty)
        # Appending is all that `merge` does, and doing it for all parts at once takes linear time.
        return {key: jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part[key] for part in self._parts[:count])) for key in self._empty}

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the rows so far by log key, for a checkpoint."""
        return {key: jax.tree.leaves(metric) for key, metric in self._joined(self._count).items()} if self._count else {}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Takes back what `state_dict` returned.

        Raises:
            RestoreError: It is of other metrics, such as one of an epoch's beginning, when none was collected.
        """
        if set(state) != set(self._empty):
            raise RestoreError(f"The checkpoint has collected rows of {sorted(state)}, but the compiled metrics collect {sorted(self._empty)}.")
        structures = {key: jax.tree.structure(metric) for key, metric in self._empty.items()}
        self._parts = [{key: jax.tree.unflatten(structures[key], [np.asarray(leaf) for leaf in state[key]]) for key in self._empty}]
        self._count = 1


def _computed(key: str, metric: Metric) -> Any:
    """Returns a metric's value as logs have it: a Python float, or an array of float32 or bytes."""
    value = np.asarray(metric.compute())
    if value.dtype.kind not in "fiub":
        raise MetricError(f"The metric {key!r} computes {value!r}, which is neither a number nor an array of numbers.")
    if value.ndim == 0:
        return float(value)
    return value if value.dtype == np.uint8 else value.astype(np.float32)  # Images are often of bytes.
