"""What several processes of a run must have alike as it begins, and decide alike, at the same step: whether it is to stop, and what time it is.

A step is made by all of them or by none, so that nothing that differs between them (a clock, a callback of one alone) may decide by itself. They agree
without a word where they can, and seldom where they must:

* At the end of an epoch each tells the others whether it was asked to stop; process 0 tells the time.
* In between, about once a second, there is a step to which process 0 has posted, long before anybody can have come so far, what holds from there on: the
  time, whether somebody asked to stop, and which step will be the next of this kind.
* A process that is asked to stop asks the others at once. If all were asked to at the same step, as by a metric, which is the same in all, they stop there,
  as a single process would; otherwise at the next step of the kind above.
"""

import dataclasses
import itertools
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from typing_extensions import override

from fitflax.data.batch import fingerprint
from fitflax.errors import ReplicaError
from fitflax.parallel.board import Board
from fitflax.parallel.processes import exchange
from fitflax.state import TrainState

__all__ = ["Agreement", "Together", "check_alike", "summary_of"]

# How often process 0 is listened to; for each 500 processes a second more, which all ask the one coordinator.
_INTERVAL_SECONDS = 1.0
_PROCESSES_A_SECOND = 500
# How long a process that is asked to stop waits for others that may be asked at the same step: for as long as they may lag behind it.
_PATIENCE_SECONDS = 1.5
_LOOK_SECONDS = 0.02
_YES, _NO = b"yes", b"no"
# Elements of arrays by which processes see that they begin alike.
_SMALL_SIZE = 2**12

# Of runs, the same in all processes; and up to which process 0 has removed their messages.
_numbers = itertools.count()
_removed = 0


class Agreement:
    """Decides for a run whether it is to stop, and what time it is; by itself, for a process that is alone.

    Args:
        clock: Returns seconds.
        is_asked: Returns whether this process was asked to stop.

    >>> agreement = Agreement(lambda: 5.0, lambda: True)
    >>> agreement.seconds, agreement.stops(1)
    (5.0, True)
    """

    def __init__(self, clock: Callable[[], float], is_asked: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self.is_asked = is_asked

    @property
    def seconds(self) -> float:
        """The time by which triggers go, the same in all processes."""
        return self._clock()

    def stops(self, step: int) -> bool:
        """Returns whether the run is to stop after a step."""
        return self.is_asked()

    def begin(self, step: int, first_step: int) -> None:
        """Begins after a step; calls of several steps end at multiples of their size from `first_step` on."""

    def next_step(self) -> int | None:
        """Returns the next step at which `listen` is to be called; `None` if it need not be."""
        return None

    def listen(self, step: int) -> None:
        """Takes what was posted for a step."""

    def meet(self) -> None:
        """Tells each other what there is to tell; all processes call it at the same point."""


class Together(Agreement):
    """One of several processes that make the same steps.

    Args:
        clock: As of `Agreement`; that of process 0 counts.
        is_asked: As of `Agreement`.
        reason: Returns why this process was asked to stop.
        stop: Called with the reason where another one was.
        ahead: By how many steps one process may be ahead of another.
        multiple: Steps of a call: what is agreed on holds between two calls.
    """

    def __init__(
        self, clock: Callable[[], float], is_asked: Callable[[], bool], *, reason: Callable[[], str], stop: Callable[[str], None], ahead: int, multiple: int
    ) -> None:
        super().__init__(clock, is_asked)
        self._reason = reason
        self._stop = stop
        self._lead = (ahead // multiple + 1) * multiple
        self._multiple = multiple
        self._index, self._count = jax.process_index(), jax.process_count()
        self._interval = max(_INTERVAL_SECONDS, self._count / _PROCESSES_A_SECOND)
        self._number = next(_numbers)
        self._board = Board(f"runs/{self._number}")
        self._has_begun = False
        self._is_stopping = self._was_refused = False
        self._seconds = 0.0
        # The next step that something is posted for. Process 0: what, for which steps before, and where and when it listened last.
        self._next = 0
        self._record: dict[str, Any] = {}
        self._posted: list[int] = []
        self._last = (0, 0.0)
        self.meet()

    @property
    @override
    def seconds(self) -> float:
        return self._seconds

    @override
    def begin(self, step: int, first_step: int) -> None:
        if self._has_begun:
            self._number = next(_numbers)
            self._board = Board(f"runs/{self._number}")
        self._has_begun, self._posted, self._was_refused, self._is_stopping = True, [], False, False
        self.meet()
        if self._index == 0:
            global _removed
            for earlier in range(_removed, self._number):  # All have left them.
                Board("runs").remove(str(earlier))
            _removed = max(_removed, self._number)
        self._next, self._last = step + self._lead + self._multiple - (step - first_step) % self._multiple, (step, self._clock())
        if self._index == 0:
            self._post(self._next, self._next + self._lead)

    @override
    def next_step(self) -> int | None:
        return self._next

    @override
    def listen(self, step: int) -> None:
        if step < self._next:
            return
        record = json.loads(self._board.read(f"steps/{self._next}")) if self._index else self._record
        self._take(record["seconds"], record["stop"])
        self._next = record["next"]
        if self._index == 0:
            (begin, since), now = self._last, self._clock()
            steps = int(min(self._interval * (step - begin) / max(now - since, 1e-9), 1e9)) // self._multiple * self._multiple
            self._last = step, now
            self._post(self._next, self._next + max(steps, self._lead))

    def _post(self, step: int, following: int) -> None:
        """Posts what holds from a step on, and which one will be the next of its kind."""
        asked = self._board.read_all("asked")
        reason = asked[min(asked)].decode() if asked else None
        self._record = {"seconds": self._clock(), "stop": reason, "next": following}
        self._board.post(f"steps/{step}", json.dumps(self._record).encode())
        self._posted.append(step)
        if len(self._posted) > 3:  # All have come further than that.
            self._board.remove(f"steps/{self._posted.pop(0)}")

    @override
    def meet(self) -> None:
        found = exchange([self._clock(), self._reason() if self.is_asked() else None], "the beginning of a run or the end of an epoch")
        self._take(found[0][0], next((reason for _, reason in found if reason is not None), None))

    def _take(self, seconds: float, reason: str | None) -> None:
        self._seconds = max(self._seconds, seconds)
        if reason is not None:
            self._is_stopping = True
            self._stop(reason)

    @override
    def stops(self, step: int) -> bool:
        if not self._is_stopping and not self._was_refused and self.is_asked():
            if self._are_all_asked(step):
                self._is_stopping = True
            else:
                self._was_refused = True
                self._board.post(f"asked/{self._index}", self._reason().encode())
        return self._is_stopping

    def _are_all_asked(self, step: int) -> bool:
        """Returns whether all processes are asked to stop after this step; whoever asks this gets the same answer."""
        self._board.post(f"votes/{step}/{self._index}", _YES)
        end = time.monotonic() + _PATIENCE_SECONDS
        while len(self._board.read_all(f"votes/{step}")) < self._count:
            if time.monotonic() > end:
                return self._board.settle(f"verdicts/{step}", _NO) == _YES
            time.sleep(_LOOK_SECONDS)
        return self._board.settle(f"verdicts/{step}", _YES) == _YES


def summary_of(state: TrainState) -> str:
    """Returns what tells a state from others: its structure, shapes and small arrays, as a number."""
    leaves = jax.tree.leaves(dataclasses.replace(state, key=()))  # type: ignore[arg-type]
    whole = [leaf.addressable_data(0) for leaf in leaves if leaf.is_fully_replicated and leaf.size <= _SMALL_SIZE]
    shapes = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    return f"{zlib.crc32(f'{len(leaves)} {shapes}'.encode()):08x} {fingerprint(whole):08x}"


def check_alike(what: str, here: Mapping[str, Any]) -> None:
    """Checks that all processes have the same; all of them must call it.

    Args:
        what: What of a process it is, for the error: "is set", "begins with".
        here: What this process has, by name.

    Raises:
        ReplicaError: They have not.
    """
    every = exchange(dict(here), "the beginning of a run")
    faults = [
        f"{name} is {every[0].get(name)} in process 0 and {other.get(name)} in process {process}"
        for process, other in enumerate(every)
        for name in sorted(every[0].keys() | other.keys())
        if other.get(name) != every[0].get(name)
    ]
    if faults:
        raise ReplicaError(f"The processes must do the same, but what each {what} differs: {'; '.join(faults[:5])}. Give all the same, callbacks included.")
