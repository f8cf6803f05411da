"""Loops over data without training: `Evaluation` adds metrics to checkpoints, `predict` and `predict_iter` return outputs."""

import contextlib
import dataclasses
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
from fitflax.data.arrays import ArraySource, IndexedSource
from fitflax.data.feed import undisturbed
from fitflax.data.padding import without_padding
from fitflax.errors import DataError, warn
from fitflax.logs import Kind, Logs, TimeSpent, Values
from fitflax.loops.session import Session
from fitflax.loops.signals import Interruption
from fitflax.state import Batch, PyTree, TrainState, shapes_key
from fitflax.steps.live_state import Carry, Sums
from fitflax.steps.outputs import Returned
from fitflax.steps.program import Program, check_in_memory, check_measures, check_total_weight
from fitflax.triggers import Trigger

# Minimum time between two calls of batch hooks if all callbacks allow batches to be skipped.
_BATCH_HOOK_SECONDS = 0.05


class Interrupted(Exception):
    """Ends an evaluation after a signal. It is always caught, so users never see it."""


class Evaluation:
    """Evaluates a state over data. Called with a checkpoint, it returns a `Summary`, so several evaluations can be chained.

    `steps` is the number of batches of an evaluation, or `None` for all, and `name` is the name of the group of metrics. A signal ends an evaluation
    before its next batch.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        source: Source,
        *,
        steps: int | None,
        name: str,
        callbacks: CallbackList | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self._session, self._program, self._source, self._steps, self.name = session, program, source, steps, name
        self._make_feed = session.task.feeder.evaluations(source, name, steps, exact=lambda: program.dry_run.loss_is_scalar)
        self._pad = session.task.pad
        self._dry_runs: set[Any] = set()
        self._callbacks, self._interruption = callbacks or CallbackList(), interruption or Interruption()

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
            self._session.state.check_batch(fed.batch)
            self._dry_run(state, fed.batch)

    def _dry_run(self, state: TrainState, batch: Batch) -> None:
        """Dry-runs an evaluation and checks data in memory, once for each structure of the state and shapes of the first batch, with and without jit."""
        kind = jax.tree.structure(state), shapes_key(batch), self._program.is_eager
        if kind in self._dry_runs:
            return
        self._program.preparation.evaluate(state, batch)
        check_measures(self._program, self.name)
        check_in_memory(self._program, self._source, state, batch, pad=self._pad, train=False)
        self._dry_runs.add(kind)

    def evaluate(self, get_state: Callable[[], TrainState]) -> dict[str, Any]:
        """Returns the metrics of a state, read from the device in one transfer at the end; raises `DataError` if there is no batch.

        `get_state` is called after the first batch has been checked, because the check may change how the state is laid out.
        """
        hooks = self._callbacks
        hooks.params["test_steps"] = self._steps or self._source.all_batches
        with undisturbed(), contextlib.closing(self._make_feed()) as feed:
            hooks.call("on_test_begin", {})
            values = self._evaluate_batches(get_state, feed)
            logs = Logs(values, kinds=self.kinds)
            hooks.call("on_test_end", logs)
            metrics = dict(logs)
            check_total_weight(self._program, self.name, values)
            return metrics

    def _evaluate_batches(self, get_state: Callable[[], TrainState], feed: Feed) -> Values:
        program, batch_hooks = self._program, _BatchHooks(self._callbacks)
        sums: Sums | None = None
        carry: Carry | None = None
        values: Values | None = None
        collected = None
        batch, size = 0, 1
        while self._steps is None or batch < self._steps:
            if self._interruption.requested:
                raise Interrupted
            fed = feed.next(size if size > 1 else None)
            if fed is None:
                break
            if sums is None or carry is None:
                self._session.state.check_batch(fed.batch)
                state = get_state()
                carry = program.eval_carry(state)
                self._dry_run(state, fed.batch)
                sums, collected = program.empty_sums(train=False), program.collector(train=False)
                # Only for arrays: other sources may be slow, and a call waits for all of its batches.
                may_group = isinstance(self._source, ArraySource) and not batch_hooks.see_all
                size = program.preparation.group_for("evaluate", fed.batch) if may_group else 1
            batch_hooks.begin(batch)
            group = _group_of(feed, fed, size, None if self._steps is None else self._steps - batch)
            sums, values, rows = program.evaluate(carry, sums, group, size)
            if collected is not None:
                collected.add(rows, None if size == 1 else len(group))
            batch += len(group)
            batch_hooks.end(batch - 1, values, self.kinds)
        if values is None:
            raise DataError(f"The data of {self.name!r} yields no batches. Check that it is neither empty nor an exhausted iterator.")
        if self._steps is not None and batch < self._steps:
            warn(f"The data of {self.name!r} ended after {batch} of {self._steps} batches, so its metrics cover only these. Pass more data or fewer steps.")
        batch_hooks.finish()
        return values if collected is None else values.with_late(collected.keys, collected.now())


@dataclasses.dataclass(frozen=True)
class Validation:
    """The evaluations during training, and when they run."""

    loops: Sequence[Evaluation] = ()  # One evaluation for each validation set.
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

    def evaluate(self, checkpoint: Checkpoint, program: Program, spent: TimeSpent) -> Checkpoint:
        """Returns a checkpoint with the metrics of all sets."""
        waited = program.seconds_waited
        with spent.on("evaluating"):
            for evaluate in self.loops:
                checkpoint = evaluate(checkpoint)
        spent.move("evaluating", "compiling", program.seconds_waited - waited)
        return checkpoint


class _BatchHooks:
    """Calls the batch hooks of an evaluation: for each batch or, if all callbacks allow skipping, 20 times a second and for the last batch."""

    def __init__(self, callbacks: CallbackList) -> None:
        self._callbacks = callbacks
        self.see_all = callbacks.needs_every_batch("on_test_batch_begin", "on_test_batch_end")
        self._has_end_hook = callbacks.has_hook("on_test_batch_end")
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
            if self._has_end_hook:
                self._callbacks.call("on_test_batch_end", batch, Logs(values, kinds=kinds))

    def finish(self) -> None:
        """Calls the hooks of the last batch if they were skipped."""
        if self._last is not None:
            self._next_time = -math.inf
            self.begin(self._last[0])
            self.end(*self._last)


class _IsolatedRandomState:
    """The state of the global random generators for one iteration over data, isolated from other code that draws numbers between batches."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the generators to their state at the end of the previous block. When this block ends, undoes all changes of their state."""
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
    number: int  # Index of the batch, or of the last batch of a group.
    outputs: Returned
    group: Sequence[FedBatch]
    is_group: bool  # Whether the outputs have an axis of batches.


def predict(session: Session, source: Source, *, steps: int | None, callbacks: CallbackList) -> PyTree:
    """Returns the outputs for the real rows of all batches, concatenated in order, as NumPy arrays in the containers that the module returns."""
    live = session.state.need("predict")
    with contextlib.closing(session.task.feeder.prediction(source)) as feed, undisturbed():
        # Only for arrays: other sources may be slow, and a call waits for all of its batches.
        may_group = isinstance(source, ArraySource) and not callbacks.needs_every_batch("on_predict_batch_begin", "on_predict_batch_end")
        results: list[PyTree] = []
        with contextlib.closing(_predictions(session.task.any_program(), session, live.borrow, feed, steps, callbacks, may_group=may_group)) as predictions:
            for outputs in predictions:
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


def predict_iter(session: Session, source: Source, *, steps: int | None) -> Generator[PyTree, None, None]:
    """Returns an iterator over the outputs that `predict` concatenates, batch by batch, for the state at the time of the call."""
    live = session.state.need("predict_iter")
    state, version, program, feeder = live.lend(), live.version, session.task.any_program(), session.task.feeder

    def get_state() -> TrainState:
        # The check of the first batch replaces a restored state by an equal one, whose placement may differ.
        is_same = live.version == version or session.state.checked_versions == (version, live.version)
        return live.lend() if is_same else state

    def iterate() -> Generator[PyTree, None, None]:
        with contextlib.closing(feeder.prediction(source)) as feed:
            # Not `undisturbed`, because the caller may draw random numbers between two batches. It costs half a millisecond per batch, and reading
            # arrays draws no random numbers.
            reading = contextlib.nullcontext if isinstance(source, ArraySource) else _IsolatedRandomState().entered
            yield from _predictions(program, session, get_state, feed, steps, CallbackList(), reading=reading)

    return iterate()


def _predictions(
    program: Program,
    session: Session,
    get_state: Callable[[], TrainState],
    feed: Feed,
    steps: int | None,
    callbacks: CallbackList,
    *,
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    may_group: bool = False,
) -> Generator[PyTree, None, None]:
    """Yields the outputs of each batch's real rows, in order, while the next batch is computed. Data is read inside `reading()`.

    With `may_group`, outputs of several batches may be yielded together. `get_state` is called after the first batch has been checked.
    """
    carry: Carry | None = None
    pending: list[_Dispatched] = []  # At most two, so that memory does not grow with the data.
    callbacks.call("on_predict_begin", {})
    batch, size, is_over = 0, 1, False
    while not is_over:
        with reading():
            fed = feed.next(size if size > 1 else None) if steps is None or batch < steps else None
        is_over = fed is None
        if fed is not None:
            if carry is None:
                session.state.check_batch(fed.batch)
                state = get_state()
                carry = program.eval_carry(state)
                program.preparation.predict(state, fed.batch, is_counted=fed.is_counted)
                size = program.preparation.group_for("predict", fed.batch) if may_group else 1
            callbacks.call("on_predict_batch_begin", batch, {})
            group = _group_of(feed, fed, size, None if steps is None else steps - batch)
            last = batch + len(group) - 1
            # Not assigned to a variable, which would keep the outputs alive while the caller works.
            pending.append(_Dispatched(last, program.predict(carry, group, batch, size), group, is_group=size > 1))
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
    for leaf in jax.tree.leaves(outputs):
        leaf.copy_to_host_async()


def _group_of(feed: Feed, fed: FedBatch, size: int, left: int | None) -> list[FedBatch]:
    """Returns the batches of a call that begins with `fed`: at most `size`, and at most `left` unless it is `None`."""
    return [fed] if size == 1 else [fed, *feed.next_like(fed.batch, (size if left is None else min(size, left)) - 1)]


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
    rebuilt = outputs.rebuilt()
    callbacks.call("on_predict_batch_end", dispatched.number, {"outputs": rebuilt})
    return rebuilt
