"""The training loop: when things happen. A `Run` yields checkpoints, and `fit` iterates over them.

`Run._epochs` is the order of a run. The loop never waits for the newest step: a bounded number of steps is in flight, and values are copied to the
host when they are read.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Self

import jax

from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.run_position import RunPosition, Timer
from fitflax.checkpoints.run_view import RunView
from fitflax.checkpoints.writer.saver import Saver
from fitflax.data import FedBatch, Feed
from fitflax.errors import ConfigError
from fitflax.logs import Logs, StepValues
from fitflax.loops.agreement import Agreement
from fitflax.loops.evaluation import Interrupted
from fitflax.loops.run_plan import BeforeEpochEnd, Progress, RunPlan, Validation
from fitflax.loops.signals import Interruption
from fitflax.state import TrainState
from fitflax.steps.collected_rows import Collected
from fitflax.steps.early_checks import check_total_weight
from fitflax.steps.kept_values import Kept
from fitflax.steps.live_state import LiveState, Sums
from fitflax.steps.step_dispatch import Program
from fitflax.time_spent import TimeSpent
from fitflax.triggers import Moment, Schedule, Trigger

__all__ = ["Run"]

# Maximum number of steps between which only signals are checked, and maximum time of them if a callback shows progress.
_MAX_STEPS_WITHOUT_HOOKS = 1000
_SECONDS_WITHOUT_HOOKS = 0.05


class Run:
    """Trains, and yields a `Checkpoint` whenever one is due and after the last step. `prepare_run` makes it.

    Only `change` modifies its plan. `progress` is where the run begins, and is updated. A resumed run gets the `values` of its last step, and of its
    open epoch the packed `sums`, the rows that metrics have `collected`, and the results of the last validation. `agreement` makes an `Agreement` from a
    clock. `exhausted` is called if the data ends before the plan does, and `beside_first_step` while the device computes the first step. The saver is
    closed at the end.
    """

    def __init__(
        self,
        program: Program,
        live: LiveState,
        feed: Feed,
        plan: RunPlan,
        *,
        progress: Progress,
        agreement: Callable[[Callable[[], float]], Agreement],
        exhausted: Callable[[], None],
        saver: Saver,
        spent: TimeSpent,
        callbacks: CallbackList | None = None,
        validation: Validation | None = None,
        sums: Sums | None = None,
        collected: Collected | None = None,
        values: StepValues | None = None,
        validated: Mapping[str, float] | None = None,
        interruption: Interruption | None = None,
        beside_first_step: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program, self._live, self._feed = program, live, feed
        self.plan, self.progress = plan, progress
        self.callbacks = callbacks or CallbackList()
        self._validation = validation or Validation()
        self._exhausted, self._beside_first_step = exhausted, beside_first_step
        self.interruption, self._saver, self.spent = interruption, saver, spent
        self._clock = clock
        self._agreement = agreement(lambda: self._clock())
        self._schedule = Schedule(plan.every, self.seconds)
        self._validation_schedule = Schedule(self._validation.trigger, self.seconds)
        self._upcoming: list[FedBatch] = []  # Batches of the next call: at first one, the others are added just before the call.
        self._run_end_step: int | None = None  # The last step of the current call of `run`.
        self._sums, self._collected, self._values = sums, collected, values
        self._kept: Kept | None = None
        self._validated: dict[str, float] = dict(validated or {})
        self._timer = Timer(self._clock)
        self._begin_step = self._last_yielded = self.progress.step
        self._has_yielded = False
        self._pending_checkpoint: Checkpoint | None = None  # Made by the end of an epoch or a validation before it is yielded.
        self._is_last = self._is_rescue = self._epoch_was_finished = False
        self.failure: BaseException | None = None  # The error that ended the run, possibly only in this process.
        self._before_epoch_end: BeforeEpochEnd | None = None  # Saved instead of the current values if the end of an epoch is interrupted.
        # For the consumer of the checkpoints: indices of due callbacks, and logs of the last epoch.
        self.due: set[int] = set()
        self.epoch_logs = Logs()
        self._due_flags = self._epochs_with_rescue()
        self._is_compiled = self.has_ended = self._is_being_closed = False
        # A callback may change the data in `on_epoch_begin`. An iterator must still be asked first, because an epoch without a batch does not begin.
        self._prefetches_epochs = self.callbacks.may_prefetch or not feed.source.can_restart
        if not self._prefetches_epochs:
            feed.hold_passes()

    # -- ways of stepping --

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        self._restart_timer()
        for is_due in self._due_flags:
            if is_due:
                return self._yielded()
        raise StopIteration

    def run(self, steps: int) -> Checkpoint | None:
        """Runs `steps` steps, fewer if the run ends before, and returns the checkpoint of the last one; `None` if no step was left."""
        if steps < 1:
            raise ConfigError(f"run(steps) must run at least one step. Received: {steps!r}.")
        self._restart_timer()
        begin = self.progress.step
        self._run_end_step = begin + steps
        for _ in self._due_flags:
            if self.progress.step >= self._run_end_step:
                break
        self._run_end_step = None
        return self._yielded() if self.progress.step > begin else None

    def _restart_timer(self) -> None:
        self._timer.stop(wait=False)  # The last checkpoint's time must stop now, even if it is read later.
        self._timer = Timer(self._clock)

    def _yielded(self) -> Checkpoint:
        checkpoint, self._pending_checkpoint = self._pending_checkpoint or self._make_checkpoint(), None
        repeat = self._has_yielded and self.progress.step == self._last_yielded
        if self.progress.is_pending:
            self.due = set()  # A resume evaluates the triggers of this step.
        self._has_yielded = True
        self._timer.pause(self._values)
        run = checkpoint.run
        run.position = dataclasses.replace(run.position, is_last=self._is_last, is_rescue=self._is_rescue, is_repeat=repeat)
        self._last_yielded = self.progress.step
        return checkpoint

    def close(self) -> None:
        """Ends the run at the current step, without a last checkpoint, and waits for saves."""
        self._is_being_closed = True
        self._due_flags.close()
        self._feed.push_back(len(self._upcoming))
        self._upcoming = []
        self._feed.close()
        self._finish_saving()

    def _finish_saving(self) -> None:
        if self.interruption is not None and self.interruption.leaves_at_once:
            self._saver.abandon()
        with self.spent.on("saving"):
            self._saver.close()

    def change(self, *, end_step: int | None, every: Trigger | None, saver: Callable[[], Saver]) -> None:
        """Changes the end and the trigger of the run. A run that has ended normally continues with a new saver if its end is now later.

        A new trigger measures time from now.
        """
        if every is not self.plan.every:
            self._schedule = Schedule(every, self.seconds)
        self.plan = dataclasses.replace(self.plan, end_step=end_step, every=every)
        if self.has_ended and not self.is_finished:
            self._saver, self._begin_step, self.has_ended = saver(), self.progress.step, False
            self._is_last = self._is_rescue = self._epoch_was_finished = False
            self._before_epoch_end = None
            self._feed.reopen()
            self._due_flags = self._epochs_with_rescue()

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.progress.step

    @property
    def seconds(self) -> float:
        """The time that triggers use."""
        return self._agreement.seconds

    @property
    def is_finished(self) -> bool:
        """Whether the plan has no more steps, or a stop was requested."""
        plan, progress = self.plan, self.progress
        if plan.end_step is not None and progress.step >= plan.end_step:
            return True
        if plan.end_epoch is not None and progress.epoch >= plan.end_epoch:
            return True
        return self._agreement.stops(progress.step)

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether a resumed run had already reached its end."""
        return self.is_finished or (self.progress.epoch_is_open and not self.progress.epoch_is_over and not self._fetch())

    def skip_epoch_end(self, logs: Logs) -> None:
        """Skips the end of the open epoch because an earlier process ran it, with these logs."""
        self.epoch_logs = logs
        self._epoch_was_finished = True

    # -- the order of a run --

    def _epochs_with_rescue(self) -> Generator[bool, None, None]:
        """Runs `_epochs`; after an exception, yields a checkpoint of the last finished step."""
        is_given_up = False
        try:
            self._agreement.begin(self.progress.step, self.progress.first_step)
            yield from self._epochs()
            self.has_ended = True
        except GeneratorExit:
            is_given_up = True
            raise
        except BaseException as error:  # Includes a KeyboardInterrupt that user code raises.
            self._mark_epoch_end()
            self.failure = None if isinstance(error, Interrupted) else error
            if self._before_epoch_end is not None:
                self._undo_callbacks(self._before_epoch_end.state)
            is_whole = self._live.is_intact and self._live.step == self.progress.step
            if is_whole and not (self.interruption is not None and self.interruption.leaves_at_once):
                is_given_up = True  # Unless the consumer of this checkpoint asks for the next one.
                yield from self._last_checkpoint(rescue=True)
                is_given_up = False
            # Now, because a scheduler may signal the workers of a loader before their parent.
            if self.failure is not None and not (self.interruption is not None and self.interruption.explains(error)):
                raise
        finally:
            if not is_given_up:
                self._feed.close()  # This ends worker processes of a loader.
                self._finish_saving()
            elif not self._is_being_closed:
                # The run was dropped, and this may be any thread that collects garbage.
                self._feed.close()
                self._saver.let_go()

    def _undo_callbacks(self, state: TrainState | None) -> None:
        """Restores the state from before callbacks changed it, unless one of them has trained it and so donated its buffers."""
        if state is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            self._live.replace(state, self.progress.step)
            self._live.lend()  # It may have been lent.

    def _epochs(self) -> Iterator[bool]:
        """Yields after every step whether a checkpoint is due."""
        progress = self.progress
        while True:
            if not progress.epoch_is_open:
                if self._is_interrupted():
                    yield from self._last_checkpoint(rescue=True)
                    return
                if self.is_finished:
                    yield from self._last_checkpoint()
                    return
                if not self._begin_epoch():
                    self._exhausted()
                    yield from self._last_checkpoint()
                    return
            while not progress.epoch_is_over:
                progress.is_pending &= self._has_observers
                if progress.is_pending and not self._is_interrupted():
                    # The next batch is read first: if the data fails, a resume evaluates this step's triggers again.
                    goes_on = not self.is_finished and self._fetch()
                    is_due = self._evaluate_triggers()
                    if goes_on:
                        yield is_due
                if self._is_interrupted():
                    yield from self._last_checkpoint(rescue=True)
                    return
                if self.is_finished or not self._fetch():
                    # The run ends inside an epoch: first comes the checkpoint that a resume needs, then the end of the epoch over the steps so far,
                    # only for logs.
                    if not self.is_finished:
                        self._exhausted()
                    yield from self._last_checkpoint()
                    self._end_inside_epoch()
                    return
                self._train_group()
                if self.interruption is not None:
                    self.interruption.check(progress.step)
                self._agreement.listen(progress.step)
                self._check_epoch_end()
            self._agreement.synchronize()
            # Only an iterator that cannot restart can turn out to be exhausted.
            ends = self.is_finished or (self.plan.end_epoch is not None and progress.epoch + 1 >= self.plan.end_epoch)
            has_more = ends or self._feed.source.can_restart or self._fetch()
            self._end_epoch()
            self._agreement.synchronize()
            self._is_rescue = self._is_interrupted()
            self._is_last = self._is_rescue or self.is_finished or not has_more
            yield self._evaluate_triggers() or self._is_last or self.plan.is_fit

    def _is_interrupted(self) -> bool:
        return self.interruption is not None and self.interruption.requested is not None

    def _last_checkpoint(self, *, rescue: bool = False) -> Iterator[bool]:
        """Yields the last step's checkpoint, unless it has been yielded as the last one or no step ran."""
        was_yielded = self.progress.step == self._last_yielded
        if self.progress.step == self._begin_step or (was_yielded and (self._is_last or not self.plan.is_fit)):
            return
        self._is_last, self._is_rescue = True, rescue
        yield True

    def _fetch(self) -> bool:
        """Reads the next batch, beginning a new pass if needed; returns whether there is one."""
        if not self._upcoming and not self._read_batch() and self._can_start_pass():
            progress = self.progress
            progress.begin_pass(progress.position.passes + (progress.position.examples > 0 or any(progress.used)))
            self._read_batch()
        return bool(self._upcoming)

    def _read_batch(self) -> bool:
        with self.spent.on("data"):
            fed = self._feed.next(None if self.plan.steps_per_call == 1 else self._steps_of_call(self._steps_to_next_event()))
        self._upcoming = [] if fed is None else [fed]
        return fed is not None

    def _can_start_pass(self) -> bool:
        # If an epoch is one pass, the end of the pass is the end of the epoch.
        is_inside = self.progress.epoch_is_open and self.progress.step_in_epoch > 0
        return self._feed.source.can_restart and (self.plan.steps_per_epoch is not None or not is_inside)

    def _begin_epoch(self) -> bool:
        """Begins an epoch; returns whether it has a batch."""
        if self._prefetches_epochs:
            has_batch = self._fetch()
            if has_batch:
                self._open_epoch()
            return has_batch
        self._feed.announce_pass()
        self._open_epoch()
        self.progress.epoch_is_open = self.is_finished or self._is_interrupted() or self._fetch()
        return self.progress.epoch_is_open

    def _open_epoch(self) -> None:
        self.progress.epoch_is_open, self.progress.epoch_is_over, self.progress.step_in_epoch = True, False, 0
        self._is_last = False  # The consumer of the last checkpoint may have moved the end.
        self._sums = self._collected = None
        self._validated = {}
        self.callbacks.call("on_epoch_begin", self.progress.epoch, {})

    def _steps_to_next_event(self) -> int:
        """Returns the number of steps until the next event, such as a trigger or the end of the epoch."""
        plan, progress = self.plan, self.progress
        step, is_seen = progress.step, self.callbacks.wants_every("on_train_batch_begin", "on_train_batch_end")
        ends: list[int | None] = [step + (self._steps_of_call(_MAX_STEPS_WITHOUT_HOOKS) if is_seen else _MAX_STEPS_WITHOUT_HOOKS)]
        ends += [plan.end_step, self._run_end_step, self._agreement.next_step()]
        ends += [schedule.next_step(step, plan.process_start) for schedule in (self._schedule, self._validation_schedule, self.callbacks)]
        if plan.steps_per_epoch is not None:
            ends.append(step + plan.steps_per_epoch - (progress.step_in_epoch if progress.epoch_is_open else 0))
        return max(1, min(end for end in ends if end is not None) - step)

    def _steps_of_call(self, most: int) -> int:
        """Returns the number of steps of the next call, at most `most`: calls end at multiples of their size in this run."""
        size = self.plan.steps_per_call
        return min(most, size - (self.progress.step - self.progress.first_step) % size)

    def _train_group(self) -> None:
        """Dispatches one call, usually of one step, and calls its hooks; then runs steps between which nothing is due."""
        self._pending_checkpoint = None
        progress, hooks, plan = self.progress, self.callbacks, self.plan
        if self._live.step != progress.step:
            raise ConfigError(
                f"This run is at step {progress.step}, but the trainer's state is at step {self._live.step}, because another call has trained or replaced it. "
                "Do not interleave two runs of one trainer; use a trainer for each."
            )
        hooks.call("on_train_batch_begin", progress.step_in_epoch, {})
        steps_left = self._steps_to_next_event()
        if plan.steps_per_call > 1:
            with self.spent.on("data"):
                self._upcoming += self._feed.next_like(self._upcoming[0].batch, self._steps_of_call(steps_left) - 1)
        without_hooks = steps_left - len(self._upcoming)
        if self._sums is None:
            self._collected = self._program.collector(train=True)
        sums = self._program.empty_sums(train=True) if self._sums is None else self._sums
        if not self._is_compiled:
            self._await_step()
        self._train_upcoming(sums)
        if self._beside_first_step is not None:
            begin, look, self._beside_first_step = self._clock(), self._beside_first_step, None
            with self.spent.on("compiling"):
                look()
            self._timer.excluded += self._clock() - begin
        if without_hooks:
            self._train_without_hooks(without_hooks)
        if hooks.wants("on_train_batch_end"):
            hooks.call("on_train_batch_end", progress.step_in_epoch - 1, Logs(self._values, kinds=self._program.dry_run.kinds))

    def _await_step(self) -> None:
        """Waits until the step is compiled, which does not count as step time."""
        begin, self._is_compiled = self._clock(), True
        with self.spent.on("compiling"):
            self._program.await_step(self._live.carry, steps_per_call=self.plan.steps_per_call, keep=self.plan.keep)
        self._timer.excluded += self._clock() - begin

    def _train_upcoming(self, sums: Sums) -> None:
        group, plan = self._upcoming, self.plan
        self._kept = None  # Frees the memory for the next one.
        trained = self._program.train_group(self._live.take(), sums, group, plan.steps_per_call, keep=plan.keep)
        carry, self._sums, self._values, rows, self._kept = trained
        steps = len(group)
        if self._collected is not None:
            self._collected.add(rows, None if plan.steps_per_call == 1 else steps)
        # Only now, because an interrupted step has not used its batch, which may be the last of its pass.
        self._upcoming = []
        self.spent.examples += group[0].num_real if steps == 1 else sum(fed.num_real for fed in group)
        progress = self.progress
        progress.step += steps
        progress.step_in_epoch += steps
        progress.is_pending = True
        progress.position, progress.used = group[-1].position, group[-1].used
        # Last: a KeyboardInterrupt before this finds donated buffers and saves nothing; after it, the whole step is counted.
        self._live.advance(carry, steps)

    def _train_without_hooks(self, steps: int) -> None:
        """Runs more steps as long as no event is due between them, because the rest of the loop takes time."""
        feed, progress, interruption, agreement, clock = self._feed, self.progress, self.interruption, self._agreement, self._clock
        spent = self.spent
        due = min(self._schedule.next_seconds, self._validation_schedule.next_seconds, self.callbacks.next_seconds)
        watches_time = due < math.inf
        end = clock() + _SECONDS_WITHOUT_HOOKS if self.callbacks.wants("on_train_batch_end") else math.inf
        while steps > 0:
            if not feed.has_more or agreement.is_asked() or clock() >= end or (watches_time and agreement.seconds >= due):
                return
            if interruption is not None:
                interruption.check(progress.step)  # Once for each step; if this returns earlier, the caller asks.
                if interruption.requested is not None:
                    return
            begin, count = spent.clock(), self._steps_of_call(steps)
            fed = feed.next(count if count > 1 else None)
            assert fed is not None and self._sums is not None
            self._upcoming = [fed, *feed.next_like(fed.batch, count - 1)] if count > 1 else [fed]
            spent.add("data", spent.clock() - begin)
            steps -= len(self._upcoming)
            self._train_upcoming(self._sums)

    def _mark_epoch_end(self) -> None:
        """Marks the end of an epoch that an interrupted step did not mark, if it is known without reading data."""
        progress, plan = self.progress, self.plan
        if not progress.epoch_is_open or progress.epoch_is_over or progress.step_in_epoch == 0:
            return
        if plan.steps_per_epoch is not None:
            progress.epoch_is_over = progress.step_in_epoch >= plan.steps_per_epoch
        elif not self._upcoming and self._feed.pass_has_ended:
            self._end_pass()

    def _end_pass(self) -> None:
        self.progress.epoch_is_over = True
        self.progress.begin_pass(self.progress.position.passes + 1)

    def _check_epoch_end(self) -> None:
        """Finds out whether the epoch is over; if only another batch can tell, reads it while the device computes."""
        progress, plan = self.progress, self.plan
        if plan.steps_per_epoch is not None:
            progress.epoch_is_over = progress.step_in_epoch >= plan.steps_per_epoch
            return
        ended = self._feed.pass_has_ended
        # An iterator that cannot restart is not asked for a batch that will not be used.
        if ended is None and (self._feed.source.can_restart or not self.is_finished):
            ended = not self._read_batch()
        if ended:
            self._end_pass()

    def _end_epoch(self) -> None:
        """Ends an epoch normally; the next checkpoint contains the results of validation and callbacks."""
        progress = self.progress
        self._pending_checkpoint = self._finish_epoch(is_whole=True)
        self._before_epoch_end = None
        progress.epoch += 1
        progress.epoch_is_open = progress.epoch_is_over = False

    def _end_inside_epoch(self) -> None:
        """Ends an epoch for the steps so far because the run ends inside it. Only the epoch's row is saved, next to the checkpoint."""
        if self._values is None or self._epoch_was_finished or self.progress.step_in_epoch == 0:
            return
        checkpoint = self._finish_epoch(is_whole=False)
        self.callbacks.on_closing(checkpoint, self.progress.epoch, checkpoint.logs)

    def _finish_epoch(self, *, is_whole: bool) -> Checkpoint:
        """Validates, and calls `on_epoch_end`; returns the checkpoint whose logs the callbacks got."""
        # Now, so that a resume from a checkpoint saved below ends the epoch again. After a partial epoch, no state is saved.
        self._before_epoch_end = BeforeEpochEnd(self.callbacks.state_dict(self.seconds), self._live.borrow() if is_whole else None)
        checkpoint = self._make_checkpoint(epoch_ends=True)
        if self._validation.at_epoch(self.progress.epoch) or (is_whole and self._validation_schedule.due(self._moment(epoch_ends=True))):
            checkpoint = self._validate(checkpoint)
        checkpoint.logs.earlier = self._validated
        self.epoch_logs = checkpoint.logs
        self.callbacks.call("on_epoch_end", self.progress.epoch, checkpoint.logs)
        if checkpoint.logs.source is not None and checkpoint.logs.source.is_read:
            check_total_weight(self._program, "train", checkpoint.logs.source)
        return checkpoint

    def _validate(self, checkpoint: Checkpoint) -> Checkpoint:
        waited = self._program.seconds_waited
        with self.spent.on("evaluating"):
            for evaluate in self._validation.loops:
                checkpoint = evaluate(checkpoint)
        self.spent.move("evaluating", "compiling", self._program.seconds_waited - waited)
        return checkpoint

    @property
    def _has_observers(self) -> bool:
        return self._has_triggers or self.callbacks.has_schedules or self._run_end_step is not None

    @property
    def _has_triggers(self) -> bool:
        return self.plan.every is not None or self._validation.trigger is not None

    def _evaluate_triggers(self) -> bool:
        """Returns whether a checkpoint of this step is due; validates if that is due inside an epoch."""
        if not self._has_triggers and not self.callbacks.has_schedules:
            self.progress.is_pending = False
            return False
        moment = self._moment(epoch_ends=not self.progress.epoch_is_open)
        if self.progress.epoch_is_open and self._validation_schedule.due(moment):
            self._pending_checkpoint = self._validate(self._make_checkpoint())
            self._validated = {key: self._pending_checkpoint.logs[key] for key in sorted(self._pending_checkpoint.evaluated)}
        self.due = self.callbacks.due(moment)
        self.progress.is_pending = False
        return self._schedule.due(moment) or bool(self.due) or (self._pending_checkpoint is not None and self.progress.epoch_is_open)

    def _moment(self, *, epoch_ends: bool) -> Moment:
        progress = self.progress
        return Moment(
            step=progress.step,
            start_step=self.plan.process_start,
            epochs_done=progress.epoch + progress.epoch_is_over,
            epoch_ends=epoch_ends,
            seconds=self.seconds,
        )

    # -- checkpoints --

    def _make_checkpoint(self, *, epoch_ends: bool = False) -> Checkpoint:
        progress = self.progress
        position = RunPosition(
            step=progress.step,
            epoch=progress.epoch,
            step_in_epoch=progress.step_in_epoch,
            data_position=progress.position,
            n_completed_steps=progress.step - self._last_yielded,
            epoch_ends=epoch_ends,
            seconds=self.seconds,
            process_start=self.plan.process_start,
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

    def _run_state(self) -> dict[str, Any]:
        """Returns what a resume needs besides the train state; called when it is saved."""
        callbacks = self.callbacks.state_dict(self.seconds) if self._before_epoch_end is None else self._before_epoch_end.callbacks
        data = self._feed.state_dict(self.progress.position)
        if data:
            callbacks = {**callbacks, "data": data}
        values = {} if self._values is None else {"values": self._values.vector}
        if not self.progress.epoch_is_open or self._sums is None:
            return {**callbacks, **values}
        rows = {} if self._collected is None else {"rows": self._collected.state_dict()}
        return {**callbacks, **values, **rows, "sums": self._program.unpack_sums(self._sums, train=True), "validated": self._validated}

    def _info(self) -> dict[str, Any]:
        return {**self.plan.info, "progress": self.progress.as_json(), "full_batch_size": self._feed.full_size}
