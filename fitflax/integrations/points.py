"""The values logged at one step: `Point`, plain data, and `Reading`, whose numbers may still be on the device.

Making a reading does not wait for the device. The sending thread reads it. A checkpoint that is saved earlier contains its arrays.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from fitflax.callbacks.media import FigureSummary, ImageSummary, write_logged, write_sown
from fitflax.logs import GRADIENTS_NORM, STEP_LOSS, Kind, Logs, Place, read_vector

__all__ = ["Media", "Point", "Reading", "points_of_text", "reading_of_logs", "readings_of_state", "state_of", "text_of_points"]


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


class Media(NamedTuple):
    """PNG files of a step by name, and numbers that are shown with them."""

    numbers: Mapping[str, float]
    images: Mapping[str, bytes]


def text_of_points(points: Iterable[Point]) -> str:
    """Returns the numbers of points as text, without loss of precision and without images.

    >>> points_of_text(text_of_points([Point(1, 0.5, {"loss": 0.1})]))
    [Point(step=1, seconds=0.5, values={'loss': 0.1}, images={})]
    """
    return f"[{', '.join(map(_text_of, points))}]"


def _text_of(point: Point) -> str:
    return json.dumps([point.step, point.seconds, dict(point.values)])


def points_of_text(text: str) -> list[Point]:
    """Returns the points from the text of `text_of_points`."""
    return [Point(step, seconds, values) for step, seconds, values in json.loads(text)]


@dataclasses.dataclass(frozen=True)
class _Unread:
    """The arguments of a `Reading` that has not been read."""

    known: Mapping[str, Any]
    vector: Any
    places: Mapping[str, Place]
    scalars: Mapping[str, Any]
    late: Callable[[], Mapping[str, Any]] | None
    media: Callable[[], Media] | None

    @property
    def is_ready(self) -> bool:
        return self.vector is None or not hasattr(self.vector, "is_ready") or bool(self.vector.is_ready())

    def numbers(self) -> dict[str, Any]:
        values: dict[str, Any] = dict(self.known)
        if self.places:
            read = read_vector(self.vector)
            values |= {name: place.of(read) for name, place in self.places.items()}
        values |= jax.device_get(dict(self.scalars))
        if values.get("step/gradients_norm", 0) < 0:  # The step did not compute it.
            del values["step/gradients_norm"]
        return values


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
        media: Callable[[], Media] | None = None,
    ) -> None:
        self.step = step
        self.seconds = seconds
        self._content: _Unread | Point = _Unread(dict(known), vector, dict(places or {}), dict(scalars or {}), late, media)
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

    def drop(self, names: Iterable[str]) -> None:
        """Drops some of its numbers. Call it before the reading is shared with another thread."""
        content, gone = self._content, set(names)
        if isinstance(content, Point):
            self._content = content.without(gone)
            return
        known, places, scalars = (
            {name: value for name, value in part.items() if name not in gone} for part in (content.known, content.places, content.scalars)
        )
        self._content = dataclasses.replace(content, known=known, places=places, scalars=scalars)

    def drop_media(self) -> None:
        """Drops images and functions that draw them."""
        content = self._content
        self._content = dataclasses.replace(content, images={}) if isinstance(content, Point) else dataclasses.replace(content, media=None)

    @property
    def is_ready(self) -> bool:
        """Whether `read` does not have to wait for the device."""
        content = self._content
        return isinstance(content, Point) or content.is_ready

    def read(self) -> Point:
        """Returns the point. The first call waits for the device and draws images."""
        content = self._content
        if isinstance(content, Point):
            return content
        values, images = content.numbers(), Media({}, {})
        if content.late is not None:
            values |= content.late()
        if content.media is not None:
            images = content.media()
        point = Point(self.step, self.seconds, dict(_numbers(values | dict(images.numbers))), images.images)
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
        known = text_of_points([Point(self.step, self.seconds, dict(_numbers(content.known)))])
        places = [[name, place.begin, list(place.shape)] for name, place in content.places.items()]
        return {"known": known, "places": json.dumps(places), "vector": content.vector, "scalars": dict(content.scalars)}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Self:
        """Returns the reading from the dict of `saved`."""
        (point,) = points_of_text(saved["known"])
        places = {name: Place(begin, tuple(shape)) for name, begin, shape in json.loads(saved["places"])}
        return cls(point.step, point.seconds, point.values, vector=saved["vector"], places=places, scalars=saved["scalars"])


def state_of(readings: Iterable[Reading], *, numbers_only: bool) -> dict[str, Any]:
    """Returns the state of readings for a checkpoint, without duplicates. With `numbers_only` it contains no arrays, which may span processes."""
    saved = [_text_of(reading.read_numbers()) if numbers_only and not reading.is_read else reading.saved() for reading in dict.fromkeys(readings)]
    return {
        "unsent": f"[{', '.join(entry for entry in saved if isinstance(entry, str))}]",
        "unread": [entry for entry in saved if not isinstance(entry, str)],
    }


def readings_of_state(state: Mapping[str, Any]) -> list[Reading]:
    """Returns the readings from the dict of `state_of`, sorted by step."""
    readings = [*map(Reading.of_point, points_of_text(state["unsent"])), *map(Reading.of_saved, state["unread"])]
    return sorted(readings, key=lambda reading: (reading.step, reading.seconds))


def _numbers(values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yields numbers, and each entry of one-dimensional arrays. Other values are left out."""
    for name, value in values.items():
        array = np.asarray(value) if value is not None else np.zeros((0, 0))
        if array.dtype != bool and not np.issubdtype(array.dtype, np.number) and array.dtype.name != "bfloat16":
            continue
        if array.ndim == 0:
            yield name, float(array)
        elif array.ndim == 1:
            yield from ((f"{name}/{index}", float(entry)) for index, entry in enumerate(array))


def reading_of_logs(
    step: int,
    seconds: float,
    logs: Logs,
    *,
    ends: bool,
    step_values: Any,
    has_norm: bool,
    extra: Mapping[str, Any],
    scalars: Mapping[str, Any],
    sown: Mapping[str, Any],
) -> Reading:
    """Returns a reading of the values logged at a step.

    If `ends`, it includes metrics that are computed on the host. `step_values` are those of the step alone, `None` if an earlier process ran it. `extra` are
    additional values on the host; `scalars` are additional numbers on the device.
    """
    source = logs.source
    pictured = {key: kind for key, kind in logs.kinds.items() if kind.summary is not None and key in logs}
    at_hand = logs.at_hand
    known = {key: value for key, value in at_hand.items() if key not in pictured}
    late = () if source is None else tuple(key for key in source.late if key not in at_hand)
    places: dict[str, Place] = {}
    if source is not None:
        places |= {key: place for key, place in source.places.items() if place is not None and key in logs and key not in at_hand and key not in pictured}
    if step_values is not None:
        places |= {"step/loss": Place(STEP_LOSS)} | ({"step/gradients_norm": Place(GRADIENTS_NORM)} if has_norm else {})
        source = step_values
    numbers = {tag: value for tag, value in sown.items() if not isinstance(value, ImageSummary | FigureSummary) and not hasattr(value, "values")}
    numbers = {tag: value for tag, value in numbers.items() if np.ndim(value) == 0}
    media = {tag: value for tag, value in sown.items() if isinstance(value, ImageSummary | FigureSummary)}
    shown = {key: kind for key, kind in pictured.items() if ends or key not in late}
    plain = tuple(key for key in late if key not in pictured) if ends else ()
    read = logs.deferred(late=ends)

    def compute() -> Mapping[str, Any]:
        found = read()
        return {key: found[key] for key in plain if key in found}

    def draw() -> Media:
        found = read() if shown else {}
        return _drawn_media(step, {key: value for key, value in found.items() if key in shown}, shown, media)

    return Reading(
        step,
        seconds,
        {**known, **extra},
        vector=None if source is None else source.vector,
        places=places,
        scalars={**scalars, **numbers},
        late=compute if plain else None,
        media=draw if shown or media else None,
    )


def _drawn_media(step: int, values: Mapping[str, Any], kinds: Mapping[str, Kind], media: Mapping[str, Any]) -> Media:
    """Returns the numbers and PNG files that TensorBoard's summaries of metrics and sown values contain."""
    numbers: dict[str, float] = {}
    images: dict[str, bytes] = {}

    def write(group: str, step: int, summary: Any, seconds: float) -> None:
        for value in summary.value:
            if value.HasField("image"):
                images[value.tag] = value.image.encoded_image_string
            elif value.HasField("simple_value"):
                numbers[value.tag] = value.simple_value

    write_logged(write, "", step, values, kinds, 0.0)
    write_sown(write, "", step, media, 0.0)
    return Media(numbers, images)
