"""The plan of a run and its progress, as plain values that the loop reads and updates."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fitflax.data import Position
from fitflax.loops.evaluation import Evaluation
from fitflax.state import TrainState
from fitflax.steps.kept_values import NOTHING, Keep
from fitflax.triggers import Trigger

__all__ = ["BeforeEpochEnd", "Progress", "RunPlan", "Validation"]


@dataclasses.dataclass
class Progress:
    """Where a run is, counted on the host; what a resume needs of it is saved as JSON."""

    step: int = 0  # Finished updates.
    epoch: int = 0  # Index of the current or next epoch.
    step_in_epoch: int = 0  # Finished updates of the current epoch.
    epoch_is_open: bool = False  # Whether the epoch has begun and not ended.
    epoch_is_over: bool = False  # Whether the open epoch has had all its batches.
    is_pending: bool = False  # Whether the triggers of the last step have not been evaluated yet.
    position: Position = dataclasses.field(default_factory=Position)  # Position in the data after the last finished step.
    used: tuple[int, ...] = ()  # `position.examples` of each process, if each has its own shard.
    first_step: int = 0  # Step at which this run began; its total is counted from it.

    def begin_pass(self, number: int) -> None:
        """Sets the position to the beginning of a pass over the data."""
        self.position, self.used = Position(number), ()

    def as_json(self) -> dict[str, Any]:
        """Returns all values as a dict that can be written as JSON."""
        # For a resume, an epoch without a step has not begun.
        is_open = self.epoch_is_open and self.step_in_epoch > 0
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.used:
            del own["used"]
        return {**own, "position": self.position._asdict(), "epoch_is_open": is_open, "is_pending": self.is_pending and is_open}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Progress":
        """Returns the progress that `as_json` was called on."""
        return cls(**{**saved, "position": Position(**saved["position"]), "used": tuple(saved.get("used", ()))})


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The plan of a run."""

    end_step: int | None = None  # Step after which the run ends; `None` for no limit.
    end_epoch: int | None = None  # Index of the epoch before which the run ends; `None` for no limit.
    steps_per_epoch: int | None = None  # Batches of an epoch; `None` for a pass over the data.
    every: Trigger | None = None  # Trigger for checkpoints, besides the last step.
    # Whether callbacks consume the checkpoints. Then each epoch's end yields one, and a step that has been yielded is yielded again if it turns out to
    # be the last, for callbacks that save only then.
    is_fit: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values that are saved with every checkpoint.
    process_start: int = 0  # Step at which this process began.
    keep: Keep = NOTHING  # What checkpoints contain of their step besides its values.
    steps_per_call: int = 1  # Maximum number of steps of a call.


@dataclasses.dataclass(frozen=True)
class Validation:
    """What is evaluated during training, and when."""

    loops: Sequence[Evaluation] = ()  # One evaluation for each set.
    frequency: int | frozenset[int] | Trigger = 1  # Number of epochs between validations, a set of epochs (counted from 1), or a trigger.

    def at_epoch(self, epoch: int) -> bool:
        """Returns whether to validate at the end of the epoch with this index."""
        if isinstance(self.frequency, Trigger) or not self.loops:
            return False
        return epoch + 1 in self.frequency if isinstance(self.frequency, frozenset) else (epoch + 1) % self.frequency == 0

    @property
    def trigger(self) -> Trigger | None:
        """The trigger, if the frequency is one."""
        return self.frequency if isinstance(self.frequency, Trigger) and self.loops else None


class BeforeEpochEnd(NamedTuple):
    """Values from before the end of an epoch."""

    callbacks: dict[str, Any]  # States of the callbacks.
    state: TrainState | None  # The train state, borrowed, because no step runs meanwhile; `None` if no checkpoint will need it.
