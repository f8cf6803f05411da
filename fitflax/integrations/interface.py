"""`Tracker`: the interface of experiment trackers for `TrackerLogger`."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path

from fitflax.integrations.points import Point

__all__ = ["Tracker"]


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
