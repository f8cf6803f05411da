"""Agreement between the processes of a run: settings checked when it begins, and, at the same step, when to stop and what time it is.

All processes run the same steps, so a decision must not depend on anything that differs between them, such as a clock or a callback of one process.
They communicate as rarely as possible:

* At the end of an epoch, each process tells the others whether it was asked to stop, and process 0 tells the time.
* About once a second there is a listening step. Long before any process can reach it, process 0 posts the time, whether any process was asked to
  stop, and the next listening step.
* A process that is asked to stop tells the others immediately. If all of them were asked at the same step, for example by a metric, they stop there,
  as a single process would; otherwise they stop at the next listening step.
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
from fitflax.leaves import listed
from fitflax.parallel.board import Board
from fitflax.parallel.processes import exchange
from fitflax.state import TrainState

__all__ = ["Agreement", "DistributedAgreement", "check_same_in_all_processes", "fingerprint_of"]

# Interval of the listening steps: at least this, and a second for each 500 processes, because all of them read from one coordinator.
_INTERVAL_SECONDS = 1.0
_PROCESSES_A_SECOND = 500
# How long a process that is asked to stop waits for others that may be asked at the same step but lag behind.
_VOTE_SECONDS = 1.5
_POLL_SECONDS = 0.02
_YES, _NO = b"yes", b"no"
# Arrays up to this size are compared when a run begins.
_SMALL_SIZE = 2**12

# Numbers of runs, the same in all processes; messages of runs below `_removed` have been removed.
_run_numbers = itertools.count()
_removed = 0


class Agreement:
    """Decides for a run whether to stop and what time it is. This base class is for a single process.

    `clock` returns seconds, and `is_asked` whether this process was asked to stop.
    """

    def __init__(self, clock: Callable[[], float], is_asked: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self.is_asked = is_asked

    @property
    def seconds(self) -> float:
        """The time that triggers use, the same in all processes."""
        return self._clock()

    def stops(self, step: int) -> bool:
        """Returns whether the run stops after a step."""
        return self.is_asked()

    def begin(self, step: int, first_step: int) -> None:
        """Begins after `step`. Calls of several steps end at multiples of their size, counted from `first_step`."""

    def next_step(self) -> int | None:
        """Returns the next step at which `listen` must be called; `None` if there is none."""
        return None

    def listen(self, step: int) -> None:
        """Applies what was posted for a step."""

    def synchronize(self) -> None:
        """Exchanges stop requests and the time; all processes call it at the same point."""


class DistributedAgreement(Agreement):
    """The agreement of one of several processes that run the same steps, none of which is more than `ahead` steps ahead of another.

    Only the clock of process 0 is used. `reason` returns why this process was asked to stop; `stop` is called with the reason if another one was.
    Decisions apply between two calls of `multiple` steps.
    """

    def __init__(
        self, clock: Callable[[], float], is_asked: Callable[[], bool], *, reason: Callable[[], str], stop: Callable[[str], None], ahead: int, multiple: int
    ) -> None:
        super().__init__(clock, is_asked)
        self._reason, self._stop = reason, stop
        self._lead, self._multiple = (ahead // multiple + 1) * multiple, multiple
        self._index, self._count = jax.process_index(), jax.process_count()
        self._interval = max(_INTERVAL_SECONDS, self._count / _PROCESSES_A_SECOND)
        self._number = next(_run_numbers)
        self._board = Board(f"runs/{self._number}")
        self._has_begun = False
        self._is_stopping = self._was_refused = False
        self._seconds = 0.0
        # The next listening step. In process 0 also: what was posted, for which steps, and the step and time of the last listening step.
        self._next = 0
        self._record: dict[str, Any] = {}
        self._posted: list[int] = []
        self._last = (0, 0.0)
        self.synchronize()

    @property
    @override
    def seconds(self) -> float:
        return self._seconds

    @override
    def begin(self, step: int, first_step: int) -> None:
        if self._has_begun:
            self._number = next(_run_numbers)
            self._board = Board(f"runs/{self._number}")
        self._has_begun, self._posted, self._was_refused, self._is_stopping = True, [], False, False
        self.synchronize()
        if self._index == 0:
            global _removed
            for earlier in range(_removed, self._number):  # All processes have finished these runs.
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
        self._apply(record["seconds"], record["stop"])
        self._next = record["next"]
        if self._index == 0:
            (begin, since), now = self._last, self._clock()
            steps = int(min(self._interval * (step - begin) / max(now - since, 1e-9), 1e9)) // self._multiple * self._multiple
            self._last = step, now
            self._post(self._next, self._next + max(steps, self._lead))

    def _post(self, step: int, following: int) -> None:
        """Posts the decisions for a listening step, and which step is the next one."""
        asked = self._board.read_all("asked")
        reason = asked[min(asked)].decode() if asked else None
        self._record = {"seconds": self._clock(), "stop": reason, "next": following}
        self._board.post(f"steps/{step}", json.dumps(self._record).encode())
        self._posted.append(step)
        if len(self._posted) > 3:  # All processes are past that step.
            self._board.remove(f"steps/{self._posted.pop(0)}")

    @override
    def synchronize(self) -> None:
        found = exchange([self._clock(), self._reason() if self.is_asked() else None], "the beginning of a run or the end of an epoch")
        self._apply(found[0][0], next((reason for _, reason in found if reason is not None), None))

    def _apply(self, seconds: float, reason: str | None) -> None:
        self._seconds = max(self._seconds, seconds)
        if reason is not None:
            self._is_stopping = True
            self._stop(reason)

    @override
    def stops(self, step: int) -> bool:
        if not self._is_stopping and not self._was_refused and self.is_asked():
            if self._all_asked(step):
                self._is_stopping = True
            else:
                self._was_refused = True
                self._board.post(f"asked/{self._index}", self._reason().encode())
        return self._is_stopping

    def _all_asked(self, step: int) -> bool:
        """Returns whether all processes are asked to stop after this step; every process that calls it gets the same answer."""
        self._board.post(f"votes/{step}/{self._index}", _YES)
        end = time.monotonic() + _VOTE_SECONDS
        while len(self._board.read_all(f"votes/{step}")) < self._count:
            if time.monotonic() > end:
                return self._board.settle(f"verdicts/{step}", _NO) == _YES
            time.sleep(_POLL_SECONDS)
        return self._board.settle(f"verdicts/{step}", _YES) == _YES


def fingerprint_of(state: TrainState) -> str:
    """Returns a fingerprint of a state's structure, shapes and small arrays."""
    leaves = jax.tree.leaves(dataclasses.replace(state, key=()))  # type: ignore[arg-type]
    whole = [leaf.addressable_data(0) for leaf in leaves if leaf.is_fully_replicated and leaf.size <= _SMALL_SIZE]
    shapes = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    return f"{zlib.crc32(f'{len(leaves)} {shapes}'.encode()):08x} {fingerprint(whole):08x}"


def check_same_in_all_processes(what: str, here: Mapping[str, Any]) -> None:
    """Raises `ReplicaError` unless all processes, which must all call it, have equal values; `what` names them in the message."""
    every = exchange(dict(here), "the beginning of a run")
    faults = [
        f"{name} is {every[0].get(name)} in process 0 and {other.get(name)} in process {process}"
        for process, other in enumerate(every)
        for name in sorted(every[0].keys() | other.keys())
        if other.get(name) != every[0].get(name)
    ]
    if faults:
        raise ReplicaError(f"The processes have different {what}: {listed(faults, '; ')}. Use the same model, arguments and callbacks in every process.")
