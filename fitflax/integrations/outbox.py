"""`Outbox`: the queue of points for a tracker, and the thread that sends them. `RunStart` begins or resumes a run in the tracker.

The training thread only appends to a deque. The sending thread reads points from the device, sends them every few seconds in one request, and keeps those
that could not be sent. An outbox and its tracker belong to one run, so an abandoned thread that is still in a request cannot change the next run. There are
no locks that an interrupt could leave locked; see `fitflax.background`.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fitflax.background import Background
from fitflax.errors import FitflaxError
from fitflax.integrations.tracker_base import Point, Reading, Tracker

# Seconds between two attempts while the tracker cannot be reached, with exponential backoff.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
# The number of points in a request, and the maximum numbers of waiting points, of those with images, and of unread ones, which slow down checkpoints.
_BATCH = 100
_CAPACITY = 10_000
_CAPACITY_OF_MEDIA = 100
_CAPACITY_OF_UNREAD = 200
# How many consecutive points a tracker may reject, plus one for each earlier failure, until that counts as a failure of the tracker.
_MAX_REJECTIONS = 3
_NICENESS = 10
# Settings that may change when a run is resumed.
_NOT_COMPARED = ("epochs", "log_every")


@dataclasses.dataclass(frozen=True)
class RunStart:
    """Everything that the sending thread needs to begin a run."""

    name: str  # The run's id in fitflax.
    run_id: str | None = None  # The tracker's id of the run, if known.
    config: Mapping[str, float | str | bool] = dataclasses.field(default_factory=dict)
    settings_before: str | None = None  # The `settings` that were last logged.
    changed_step: int = 0  # The step from which `config` applies, if it differs from those.

    @property
    def settings(self) -> str:
        """The hyperparameters that distinguish runs, as text."""
        return json.dumps({name: value for name, value in self.config.items() if name not in _NOT_COMPARED}, sort_keys=True)

    @property
    def has_changed(self) -> bool:
        """Whether the settings differ from those that were last logged."""
        return self.settings_before is not None and self.settings_before != self.settings

    def begin(self, tracker: Tracker, warn_once: Callable[[str, str], None]) -> tuple[str, int | None]:
        """Begins or resumes the run in the tracker, or begins a new one if settings have changed. Called in the sending thread.

        Returns:
            The tracker's id of the run, and the step up to which points are in the old run; `None` if there is no old run.
        """
        commit = _git_commit()
        config: dict[str, Any] = {**self.config, **({} if commit is None else {"git_commit": commit})}
        before, now = self.settings_before, self.settings
        # The name depends only on the run and its settings, so that a process without the id finds the run. A run that was killed before its first checkpoint
        # begins again as the same run, and has the same values.
        run_id = tracker.start(f"{self.name}-{_digest(before or now)}", self.run_id, config)
        if self.run_id not in (None, run_id):
            warn_once(
                "run",
                f"This run was logged to {tracker.title} as {self.run_id}. It continues as {run_id}: the active run, or a new one if the old run was deleted.",
            )
        if not self.has_changed or tracker.is_given or (tracker.last_step("loss") or 0) <= self.changed_step:
            return run_id, None
        tracker.finish("interrupted", {}, None)
        config |= {"resumed_from": run_id, "resumed_step": self.changed_step}
        return tracker.start(f"{self.name}-{_digest(now)}-{self.changed_step}", None, config), self.changed_step


class Ending(NamedTuple):
    """How a run ended: the arguments of `Tracker.finish`."""

    status: str
    summary: Mapping[str, float | str]
    artifact: tuple[str, Path | str] | None = None


class Outbox:
    """Sends the points of one run to a tracker that no other outbox uses.

    `resumed` tells whether the tracker may already have some of the points; `interval` is the time between two requests, in seconds. Beyond `capacity` waiting
    points, the oldest are dropped and counted in `num_lost`.
    """

    def __init__(self, tracker: Tracker, *, resumed: bool, interval: float, capacity: int = _CAPACITY) -> None:
        self.tracker = tracker
        self.run_id: str | None = None
        self.num_lost = 0
        self._start: RunStart | None = None
        self._resumed = resumed
        self._interval = interval
        self._capacity = capacity
        self._waiting: collections.deque[Reading] = collections.deque()
        # Readings that the tracker may still lose if this process is killed, and the time at which they were sent.
        self._unsettled: collections.deque[tuple[float, Reading]] = collections.deque()
        # The readings of the first batch that were accepted, if others were rejected.
        self._accepted: set[Reading] = set()
        # The step up to which another run of the tracker has the points.
        self._old_run_step = -1
        # Waiting readings that may not have been read; only the training thread uses this.
        self._unread: collections.deque[Reading] = collections.deque()
        self._last: dict[str, int | None] = {}
        self._thread = Background("fitflax-tracker", on_error=self._record_failure, niceness=_NICENESS)
        self._wake_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._next_time = 0.0
        self._num_failures = 0
        self._warnings: collections.deque[str] = collections.deque()
        self._ending: Ending | None = None
        self._warned: set[str] = set()  # The kinds of warnings that were queued.
        self._has_ended = self._has_tried_to_end = self._is_abandoned = False

    # -- in the training thread --

    def begin(self, start: RunStart) -> None:
        """Begins the run in the thread. Call it before `put`."""
        self._start = start
        self._submit()

    def put(self, reading: Reading) -> None:
        """Adds a point to send, without waiting."""
        if len(self._waiting) >= 2 * self._capacity:  # The thread is stuck in a request; otherwise it drops the oldest itself.
            self.num_lost += 1
            return
        if reading.has_media and sum(one.has_media for one in list(self._waiting)) >= _CAPACITY_OF_MEDIA:
            reading.drop_media()
        self._unread.append(reading)
        while self._unread and self._unread[0].is_read:
            self._unread.popleft()
        if len(self._unread) > _CAPACITY_OF_UNREAD and self._unread[0].is_ready:  # The thread is in a slow request.
            self._unread.popleft().keep_numbers()
        self._waiting.append(reading)
        self._submit()

    def _submit(self) -> None:
        if not self._thread.waiting:
            self._thread.submit(self._work)

    @property
    def unsent(self) -> list[Reading]:
        """The readings that the tracker may not have yet, sorted by step. A reading may be listed twice for an instant."""
        settled = time.monotonic() - self.tracker.settle_seconds
        waiting = list(self._waiting)  # Copied first, so that a reading that the thread moves meanwhile is in both lists, not in neither.
        return [*(reading for sent, reading in list(self._unsettled) if sent > settled), *waiting]

    def warn_once(self, kind: str, message: str) -> None:
        """Queues a warning for the training thread, unless it has queued one of this kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._warnings.append(message)

    def take_warnings(self) -> list[str]:
        """Returns the queued warnings, and clears them."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def end(self, ending: Ending, *, seconds: float) -> bool:
        """Sends the remaining points, ends the run in the tracker, and returns whether that succeeded in this time.

        If the tracker cannot be reached, there is only one more attempt.
        """
        self._ending = ending
        deadline = time.monotonic() + seconds
        self._wake_up.put(None)
        self._thread.submit(self._work)
        try:
            self._thread.wait_until(lambda: self._has_ended or self._thread.is_idle or time.monotonic() > deadline)
        finally:
            self.abandon()
        return self._has_ended

    def abandon(self) -> None:
        """Ends the thread without sending waiting points."""
        self._is_abandoned = True
        self._wake_up.put(None)
        self._thread.submit(self._abandon_tracker)
        self._thread.end(wait=False)

    # -- in the sending thread --

    def _work(self) -> None:
        while not (self._is_abandoned or self._has_ended or self._has_tried_to_end):
            ending = self._ending  # Read first: all points were put before it was set.
            try:
                self._read_ready()
                if not self._waiting and ending is None and self.run_id is not None:
                    return
                pause = self._next_time - time.monotonic()
                if pause > 0 and ending is None:
                    with contextlib.suppress(queue.Empty):
                        self._wake_up.get(timeout=pause)
                    continue
                self._send(ending)
            except Exception as error:  # noqa: BLE001 (a tracker's error never ends a run; the user is warned)
                self._record_failure(error)
                self._has_tried_to_end = ending is not None
            else:
                self._num_failures = 0
                self._next_time = time.monotonic() + self._interval

    def _abandon_tracker(self) -> None:
        if not self._has_ended and self.run_id is not None:
            with contextlib.suppress(Exception):
                self.tracker.abandon()

    def _read_ready(self) -> None:
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.num_lost += 1
        for reading in itertools.takewhile(lambda reading: reading.is_ready, list(self._waiting)):
            self._read(reading)

    def _read(self, reading: Reading) -> Point:
        """Returns a point without the values that cannot be drawn or computed. The first failure is a warning."""
        try:
            return reading.read()
        except Exception as error:  # noqa: BLE001 (from a user's function that draws; the user is warned)
            self.warn_once(
                "media",
                f"{self.tracker.title} does not receive the images of step {reading.step}: {str(error).rstrip('.')}. Later images that fail are left out, too.",
            )
        reading.drop_media()
        try:
            return reading.read()
        except Exception:  # noqa: BLE001 (from a metric's function, which also fails for History)
            reading.keep_numbers()
            return reading.read()

    def _send(self, ending: Ending | None) -> None:
        if self.run_id is None:
            assert self._start is not None
            self.run_id, old_run_step = self._start.begin(self.tracker, self.warn_once)
            self._old_run_step = -1 if old_run_step is None else old_run_step
        while self._waiting and not self._is_abandoned:
            batch = list(itertools.islice(list(self._waiting), _BATCH))
            new = [reading for reading in batch if reading.step > self._old_run_step and reading not in self._accepted]
            points = _merged(self._without_logged(self._read(reading)) for reading in new)
            points = [point for point in points if not point.is_empty]
            if points:
                self._log(points, batch)
            # In this order, so that a reading is in both queues for an instant, which is harmless, and never in neither.
            self._unsettled.extend((time.monotonic(), reading) for reading in batch if reading.step > self._old_run_step)
            for _ in batch:
                self._waiting.popleft()
            self._accepted.clear()
            self._drop_settled()
        if ending is not None and not self._is_abandoned:
            self.tracker.finish(ending.status, ending.summary, ending.artifact)
            self._has_ended = True

    def _log(self, points: Sequence[Point], batch: Sequence[Reading]) -> None:
        """Logs points. If the tracker rejects some and accepts others, the rejected ones are left out, with one warning."""
        try:
            self.tracker.log(points)
        except Exception as failure:
            if _is_unreachable(failure):
                raise
            first = failure
        else:
            return
        rejected: list[tuple[Point, Exception]] = []
        has_accepted = False
        for point in points:
            if self._is_abandoned:
                raise first
            error = self._log_one(point)
            if error is None:
                has_accepted = True
                self._accepted |= {reading for reading in batch if reading.step == point.step}
                continue
            rejected.append((point, error))
            if not has_accepted and len(rejected) >= _MAX_REJECTIONS + self._num_failures:
                raise first
        if not has_accepted:  # Perhaps the tracker rejects everything at the moment, so try again later.
            raise first
        if rejected:
            point, error = rejected[0]
            self.warn_once(
                "rejection",
                f"{self.tracker.title} rejected the values of step {point.step}: {type(error).__name__}: {str(error).rstrip('.')}. "
                "They are left out, and so are later values that it rejects.",
            )

    def _log_one(self, point: Point) -> Exception | None:
        """Logs a point, without its images if those are rejected. Returns the error if the point is rejected."""
        rejection: Exception | None = None
        for part in (point, dataclasses.replace(point, images={})) if point.images and point.values else (point,):
            try:
                self.tracker.log([part])
            except Exception as error:
                if _is_unreachable(error):
                    raise
                rejection = error
            else:
                if rejection is not None:
                    self.warn_once(
                        "media",
                        f"{self.tracker.title} rejected the images of step {point.step}: {str(rejection).rstrip('.')}. They are left out, "
                        "and so are later images that it rejects.",
                    )
                return None
        return rejection

    def _without_logged(self, point: Point) -> Point:
        """Drops values that the tracker has. A resumed run repeats the steps after its checkpoint, with the same values."""
        if not self._resumed and not self.tracker.is_continued:
            return point
        for name in (*point.values, *point.images):
            if name not in self._last:
                self._last[name] = self.tracker.last_step(name)
        return point.without(name for name, last in self._last.items() if last is not None and point.step <= last)

    def _drop_settled(self) -> None:
        settled = time.monotonic() - self.tracker.settle_seconds
        while self._unsettled and (self._unsettled[0][0] <= settled or len(self._unsettled) > self._capacity):
            self._unsettled.popleft()

    def _record_failure(self, error: BaseException) -> None:
        self._num_failures += 1
        self._next_time = time.monotonic() + min(max(self._interval, _SHORTEST_PAUSE) * 2.0 ** min(self._num_failures - 1, 10), _LONGEST_PAUSE)
        what = f"cannot be reached: {error}" if _is_unreachable(error) else f"failed: {type(error).__name__}: {error}"
        self.warn_once(
            "failure",
            f"{self.tracker.title} {what.rstrip('.')}. Training continues. Up to {self._capacity} points are kept and sent when the tracker is available "
            "again.",
        )


def _is_unreachable(error: BaseException) -> bool:
    """Returns whether an error means that the tracker cannot be reached, not that it rejects the points."""
    return isinstance(error, FitflaxError | OSError)


def _merged(points: Iterable[Point]) -> list[Point]:
    """Merges points of the same step. A run that ends inside an epoch logs its last step twice."""
    merged: list[Point] = []
    for point in points:
        if merged and merged[-1].step == point.step:
            last = merged[-1]
            merged[-1] = dataclasses.replace(last, values={**last.values, **point.values}, images={**last.images, **point.images})
        else:
            merged.append(point)
    return merged


def _digest(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()[:6]


def _git_commit() -> str | None:
    """Returns the commit of the script's git repository, or of the current directory's; `None` if there is no repository or no git."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for directory in ([Path(script).resolve().parent] if script else []) + [Path.cwd()]:
        try:
            result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=directory, capture_output=True, timeout=10, check=False, text=True)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if result.returncode == 0 and result.stdout.strip():
            return result.stdout.strip()
    return None
