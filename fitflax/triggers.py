"""Triggers say *when* something happens, as values that can be combined, compared and saved.

A trigger is a pure function of a `Moment` and the time when it last fired. The `Schedule` that runs it remembers that time, so callbacks can share triggers.
"""

import abc
import dataclasses
import math
from typing import Any

from typing_extensions import override

from fitflax.errors import ConfigError, integer_of, is_integer


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """A point between two steps of a run, as triggers see it.

    Attributes:
        step: The number of finished steps since the beginning of the run.
        start_step: The number of finished steps when this process started; larger than 0 after a resume.
        epochs_done: The number of finished epochs, including one that ends here.
        epoch_ends: Whether an epoch ends at this step.
        seconds: Process 0's clock in seconds, from any origin.
    """

    step: int
    start_step: int = 0
    epochs_done: int = 0
    epoch_ends: bool = False
    seconds: float = 0.0


class Trigger(abc.ABC):
    """Determines when something happens; created by `every`, `at` and `first`, combined with `|`.

    >>> isinstance(every(steps=10) | at(1), Trigger)
    True
    """

    @abc.abstractmethod
    def parts(self) -> "tuple[Trigger, ...]":
        """Returns the simple triggers that this one consists of."""

    @abc.abstractmethod
    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        """Returns whether this trigger fires; `last_seconds` is the time when it last fired, or when its schedule began."""

    def next_step(self, step: int, start_step: int) -> int | None:
        """Returns the first step after `step` at which this trigger must be checked; `None` if only the end of an epoch or time matters."""
        return step + 1

    def next_seconds(self, last_seconds: float) -> float:
        """Returns the time at which this trigger must be checked; infinite if time does not matter."""
        return last_seconds

    def __or__(self, other: "Trigger") -> "Trigger":
        if not isinstance(other, Trigger):
            return NotImplemented
        return _AnyOf(self.parts() + other.parts())


@dataclasses.dataclass(frozen=True, repr=False)
class _Simple(Trigger):
    """A trigger of one part; `text` is the code that creates it."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def parts(self) -> tuple[Trigger, ...]:
        return (self,)

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        return None

    @override
    def next_seconds(self, last_seconds: float) -> float:
        return math.inf


@dataclasses.dataclass(frozen=True, repr=False)
class _EverySteps(_Simple):
    steps: int
    offset: int

    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        return moment.step >= self.offset and (moment.step - self.offset) % self.steps == 0

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        return max(self.offset, step + 1 + (self.offset - step - 1) % self.steps)


@dataclasses.dataclass(frozen=True, repr=False)
class _EveryEpochs(_Simple):
    epochs: int

    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        return moment.epoch_ends and moment.epochs_done % self.epochs == 0


@dataclasses.dataclass(frozen=True, repr=False)
class _EverySeconds(_Simple):
    seconds: float

    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        return moment.seconds - last_seconds >= self.seconds

    @override
    def next_seconds(self, last_seconds: float) -> float:
        return last_seconds + self.seconds


@dataclasses.dataclass(frozen=True, repr=False)
class _At(_Simple):
    steps: tuple[int, ...]
    of_process: bool

    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        return moment.step - (moment.start_step if self.of_process else 0) in self.steps

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        begin = start_step if self.of_process else 0
        return min((begin + one for one in self.steps if begin + one > step), default=None)


@dataclasses.dataclass(frozen=True, repr=False)
class _First(_Simple):
    steps: int
    of_process: bool

    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        return self.next_step(moment.step - 1, moment.start_step) == moment.step

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        begin = start_step if self.of_process else 0
        return max(step, begin) + 1 if step < begin + self.steps else None


@dataclasses.dataclass(frozen=True, repr=False)
class _AnyOf(Trigger):
    members: tuple[Trigger, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.members))

    def parts(self) -> tuple[Trigger, ...]:
        return self.members

    def is_due(self, moment: Moment, last_seconds: float) -> bool:
        return any(member.is_due(moment, last_seconds) for member in self.members)

    @override
    def next_step(self, step: int, start_step: int) -> int | None:
        return min((one for member in self.members if (one := member.next_step(step, start_step)) is not None), default=None)


def every(*, steps: int | None = None, epochs: int | None = None, seconds: float | None = None, offset: int | None = None) -> Trigger:
    """Returns a trigger that fires at regular intervals of steps, epochs or time.

    Args:
        steps: The interval in steps: fires when the step is a multiple of it.
        epochs: The interval in epochs: fires at the end of every `epochs` epochs.
        seconds: The least time between two firings, in seconds; checked between steps.
        offset: With `steps=n`, the first step: fires at `offset`, `offset + n`, `offset + 2n`, ...

    Raises:
        ConfigError: Not exactly one of `steps`, `epochs` and `seconds` is given, it is not positive, or `offset` is given without `steps`.

    >>> schedule = Schedule(every(steps=3, offset=1))
    >>> [step for step in range(1, 9) if schedule.due(Moment(step))]
    [1, 4, 7]
    """
    intervals = {name: value for name, value in (("steps", steps), ("epochs", epochs), ("seconds", seconds)) if value is not None}
    if len(intervals) != 1:
        raise ConfigError(f"every() takes exactly one of steps, epochs and seconds. Received: {intervals or 'none of them'}. Combine triggers with |.")
    if offset is not None and (steps is None or not is_integer(offset, 0)):
        raise ConfigError(f"every(offset=...) must be an integer of at least 0, and needs steps=. Received: offset={offset!r} with {intervals}.")
    if steps is not None:
        steps = integer_of("every(steps=...)", steps, at_least=1)
        text = f"every(steps={steps})" if offset is None else f"every(steps={steps}, offset={offset})"
        return _EverySteps(text, steps, int(steps if offset is None else offset))
    if epochs is not None:
        epochs = integer_of("every(epochs=...)", epochs, at_least=1)
        return _EveryEpochs(f"every(epochs={epochs})", epochs)
    assert seconds is not None
    if not (is_integer(seconds) or isinstance(seconds, float)) or not seconds > 0:
        raise ConfigError(f"every(seconds=...) must be a positive number. Received: {seconds!r}.")
    return _EverySeconds(f"every(seconds={seconds:g})", float(seconds))


def at(*steps: int, of_process: bool = False) -> Trigger:
    """Returns a trigger that fires at the given steps.

    Args:
        *steps: Steps, counted from 1.
        of_process: Whether to count from the step at which this process started, as in `first`, instead of from the beginning of the run.

    Raises:
        ConfigError: There is no step, or a step is not a positive integer.

    >>> schedule = Schedule(at(1, 17))
    >>> [step for step in range(1, 20) if schedule.due(Moment(step))]
    [1, 17]
    """
    if not steps:
        raise ConfigError("at() takes at least one step.")
    steps = tuple(integer_of("at(...)", step, at_least=1) for step in steps)
    return _At(f"at({', '.join(map(str, steps))}{', of_process=True' if of_process else ''})", steps, of_process)


def first(steps: int, *, of_process: bool = False) -> Trigger:
    """Returns a trigger that fires at each of the first `steps` steps.

    Args:
        steps: The number of steps.
        of_process: Whether to count from the step at which this process started, which is later after a resume, instead of from the beginning of the run.

    Raises:
        ConfigError: `steps` is not a positive integer.

    >>> schedule = Schedule(first(2, of_process=True))
    >>> [step for step in range(101, 106) if schedule.due(Moment(step, start_step=100))]
    [101, 102]
    """
    steps = integer_of("first(...)", steps, at_least=1)
    return _First(f"first({steps}, of_process=True)" if of_process else f"first({steps})", steps, of_process)


class Schedule:
    """Runs one trigger over time and remembers when each of its parts last fired.

    Every part is checked at every moment, so that a part that measures time stays up to date when another part fires.

    Args:
        trigger: The trigger to run; `None` never fires.
        seconds: The time at the beginning, from which time intervals are counted.

    >>> schedule = Schedule(every(seconds=7), seconds=0.0)
    >>> [t for t in (10, 15, 19, 25, 27) if schedule.due(Moment(1, seconds=t))]
    [10, 19, 27]
    """

    def __init__(self, trigger: Trigger | None, seconds: float = 0.0) -> None:
        self._trigger = trigger
        self._parts = () if trigger is None else trigger.parts()
        self._last = [seconds] * len(self._parts)

    @property
    def measures_time(self) -> bool:
        """Whether any part measures time, so that the schedule has state worth saving."""
        return any(isinstance(part, _EverySeconds) for part in self._parts)

    def due(self, moment: Moment) -> bool:
        """Returns whether the trigger fires at `moment`, and remembers it."""
        fired = False
        for index, part in enumerate(self._parts):
            if part.is_due(moment, self._last[index]):
                self._last[index] = moment.seconds
                fired = True
        return fired

    def next_step(self, step: int, start_step: int) -> int | None:
        """Returns the first step after `step` at which the trigger may fire because of its step; `None` if there is none."""
        return None if self._trigger is None else self._trigger.next_step(step, start_step)

    @property
    def next_seconds(self) -> float:
        """The time at which the trigger may fire because of time; infinite if it never does."""
        return min((part.next_seconds(last) for part, last in zip(self._parts, self._last, strict=True)), default=math.inf)

    def state_dict(self, seconds: float) -> dict[str, Any]:
        """Returns the time since each part last fired, as of `seconds`."""
        return {"since": [seconds - last for last in self._last]}

    def load_state_dict(self, state: dict[str, Any], seconds: float) -> None:
        """Restores a `state_dict`, with `seconds` as the current time. Ignores the state of a trigger with another number of parts."""
        since = list(state.get("since", ()))
        if len(since) == len(self._last):
            self._last = [seconds - float(value) for value in since]
