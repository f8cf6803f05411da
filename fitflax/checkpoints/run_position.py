"""The position of a run at a checkpoint, and the time it took to get there."""

import dataclasses
from collections.abc import Callable

from fitflax.data import Position
from fitflax.logs import StepValues

__all__ = ["RunPosition", "Timer"]


class Timer:
    """Measures a stretch of training that ends when the device has finished, without compilation and the consumer of checkpoints."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = clock()
        self._end: float | None = None
        self._values: StepValues | None = None
        self.excluded = 0.0

    def pause(self, values: StepValues | None) -> None:
        """Records that the loop yields to the consumer now; `values` may still be computed on the device."""
        self._end, self._values = self._clock(), values

    def stop(self, *, wait: bool = True) -> float:
        """Returns the seconds of the stretch.

        With `wait`, this includes the work that the device still had to do when the loop yielded, but not its idle time.
        """
        if self._values is not None:
            if wait and not self._values.is_ready:
                self._values.wait()
                self._end = self._clock()
            self._values = None
        end = self._clock() if self._end is None else self._end
        return max(end - self._begin - self.excluded, 0.0)


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """The position of a run at a checkpoint. All values are on the host; public ones are described in `Checkpoint`."""

    step: int
    epoch: int
    step_in_epoch: int
    data_position: Position
    n_completed_steps: int
    epoch_ends: bool
    seconds: float  # The time that triggers use, equal in all processes.
    process_start: int  # The step at which this process started.
    used: tuple[int, ...] = ()  # The amount of the current pass that each process has used, if each has its own shard.
    is_last: bool = False
    is_rescue: bool = False  # Whether the run is ending because of a signal or an exception.
    is_repeat: bool = False  # Whether this step already was a checkpoint before it was known to be the last.
