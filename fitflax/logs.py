"""Log values that stay on the device until they are read, the mapping that callbacks get, and `TimeSpent`, the source of the times in the logs.

A step returns its values as one vector, which is not donated, so it can be read at any time; reading one value transfers all of them.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple, Self, cast

import jax
import numpy as np

from fitflax.leaves import on_host

UNDEFINED = np.finfo(np.float32).min
"""Represents NaN in a vector of values for a value over a total weight of 0, which is valid; a NaN would trigger `jax_debug_nans`."""

# Indices of the step's own values in its vector; the running metrics follow.
STEP_LOSS, GRADIENTS_NORM, STEPS_SINCE_BAD = 0, 1, 2
CULPRIT = 3
NUM_STEP_VALUES = 4


class Place(NamedTuple):
    """The position of a metric in a vector of values.

    Attributes:
        begin: The index of its first value.
        shape: The shape of the metric; `()` for a number.

    >>> Place(3).of([0.0, 0.0, 0.0, 0.5]), Place(0, (2,)).of([1.0, 2.0])
    (0.5, array([1., 2.], dtype=float32))
    """

    begin: int
    shape: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The index after its last value."""
        return self.begin + math.prod(self.shape)

    def of(self, values: list[float]) -> Any:
        """Returns the metric: a Python float, or a float32 array."""
        if not self.shape:
            return values[self.begin]
        return np.array(values[self.begin : self.end], np.float32).reshape(self.shape)


def read_vector(vector: Any) -> list[float]:
    """Returns the values of a step's vector, copied to the host, with NaN for `UNDEFINED`.

    >>> read_vector(jax.numpy.array([0.5, UNDEFINED]))
    [0.5, nan]
    """
    return [math.nan if value == UNDEFINED else float(value) for value in on_host(vector)]


class Kind(NamedTuple):
    """Properties of a metric besides its values.

    Attributes:
        direction: `"max"` or `"min"`, whichever is better; `None` if the metric does not declare it.
        summary: A function of a value that returns what TensorBoard shows instead; `None` if it shows the value.
        is_recorded: Whether `History` and checkpoint metadata keep the values.
    """

    direction: str | None = None
    summary: Callable[[Any], Any] | None = None
    is_recorded: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class Values:
    """Metrics that stay on the device until they are read.

    Attributes:
        places: The positions of the metrics in the vector, in display order; `None` for metrics that are computed on the host.
        vector: float32 `[values]`.
        late: The keys of metrics that `compute_late` computes on the host, from collected outputs of all examples.
        before_read: Called once before the vector is copied to the host.

    >>> Values({"loss": Place(1)}, jax.numpy.array([0.5, 0.25])).metrics()
    {'loss': 0.25}
    """

    places: Mapping[str, Place | None]
    vector: jax.Array
    late: tuple[str, ...] = ()
    compute_late: Callable[[], Mapping[str, Any]] = dict
    before_read: Callable[[], Any] | None = dataclasses.field(default=None, init=False, repr=False)
    _host: list[float] | None = dataclasses.field(default=None, init=False)
    _metrics: dict[str, Any] | None = dataclasses.field(default=None, init=False)

    def with_late(self, late: tuple[str, ...], compute_late: Callable[[], Mapping[str, Any]]) -> Self:
        """Returns these values together with metrics that are computed on the host."""
        return dataclasses.replace(self, late=late, compute_late=compute_late)

    @property
    def keys(self) -> tuple[str, ...]:
        """The log keys, in display order."""
        return tuple(key for key, place in self.places.items() if place is not None or key in self.late)

    def _read(self) -> list[float]:
        if self._host is None:
            if self.before_read is not None:
                self.before_read()
            self._host = read_vector(self.vector)
        return self._host

    @property
    def is_read(self) -> bool:
        """Whether the values are on the host."""
        return self._host is not None

    @property
    def undefined(self) -> list[str]:
        """The keys of the metrics over a total weight of 0, which are NaN."""
        if not any(map(math.isnan, self._read())):
            return []
        vector = on_host(self.vector)
        return [key for key, place in self.places.items() if place is not None and UNDEFINED in vector[place.begin : place.end]]

    @property
    def is_ready(self) -> bool:
        """Whether the step has finished, so that reading does not block."""
        return self._host is not None or bool(cast(Any, self.vector).is_ready())

    def wait(self) -> None:
        """Waits until the step has finished, without reading."""
        self.vector.block_until_ready()

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics as floats or arrays; the first call reads them."""
        if self._metrics is None:
            computed = {**self.summed(), **self.compute_late()}
            self._metrics = {key: computed[key] for key in self.keys}
        return dict(self._metrics)

    def summed(self) -> dict[str, Any]:
        """Returns all metrics except those that are computed on the host."""
        read = self._read()
        return {key: place.of(read) for key, place in self.places.items() if place is not None}


@dataclasses.dataclass(slots=True, eq=False)
class StepValues(Values):
    """The values of one training step: the running metrics of its epoch, and the step's own loss and gradient norm.

    Attributes:
        vector: The vector of the step; if a call ran several steps, of the last one.
        suspects: The names of the values that were checked for non-finite numbers.

    >>> StepValues({"loss": Place(4)}, jax.numpy.array([0.5, 1.0, -1.0, -1.0, 0.25])).loss
    0.5
    """

    suspects: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """The loss of this step only; NaN if the total weight of its batch is 0."""
        return self._read()[STEP_LOSS]

    @property
    def has_no_weight(self) -> bool:
        """Whether the total weight of this step's batch is 0, so that its loss is NaN."""
        return bool(on_host(self.vector)[STEP_LOSS] == UNDEFINED)

    @property
    def gradients_norm(self) -> float:
        """The global L2 norm of this step's gradient; NaN if the step did not compute it."""
        norm = self._read()[GRADIENTS_NORM]
        return math.nan if norm < 0 else norm

    @property
    def steps_since_bad(self) -> int | None:
        """The number of steps since the loss or the gradient first was not finite (0 for this step); `None` if both were finite in this epoch."""
        since = self._read()[STEPS_SINCE_BAD]
        return None if since < 0 else int(since)

    @property
    def culprit(self) -> str | None:
        """The first value that was not finite, such as "the gradient of Dense_0/kernel"; `None` if all were finite or were not checked."""
        number = int(self._read()[CULPRIT])
        return self.suspects[number] if 0 <= number < len(self.suspects) else None


def flat_name(group: str, key: str) -> str:
    """Returns the log key of a metric: `<key>` for training, `<group>_<key>` for evaluations.

    >>> flat_name("train", "loss"), flat_name("val", "loss")
    ('loss', 'val_loss')
    """
    return key if group == "train" else sys.intern(f"{group}_{key}")  # The history has it in each epoch.


def default_direction(name: str) -> Literal["min"] | None:
    """Returns `"min"` if the log key is that of a loss, otherwise `None`, because it is unknown."""
    return "min" if name == "loss" or name.endswith("_loss") else None


def row_of(logs: Mapping[str, Any], *, only_recorded: bool) -> dict[str, Any]:
    """Returns the values of an epoch to record, including those of its last validation if that ran before the end of the epoch.

    If `only_recorded`, values that are too large to keep for each epoch are dropped.
    """
    row: dict[str, Any] = {}
    for source in (logs, getattr(logs, "earlier", {})):
        values = recorded(source) if only_recorded else source
        row |= {key: value for key, value in values.items() if key not in row}
    return row


def recorded(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that `History` and checkpoint metadata keep."""
    return {key: value for key, value in logs.items() if not isinstance(logs, Logs) or logs.is_recorded(key)}


class Logs(MutableMapping[str, Any]):
    """The `logs` of callbacks: one mapping per event, shared by all callbacks, whose values are read from the device on first use.

    Args:
        values: Values that are still on the device.
        extra: Values that are already on the host.
        kinds: Properties of metrics by key.

    Attributes:
        earlier: Values of this epoch's last validation if that was before this event; used only for recording.
        source: The `values` argument.

    >>> logs = Logs(extra={"loss": 0.5})
    >>> logs["f1"] = 0.9
    >>> dict(logs)
    {'loss': 0.5, 'f1': 0.9}
    """

    __slots__ = ("_extra", "_pending", "earlier", "kinds", "source")

    def __init__(self, values: Values | None = None, extra: Mapping[str, Any] | None = None, kinds: Mapping[str, Kind] | None = None) -> None:
        self.source = self._pending = values
        self._extra: dict[str, Any] = dict.fromkeys(values.keys) if values is not None else {}
        self._extra.update(extra or {})
        self.kinds: Mapping[str, Kind] = kinds or {}
        self.earlier: Mapping[str, Any] = {}

    def is_recorded(self, key: str) -> bool:
        """Returns whether `History` and checkpoint metadata keep a value."""
        return key not in self.kinds or self.kinds[key].is_recorded

    @property
    def host_values(self) -> dict[str, Any]:
        """The values that are available without reading from the device."""
        return {key: value for key, value in self._extra.items() if self._pending is None or value is not None}

    def _read(self) -> dict[str, Any]:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            for key, value in pending.metrics().items():
                if self._extra.get(key) is None:
                    self._extra[key] = value
        return self._extra

    def deferred(self, *, late: bool = True) -> Callable[[], dict[str, Any]]:
        """Returns a function that reads and returns the current logs, possibly in another thread; with or without `late` metrics."""
        known, pending = dict(self._extra), self._pending
        if pending is None:
            return lambda: known
        if not late:
            known = {key: value for key, value in known.items() if value is not None or key not in pending.late}

        def read() -> dict[str, Any]:
            values = pending.metrics() if late else pending.summed()
            return {key: values[key] if value is None else value for key, value in known.items()}

        return read

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._read()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._read()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._extra

    def __iter__(self) -> Iterator[str]:
        return iter(self._extra)

    def __len__(self) -> int:
        return len(self._extra)

    def __repr__(self) -> str:
        return repr(self._read())


class TimeSpent:
    """Seconds of wall-clock time by activity. Time that is not claimed is the time for running steps and waiting for them.

    Args:
        clock: A function that returns seconds; `time.perf_counter` by default.

    Attributes:
        seconds: Seconds by activity: `"loading"` (the checkpoint of a resume), `"compiling"` (including tracing and initialization), `"data"` (waiting for
            it), `"evaluating"`, `"callbacks"` (all hooks except batch hooks) and `"saving"`.
        examples: The number of training examples, without padding.

    >>> now = iter(range(100))
    >>> spent = TimeSpent(lambda: next(now))
    >>> with spent.on("evaluating"):
    ...     with spent.on("compiling"):
    ...         pass
    >>> spent.seconds["evaluating"], spent.seconds["compiling"], spent.total, spent.stepping
    (2.0, 1.0, 5, 3.0)
    >>> round(sum(spent.shares.values()), 12)
    1.0
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or time.perf_counter
        self.seconds = {"loading": 0.0, "compiling": 0.0, "data": 0.0, "evaluating": 0.0, "callbacks": 0.0, "saving": 0.0}
        self.examples = 0
        self._begin = self.clock()
        self._nested = 0.0  # Seconds claimed inside the current block.

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Claims the time of a block, except what is claimed inside it."""
        begin, before = self.clock(), self._nested
        self._nested = 0.0
        try:
            yield
        finally:
            whole = self.clock() - begin
            self.seconds[what] += whole - self._nested
            self._nested = before + whole

    def add(self, what: str, seconds: float) -> None:
        """Claims seconds that have just passed; cheaper than `on`."""
        self.seconds[what] += seconds
        self._nested += seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves claimed seconds from one activity to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def total(self) -> float:
        """Seconds since this object was created."""
        return self.clock() - self._begin

    @property
    def stepping(self) -> float:
        """Seconds that are not claimed."""
        return max(self.total - sum(self.seconds.values()), 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of time by activity, including `"stepping"`; the sum is 1."""
        seconds = {"stepping": self.stepping, **self.seconds}
        total = sum(seconds.values())
        return {what: one / total if total else float(what == "stepping") for what, one in seconds.items()}
