"""Passes over data without training: `Evaluation` adds metrics to checkpoints, `predict` and `predict_iter` return outputs."""

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.data import FedBatch, Feed, Source
from fitflax.data.arrays import ArraySource
from fitflax.data.indexed import IndexedSource
from fitflax.data.randomness import undisturbed
from fitflax.data.whole_batches import without_padding
from fitflax.errors import DataError, warn
from fitflax.logs import Kind, Logs, Values
from fitflax.loops.signals import Interruption
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.early_checks import check_in_memory, check_measures, check_total_weight
from fitflax.steps.live_state import Carry, Sums
from fitflax.steps.model_outputs import Returned
from fitflax.steps.step_dispatch import Program

__all__ = ["Evaluation", "Interrupted", "predict", "predict_iter"]

# Minimum time between two calls of batch hooks if all callbacks allow batches to be skipped.
_BATCH_HOOK_SECONDS = 0.05


class Interrupted(Exception):
    """Leaves an evaluation after a signal; it never reaches users."""


class Evaluation:
    """Evaluates a state over data. Called with a checkpoint, it returns a `Summary`, so several evaluations can be chained.

    `steps` is the number of batches of an evaluation, `None` for all, and `name` that of the group of metrics. A signal ends an evaluation at its next
    batch. `check` is called with the first batch before it is used.
    """

    def __init__(
        self,
        program: Program,
        source: Source,
        make_feed: Callable[[], Feed],
        *,
        steps: int | None = None,
        name: str = "eval",
        callbacks: CallbackList | None = None,
        interruption: Interruption | None = None,
        pad: bool = True,
        check: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self._program, self._source, self._make_feed = program, source, make_feed
        self._steps, self.name = steps, name
        self._callbacks = callbacks or CallbackList()
        self._interruption = interruption
        self._pad = pad
        self._check_batch = check

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns `checkpoint` with the metrics of its state, which is not copied."""
        values = self.evaluate(checkpoint.run.borrow)
        return checkpoint.with_metrics(self.name, values, self.kinds)

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of the metrics by key; available after the first evaluation."""
        return self._program.dry_run.traced_step(train=False).kinds

    def prepare(self, state: TrainState) -> None:
        """Dry-runs an evaluation of in-memory data on shapes. For other data it does nothing, because that would request a batch."""
        fed = self._make_feed().next() if isinstance(self._source, IndexedSource) else None
        if fed is not None:
            self._check_batch(fed.batch)
            self._check(state, fed.batch)

    def _check(self, state: TrainState, batch: Batch) -> None:
        self._program.preparation.evaluate(state, batch)
        check_measures(self._program, self.name)
        check_in_memory(self._program, self._source, state, batch, pad=self._pad, train=False)

    def evaluate(self, get_state: Callable[[], TrainState]) -> dict[str, Any]:
        """Returns the metrics of a state, read from the device in one transfer at the end; raises `DataError` if there is no batch.

        `get_state` is called after `check` has seen the first batch, which may decide how the state is laid out.
        """
        with undisturbed(), contextlib.closing(self._make_feed()) as feed:
            return self._evaluate(get_state, feed)

    def _evaluate(self, get_state: Callable[[], TrainState], feed: Feed) -> dict[str, Any]:
        hooks, batch_hooks = self._callbacks, _BatchHooks(self._callbacks)
        hooks.params["test_steps"] = self._steps or self._source.all_batches
        hooks.call("on_test_begin", {})
        sums: Sums | None = None
        used: Carry | None = None
        values: Values | None = None
        collected = None
        batch, size = 0, 1
        while self._steps is None or batch < self._steps:
            if self._interruption is not None and self._interruption.requested:
                raise Interrupted
            fed = feed.next(size if size > 1 else None)
            if fed is None:
                break
            if sums is None or used is None:
                self._check_batch(fed.batch)
                state = get_state()
                used = self._program.eval_carry(state)
                self._check(state, fed.batch)
                sums = self._program.empty_sums(train=False)
                collected = self._program.collector(train=False)
                # Only for arrays: other sources may be slow, and a call waits for all of its batches.
                may_group = isinstance(self._source, ArraySource) and not batch_hooks.see_all
                size = self._program.preparation.group_for("evaluate", fed.batch) if may_group else 1
            batch_hooks.begin(batch)
            group = [fed]
            if size > 1:
                group += feed.next_like(fed.batch, (size if self._steps is None else min(size, self._steps - batch)) - 1)
            sums, values, rows = self._program.evaluate(used, sums, group, size)
            if collected is not None:
                collected.add(rows, None if size == 1 else len(group))
            batch += len(group)
            batch_hooks.end(batch - 1, values, self.kinds)
        if values is None:
            raise DataError(f"The data of {self.name!r} yields no batches. Check that it is neither empty nor an exhausted iterator.")
        if self._steps is not None and batch < self._steps:
            warn(f"The data of {self.name!r} ended after {batch} of {self._steps} batches, so its metrics cover only these. Pass more data or fewer steps.")
        batch_hooks.finish()
        if collected is not None:
            values = values.with_late(collected.keys, collected.now())
        logs = Logs(values, kinds=self.kinds)
        hooks.call("on_test_end", logs)
        found = dict(logs)
        check_total_weight(self._program, self.name, values)
        return found


class _BatchHooks:
    """Calls the batch hooks of an evaluation: for each batch or, if all callbacks allow skipping, 20 times a second and for the last batch."""

    def __init__(self, callbacks: CallbackList) -> None:
        self._callbacks = callbacks
        self.see_all = callbacks.wants_every("on_test_batch_begin", "on_test_batch_end")
        self._wants_end = callbacks.wants("on_test_batch_end")
        self._is_skipped, self._next_time = False, -math.inf
        self._last: tuple[int, Values, Mapping[str, Kind]] | None = None

    def begin(self, batch: int) -> None:
        """Calls the hook for the beginning of a batch, unless it is skipped."""
        self._is_skipped = not self.see_all and time.monotonic() < self._next_time
        if not self._is_skipped:
            self._callbacks.call("on_test_batch_begin", batch, {})

    def end(self, batch: int, values: Values, kinds: Mapping[str, Kind]) -> None:
        """Calls the hook for the end of a batch, with the metrics so far."""
        self._last = (batch, values, kinds) if self._is_skipped else None
        if not self._is_skipped:
            self._next_time = time.monotonic() + _BATCH_HOOK_SECONDS
            if self._wants_end:
                self._callbacks.call("on_test_batch_end", batch, Logs(values, kinds=kinds))

    def finish(self) -> None:
        """Calls the hooks of the last batch if they were skipped."""
        if self._last is not None:
            self._next_time = -math.inf
            self.begin(self._last[0])
            self.end(*self._last)


class _IsolatedRandomState:
    """The global random generators as one reader of data uses them, isolated from what the program draws between its batches."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the generators to their state at the end of the last such block, and resets them when this block ends."""
        with undisturbed():
            torch = sys.modules.get("torch")
            torch = torch if hasattr(torch, "get_rng_state") else None
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
                if torch is not None and self._states[2] is not None:
                    torch.set_rng_state(self._states[2])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()


class _Dispatched(NamedTuple):
    number: int  # Of the (last) batch.
    outputs: Returned
    group: Sequence[FedBatch]
    is_group: bool  # Whether the outputs have an axis of batches.


def predict(
    program: Program, get_state: Callable[[], TrainState], feed: Feed, *, steps: int | None, callbacks: CallbackList, check: Callable[[Batch], None]
) -> PyTree:
    """Returns the outputs for the real rows of all batches, concatenated in order, as NumPy arrays in the containers that the module returns.

    `check` is called with the first batch before it is used, and `get_state` after that.
    """
    with undisturbed():
        # Only for arrays: other sources may be slow, and a call waits for all of its batches.
        may_group = isinstance(feed.source, ArraySource) and not callbacks.wants_every("on_predict_batch_begin", "on_predict_batch_end")
        results: list[PyTree] = []
        with contextlib.closing(_predictions(program, get_state, feed, steps, callbacks, check, reading=contextlib.nullcontext, may_group=may_group)) as found:
            for outputs in found:
                results.append(outputs)
                _check_shapes_of_examples(results[0], outputs)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(Returned.of, results)).rebuilt()


def _check_shapes_of_examples(one: PyTree, other: PyTree) -> None:
    """Checks that the outputs of two batches can be concatenated."""
    shapes = [[leaf.shape[1:] for leaf in jax.tree.leaves(outputs)] for outputs in (one, other)]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"predict concatenates the outputs of all batches, so their examples must have equal shapes. Received: {shapes[0]} and {shapes[1]}. "
            "Use predict_iter, which yields the outputs of each batch, or pad the inputs to one length."
        )


def predict_iter(
    program: Program, get_state: Callable[[], TrainState], make_feed: Callable[[], Feed], *, steps: int | None, check: Callable[[Batch], None]
) -> Generator[PyTree, None, None]:
    """Yields the outputs that `predict` concatenates, batch by batch. The feed is made when the first is requested, and closed with the generator."""
    with contextlib.closing(make_feed()) as feed:
        # Not `undisturbed`, because the caller may draw random numbers between two batches. It costs half a millisecond per batch, and reading arrays
        # draws no random numbers.
        reading = contextlib.nullcontext if isinstance(feed.source, ArraySource) else _IsolatedRandomState().entered
        yield from _predictions(program, get_state, feed, steps, CallbackList(), check, reading=reading)


def _predictions(
    program: Program,
    get_state: Callable[[], TrainState],
    feed: Feed,
    steps: int | None,
    callbacks: CallbackList,
    check: Callable[[Batch], None],
    *,
    reading: Callable[[], contextlib.AbstractContextManager[None]],
    may_group: bool = False,
) -> Generator[PyTree, None, None]:
    """Yields the outputs of each batch's real rows, in order, while the next batch is computed. Data is read inside `reading()`.

    With `may_group`, outputs of several batches may be yielded together.
    """
    used: Carry | None = None
    pending: list[_Dispatched] = []  # At most two, so that memory does not grow with the data.
    callbacks.call("on_predict_begin", {})
    batch, size = 0, 1
    is_over = False
    while not is_over:
        with reading():
            fed = feed.next(size if size > 1 else None) if steps is None or batch < steps else None
        is_over = fed is None
        if fed is not None:
            if used is None:
                check(fed.batch)
                state = get_state()
                used = program.eval_carry(state)
                program.preparation.predict(state, fed.batch, is_counted=fed.is_counted)
                size = program.preparation.group_for("predict", fed.batch) if may_group else 1
            callbacks.call("on_predict_batch_begin", batch, {})
            group = [fed]
            if size > 1:
                group += feed.next_like(fed.batch, (size if steps is None else min(size, steps - batch)) - 1)
            last = batch + len(group) - 1
            # Not assigned to a variable, which would keep the outputs alive while the caller works.
            pending.append(_Dispatched(last, program.predict(used, group, batch, size), group, is_group=size > 1))
            batch = last + 1
            if not program.strategy.is_on_host:
                _copy_to_host_async(pending[-1].outputs)
        if len(pending) == 2 or (is_over and pending):
            try:
                yield _to_host(program, pending.pop(0), callbacks)
            except GeneratorExit:
                feed.push_back(len(pending))
                raise
    if batch == 0:
        raise DataError("The data yields no batches. Check that it is neither empty nor an exhausted iterator.")
    callbacks.call("on_predict_end", {})


def _copy_to_host_async(outputs: PyTree) -> None:
    """Starts copying outputs to the host as soon as they are computed. If they are on the host already, this only costs time."""
    for leaf in jax.tree.leaves(outputs):
        leaf.copy_to_host_async()


def _to_host(program: Program, dispatched: _Dispatched, callbacks: CallbackList) -> PyTree:
    group = dispatched.group
    outputs = program.strategy.join(dispatched.outputs, len(group) if dispatched.is_group else None)
    size, reals = group[0].num_rows, [fed.num_real for fed in group]
    if group[0].own is not None:
        index, parts = program.strategy.part
        outputs = jax.tree.map(lambda leaf: leaf.reshape(len(group), parts, -1, *leaf.shape[1:])[:, index].reshape(-1, *leaf.shape[1:]), outputs)
        size, reals = size // parts, [fed.own or 0 for fed in group]
    real = sum(reals)
    if group[0].real is not None:
        outputs = without_padding(outputs, group[0].real)
    elif real - reals[-1] == size * (len(group) - 1):  # The usual case: all batches but the last are full.
        outputs = jax.tree.map(lambda leaf: leaf[:real], outputs)
    else:
        rows = np.concatenate([np.arange(size) < count for count in reals])
        outputs = jax.tree.map(lambda leaf: leaf[rows], outputs)
    own = outputs.rebuilt()
    callbacks.call("on_predict_batch_end", dispatched.number, {"outputs": own})
    return own
