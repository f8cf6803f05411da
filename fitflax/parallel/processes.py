"""What several processes of one program tell each other, over JAX's own distributed runtime."""

import itertools
import json
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from fitflax.data.batch import fingerprint
from fitflax.errors import DataError, ReplicaError
from fitflax.leaves import is_key
from fitflax.parallel.board import Board
from fitflax.state import PyTree

__all__ = ["after_first", "check_same", "exchange", "gather"]

T = TypeVar("T")

# How often somebody who waits looks whether the others can still come, and after what time it says so that it waits.
_LOOK_SECONDS = 1.0
_TELL_SECONDS = 30.0
# Of exchanges, the same in all processes.
_numbers = itertools.count()


def gather(tree: PyTree) -> PyTree:
    """Returns what every process has of `tree`, `[processes, ...]`, NumPy arrays in the order of the processes; in a single process `[1, ...]`.

    All processes must call it, with trees of the same structure, shapes and dtypes. What JAX would narrow, such as float64, stays as it is.

    Args:
        tree: Numbers and arrays that lie in this process, or are replicated over all of them. Of typed keys their data is returned.

    Raises:
        ReplicaError: The processes' trees differ in structure, shapes or dtypes.

    >>> gather({"counts": np.arange(2), "loss": 0.5})
    {'counts': array([[0, 1]]), 'loss': array([0.5])}
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays: list[np.ndarray[Any, Any]] = [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in leaves]
    if jax.process_count() == 1:
        return jax.tree.unflatten(treedef, [array[None] for array in arrays])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    form = ", ".join(f"{path} {array.dtype}{list(array.shape)}" for path, array in zip(paths, arrays, strict=True))
    forms = multihost_utils.process_allgather(np.uint32(zlib.crc32(form.encode())))
    if len(set(forms.tolist())) > 1:
        raise ReplicaError(f"gather() takes trees of the same structure, shapes and dtypes on all processes. Process {jax.process_index()} has {form}.")
    # As bytes, because JAX would make 32 bits of 64.
    packed = np.concatenate([np.zeros(0, np.uint8), *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)])
    gathered = np.asarray(multihost_utils.process_allgather(packed)) if packed.size else np.zeros((jax.process_count(), 0), np.uint8)
    results, begin = [], 0
    for array in arrays:
        part = np.ascontiguousarray(gathered[:, begin : begin + array.nbytes])
        results.append(part.view(array.dtype).reshape(len(gathered), *array.shape) if array.nbytes else np.zeros((len(gathered), *array.shape), array.dtype))
        begin += array.nbytes
    return jax.tree.unflatten(treedef, results)


def exchange(value: Any, topic: str = "exchange") -> list[Any]:
    """Returns what every process calls this with, in the order of the processes; all of them must call it. No device takes part, or is waited for.

    Args:
        value: Numbers, strings, lists and dicts, as JSON has them; in a single process it is returned as it is.
        topic: What it is about; the same in all processes.

    Raises:
        ReplicaError: Another process is at something else, has ended, or has failed.

    >>> exchange({"rows": 3})
    [{'rows': 3}]
    """
    if not Board.is_there():
        return [value]
    board, number, index, count = Board("exchange"), next(_numbers), jax.process_index(), jax.process_count()
    board.post(f"{number}/{index}", json.dumps([topic, value]).encode())
    wait = _Wait(board, number, topic)
    if index:
        joined = wait.read_joined()
    else:
        joined = wait.join(count)
        board.post(f"{number}/all", json.dumps(joined).encode())
        if number:
            board.remove(str(number - 1))  # All have read it, or they would not be here.
    topics = {process: about for process, (about, _) in enumerate(joined)}
    if len(set(topics.values())) > 1:
        listed = ", ".join(f"process {process} is at {about}" for process, about in topics.items() if about != topics[0] or process == 0)
        raise ReplicaError(f"The processes do not do the same: {listed}. All of them must make the same calls in the same order.")
    return [each for _, each in joined]


class _Wait:
    """A wait for others, during which it is looked again and again whether they can still come."""

    def __init__(self, board: Board, number: int, topic: str) -> None:
        self._board = board
        self._number = number
        self._topic = topic
        self._begin = self._looked = time.monotonic()
        self._has_told = False

    def join(self, count: int) -> list[Any]:
        """Returns what all processes have posted; called by process 0."""
        pause = 0.0005
        while True:
            found = self._board.read_all(str(self._number))
            if len(found) == count:
                return [json.loads(found[str(process)]) for process in range(count)]
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() > self._looked + _LOOK_SECONDS:
                self._look()

    def read_joined(self) -> list[Any]:
        """Returns what process 0 has put together."""
        while True:
            try:
                return list(json.loads(self._board.read_within(f"{self._number}/all", _LOOK_SECONDS)))
            except TimeoutError:
                self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        index = jax.process_index()
        others = {process: error for process, error in failures().items() if process != index}
        if others:
            told = "; ".join(f"process {process} failed: {error}" for process, error in others.items())
            raise ReplicaError(f"This process cannot go on ({self._topic}): {told}")
        missing = sorted(set(range(jax.process_count())) - {int(process) for process in self._board.read_all(str(self._number)) if process.isdigit()})
        ended = sorted(set(missing) & ended_processes())
        if ended:
            raise ReplicaError(
                f"Process {index} waits ({self._topic}) for processes {ended}, which have ended. All must make the same calls of fit, evaluate and so on."
            )
        if missing and not self._has_told and self._looked > self._begin + _TELL_SECONDS:
            self._has_told = True
            print(f"Process {index} has been waiting for processes {missing} for {_TELL_SECONDS:g} s ({self._topic}).", file=sys.stderr, flush=True)


def failures() -> dict[int, str]:
    """Returns by process what has failed in those that end for it."""
    told = {int(process): json.loads(message) for process, message in Board("failed").read_all("").items()}
    return {process: each["error"] for process, each in sorted(told.items())}


def ended_processes() -> set[int]:
    """Returns those that have come to their end."""
    return {int(process) for process in Board("ended").read_all("")}


def check_same(tree: PyTree) -> None:
    """Checks that all processes have the same arrays, NumPy or on devices of this process; all of them must call it.

    Raises:
        DataError: They have not.
    """
    if len(set(exchange(fingerprint(tree), "the first batch of data"))) > 1:
        raise DataError(
            "The processes read different data: their first batches are not the same. Give all processes the same data "
            "in the same order (a fixed seed, no sharding by process): each takes its part of every batch. If each has a part of its own, say so: "
            "fitflax.data.Shard(data)."
        )


def after_first(make: Callable[[], T]) -> T:
    """Returns what each process makes, the first one before the others begin, which may wait for what it leaves on the disk; all of them must call it.

    Raises:
        ReplicaError: The first process failed, which raises its own error.

    >>> after_first(lambda: 7)
    7
    """
    if jax.process_count() == 1:
        return make()
    is_first, result, failure = jax.process_index() == 0, None, None
    if is_first:
        try:
            result = make()
        except Exception as error:  # noqa: BLE001 (raised below, once the others know)
            failure = error
    has_failed = exchange(failure is not None, "what process 0 does first")[0]
    if failure is not None:
        raise failure
    if has_failed:
        raise ReplicaError("Process 0 failed, and so do all others. Its own output says why.")
    return cast(T, result) if is_first else make()
