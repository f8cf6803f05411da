"""Communication between the processes of a program, over JAX's distributed runtime."""

import itertools
import json
import math
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax._src import distributed  # The client has no public name; Orbax also uses this one.
from jax.experimental import multihost_utils

from fitflax.data.batch import fingerprint
from fitflax.errors import DataError, ReplicaError
from fitflax.leaves import is_key, listed
from fitflax.state import PyTree

__all__ = ["after_first", "check_same", "exchange", "gather"]

# Long enough for slow processes. The heartbeat detects lost processes.
_TIMEOUT_MILLISECONDS = 24 * 3600 * 1000
# Maximum time of one wait in C++, which does not react to Ctrl-C.
_UNINTERRUPTIBLE_SECONDS = 2.0
_ROOT = "fitflax"


class Board:
    """Messages by name that every process can post and read, from any thread. Boards with the same name share their messages."""

    def __init__(self, name: str) -> None:
        client: Any = distributed.global_state.client
        if client is None:
            raise RuntimeError("Processes are not connected. Call parallel.initialize() first.")
        self._client = client
        self._root = f"{_ROOT}/{name}"

    def post(self, key: str, message: bytes) -> None:
        """Posts a message, and replaces an earlier one with this key."""
        self._client.key_value_set_bytes(f"{self._root}/{key}", message, allow_overwrite=True)

    def settle(self, key: str, message: bytes) -> bytes:
        """Posts a message unless any process has posted one with this key; returns the first one, the same in all processes."""
        try:
            self._client.key_value_set_bytes(f"{self._root}/{key}", message, allow_overwrite=False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self.read(key)
        return message

    def read(self, key: str) -> bytes:
        """Returns a message; waits until it is posted."""
        return bytes(self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", _TIMEOUT_MILLISECONDS))

    def read_within(self, key: str, seconds: float) -> bytes:
        """Returns a message; raises `TimeoutError` if it is not posted within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            wait = min(max(end - time.monotonic(), 0.001), _UNINTERRUPTIBLE_SECONDS)
            try:
                return bytes(self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", math.ceil(1000 * wait)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() >= end:
                    raise TimeoutError(f"No message {key} within {seconds:g} s.") from error

    def read_all(self, folder: str) -> dict[str, bytes]:
        """Returns the messages whose keys begin with `folder/`, by the rest of the key, without waiting."""
        messages = self._client.key_value_dir_get_bytes(f"{self._root}/{folder}")
        return {key.rsplit("/", 1)[-1]: bytes(message) for key, message in messages}

    def remove(self, key: str) -> None:
        """Removes a message, or a folder of them."""
        self._client.key_value_delete(f"{self._root}/{key}")


T = TypeVar("T")

# How often a waiting process checks for failures of the others, and when it reports that it is waiting.
_CHECK_SECONDS = 1.0
_REPORT_SECONDS = 30.0
# Indices of exchanges, the same in all processes.
_numbers = itertools.count()


def gather(tree: PyTree) -> PyTree:
    """Returns `tree` from every process as NumPy arrays `[processes, ...]`, in the order of the processes; `[1, ...]` in a single process.

    All processes must call it, with trees of the same structure, shapes and dtypes. Dtypes are kept, even those that JAX would narrow, such as float64.

    Args:
        tree: Numbers and arrays that are local to the process or fully replicated. Typed keys are returned as key data.

    Raises:
        ReplicaError: The trees of the processes differ in structure, shapes or dtypes.

    >>> gather({"counts": np.arange(2), "loss": 0.5})
    {'counts': array([[0, 1]]), 'loss': array([0.5])}
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays: list[np.ndarray[Any, Any]] = [np.asarray(jax.device_get(jax.random.key_data(leaf) if is_key(leaf) else leaf)) for leaf in leaves]
    if jax.process_count() == 1:
        return jax.tree.unflatten(treedef, [array[None] for array in arrays])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    leaf_forms = [f"{path} {array.dtype}{list(array.shape)}" for path, array in zip(paths, arrays, strict=True)]
    forms = multihost_utils.process_allgather(np.uint32(zlib.crc32(", ".join(leaf_forms).encode())))
    if len(set(forms.tolist())) > 1:
        received = f"Process {jax.process_index()} has {listed(leaf_forms)}."
        raise ReplicaError(f"gather() needs trees of the same structure, shapes and dtypes in all processes. {received}")
    # As bytes, because JAX would narrow 64-bit types.
    packed = np.concatenate([np.zeros(0, np.uint8), *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)])
    gathered = np.asarray(multihost_utils.process_allgather(packed)) if packed.size else np.zeros((jax.process_count(), 0), np.uint8)
    results, begin = [], 0
    for array in arrays:
        part = np.ascontiguousarray(gathered[:, begin : begin + array.nbytes])
        results.append(part.view(array.dtype).reshape(len(gathered), *array.shape) if array.nbytes else np.zeros((len(gathered), *array.shape), array.dtype))
        begin += array.nbytes
    return jax.tree.unflatten(treedef, results)


def exchange(value: Any, topic: str = "exchange") -> list[Any]:
    """Returns the values of all processes, in the order of the processes; all of them must call it. It neither uses devices nor waits for them.

    Args:
        value: Numbers, strings, lists and dicts, as in JSON; a single process returns it unchanged.
        topic: Subject for errors, the same in all processes.

    Raises:
        ReplicaError: Another process calls `exchange` with another topic, has ended, or has failed.

    >>> exchange({"rows": 3})
    [{'rows': 3}]
    """
    if not jax.distributed.is_initialized():
        return [value]
    board, number, index, count = Board("exchange"), next(_numbers), jax.process_index(), jax.process_count()
    board.post(f"{number}/{index}", json.dumps([topic, value]).encode())
    wait = _Wait(board, number, topic)
    if index:
        joined = wait.read("all")
    else:
        joined = [wait.read(str(process)) for process in range(count)]
        board.post(f"{number}/all", json.dumps(joined).encode())
        if number:
            board.remove(str(number - 1))  # All processes have read it, or they would not have posted this one.
    topics = {process: about for process, (about, _) in enumerate(joined)}
    if len(set(topics.values())) > 1:
        differing = listed([f"process {process} is at {about}" for process, about in topics.items() if about != topics[0] or process == 0])
        raise ReplicaError(f"The processes make different calls: {differing}. Make the same calls in the same order in all processes.")
    return [each for _, each in joined]


class _Wait:
    """Waits for messages of other processes, and checks regularly whether these processes can still post them."""

    def __init__(self, board: Board, number: int, topic: str) -> None:
        self._board, self._number, self._topic = board, number, topic
        self._begin, self._has_reported = time.monotonic(), False

    def read(self, key: str) -> Any:
        """Returns a message of this exchange, once it is posted."""
        while True:
            try:
                return json.loads(self._board.read_within(f"{self._number}/{key}", _CHECK_SECONDS))
            except TimeoutError:
                self._check_others()

    def _check_others(self) -> None:
        index = jax.process_index()
        others = {process: failure for process, failure in failures().items() if process != index}
        if others:
            reports = "; ".join(f"process {process} failed: {failure.error}" for process, failure in others.items())
            raise ReplicaError(f"This process cannot continue ({self._topic}): {reports}")
        missing = sorted(set(range(jax.process_count())) - {int(process) for process in self._board.read_all(str(self._number)) if process.isdigit()})
        ended = sorted(set(missing) & {int(process) for process in Board("ended").read_all("")})
        if ended:
            raise ReplicaError(
                f"Process {index} is waiting for processes {ended}, which have ended ({self._topic}). "
                "Make the same calls of fit, evaluate and so on in all processes."
            )
        if missing and not self._has_reported and time.monotonic() > self._begin + _REPORT_SECONDS:
            self._has_reported = True
            print(f"Process {index} has been waiting for processes {missing} for {_REPORT_SECONDS:g} s ({self._topic}).", file=sys.stderr, flush=True)


class Failure(NamedTuple):
    """The error of a process that ends because of it."""

    error: str
    is_own: bool  # Whether the error is its own, rather than a lost connection to other processes.


def failures() -> dict[int, Failure]:
    """Returns the failures of processes that end because of them, by process."""
    by_process = {int(process): Failure(**json.loads(message)) for process, message in Board("failed").read_all("").items()}
    return dict(sorted(by_process.items()))


def check_same(tree: PyTree) -> None:
    """Checks that all processes have the same arrays, NumPy or local to the process; all of them must call it.

    Args:
        tree: The arrays, such as the first batch of the data.

    Raises:
        DataError: The arrays differ.

    >>> import numpy as np
    >>> check_same({"x": np.ones((2, 3))})  # With one process, there is nothing to compare.
    """
    if len(set(exchange(fingerprint(tree), "the first batch of data"))) > 1:
        raise DataError(
            "The processes read different data: their first batches differ. Pass the same data in the same order to all processes "
            "(a fixed seed, no sharding by process); each takes its part of every batch. If each process reads its own shard, pass "
            "fitflax.data.Shard(data)."
        )


def after_first(make: Callable[[], T]) -> T:
    """Returns the result of `make` in each process; process 0 calls it first, and may leave files for the others. All processes must call this.

    Args:
        make: A function without arguments, such as one that downloads a file if it is missing and then reads it.

    Raises:
        ReplicaError: Process 0 failed; it raises its own error there.

    >>> after_first(lambda: 7)
    7
    """
    if jax.process_count() == 1:
        return make()
    is_first, result, failure = jax.process_index() == 0, None, None
    if is_first:
        try:
            result = make()
        except Exception as error:  # noqa: BLE001 (raised below, after the others are informed)
            failure = error
    has_failed = exchange(failure is not None, "what process 0 does first")[0]
    if failure is not None:
        raise failure
    if has_failed:
        raise ReplicaError("Process 0 failed, so all other processes stop. See the error in the output of process 0.")
    return cast(T, result) if is_first else make()
