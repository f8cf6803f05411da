"""What several processes of one program tell each other, over JAX's own distributed runtime."""

import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from fitflax.data.batch import fingerprint
from fitflax.errors import DataError, ReplicaError
from fitflax.parallel.board import Board
from fitflax.state import PyTree

__all__ = ["after_first", "check_same", "exchange", "gather"]

T = TypeVar("T")

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
    arrays: list[np.ndarray[Any, Any]] = [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]
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


def exchange(value: Any) -> list[Any]:
    """Returns what every process calls this with, in the order of the processes; all of them must call it. No device takes part, or is waited for.

    Args:
        value: Numbers, strings, lists and dicts, as JSON has them; in a single process it is returned as it is.

    >>> exchange({"rows": 3})
    [{'rows': 3}]
    """
    if not Board.is_there():
        return [value]
    board, number, index = Board("exchange"), next(_numbers), jax.process_index()
    board.post(f"{number}/{index}", json.dumps(value).encode())
    board.meet(str(number))
    found = board.read_all(str(number))
    if index == 0 and number:
        board.remove(str(number - 1))  # All have read it, or they would not be here.
    return [json.loads(found[str(process)]) for process in range(jax.process_count())]


def check_same(tree: PyTree) -> None:
    """Checks that all processes have the same arrays, NumPy or on devices of this process; all of them must call it.

    Raises:
        DataError: They have not.
    """
    if len(set(exchange(fingerprint(tree)))) > 1:
        raise DataError(
            f"The processes read different data: the first batch of process {jax.process_index()} is not that of all others. Give all processes the same data "
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
    has_failed = exchange(failure is not None)[0]
    if failure is not None:
        raise failure
    if has_failed:
        raise ReplicaError("Process 0 failed, and so do all others. Its own output says why.")
    return cast(T, result) if is_first else make()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
