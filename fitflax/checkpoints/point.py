"""Where a run is at a checkpoint, and how long it took to come there."""

import dataclasses
from collections.abc import Callable

from fitflax.data import Position
from fitflax.logs import StepValues

__all__ = ["Point", "Timer"]


class Timer:
    """Measures a stretch of training that ends when the device has finished, leaving out compilation and whoever consumes checkpoints.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = clock()
        self._end: float | None = None
        self._values: StepValues | None = None
        self.excluded = 0.0

    def pause(self, values: StepValues | None) -> None:
        """Notes that the loop hands over to the consumer now, with these values perhaps still to come."""
        self._end, self._values = self._clock(), values

    def stop(self, *, wait: bool = True) -> float:
        """Returns the seconds of the stretch.

        What the device still had to do when the loop handed over counts if somebody waits for it; the time in which it had nothing left does not.
        """
        if self._values is not None:
            if wait and not self._values.is_ready:
                self._values.wait()
                self._end = self._clock()
            self._values = None
        end = self._clock() if self._end is None else self._end
        return max(end - self._begin - self.excluded, 0.0)


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run is at a checkpoint; host values only.

    Attributes:
        step: Finished updates.
        epoch: Index of the epoch, from 0.
        step_in_epoch: Finished updates of that epoch.
        position: The position of the data.
        used: By process, what of the present pass is used, where each has a part of its own.
        n_completed_steps: Updates since the last checkpoint.
        epoch_ends: Whether the epoch ends here.
        seconds: The time by which triggers go, the same in all processes.
        process_start: The step at which this process began.
        is_last: Whether no step follows in this run.
        is_rescue: Whether the run is being left by a signal or an exception.
        is_repeat: Whether this step was a checkpoint already, before it was known to be the last.
    """

    step: int
    epoch: int
    step_in_epoch: int
    position: Position
    n_completed_steps: int
    epoch_ends: bool
    seconds: float
    process_start: int
    used: tuple[int, ...] = ()
    is_last: bool = False
    is_rescue: bool = False
    is_repeat: bool = False
