"""The training loop. A `Run` trains and yields checkpoints, and `fit` iterates over them.

`Run._epochs` defines the order of a run. The loop waits for the newest step only before validations and `on_epoch_end`: values are copied to the host when
they are read.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Self

import jax

from fitflax.checkpoints.checkpoint import Checkpoint, RunPosition, RunView, Timer
from fitflax.data import FedBatch
from fitflax.errors import ConfigError, integer_of
from fitflax.logs import Logs, flat_name
from fitflax.loops.evaluation_loop import Interrupted
from fitflax.loops.setup import RunSetup
from fitflax.loops.signals import make_agreement
from fitflax.state import TrainState
from fitflax.steps.live_state import Sums
from fitflax.steps.outputs import Kept
from fitflax.steps.program import check_total_weight
from fitflax.triggers import Moment, Schedule, Trigger

# Maximum number of steps without hooks in between (but at least one call) and, if a callback uses `on_train_batch_end`, their maximum time.
_MAX_STEPS_WITHOUT_HOOKS = 1000
_SECONDS_WITHOUT_HOOKS = 0.05


class Run:
    """Trains, and yields a `Checkpoint` when a trigger fires, after the last step and, in `fit`, at the end of each epoch."""

    def __init__(self, setup: RunSetup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._program, self._live, self._feed = setup.session, setup.program, setup.live, setup.feed
        self.plan, self.progress = setup.plan, setup.progress
        components, resumed = setup.components, setup.resumed
        self.callbacks, self.interruption, self.spent = components.callbacks, components.interruption, components.spent
        self._saver, self._validation = components.saver, components.validation
        self._during_first_step, self._clock = setup.during_first_step, clock
        try:
            self._agreement = make_agreement(self._session, int(self.plan.info["steps_per_call"]), lambda: self._clock())
        except BaseException:  # For example, because another process has failed.
            self._feed.close()  # This ends worker processes of a loader.
            raise
        self._schedule = Schedule(self.plan.every, self.seconds)
        self._validation_schedule = Schedule(self._validation.trigger, self.seconds)
        self._upcoming: list[FedBatch] = []  # Batches of the next call: first only one; the others are added just before the call.
        self._run_end_step: int | None = None  # The last step of the current call of `run`.
        self._values, self._sums, self._collected, self._validated = resumed.values, resumed.sums, resumed.collected, dict(resumed.validated)
        self._kept: Kept | None = None
        self._timer = Timer(self._clock)
        self._begin_step = self._last_yielded = self.progress.step
        self._checked_step: int | None = None  # The last step after which signals were checked.
        self._pending_checkpoint: Checkpoint | None = None  # Created at the end of an epoch or by a validation, until it is yielded.
        self._has_yielded = self._is_last = self._is_rescue = self._epoch_was_finished = False
        self.failure: BaseException | None = None  # The error that ended the run, possibly only in this process.
        # The states of callbacks and triggers from before a validation or the end of an epoch and, if a checkpoint may need it, the borrowed train state. If
        # this is interrupted, they are saved instead of the current ones.
        self._before_epoch_end: tuple[dict[str, Any], TrainState | None] | None = None
        # For the consumer of the checkpoints: the `id()` of each callback whose trigger fired, and the logs of the last epoch.
        self.fired_ids: set[int] = set()
        self.epoch_logs = Logs()
        self._checkpoint_flags = self._epochs_with_rescue()
        self._is_compiled = self.has_ended = self._is_being_closed = False
        # A callback may change the data in `on_epoch_begin`. An iterator is still read before it, because an epoch without a batch does not begin.
        self._prefetches_epochs = self.callbacks.may_prefetch or not self._feed.source.can_restart
        if not self._prefetches_epochs:
            self._feed.hold_passes()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        self._restart_timer()
        for should_yield in self._checkpoint_flags:
            if should_yield:
                return self._yielded()
        raise StopIteration

    def run(self, steps: int) -> Checkpoint | None:
        """Runs `steps` steps, fewer if the run ends before, and returns the checkpoint of the last one; `None` if no step was left."""
        steps = integer_of("run(steps)", steps, at_least=1)
        self._restart_timer()
        begin = self.progress.step
        self._run_end_step = begin + steps
        for _ in self._checkpoint_flags:
            if self.progress.step >= self._run_end_step:
                break
        self._run_end_step = None
        return self._yielded() if self.progress.step > begin else None

    def _restart_timer(self) -> None:
        self._timer.stop(wait=False)  # The last checkpoint's time must stop now, even if it is read later.
        self._timer = Timer(self._clock, self._timer.seconds_evaluating)

    def _yielded(self) -> Checkpoint:
        checkpoint, self._pending_checkpoint = self._pending_checkpoint or self._make_checkpoint(), None
        repeat = self._has_yielded and self.progress.step == self._last_yielded
        if self.progress.is_pending:
            self.fired_ids = set()  # A resume evaluates the triggers of this step.
        self._has_yielded = True
        run = checkpoint.run
        self._timer.pause(run.step_values)
        run.position = dataclasses.replace(run.position, is_last=self._is_last, is_rescue=self._is_rescue, is_repeat=repeat)
        self._last_yielded = self.progress.step
        return checkpoint

    def close(self) -> None:
        """Ends the run at the current step, without a last checkpoint, and waits for saves."""
        self._is_being_closed = True
        self._checkpoint_flags.close()
        if self._upcoming:
            self._feed.push_back(None)  # An interrupted call may have read more than is in `_upcoming`.
        self._upcoming = []
        self._feed.close()
        self._finish_saving()

    def _finish_saving(self) -> None:
        if self.interruption.exits_immediately:
            self._saver.abandon()
        with self.spent.on("saving"):
            self._saver.close()

    def change(self, *, end_step: int | None, every: Trigger | None) -> None:
        """Changes the end and the trigger of the run. A run that has ended normally continues with a new saver if its end is now later.

        A new trigger measures time from now.
        """
        if every is not self.plan.every:
            self._schedule = Schedule(every, self.seconds)
        self.plan = dataclasses.replace(self.plan, end_step=end_step, every=every)
        if self.has_ended and not self.is_finished:
            self._saver, self._begin_step, self.has_ended = self._session.make_saver(), self.progress.step, False
            self._is_last = self._is_rescue = self._epoch_was_finished = False
            self._before_epoch_end = None
            self._feed.reopen()
            self._checkpoint_flags = self._epochs_with_rescue()

    def skip_epoch_end(self, logs: Logs) -> None:
        """Skips the end of the open epoch because an earlier process ran it, with these logs."""
        self.epoch_logs = logs
        self._epoch_was_finished = True

    def logs_of(self, values: Mapping[str, Any]) -> Logs:
        """Returns saved values of training and validation as logs, with the kinds of their metrics."""
        dry_run = self._program.dry_run
        kinds = {flat_name(loop.name, key): kind for loop in self._validation.loops for key, kind in dry_run.eval_kinds.items()}
        return Logs(extra=values, kinds={key: kind for key, kind in {**kinds, **dry_run.kinds}.items() if key in values})

    @property
    def seconds(self) -> float:
        """The time that triggers use."""
        return self._agreement.seconds

    @property
    def is_finished(self) -> bool:
        """Whether the plan has no more steps, or a stop was requested."""
        plan, progress = self.plan, self.progress
        ends = plan.end_step is not None and progress.step >= plan.end_step
        ends |= plan.end_epoch is not None and progress.epoch >= plan.end_epoch
        return ends or self._agreement.stops(progress.step)

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether a resumed run had already reached its end."""
        return self.is_finished or (self.progress.epoch_is_open and not self.progress.epoch_is_over and not self._fetch())

    # -- the order of a run --

    def _epochs(self) -> Iterator[bool]:
        """Runs the epochs. When triggers were evaluated, and at the end of each epoch and of the run, yields whether to yield a checkpoint."""
        progress = self.progress
        while progress.epoch_is_open or (self._may_continue() and self._begin_epoch()):
            while not progress.epoch_is_over:
                progress.is_pending &= self._has_triggers or self._run_end_step is not None
                if progress.is_pending and not self._is_interrupted:
                    # The next batch is read first: if the data fails, a resume evaluates this step's triggers again.
                    continues = not self.is_finished and self._fetch()
                    should_yield = self._evaluate_triggers()
                    if continues:
                        yield should_yield
                    elif should_yield and self.plan.is_fit and self._values is not None and progress.step == self._begin_step:
                        # The run was interrupted at its last step. `_last_checkpoint` yields no checkpoint if no step ran.
                        self._is_last = True
                        yield True
                # Checked again after a batch is read, because reading may run any code and take any time.
                if not self._may_continue() or not self._has_batch() or not self._may_continue():
                    # Yield the checkpoint that a resume needs first. Then end the epoch over the steps so far, only for logs.
                    yield from self._last_checkpoint(rescue=self._is_rescue)
                    if not self._is_rescue:
                        self._end_inside_epoch()
                    return
                self._train_group()
                self._check_signals()
                self._agreement.listen(progress.step)
                self._feed.raise_kept_error()
                self._check_epoch_end(may_read=True)
            yield self._end_epoch()
        yield from self._last_checkpoint(rescue=self._is_rescue)

    def _epochs_with_rescue(self) -> Generator[bool, None, None]:
        """Runs `_epochs`; after an exception, yields a checkpoint of the last finished step."""
        is_dropped = False
        try:
            self._agreement.begin(self.progress.step, self.progress.first_step)
            if self.progress.epoch_is_over or not self.is_finished:
                with self.spent.on("data"):
                    self._feed.open_begun_pass()
            yield from self._epochs()
            self.has_ended = True
        except GeneratorExit:
            is_dropped = True
            raise
        except BaseException as error:  # Includes a KeyboardInterrupt that user code raises.
            self._check_epoch_end(may_read=False)
            self.failure = None if isinstance(error, Interrupted) else error
            if self._before_epoch_end is not None and self._before_epoch_end[1] is not None:
                self._put_back(self._before_epoch_end[1])
            if self._live.is_intact and self._live.step == self.progress.step and not self.interruption.exits_immediately:
                is_dropped = True  # Unless the consumer of this checkpoint requests the next one.
                yield from self._last_checkpoint(rescue=True)
                is_dropped = False
            # Checked after the checkpoint, because a scheduler may signal the workers of a loader before their parent.
            if self.failure is not None and not self.interruption.explains(error):
                raise
        finally:
            if not is_dropped:
                self._feed.close()  # This ends worker processes of a loader.
                self._finish_saving()
            elif not self._is_being_closed:
                # The run was dropped, and this may be any thread, because the garbage collector runs it.
                self._feed.close()
                self._saver.detach()

    def _put_back(self, state: TrainState) -> None:
        """Restores the state from before callbacks changed it at the end of an epoch, unless one has trained it and so donated its buffers."""
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            self._live.replace(state, self.progress.step)
            self._live.lend()  # It may have been lent before, so the next step must work on a copy.

    @property
    def _is_interrupted(self) -> bool:
        return self.interruption.requested is not None

    def _may_continue(self) -> bool:
        """Returns whether neither a signal nor the plan ends the run here."""
        self._is_rescue = self._is_interrupted
        return not self._is_rescue and not self.is_finished

    def _has_batch(self) -> bool:
        """Returns whether there is another batch; otherwise, the data ends before the plan does."""
        if not self._fetch():
            self._session.note_exhausted()
        return bool(self._upcoming)

    def _last_checkpoint(self, *, rescue: bool = False) -> Iterator[bool]:
        """Yields the last step's checkpoint, unless it has been yielded as the last one or no step ran."""
        was_yielded = self.progress.step == self._last_yielded
        if self.progress.step == self._begin_step or (was_yielded and (self._is_last or not self.plan.is_fit)):
            return
        self._is_last, self._is_rescue = True, rescue
        yield True

    def _fetch(self) -> bool:
        """Reads the next batch, beginning a new pass if needed; returns whether there is one."""
        if not self._upcoming and not self._read_batch():
            progress = self.progress
            # If an epoch is one pass, the end of the pass is the end of the epoch.
            ends_epoch = self.plan.steps_per_epoch is None and progress.epoch_is_open and progress.step_in_epoch > 0
            if self._feed.source.can_restart and not ends_epoch:
                progress.begin_pass(progress.position.passes + (progress.position.examples > 0 or any(progress.used)))
                self._read_batch()
        return bool(self._upcoming)

    def _read_batch(self) -> bool:
        with self.spent.on("data"):
            fed = self._feed.next(None if self.plan.steps_per_call == 1 else self._steps_of_call(self._steps_to_next_event()))
        self._upcoming = [] if fed is None else [fed]
        return fed is not None

    def _read_batch_of_pass(self, count: int) -> bool:
        """Reads the first batch of a call of `count` steps. The end of the pass or an error is kept for `_read_batch`."""
        begin = self.spent.clock()
        fed = self._feed.next_of_pass(count if count > 1 else None)
        self.spent.add("data", self.spent.clock() - begin)
        self._upcoming = [] if fed is None else [fed]
        return fed is not None

    def _begin_epoch(self) -> bool:
        """Begins an epoch; returns whether it has a batch."""
        if self._prefetches_epochs and not self._has_batch():
            return False
        if not self._prefetches_epochs:
            self._feed.announce_pass()
        progress = self.progress
        progress.epoch_is_open, progress.epoch_is_over, progress.step_in_epoch = True, False, 0
        self._is_last = False  # The consumer of the last checkpoint may have moved the end.
        self._sums = self._collected = None
        self._validated = {}
        self.callbacks.call("on_epoch_begin", progress.epoch, {})
        if not self._prefetches_epochs:
            progress.epoch_is_open = self.is_finished or self._is_interrupted or self._has_batch()
        return progress.epoch_is_open

    def _train_group(self) -> None:
        """Calls the hooks of a batch and, between them, dispatches a call, usually of one step, and further steps without events in between."""
        self._pending_checkpoint = None
        progress, hooks, plan = self.progress, self.callbacks, self.plan
        if self._live.step != progress.step:
            raise ConfigError(
                f"This run is at step {progress.step}, but the trainer's state is at step {self._live.step}, because another call has trained or replaced it. "
                "Do not interleave two runs of one trainer; use a trainer for each."
            )
        hooks.call("on_train_batch_begin", progress.step_in_epoch, {})
        steps_left = self._steps_to_next_event()
        count = self._steps_of_call(steps_left)
        if count > 1:
            self._complete_call(count)
        # If the call is the whole interval, no step may run without hooks, even if the data ends the call early.
        without_hooks = steps_left - len(self._upcoming) if steps_left > count else 0
        if self._sums is None:
            self._collected = self._program.collector(train=True)
        sums = self._program.empty_sums(train=True) if self._sums is None else self._sums
        if not self._is_compiled:
            self._is_compiled = True
            self._exclude(lambda: self._program.await_step(self._live.carry, steps_per_call=plan.steps_per_call, keep=plan.keep))
        self._train_upcoming(sums)
        if self._during_first_step is not None:
            check, self._during_first_step = self._during_first_step, None
            self._exclude(check)
        if without_hooks:
            self._train_without_hooks(without_hooks)
        if hooks.has_hook("on_train_batch_end"):
            hooks.call("on_train_batch_end", progress.step_in_epoch - 1, Logs(self._values, kinds=self._program.dry_run.kinds))

    def _complete_call(self, count: int) -> None:
        """Adds the other batches of a call of `count` steps to the first one."""
        with self.spent.on("data"):
            self._upcoming += self._feed.next_like(self._upcoming[0].batch, count - 1)

    def _check_signals(self) -> None:
        if self._checked_step != self.progress.step:
            self._checked_step = self.progress.step
            self.interruption.check(self.progress.step)

    def _exclude(self, prepare: Callable[[], None]) -> None:
        """Calls a function whose time counts as time of compiling and not of steps."""
        with self._timer.excluding(), self.spent.on("compiling"):
            prepare()

    def _train_upcoming(self, sums: Sums) -> None:
        group, plan, progress = self._upcoming, self.plan, self.progress
        self._kept = None  # Frees the memory for the values of this call.
        trained = self._program.train_group(self._live.take(), sums, group, plan.steps_per_call, keep=plan.keep)
        carry, self._sums, self._values, rows, self._kept = trained
        steps = len(group)
        if self._collected is not None:
            self._collected.add(rows, None if plan.steps_per_call == 1 else steps)
        # Cleared only now, because an interrupted step has not used its batch, which may be the last one of its pass.
        self._upcoming = []
        self.spent.examples += group[0].num_real if steps == 1 else sum(fed.num_real for fed in group)
        progress.step += steps
        progress.step_in_epoch += steps
        progress.is_pending = True
        progress.position, progress.used = group[-1].position, group[-1].used
        # Last: a KeyboardInterrupt before this finds donated buffers and saves nothing; after it, the whole step is counted.
        self._live.advance(carry, steps)

    def _train_without_hooks(self, steps: int) -> None:
        """Runs up to `steps` more steps without the rest of the loop, which takes time.

        Returns early for signals, requests to stop, time-based events, the end of a pass and errors of the data.
        """
        feed, progress, agreement, clock = self._feed, self.progress, self._agreement, self._clock
        next_seconds = min(self._schedule.next_seconds, self._validation_schedule.next_seconds, self.callbacks.next_seconds)
        watches_time = next_seconds < math.inf
        end = clock() + _SECONDS_WITHOUT_HOOKS if self.callbacks.has_hook("on_train_batch_end") else math.inf

        def must_return() -> bool:
            is_time = clock() >= end or (watches_time and agreement.seconds >= next_seconds)
            return is_time or agreement.is_stop_requested() or self._is_interrupted

        while steps > 0:
            has_more = feed.has_more
            if has_more is False or must_return():
                return
            self._check_signals()
            count = self._steps_of_call(steps)
            if self._is_interrupted or not self._read_batch_of_pass(count):
                return
            # Reading data of unknown length may run any code and take any time. The rest of the loop then uses the batch, or pushes it back.
            if has_more is None and (must_return() or self._live.step != progress.step):
                return
            if count > 1:
                self._complete_call(count)
            assert self._sums is not None
            steps -= len(self._upcoming)
            self._train_upcoming(self._sums)

    def _steps_to_next_event(self) -> int:
        """Returns the number of steps until the next event, such as a trigger or the end of the epoch."""
        plan, progress = self.plan, self.progress
        step, is_seen = progress.step, self.callbacks.needs_every_batch("on_train_batch_begin", "on_train_batch_end")
        if is_seen and plan.steps_per_call == 1:
            return 1
        # Whole calls; otherwise, the step at which this process began would determine how steps are split into calls, and so how they are rounded.
        limit = call = self._steps_of_call(plan.steps_per_call)
        if not is_seen:
            limit += max(0, _MAX_STEPS_WITHOUT_HOOKS - call) // plan.steps_per_call * plan.steps_per_call
        ends: list[int | None] = [step + limit]
        ends += [plan.end_step, self._run_end_step, self._agreement.next_step()]
        ends += [schedule.next_step(step, plan.process_start) for schedule in (self._schedule, self._validation_schedule, self.callbacks)]
        if plan.steps_per_epoch is not None:
            ends.append(step + plan.steps_per_epoch - (progress.step_in_epoch if progress.epoch_is_open else 0))
        return max(1, min(end for end in ends if end is not None) - step)

    def _steps_of_call(self, most: int) -> int:
        """Returns the number of steps of the next call, at most `most`: calls end at multiples of their size in this run."""
        size = self.plan.steps_per_call
        return min(most, size - (self.progress.step - self.progress.first_step) % size)

    # -- the end of an epoch --

    def _check_epoch_end(self, *, may_read: bool) -> None:
        """Finds out whether the epoch is over. If only reading another batch can show it, reads one while the device computes."""
        progress = self.progress
        if not progress.epoch_is_open or progress.epoch_is_over or progress.step_in_epoch == 0:
            return
        if self.plan.steps_per_epoch is not None:
            progress.epoch_is_over = progress.step_in_epoch >= self.plan.steps_per_epoch
            return
        if self._upcoming:
            return
        ended = self._feed.pass_has_ended
        # No batch that will not be used is read from an iterator that cannot restart.
        if may_read and ended is None and (self._feed.source.can_restart or self._feed.has_kept_end or not self.is_finished):
            ended = not self._read_batch()
        if ended:
            progress.epoch_is_over = True
            progress.begin_pass(progress.position.passes + 1)

    def _end_epoch(self) -> bool:
        """Ends an epoch normally; returns whether to yield its checkpoint, which has the results of validation and callbacks."""
        progress = self.progress
        self._agreement.synchronize()
        # Only an iterator that cannot restart can be exhausted here.
        ends = self.is_finished or (self.plan.end_epoch is not None and progress.epoch + 1 >= self.plan.end_epoch)
        has_more = ends or self._feed.source.can_restart or self._fetch()
        self._pending_checkpoint = self._finish_epoch(is_whole=True)
        self._before_epoch_end = None
        progress.epoch += 1
        progress.epoch_is_open = progress.epoch_is_over = False
        self._agreement.synchronize()
        self._is_rescue = self._is_interrupted
        self._is_last = self._is_rescue or self.is_finished or not has_more
        return self._evaluate_triggers() or self._is_last or self.plan.is_fit

    def _end_inside_epoch(self) -> None:
        """Ends an epoch for the steps so far because the run ends inside it. Only the epoch's row is saved, next to the checkpoint."""
        if self._values is None or self._epoch_was_finished or self.progress.step_in_epoch == 0:
            return
        before = self._live.borrow()
        checkpoint = self._finish_epoch(is_whole=False)
        if self.plan.is_fit:  # In other loops, the consumer may end the run in only one process.
            self._agreement.synchronize()
        after, step = self._live.borrow(), self._live.step
        if after is not before:
            self._put_back(before)  # For a best checkpoint, because a resume from it ends the epoch again.
        try:
            self.callbacks.on_closing(checkpoint, self.progress.epoch, checkpoint.logs)
        finally:
            if after is not before:
                self._live.replace(after, step)

    def _finish_epoch(self, *, is_whole: bool) -> Checkpoint:
        """Validates, and calls `on_epoch_end`; returns the checkpoint whose logs the callbacks got."""
        # Recorded now, so that a resume from a checkpoint that is saved below ends the epoch again. After a partial epoch, no rescue checkpoint is saved.
        self._before_epoch_end = self._repeated_state(), self._live.borrow() if is_whole else None
        checkpoint = self._make_checkpoint(epoch_ends=True)
        if self._validation.at_epoch(self.progress.epoch) or (is_whole and self._validation_schedule.due(self._moment(epoch_ends=True))):
            checkpoint = self._validate(checkpoint)
        checkpoint.logs.earlier = self.logs_of(self._validated)
        self.epoch_logs = checkpoint.logs
        if self.callbacks.has_hook("on_epoch_end"):
            with self._timer_paused():
                self.callbacks.call("on_epoch_end", self.progress.epoch, checkpoint.logs)
        if checkpoint.logs.source is not None and checkpoint.logs.source.is_read:
            check_total_weight(self._program, "train", checkpoint.logs.source)
        return checkpoint

    def _validate(self, checkpoint: Checkpoint) -> Checkpoint:
        with self._timer_paused():
            return self._validation.evaluate(checkpoint, self._program, self.spent)

    @contextlib.contextmanager
    def _timer_paused(self) -> Iterator[None]:
        """Excludes a block from the time of steps. Waits for running steps first, so that their time does not count as time of the block."""
        if self._values is not None:
            self._values.wait()
        with self._timer.excluding():
            yield

    @property
    def _has_triggers(self) -> bool:
        return self.plan.every is not None or self._validation.trigger is not None or self.callbacks.has_schedules

    def _evaluate_triggers(self) -> bool:
        """Returns whether to yield a checkpoint of this step. Validates if the trigger of validation fires inside an epoch."""
        progress = self.progress
        progress.is_pending &= self._has_triggers
        if not self._has_triggers:
            return False
        moment = self._moment(epoch_ends=not progress.epoch_is_open)
        schedule = self._validation_schedule
        before = {"validation_schedule": schedule.state_dict(self.seconds)} if schedule.measures_time else {}
        if progress.epoch_is_open and schedule.due(moment):
            self._before_epoch_end = {**self._repeated_state(), **before}, None
            self._pending_checkpoint = self._validate(self._make_checkpoint())
            self._before_epoch_end = None
            self._validated = {key: self._pending_checkpoint.logs[key] for key in sorted(self._pending_checkpoint.evaluated)}
        self.fired_ids = self.callbacks.evaluate_triggers(moment)
        progress.is_pending = False
        return self._schedule.due(moment) or bool(self.fired_ids) or (self._pending_checkpoint is not None and progress.epoch_is_open)

    def _moment(self, *, epoch_ends: bool) -> Moment:
        progress = self.progress
        epochs = progress.epoch + (epoch_ends and progress.epoch_is_open)
        return Moment(progress.step, start_step=self.plan.process_start, epochs_done=epochs, epoch_ends=epoch_ends, seconds=self.seconds)

    def _make_checkpoint(self, *, epoch_ends: bool = False) -> Checkpoint:
        progress = self.progress
        position = RunPosition(
            moment=self._moment(epoch_ends=epoch_ends),
            epoch=progress.epoch,
            step_in_epoch=progress.step_in_epoch,
            data_position=progress.position,
            n_completed_steps=progress.step - self._last_yielded,
            used=progress.used,
        )
        values = self._values
        if values is not None and self._collected is not None:
            values = values.with_late(self._collected.keys, self._collected.now())
        run = RunView(
            position=position,
            live=self._live,
            logs=Logs(values, kinds=self._program.dry_run.kinds),
            step_values=values,
            keep=self.plan.keep,
            kept=self._kept,
            timer=self._timer,
            run_state=self._run_state,
            joined=lambda: self._feed.joined_state(progress.position, is_alone=self.failure is not None),
            info=self._info,
            saver=self._saver,
        )
        return Checkpoint(run)

    def _repeated_state(self) -> dict[str, Any]:
        """Returns the state that a resume needs to repeat an interrupted validation or end of an epoch."""
        state = dict(self.callbacks.state_dict(self.seconds))
        if self._validation_schedule.measures_time:
            state["validation_schedule"] = self._validation_schedule.state_dict(self.seconds)
        if (num_started := self._feed.source.num_started) is not None:
            state["num_started"] = num_started
        return state

    def load_validation_schedule(self, states: Mapping[str, Any]) -> None:
        """Restores the trigger of validation from the saved state of a run."""
        self._validation_schedule.load_state_dict(states.get("validation_schedule", {}), self.seconds)

    def _run_state(self) -> dict[str, Any]:
        """Returns what a resume needs besides the train state; called when it is saved."""
        before = self._before_epoch_end
        state = dict(self._repeated_state() if before is None else before[0])
        if data := self._feed.state_dict(self.progress.position):
            state["data"] = data
        if self._values is not None:
            state["values"] = self._values.vector
        if self.progress.epoch_is_open and self._sums is not None:
            if self._collected is not None:
                state["rows"] = self._collected.state_dict()
            state |= {"sums": self._program.unpack_sums(self._sums, train=True), "validated": self._validated}
        return state

    def _info(self) -> dict[str, Any]:
        return {**self.plan.info, "progress": self.progress.as_json(), "full_batch_size": self._feed.full_size}
