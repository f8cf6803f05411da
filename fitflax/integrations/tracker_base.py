"""`Tracker`, the base class of experiment trackers for `TrackerLogger`, and the values logged at one step.

A `Point` is plain data. A `Reading` has numbers that may still be on the device: making one does not wait for the device, and the sending thread reads it
later. A checkpoint that is saved before that contains its arrays.
"""

import abc
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from fitflax.callbacks.summaries import FigureSummary, HistogramSummary, ImageSummary, write_logged, write_sown
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.logs import GRADIENTS_NORM, STEP_LOSS, Kind, Place, read_vector


@dataclasses.dataclass(frozen=True)
class Point:
    """The values logged at one step.

    Attributes:
        step: The step.
        seconds: The time, in seconds since 1970.
        values: Numbers by name, which may be NaN or infinite.
        images: PNG files by name.

    >>> Point(50, 0.0, {"loss": 0.5}).without({"loss"}).is_empty
    True
    """

    step: int
    seconds: float
    values: Mapping[str, float]
    images: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there are no values and no images."""
        return not self.values and not self.images

    def without(self, names: Iterable[str]) -> Self:
        """Returns a copy without the values and images of these names."""
        gone = set(names)
        values = {name: value for name, value in self.values.items() if name not in gone}
        return dataclasses.replace(self, values=values, images={name: image for name, image in self.images.items() if name not in gone})


class Tracker(abc.ABC):
    """Base class of experiment trackers, such as MLflow or W&B. For a custom one, implement `start`, `log` and `finish`.

    All methods except `prepare` are called in a background thread. They may wait for a network and raise any error: there is one warning, and the failed call
    is repeated later. If the tracker rejects some points but accepts others, the rejected ones are left out.

    Each run gets a shallow copy of the tracker (`copy.copy`), so that a pending request of an earlier run cannot interfere.

    Attributes:
        title: The tracker's name in warnings.
        settle_seconds: The time after `log` during which points may be lost if the process is killed, because they are only in memory. Checkpoints include
            such points.
        is_given: Whether the user began the run and will end it; set by `prepare`.
        is_continued: Whether a run that the user began has values that an earlier process of this training run logged; set by `start`.

    >>> class Print(Tracker):
    ...     title = "print"
    ...     def start(self, name, run_id, config):
    ...         print("run", name, dict(config))
    ...         return name
    ...     def log(self, points):
    ...         for point in points:
    ...             print(point.step, dict(point.values))
    ...     def finish(self, status, summary, artifact):
    ...         print(status)
    >>> tracker = Print()
    >>> tracker.start("a", None, {"seed": 0})
    run a {'seed': 0}
    'a'
    >>> tracker.log([Point(50, 0.0, {"loss": 0.5})])
    50 {'loss': 0.5}
    """

    title: str = "The tracker"
    settle_seconds: float = 0.0
    is_given: bool = False
    is_continued: bool = False

    def prepare(self) -> None:  # noqa: B027 (nothing to do for most)
        """Called in the training thread before each run, to look up a run that is active there. Must not use a network."""

    @abc.abstractmethod
    def start(self, name: str, run_id: str | None, config: Mapping[str, float | str | bool]) -> str:
        """Begins the run, or resumes it if it exists.

        Args:
            name: A name of letters, digits and dashes that stays the same after a resume. Use it as the id if clients can choose the id.
            run_id: The id that this method returned in an earlier process, if it is in the checkpoint.
            config: The hyperparameters.

        Returns:
            The tracker's id of the run.
        """

    @abc.abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Logs points, sorted by step. If this raises, it is called with the same points again."""

    @abc.abstractmethod
    def finish(self, status: str, summary: Mapping[str, float | str], artifact: tuple[str, Path | str] | None) -> None:
        """Ends the run, unless the user began it.

        Args:
            status: `"finished"`, `"failed"` or `"interrupted"`.
            summary: The values of the last epoch, and `stop_reason`.
            artifact: A name, and the directory or URL of the checkpoint to upload; `None` if there is none.
        """

    def abandon(self) -> None:  # noqa: B027 (nothing to do for most)
        """Called instead of `finish` if the end of the run cannot be sent in time. Stop background work here. Must not use a network."""

    def last_step(self, key: str) -> int | None:
        """Returns the last step for which the run has a value or image named `key`; `None` if there is none or the tracker does not know.

        Called after a resume, once for each name, so that no value is logged twice.
        """
        return None


@dataclasses.dataclass(frozen=True)
class _Unread:
    """The arguments of a `Reading` that has not been read."""

    known: Mapping[str, Any]
    vector: Any
    places: Mapping[str, Place]
    scalars: Mapping[str, Any]
    late: Callable[[], Mapping[str, Any]] | None
    media: Callable[[], Point] | None

    def numbers(self) -> dict[str, Any]:
        values: dict[str, Any] = dict(self.known)
        if self.places:
            read = read_vector(self.vector)
            values |= {name: place.of(read) for name, place in self.places.items()}
        values |= jax.device_get(dict(self.scalars))
        if values.get("step/gradients_norm", 0) < 0:  # The step did not compute it.
            del values["step/gradients_norm"]
        return values

    def without(self, gone: set[str]) -> Self:
        known, places, scalars = ({name: value for name, value in part.items() if name not in gone} for part in (self.known, self.places, self.scalars))
        return dataclasses.replace(self, known=known, places=places, scalars=scalars)


class Reading:
    """A point whose numbers are copied to the host when it is read.

    The training and sending threads share readings without a lock: only one attribute changes, from the unread arguments to the point, and each method
    reads it once.

    Args:
        step, seconds: As in `Point`.
        known: Numbers and NumPy arrays on the host.
        vector: The step's vector of values; `None` if there is none.
        places: Places in `vector`, by name.
        scalars: Numbers that are still on the device.
        late: A function that returns numbers which metrics compute on the host. It is called by `read`, and its values are not in `saved` before that.
        media: A function that returns images, and numbers that are shown with them. It is called like `late`.
    """

    def __init__(
        self,
        step: int,
        seconds: float,
        known: Mapping[str, Any],
        *,
        vector: Any = None,
        places: Mapping[str, Place] | None = None,
        scalars: Mapping[str, Any] | None = None,
        late: Callable[[], Mapping[str, Any]] | None = None,
        media: Callable[[], Point] | None = None,
    ) -> None:
        self.step = step
        self.seconds = seconds
        self._content: _Unread | Point = _Unread(known, vector, places or {}, scalars or {}, late, media)
        self._text: str | None = None

    @classmethod
    def of_point(cls, point: Point) -> Self:
        """Returns a reading that has already been read."""
        reading = cls(point.step, point.seconds, {})
        reading._content = point
        return reading

    @property
    def is_read(self) -> bool:
        """Whether it has been read."""
        return isinstance(self._content, Point)

    @property
    def names(self) -> frozenset[str]:
        """The names of its numbers that are known before it is read."""
        content = self._content
        return frozenset(content.values) if isinstance(content, Point) else frozenset([*content.known, *content.places, *content.scalars])

    @property
    def has_media(self) -> bool:
        """Whether it has images, or functions that draw some."""
        content = self._content
        return bool(content.images) if isinstance(content, Point) else content.media is not None

    @property
    def is_ready(self) -> bool:
        """Whether `read` does not have to wait for the device."""
        content = self._content
        return isinstance(content, Point) or not hasattr(content.vector, "is_ready") or bool(content.vector.is_ready())

    def drop(self, names: Iterable[str]) -> None:
        """Drops some of its numbers. Call it before the reading is shared with another thread."""
        self._content = self._content.without(set(names))

    def drop_media(self) -> None:
        """Drops images and functions that draw them."""
        content = self._content
        self._content = dataclasses.replace(content, images={}) if isinstance(content, Point) else dataclasses.replace(content, media=None)

    def read(self) -> Point:
        """Returns the point. The first call waits for the device and draws images."""
        content = self._content
        if isinstance(content, Point):
            return content
        values = content.numbers() | dict({} if content.late is None else content.late())
        drawn = Point(self.step, self.seconds, {}) if content.media is None else content.media()
        point = Point(self.step, self.seconds, dict(_numbers(values | dict(drawn.values))), drawn.images)
        self._text = _text_of(point)
        self._content = point
        return point

    def read_numbers(self) -> Point:
        """Returns the point without values that are computed or drawn on the host. Never raises errors of the device or of user functions."""
        content = self._content
        if isinstance(content, Point):
            return content
        try:
            values = content.numbers()
        except Exception:  # noqa: BLE001 (the training thread gets the error from the step)
            values = dict(content.known)
        return Point(self.step, self.seconds, dict(_numbers(values)))

    def keep_numbers(self) -> None:
        """Replaces its contents with `read_numbers`, which frees its arrays on the device."""
        self._content = self.read_numbers()

    def saved(self) -> str | dict[str, Any]:
        """Returns its numbers for a checkpoint: text if it has been read, otherwise plain data and arrays on the device."""
        content = self._content
        if isinstance(content, Point):
            self._text = text = self._text or _text_of(content)
            return text
        known = f"[{_text_of(Point(self.step, self.seconds, dict(_numbers(content.known))))}]"
        places = [[name, place.begin, list(place.shape)] for name, place in content.places.items()]
        return {"known": known, "places": json.dumps(places), "vector": content.vector, "scalars": dict(content.scalars)}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Self:
        """Returns the reading from the dict of `saved`."""
        (point,) = _points_of(saved["known"])
        places = {name: Place(begin, tuple(shape)) for name, begin, shape in json.loads(saved["places"])}
        return cls(point.step, point.seconds, point.values, vector=saved["vector"], places=places, scalars=saved["scalars"])


def _text_of(point: Point) -> str:
    """Returns the numbers of a point as text, without loss of precision and without images."""
    return json.dumps([point.step, point.seconds, dict(point.values)])


def _points_of(text: str) -> list[Point]:
    """Returns the points of a list of texts.

    >>> _points_of(f"[{_text_of(Point(1, 0.5, {'loss': 0.1}))}]")
    [Point(step=1, seconds=0.5, values={'loss': 0.1}, images={})]
    """
    return [Point(step, seconds, values) for step, seconds, values in json.loads(text)]


def state_of(readings: Iterable[Reading], *, numbers_only: bool) -> dict[str, Any]:
    """Returns the state of readings for a checkpoint, without duplicates. With `numbers_only` it contains no arrays, which may span processes."""
    saved = [_text_of(reading.read_numbers()) if numbers_only and not reading.is_read else reading.saved() for reading in dict.fromkeys(readings)]
    unsent = ", ".join(entry for entry in saved if isinstance(entry, str))
    return {"unsent": f"[{unsent}]", "unread": [entry for entry in saved if not isinstance(entry, str)]}


def readings_of_state(state: Mapping[str, Any]) -> list[Reading]:
    """Returns the readings from the dict of `state_of`, sorted by step."""
    readings = [*map(Reading.of_point, _points_of(state["unsent"])), *map(Reading.of_saved, state["unread"])]
    return sorted(readings, key=lambda reading: (reading.step, reading.seconds))


def _numbers(values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yields numbers, and each entry of one-dimensional arrays. Other values are left out."""
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except ValueError:  # Nested lists of different lengths.
            continue
        if array.dtype != bool and not np.issubdtype(array.dtype, np.number) and array.dtype.name != "bfloat16":
            continue
        if array.ndim == 0:
            yield name, float(array)
        elif array.ndim == 1:
            yield from ((f"{name}/{index}", float(entry)) for index, entry in enumerate(array))


def reading_of(checkpoint: Checkpoint, seconds: float, *, extra: Mapping[str, Any], scalars: Mapping[str, Any], sown: Mapping[str, Any]) -> Reading:
    """Returns a reading of the values logged at a checkpoint. At the end of an epoch, it includes metrics that are computed on the host.

    `extra` are additional values on the host, `scalars` additional numbers on the device, and `sown` the sown values by tag.
    """
    step, logs, ends, step_values = checkpoint.step, checkpoint.logs, checkpoint.epoch_ends, checkpoint.run.step_values
    source, host_values, read = logs.source, logs.host_values, logs.deferred(late=ends)
    pictured = {key: kind for key, kind in logs.kinds.items() if kind.summary is not None and key in logs}
    late = () if source is None else tuple(key for key in source.late if key not in host_values)
    places: dict[str, Place] = {}
    if source is not None:
        places |= {key: place for key, place in source.places.items() if place is not None and key in logs and key not in host_values and key not in pictured}
    if step_values is not None:
        places |= {"step/loss": Place(STEP_LOSS)} | ({"step/gradients_norm": Place(GRADIENTS_NORM)} if checkpoint.has_gradients_norm else {})
        source = step_values
    media = {tag: value for tag, value in sown.items() if isinstance(value, ImageSummary | FigureSummary)}
    numbers = {tag: value for tag, value in sown.items() if tag not in media and not isinstance(value, HistogramSummary) and np.ndim(value) == 0}
    shown = {key: kind for key, kind in pictured.items() if ends or key not in late}
    plain = tuple(key for key in late if key not in pictured) if ends else ()

    def compute() -> Mapping[str, Any]:
        logged = read()
        return {key: logged[key] for key in plain if key in logged}

    def draw() -> Point:
        logged = read() if shown else {}
        return _draw(step, {key: value for key, value in logged.items() if key in shown}, shown, media)

    return Reading(
        step,
        seconds,
        {**{key: value for key, value in host_values.items() if key not in pictured}, **extra},
        vector=None if source is None else source.vector,
        places=places,
        scalars={**scalars, **numbers},
        late=compute if plain else None,
        media=draw if shown or media else None,
    )


def _draw(step: int, values: Mapping[str, Any], kinds: Mapping[str, Kind], media: Mapping[str, Any]) -> Point:
    """Returns the numbers and PNG files that TensorBoard's summaries of metrics and sown values contain."""
    numbers: dict[str, float] = {}
    images: dict[str, bytes] = {}

    def emit(summary: Any) -> None:
        for value in summary.value:
            if value.HasField("image"):
                images[value.tag] = value.image.encoded_image_string
            elif value.HasField("simple_value"):
                numbers[value.tag] = value.simple_value

    write_logged(emit, values, kinds)
    write_sown(emit, media)
    return Point(step, 0.0, numbers, images)
