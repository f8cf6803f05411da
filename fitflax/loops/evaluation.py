"""Passes over data that do not train: `Evaluation` adds metrics to checkpoints, `predict` and `predict_iter` give outputs."""

import contextlib
import random
import sys
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
from fitflax.errors import DataError, warn
from fitflax.logs import Kind, Logs, Values
from fitflax.loops.signals import Interruption
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.live import Carry, Sums
from fitflax.steps.preflight import check_in_memory, check_measures
from fitflax.steps.program import Program

__all__ = ["Evaluation", "Interrupted", "predict", "predict_iter"]


class Interrupted(Exception):
    """Leaves an evaluation because a signal asked to stop; never reaches users."""


class Evaluation:
    """Evaluates a state over data. Called with a checkpoint it returns a `Summary`; several can follow one another.

    Args:
        program: The compiled steps.
        source: The data.
        make_feed: Makes its batches, anew for each evaluation.
        steps: Batches of an evaluation; `None` for all.
        name: The group of its metrics.
        callbacks: Whose `on_test_*` hooks are called.
        interruption: A signal noted here ends an evaluation at its next batch.
        pad: Whether short batches are padded.
        check: Called with the first batch, before anything is done with it.
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
        self._program = program
        self._source = source
        self._make_feed = make_feed
        self._steps = steps
        self.name = name
        self._callbacks = callbacks or CallbackList()
        self._interruption = interruption
        self._pad = pad
        self._check_batch = check

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns `checkpoint` with the metrics of its state; the state is borrowed, not copied."""
        values = self.evaluate(checkpoint.run.borrow)
        return checkpoint.with_metrics(self.name, values, self.kinds)

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """By key, what is known of the metrics; after the first evaluation."""
        return self._program.dry_run.traced_step(train=False).kinds

    def prepare(self, state: TrainState) -> None:
        """Dry-runs an evaluation of in-memory data on shapes alone; other data is not asked for a batch before it is evaluated.

        Raises:
            DataError, ModelError, LossError, MetricError: What does not fit.
        """
        fed = self._make_feed().next() if isinstance(self._source, IndexedSource) else None
        if fed is not None:
            self._check_batch(fed.batch)
            self._check(state, fed.batch)

    def _check(self, state: TrainState, batch: Batch) -> None:
        self._program.prepare_evaluate(state, batch)
        check_measures(self._program, self.name)
        check_in_memory(self._program, self._source, state, batch, pad=self._pad, train=False)

    def evaluate(self, get_state: Callable[[], TrainState]) -> dict[str, Any]:
        """Returns the metrics of a state, read in one transfer at the end.

        Args:
            get_state: Returns it; called when the first batch has been looked at, which may show where the state of a checkpoint is to lie.

        Raises:
            DataError: The data has no batch.
        """
        with undisturbed(), contextlib.closing(self._make_feed()) as feed:
            return self._evaluate(get_state, feed)

    def _evaluate(self, get_state: Callable[[], TrainState], feed: Feed) -> dict[str, Any]:
        hooks = self._callbacks
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
                used = self._program.in_use(state)
                self._check(state, fed.batch)
                sums = self._program.empty_sums(train=False)
                collected = self._program.collector(train=False)
                # Only arrays: nobody waits for several batches of them.
                may_group = isinstance(self._source, ArraySource) and not hooks.wants_every("on_test_batch_begin", "on_test_batch_end")
                size = self._program.group_for("evaluate", fed.batch) if may_group else 1
            hooks.call("on_test_batch_begin", batch, {})
            group = [fed]
            if size > 1:
                group += feed.next_like(fed.batch, (size if self._steps is None else min(size, self._steps - batch)) - 1)
            sums, values, rows = self._program.evaluate(used, sums, group, size)
            if collected is not None:
                collected.add(rows, None if size == 1 else len(group))
            batch += len(group)
            if hooks.wants("on_test_batch_end"):
                hooks.call("on_test_batch_end", batch - 1, Logs(values, kinds=self.kinds))
        if values is None:
            raise DataError(f"The data of {self.name!r} yields no batch.")
        if self._steps is not None and batch < self._steps:
            warn(f"The data of {self.name!r} ended after {batch} of {self._steps} batches.")
        if collected is not None:
            values = values.with_late(collected.keys, collected.now())
        logs = Logs(values, kinds=self.kinds)
        hooks.call("on_test_end", logs)
        return dict(logs)


class _OwnRandomness:
    """The process's global random generators as one reader of data uses them, apart from what the rest of the program draws between its batches."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the generators to where the last block of this kind left them, and back when this one ends."""
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
    """Outputs that are being computed.

    Attributes:
        number: The number of the (last) batch.
        outputs: On the devices.
        group: The batches.
        is_group: Whether the outputs have an axis of batches.
    """

    number: int
    outputs: PyTree
    group: Sequence[FedBatch]
    is_group: bool


def predict(
    program: Program, get_state: Callable[[], TrainState], feed: Feed, *, steps: int | None, callbacks: CallbackList, check: Callable[[Batch], None]
) -> PyTree:
    """Returns the outputs for the real rows of all batches, joined in order, as NumPy arrays.

    Args:
        program: The compiled steps.
        get_state: Returns the state whose parameters and collections are used; called after `check`.
        feed: The batches.
        steps: How many batches; `None` for all.
        callbacks: Whose `on_predict_*` hooks are called.
        check: Called with the first batch, before anything is done with it.

    Raises:
        DataError: The data has no batch.
        ModelError: The module does not run on it, or an output has no axis of examples.
    """
    with undisturbed():
        # Only arrays: nobody waits for several batches of them.
        may_group = isinstance(feed.source, ArraySource) and not callbacks.wants_every("on_predict_batch_begin", "on_predict_batch_end")
        results = list(_predictions(program, get_state, feed, steps, callbacks, check, reading=contextlib.nullcontext, may_group=may_group))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)


def predict_iter(
    program: Program, get_state: Callable[[], TrainState], make_feed: Callable[[], Feed], *, steps: int | None, check: Callable[[Batch], None]
) -> Generator[PyTree, None, None]:
    """Yields what `predict` joins, batch by batch. Closing it closes the feed.

    Args:
        program: The compiled steps.
        get_state: Returns the state whose parameters and collections are used; called after `check`.
        make_feed: Makes the batches, when the first one is asked for.
        steps: How many batches; `None` for all.
        check: Called with the first batch, before anything is done with it.

    Raises:
        DataError, ModelError: As in `predict`.
    """
    with contextlib.closing(make_feed()) as feed:
        # Not `undisturbed`: between two batches it is the caller who draws. It takes half a millisecond a batch, and arrays draw nothing.
        reading = contextlib.nullcontext if isinstance(feed.source, ArraySource) else _OwnRandomness().entered
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
    """Yields the outputs of each batch's real rows, in order, while the next batch is computed; data is read inside of `reading()`.

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
                used = program.in_use(state)
                program.prepare_predict(state, fed.batch)
                size = program.group_for("predict", fed.batch) if may_group else 1
            callbacks.call("on_predict_batch_begin", batch, {})
            group = [fed]
            if size > 1:
                group += feed.next_like(fed.batch, (size if steps is None else min(size, steps - batch)) - 1)
            last = batch + len(group) - 1
            # In no variable of its own, which would keep it while the caller works.
            pending.append(_Dispatched(last, program.predict(used, group, batch, size), group, is_group=size > 1))
            batch = last + 1
            if not program.strategy.is_on_host:
                _send_to_host(pending[-1].outputs)
        if len(pending) == 2 or (is_over and pending):
            try:
                yield _to_host(program, pending.pop(0), callbacks)
            except GeneratorExit:
                feed.push_back(len(pending))
                raise
    if batch == 0:
        raise DataError("The data yields no batch.")
    callbacks.call("on_predict_end", {})


def _send_to_host(outputs: PyTree) -> None:
    """Has outputs come to the host as soon as they are computed, and not only when somebody waits for them; where they are there already it costs time."""
    for leaf in jax.tree.leaves(outputs):
        leaf.copy_to_host_async()


def _to_host(program: Program, dispatched: _Dispatched, callbacks: CallbackList) -> PyTree:
    group = dispatched.group
    outputs = program.strategy.join(dispatched.outputs, len(group) if dispatched.is_group else None)
    size, reals = group[0].num_rows, [fed.num_real for fed in group]
    if group[0].own is not None:
        index, parts = program.strategy.part
        outputs = jax.tree.map(lambda leaf: leaf.reshape(len(group), parts, size // parts, *leaf.shape[1:])[:, index].reshape(-1, *leaf.shape[1:]), outputs)
        size, reals = size // parts, [fed.own or 0 for fed in group]
    real = sum(reals)
    if real - reals[-1] == size * (len(group) - 1):  # The usual case: but for the last one, all batches are full.
        outputs = jax.tree.map(lambda leaf: leaf[:real], outputs)
    else:
        rows = np.concatenate([np.arange(size) < count for count in reals])
        outputs = jax.tree.map(lambda leaf: leaf[rows], outputs)
    callbacks.call("on_predict_batch_end", dispatched.number, {"outputs": outputs})
    return outputs
