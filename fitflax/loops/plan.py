"""What a run is to do, and where it is: plain values that the loop reads and keeps up to date."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fitflax.checkpoints.point import Point
from fitflax.data import Position
from fitflax.loops.evaluation import Evaluation
from fitflax.state import TrainState
from fitflax.steps.task import NOTHING, Keep
from fitflax.triggers import Trigger

__all__ = ["BeforeClosing", "Progress", "RunPlan", "Validation"]


@dataclasses.dataclass
class Progress:
    """Where a run is, counted on the host; what of it a resume needs is saved as JSON.

    Attributes:
        step: Finished updates.
        epoch: Index of the present or next epoch.
        step_in_epoch: Finished updates of the present epoch.
        epoch_is_open: Whether the epoch has begun and not ended.
        epoch_is_over: Whether the open epoch has had all its batches.
        is_pending: Whether it is still to be seen what the last step's triggers ask for.
        position: The position of the data after the last finished step.
        used: By process, what `position.examples` is, where each has a part of the data of its own.
        first_step: The step at which this run began, which its total is counted from.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    epoch_is_open: bool = False
    epoch_is_over: bool = False
    is_pending: bool = False
    position: Position = dataclasses.field(default_factory=Position)
    used: tuple[int, ...] = ()
    first_step: int = 0

    def begin_pass(self, number: int) -> None:
        """Notes that nothing is used yet of a pass over the data."""
        self.position, self.used = Position(number), ()

    def point(self, *, n_completed_steps: int, epoch_ends: bool, seconds: float, process_start: int) -> Point:
        """Returns where the run is, as checkpoints have it; arguments as of `Point`."""
        return Point(
            step=self.step,
            epoch=self.epoch,
            step_in_epoch=self.step_in_epoch,
            position=self.position,
            n_completed_steps=n_completed_steps,
            epoch_ends=epoch_ends,
            seconds=seconds,
            process_start=process_start,
            used=self.used,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as a dict that JSON can hold."""
        # An epoch without a step has not begun, as far as a resume is concerned.
        is_open = self.epoch_is_open and self.step_in_epoch > 0
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.used:
            del own["used"]
        return {**own, "position": self.position._asdict(), "epoch_is_open": is_open, "is_pending": self.is_pending and is_open}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Progress":
        """Returns what `as_json` was called on."""
        return cls(**{**saved, "position": Position(**saved["position"]), "used": tuple(saved.get("used", ()))})


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What a run is to do.

    Attributes:
        end_step: The step after which it ends; `None` for no bound.
        end_epoch: The epoch index before which it ends; `None` for no bound.
        steps_per_epoch: Batches of an epoch; `None` for a pass over the data.
        every: When a checkpoint is yielded, besides the last step.
        is_fit: Whether callbacks consume the checkpoints: then there is one at the end of each epoch, and a step that was yielded already is yielded once
            more when it turns out to be the last, for those who save only then.
        info: What is saved with every checkpoint, as JSON.
        process_start: The step at which this process began.
        keep: What of their step checkpoints have besides its values.
        steps_per_call: How many steps a call of the device makes at most.
    """

    end_step: int | None = None
    end_epoch: int | None = None
    steps_per_epoch: int | None = None
    every: Trigger | None = None
    is_fit: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    process_start: int = 0
    keep: Keep = NOTHING
    steps_per_call: int = 1


@dataclasses.dataclass(frozen=True)
class Validation:
    """What is evaluated during training, and when.

    Attributes:
        loops: One for each set.
        frequency: Every so many epochs, at the end of these epochs (counted from 1), or when a trigger fires.
    """

    loops: Sequence[Evaluation] = ()
    frequency: int | frozenset[int] | Trigger = 1

    def at_epoch(self, epoch: int) -> bool:
        """Returns whether the end of the epoch with this index validates."""
        if isinstance(self.frequency, Trigger) or not self.loops:
            return False
        return epoch + 1 in self.frequency if isinstance(self.frequency, frozenset) else (epoch + 1) % self.frequency == 0

    @property
    def trigger(self) -> Trigger | None:
        """The trigger, where the frequency is one."""
        return self.frequency if isinstance(self.frequency, Trigger) and self.loops else None


class BeforeClosing(NamedTuple):
    """What was before the closing of an epoch.

    Attributes:
        callbacks: The callbacks' states.
        state: The train state, borrowed: the run makes no step meanwhile. `None` where nothing will be saved that it is needed for.
    """

    callbacks: dict[str, Any]
    state: TrainState | None
