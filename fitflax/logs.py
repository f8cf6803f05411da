"""Lazily read values: what a step leaves on the device for logs, and the mapping that callbacks see.

A step returns its values as one vector, which is not donated and stays readable for as long as somebody holds it. Reading any of them reads all, in one
transfer; reading none costs nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple, Self, cast

import jax
import numpy as np
from typing_extensions import override

__all__ = ["Kind", "Logs", "Place", "StepValues", "Values", "default_direction", "flat_name", "row_of"]

# The places of the step's own values in its vector; the running metrics follow.
STEP_LOSS, GRADIENTS_NORM, STEPS_SINCE_BAD = 0, 1, 2
CULPRIT = 3
NUM_STEP_VALUES = 4


class Place(NamedTuple):
    """Where in a vector of values a metric lies.

    Attributes:
        begin: The index of its first value.
        shape: Its shape; `()` for a number.

    >>> Place(3).of([0.0, 0.0, 0.0, 0.5]), Place(0, (2,)).of([1.0, 2.0])
    (0.5, array([1., 2.], dtype=float32))
    """

    begin: int
    shape: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The index behind its last value."""
        return self.begin + math.prod(self.shape)

    def of(self, values: list[float]) -> Any:
        """Returns the metric: a Python float, or a float32 array."""
        if not self.shape:
            return values[self.begin]
        return np.array(values[self.begin : self.end], np.float32).reshape(self.shape)


class Kind(NamedTuple):
    """What is known of a metric besides its values.

    Attributes:
        direction: `"max"` or `"min"` where it declares which is better.
        summary: Returns what TensorBoard shows in place of a value; `None` where it shows the value.
        is_recorded: Whether values are kept in `History` and in checkpoints' metadata.

    >>> Kind("min").direction
    'min'
    """

    direction: str | None = None
    summary: Callable[[Any], Any] | None = None
    is_recorded: bool = True


class Values:
    """Metrics on the device until somebody reads them.

    Args:
        places: The metrics' places in the vector, in the order in which they are shown; `None` for those that are computed on the host.
        vector: float32 `[values]`.
        late: Keys of metrics that are computed on the host, from what was collected of every example.
        compute_late: Computes them.

    >>> Values({"loss": Place(1)}, jax.numpy.array([0.5, 0.25])).metrics()
    {'loss': 0.25}
    """

    __slots__ = ("_compute_late", "_host", "_metrics", "late", "places", "vector")

    def __init__(
        self, places: Mapping[str, Place | None], vector: jax.Array, late: tuple[str, ...] = (), compute_late: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self.places = places
        self.vector = vector
        self.late = late
        self._compute_late = compute_late
        self._host: list[float] | None = None
        self._metrics: dict[str, Any] | None = None

    def with_late(self, late: tuple[str, ...], compute_late: Callable[[], Mapping[str, Any]]) -> Self:
        """Returns these values with metrics that are computed on the host."""
        return type(self)(self.places, self.vector, late, compute_late)

    @property
    def keys(self) -> tuple[str, ...]:
        """The log keys, in the order in which they are shown."""
        return tuple(key for key, place in self.places.items() if place is not None or key in self.late)

    def _read(self) -> list[float]:
        if self._host is None:
            self._host = [float(value) for value in np.asarray(self.vector)]
        return self._host

    @property
    def is_ready(self) -> bool:
        """Whether the step has finished, so that reading does not wait."""
        return self._host is not None or bool(cast(Any, self.vector).is_ready())

    def wait(self) -> None:
        """Waits until the step has finished; reads nothing."""
        self.vector.block_until_ready()

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics, floats or arrays; the first call reads them."""
        if self._metrics is None:
            found = {**self.summed(), **self._compute_late()}
            self._metrics = {key: found[key] for key in self.keys}
        return dict(self._metrics)

    def summed(self) -> dict[str, Any]:
        """Returns the metrics without those that are computed on the host."""
        read = self._read()
        return {key: place.of(read) for key, place in self.places.items() if place is not None}


class StepValues(Values):
    """The values of one training step: the running metrics of its epoch, and its own loss and gradient.

    Args:
        places: As in `Values`.
        vector: The step's vector; of the last step, where a call made several.
        late: As in `Values`.
        compute_late: As in `Values`.
        suspects: The names of what was looked at for values that are not finite.

    >>> StepValues({"loss": Place(4)}, jax.numpy.array([0.5, 1.0, -1.0, -1.0, 0.25])).loss
    0.5
    """

    __slots__ = ("_suspects",)

    def __init__(
        self,
        places: Mapping[str, Place | None],
        vector: jax.Array,
        late: tuple[str, ...] = (),
        compute_late: Callable[[], Mapping[str, Any]] = dict,
        suspects: tuple[str, ...] = (),
    ) -> None:
        super().__init__(places, vector, late, compute_late)
        self._suspects = suspects

    @override
    def with_late(self, late: tuple[str, ...], compute_late: Callable[[], Mapping[str, Any]]) -> Self:
        return type(self)(self.places, self.vector, late, compute_late, self._suspects)

    @property
    def loss(self) -> float:
        """The loss of this step alone."""
        return self._read()[STEP_LOSS]

    @property
    def gradients_norm(self) -> float:
        """The global L2 norm of this step's gradient."""
        return self._read()[GRADIENTS_NORM]

    @property
    def steps_since_bad(self) -> int | None:
        """How many steps ago the loss or the gradient first was not finite, 0 for this step; `None` if it never was in this epoch."""
        since = self._read()[STEPS_SINCE_BAD]
        return None if since < 0 else int(since)

    @property
    def culprit(self) -> str | None:
        """What it was that first was not finite, as in "the gradient of Dense_0/kernel"; `None` if nothing was, or nobody looked."""
        number = int(self._read()[CULPRIT])
        return self._suspects[number] if 0 <= number < len(self._suspects) else None


def flat_name(group: str, key: str) -> str:
    """Returns the name under which a metric of a group is logged: its key alone for training, `<group>_<key>` for evaluations.

    >>> flat_name("train", "loss"), flat_name("val", "loss")
    ('loss', 'val_loss')
    """
    return key if group == "train" else f"{group}_{key}"


def default_direction(name: str) -> Literal["min"] | None:
    """Returns which way is better by a flat name alone: less of a loss; of others it is not known."""
    return "min" if name == "loss" or name.endswith("_loss") else None


def row_of(logs: Mapping[str, Any], *, only_recorded: bool) -> dict[str, Any]:
    """Returns what is kept of an epoch: its values, and those of its last validation if that was before its end.

    Args:
        logs: The logs of its end.
        only_recorded: Whether values that are too large to be kept for ever are left out.
    """
    values = {**logs, **{key: value for key, value in getattr(logs, "earlier", {}).items() if key not in logs}}
    if only_recorded and isinstance(logs, Logs):
        values = {key: value for key, value in values.items() if logs.is_recorded(key)}
    return values


class Logs(MutableMapping[str, Any]):
    """What callbacks get as `logs`: one mapping per event, shared by all of them, whose values come to the host when first read.

    Args:
        values: Values that are still on the device.
        extra: Values already at hand.
        kinds: What is known of metrics by key.

    Attributes:
        earlier: Values of this epoch's last validation, if that was before this event; for the record only.
        source: The values that were given, for whoever needs more of them than metrics.

    >>> logs = Logs(extra={"loss": 0.5})
    >>> logs["f1"] = 0.9
    >>> dict(logs)
    {'loss': 0.5, 'f1': 0.9}
    """

    __slots__ = ("_extra", "_pending", "earlier", "kinds", "source")

    def __init__(
        self,
        values: Values | None = None,
        extra: Mapping[str, Any] | None = None,
        kinds: "Mapping[str, Kind] | None" = None,
    ) -> None:
        self.source = self._pending = values
        self._extra: dict[str, Any] = dict.fromkeys(values.keys) if values is not None else {}
        self._extra.update(extra or {})
        self.kinds: Mapping[str, Kind] = kinds or {}
        self.earlier: Mapping[str, float] = {}

    def is_recorded(self, key: str) -> bool:
        """Returns whether a value is kept in `History` and in checkpoints' metadata."""
        return key not in self.kinds or self.kinds[key].is_recorded

    def _read(self) -> dict[str, Any]:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            for key, value in pending.metrics().items():
                if self._extra.get(key) is None:
                    self._extra[key] = value
        return self._extra

    def deferred(self, *, late: bool = True) -> Callable[[], dict[str, Any]]:
        """Returns a function that gives what is logged now, reading it when it is called, perhaps in another thread.

        Args:
            late: Whether metrics that would have to be computed on the host are among it.
        """
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
