"""The loop of training: WHEN things happen. A `Run` yields checkpoints; `fit` is a `for` over one.

`Run._epochs` is the whole order of a run, top to bottom; what it calls happens in one place each. The loop never waits for the newest step: it
keeps a bounded number in flight, and values come to the host when somebody reads them.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.point import Timer
from fitflax.checkpoints.run_at_step import RunAtStep
from fitflax.checkpoints.saving import Saver
from fitflax.data import FedBatch, Feed
from fitflax.errors import ConfigError
from fitflax.logs import Logs, StepValues
from fitflax.loops.agreement import Agreement
from fitflax.loops.evaluation import Interrupted
from fitflax.loops.plan import BeforeClosing, Progress, RunPlan, Validation
from fitflax.loops.signals import Interruption
from fitflax.state import TrainState
from fitflax.steps.collected import Collected
from fitflax.steps.live import LiveState, Sums
from fitflax.steps.program import Program, Trained
from fitflax.steps.task import Kept
from fitflax.time_spent import TimeSpent
from fitflax.triggers import Moment, Schedule, Trigger

__all__ = ["Run"]

# Single steps between which nothing but signals is looked at: at most so many, and for so many seconds where a callback shows how far they are.
_MOST_UNSEEN = 1000
_UNSEEN_SECONDS = 0.05


class Run:
    """Trains, and yields a `Checkpoint` whenever one is due and after the last step. Made by `prepare_run`.

    Its plan is changed by `change` alone, not by the ways of stepping.

    Args:
        program: The compiled steps.
        live: The state that is trained.
        feed: The batches.
        plan: What to do.
        progress: Where the run is; changed as it goes.
        callbacks: Whose hooks are called.
        validation: What is evaluated during training.
        sums: Packed sums of the epoch in whose middle the run begins.
        collected: What metrics have collected of that epoch's examples.
        values: The last step's values, where the run begins after a step of another process.
        validated: Results of that epoch's last validation so far.
        agreement: Makes, of a clock, what decides whether to stop, and what time it is.
        exhausted: Called when the data ended before the plan did.
        interruption: A signal noted here ends the run after the present step.
        saver: Who saves for the run; closed at its end.
        clock: Returns seconds.
        spent: Where the run's time is noted.
    """

    def __init__(
        self,
        program: Program,
        live: LiveState,
        feed: Feed,
        plan: RunPlan,
        *,
        progress: Progress | None = None,
        callbacks: CallbackList | None = None,
        validation: Validation | None = None,
        sums: Sums | None = None,
        collected: Collected | None = None,
        values: StepValues | None = None,
        validated: Mapping[str, float] | None = None,
        agreement: Callable[[Callable[[], float]], Agreement] = Agreement,
        exhausted: Callable[[], None] = lambda: None,
        interruption: Interruption | None = None,
        saver: Saver | None = None,
        clock: Callable[[], float] = time.monotonic,
        spent: TimeSpent | None = None,
    ) -> None:
        self._program = program
        self._live = live
        self._feed = feed
        self.plan = plan
        self.progress = progress or Progress(step=live.step, first_step=live.step)
        self.callbacks = callbacks or CallbackList()
        self._validation = validation or Validation()
        self._sums = sums
        self._exhausted = exhausted
        self.interruption = interruption
        self._saver = saver or Saver()
        self._clock = clock
        self._agreement = agreement(lambda: self._clock())
        self.spent = spent or TimeSpent()
        self._schedule = Schedule(plan.every, self.seconds)
        self._validation_schedule = Schedule(self._validation.trigger, self.seconds)
        # What the next call trains on: its first batch, and others once the call is made.
        self._upcoming: list[FedBatch] = []
        # Where the present stretch of stepping by hand ends.
        self._stretch_end: int | None = None
        self._values = values
        self._kept: Kept | None = None
        self._collected = collected
        self._validated: dict[str, float] = dict(validated or {})
        self._timer = Timer(clock)
        self._begin_step = self._last_yielded = self.progress.step
        self._has_yielded = False
        # The checkpoint that the end of an epoch, or a validation, has made before it is yielded.
        self._made: Checkpoint | None = None
        self._is_last = self._is_rescue = self._epoch_was_closed = False
        # What ends the run in this process, and for all that is known in no other.
        self.failure: BaseException | None = None
        # What is saved when the closing of an epoch is broken off.
        self._before_closing: BeforeClosing | None = None
        # For whoever consumes the checkpoints: which callbacks are due, and the logs of the last epoch.
        self.due: set[int] = set()
        self.epoch_logs = Logs()
        self._moments = self._guarded()
        self._is_compiled = self.has_ended = self._is_being_closed = False

    # -- ways of stepping --

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        self._begin_stretch()
        for is_due in self._moments:
            if is_due:
                return self._yielded()
        raise StopIteration

    def run(self, steps: int) -> Checkpoint | None:
        """Makes so many steps, fewer if the run ends before, and returns the checkpoint of the last one; `None` if there was no step left.

        Raises:
            ConfigError: `steps` is not positive.
        """
        if steps < 1:
            raise ConfigError(f"run(steps) must make at least one step. Received: {steps!r}.")
        self._begin_stretch()
        begin = self.progress.step
        self._stretch_end = begin + steps
        for _ in self._moments:
            if self.progress.step >= self._stretch_end:
                break
        self._stretch_end = None
        return self._yielded() if self.progress.step > begin else None

    def _begin_stretch(self) -> None:
        self._timer.stop(wait=False)  # Read later, the last checkpoint's time must not go on.
        self._timer = Timer(self._clock)

    def _yielded(self) -> Checkpoint:
        checkpoint, self._made = self._made or self._make_checkpoint(), None
        repeat = self._has_yielded and self.progress.step == self._last_yielded
        if self.progress.is_pending:
            self.due = set()  # A resume looks at the triggers of this step.
        self._has_yielded = True
        self._timer.pause(self._values)
        run = checkpoint.run
        run.point = dataclasses.replace(run.point, is_last=self._is_last, is_rescue=self._is_rescue, is_repeat=repeat)
        self._last_yielded = self.progress.step
        return checkpoint

    def close(self) -> None:
        """Ends the run where it is, without a last checkpoint, and waits for saves.

        Raises:
            CheckpointError: A save failed.
        """
        self._is_being_closed = True
        self._moments.close()
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
        """Ends elsewhere from now on, and yields at other steps; a run that has ended in order goes on if that is now later.

        Args:
            end_step: As in the plan.
            every: As in the plan; another trigger begins to measure time now.
            saver: Makes who saves for a run that goes on.
        """
        if every is not self.plan.every:
            self._schedule = Schedule(every, self.seconds)
        self.plan = dataclasses.replace(self.plan, end_step=end_step, every=every)
        if self.has_ended and not self.is_finished:
            self._reopen(saver())

    def _reopen(self, saver: Saver) -> None:
        self._saver, self._begin_step, self.has_ended = saver, self.progress.step, False
        self._is_last = self._is_rescue = self._epoch_was_closed = False
        self._before_closing = None
        self._feed.reopen()
        self._moments = self._guarded()

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.progress.step

    @property
    def seconds(self) -> float:
        """The time by which triggers go."""
        return self._agreement.seconds

    @property
    def is_finished(self) -> bool:
        """Whether the plan asks for no more steps, or somebody to stop."""
        plan, progress = self.plan, self.progress
        if plan.end_step is not None and progress.step >= plan.end_step:
            return True
        if plan.end_epoch is not None and progress.epoch >= plan.end_epoch:
            return True
        return self._agreement.stops(progress.step)

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether the run had ended, when it was saved, where it is to end now."""
        return self.is_finished or (self.progress.epoch_is_open and not self.progress.epoch_is_over and not self._fetch())

    def skip_closing(self, logs: Logs) -> None:
        """Leaves out the closing of the epoch in whose middle the run begins, because an earlier process did it, with these logs."""
        self.epoch_logs = logs
        self._epoch_was_closed = True

    # -- the order of a run --

    def _guarded(self) -> Generator[bool, None, None]:
        """Runs `_epochs`; an exception on the way leaves a checkpoint of the last finished step behind it."""
        is_given_up = False
        try:
            self._agreement.begin(self.progress.step, self.progress.first_step)
            yield from self._epochs()
            self.has_ended = True
        except GeneratorExit:
            is_given_up = True
            raise
        except BaseException as error:  # KeyboardInterrupt raised by hand as well.
            self._settle()
            self.failure = None if isinstance(error, Interrupted) else error
            if self._before_closing is not None:
                self._take_back(self._before_closing.state)
            is_whole = self._live.is_intact and self._live.step == self.progress.step
            if is_whole and not (self.interruption is not None and self.interruption.leaves_at_once):
                is_given_up = True  # If whoever gets this checkpoint asks for no more.
                yield from self._last_checkpoint(rescue=True)
                is_given_up = False
            if self.failure is not None:
                raise
        finally:
            if not is_given_up:
                self._feed.close()  # Worker processes of a loader end here.
                self._finish_saving()
            elif not self._is_being_closed:
                # Nobody has the run any more, and this is whatever thread collects the garbage.
                self._feed.close()
                self._saver.let_go()

    def _take_back(self, state: TrainState | None) -> None:
        """Undoes what callbacks did to the state, unless one of them has trained it, which took its buffers."""
        if state is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            self._live.replace(state, self.progress.step)
            self._live.lend()  # It may have been lent before.

    def _epochs(self) -> Iterator[bool]:
        """Yields after every step whether a checkpoint is due there."""
        progress = self.progress
        while True:
            if not progress.epoch_is_open:
                if self._is_interrupted():
                    yield from self._last_checkpoint(rescue=True)
                    return
                if self.is_finished:
                    yield from self._last_checkpoint()
                    return
                if not self._fetch():
                    self._exhausted()
                    yield from self._last_checkpoint()
                    return  # An epoch that gets no batch does not begin.
                self._open_epoch()
            while not progress.epoch_is_over:
                progress.is_pending &= self._is_watched
                if progress.is_pending and not self._is_interrupted():
                    # The next batch comes first: if the data fails, a resume looks at this step's triggers once more.
                    goes_on = not self.is_finished and self._fetch()
                    is_due = self._look_at_triggers()
                    if goes_on:
                        yield is_due
                if self._is_interrupted():
                    yield from self._last_checkpoint(rescue=True)
                    return
                if self.is_finished or not self._fetch():
                    # The run ends in order, but inside an epoch: first what a resume goes on from, then the epoch's end over the part seen, for show.
                    if not self.is_finished:
                        self._exhausted()
                    yield from self._last_checkpoint()
                    self._end_inside_epoch()
                    return
                self._train_group()
                if self.interruption is not None:
                    self.interruption.check(progress.step)
                self._agreement.listen(progress.step)
                self._look_ahead()
            self._agreement.meet()
            # Only an iterator that serves once can turn out to have nothing more; others begin again.
            ends = self.is_finished or (self.plan.end_epoch is not None and progress.epoch + 1 >= self.plan.end_epoch)
            has_more = ends or self._feed.source.can_restart or self._fetch()
            self._end_epoch()
            self._agreement.meet()
            self._is_rescue = self._is_interrupted()
            self._is_last = self._is_rescue or self.is_finished or not has_more
            yield self._look_at_triggers() or self._is_last or self.plan.is_fit

    def _is_interrupted(self) -> bool:
        return self.interruption is not None and self.interruption.requested is not None

    def _last_checkpoint(self, *, rescue: bool = False) -> Iterator[bool]:
        """Yields the last step's checkpoint, unless it was yielded as the last already or no step was made."""
        was_yielded = self.progress.step == self._last_yielded
        if self.progress.step == self._begin_step or (was_yielded and (self._is_last or not self.plan.is_fit)):
            return
        self._is_last, self._is_rescue = True, rescue
        yield True

    def _fetch(self) -> bool:
        """Takes the next batch of the data, over the end of a pass if need be; returns whether there is one."""
        if not self._upcoming and not self._take() and self._may_pass_again():
            progress = self.progress
            progress.begin_pass(progress.position.passes + (progress.position.examples > 0 or any(progress.used)))
            self._take()
        return bool(self._upcoming)

    def _take(self) -> bool:
        with self.spent.on("data"):
            fed = self._feed.next(None if self.plan.steps_per_call == 1 else self._room())
        self._upcoming = [] if fed is None else [fed]
        return fed is not None

    def _may_pass_again(self) -> bool:
        # Within an open epoch that is one pass, the end of the pass is the end of the epoch, not a reason to begin another pass.
        return self._feed.source.can_restart and (self.plan.steps_per_epoch is not None or not self.progress.epoch_is_open)

    def _open_epoch(self) -> None:
        self.progress.epoch_is_open, self.progress.epoch_is_over, self.progress.step_in_epoch = True, False, 0
        self._is_last = False  # Whoever got the last checkpoint may have moved the end.
        self._sums = self._collected = None
        self._validated = {}
        self.callbacks.call("on_epoch_begin", self.progress.epoch, {})

    def _room(self) -> int:
        """Returns how many steps may be made before somebody may want to look: in one call, or one by one."""
        plan, progress = self.plan, self.progress
        step, room = progress.step, plan.steps_per_call
        if room > 1:
            room -= (step - progress.first_step) % room  # Calls end at multiples of their size in this run.
        elif not self.callbacks.wants_every("on_train_batch_begin", "on_train_batch_end"):
            room = _MOST_UNSEEN
        ends: list[int | None] = [step + room]
        ends += [plan.end_step, self._stretch_end, self._agreement.next_step()]
        ends += [schedule.next_step(step, plan.process_start) for schedule in (self._schedule, self._validation_schedule, self.callbacks)]
        if plan.steps_per_epoch is not None:
            ends.append(step + plan.steps_per_epoch - (progress.step_in_epoch if progress.epoch_is_open else 0))
        return max(1, min(end for end in ends if end is not None) - step)

    def _train_group(self) -> None:
        """Dispatches one call, usually of one step, and calls its hooks."""
        self._made = None
        progress, hooks, plan = self.progress, self.callbacks, self.plan
        if self._live.step != progress.step:
            raise ConfigError(
                f"This run is at step {progress.step}, but the trainer's state is at step {self._live.step}: something else trained or replaced it meanwhile. "
                "Two runs of one trainer cannot be mixed."
            )
        hooks.call("on_train_batch_begin", progress.step_in_epoch, {})
        room = self._room()
        if plan.steps_per_call > 1:
            with self.spent.on("data"):
                self._upcoming += self._feed.next_like(self._upcoming[0].batch, room - 1)
        group = self._upcoming
        if self._sums is None:
            self._collected = self._program.collector(train=True)
        sums = self._program.empty_sums(train=True) if self._sums is None else self._sums
        if not self._is_compiled:
            self._await_step()
        if plan.steps_per_call == 1:
            self._train_one(group[0], sums)
        else:
            self._kept = None  # Its memory is free for the next one.
            trained = self._program.train_group(self._live.take(), sums, group, plan.steps_per_call, keep=plan.keep)
            self._advance(trained, group)
        if plan.steps_per_call == 1 and room > 1:
            self._train_unseen(room - 1)
        if hooks.wants("on_train_batch_end"):
            hooks.call("on_train_batch_end", progress.step_in_epoch - 1, Logs(self._values, kinds=self._program.dry_run.kinds))

    def _await_step(self) -> None:
        """Waits for the step to be compiled, which is no time of the steps."""
        begin, self._is_compiled = self._clock(), True
        with self.spent.on("compiling"):
            self._program.await_step(self._live.carry, steps_per_call=self.plan.steps_per_call, keep=self.plan.keep)
        self._timer.excluded += self._clock() - begin

    def _train_one(self, fed: FedBatch, sums: Sums) -> None:
        self._kept = None
        self._advance(self._program.train(self._live.take(), sums, fed, keep=self.plan.keep), (fed,))

    def _advance(self, trained: Trained, group: Sequence[FedBatch]) -> None:
        carry, self._sums, self._values, rows, self._kept = trained
        steps = len(group)
        if self._collected is not None:
            self._collected.add(rows, None if self.plan.steps_per_call == 1 else steps)
        # Not before: a step that is broken off has not used its batch, which may be the last of its pass.
        self._upcoming = []
        self.spent.examples += group[0].num_real if steps == 1 else sum(fed.num_real for fed in group)
        progress = self.progress
        progress.step += steps
        progress.step_in_epoch += steps
        progress.is_pending = True
        progress.position, progress.used = group[-1].position, group[-1].used
        # Last: a KeyboardInterrupt before this finds the state's buffers taken, and saves nothing; one after it finds the whole step counted.
        self._live.advance(carry, steps)

    def _train_unseen(self, steps: int) -> None:
        """Makes more single steps, as long as nothing happens between them that anybody could see; all that the loop does otherwise takes time."""
        feed, progress, interruption, agreement, clock = self._feed, self.progress, self.interruption, self._agreement, self._clock
        spent = self.spent
        due = min(self._schedule.next_seconds, self._validation_schedule.next_seconds, self.callbacks.next_seconds)
        watches_time = due < math.inf
        end = clock() + _UNSEEN_SECONDS if self.callbacks.wants("on_train_batch_end") else math.inf
        for _ in range(steps):
            if not feed.has_more or agreement.is_asked() or clock() >= end or (watches_time and agreement.seconds >= due):
                return
            if interruption is not None:
                interruption.check(progress.step)  # Once for each step: where this returns without asking, the caller does.
                if interruption.requested is not None:
                    return
            begin = spent.clock()
            fed = feed.next()
            spent.add("data", spent.clock() - begin)
            assert fed is not None and self._sums is not None
            self._upcoming = [fed]
            self._train_one(fed, self._sums)

    def _settle(self) -> None:
        """Notes the end of an epoch that a broken off step had no time to notice, as far as it can be known without asking for data."""
        progress, plan = self.progress, self.plan
        if not progress.epoch_is_open or progress.epoch_is_over:
            return
        if plan.steps_per_epoch is not None:
            progress.epoch_is_over = progress.step_in_epoch >= plan.steps_per_epoch
        elif not self._upcoming and self._feed.pass_has_ended:
            self._end_pass()

    def _end_pass(self) -> None:
        self.progress.epoch_is_over = True
        self.progress.begin_pass(self.progress.position.passes + 1)

    def _look_ahead(self) -> None:
        """Finds out whether the epoch is over; where only another batch can tell, takes it while the device works."""
        progress, plan = self.progress, self.plan
        if plan.steps_per_epoch is not None:
            progress.epoch_is_over = progress.step_in_epoch >= plan.steps_per_epoch
            return
        ended = self._feed.pass_has_ended
        # An iterator that serves once is not asked for a batch that nobody will use.
        if ended is None and (self._feed.source.can_restart or not self.is_finished):
            ended = not self._take()
        if ended:
            self._end_pass()

    def _end_epoch(self) -> None:
        """An epoch's end in order; the checkpoint that follows holds what validation and callbacks made of it."""
        progress = self.progress
        self._made = self._close_epoch(is_whole=True)
        self._before_closing = None
        progress.epoch += 1
        progress.epoch_is_open = progress.epoch_is_over = False

    def _end_inside_epoch(self) -> None:
        """The end of the part of an epoch that was seen, where the run ends inside it; nothing of it is in the checkpoint, only its row beside it."""
        if self._values is None or self._epoch_was_closed or self.progress.step_in_epoch == 0:
            return
        checkpoint = self._close_epoch(is_whole=False)
        self.callbacks.on_closing(checkpoint, self.progress.epoch, checkpoint.logs)

    def _close_epoch(self, *, is_whole: bool) -> Checkpoint:
        """Validates, and calls `on_epoch_end` of all; returns the checkpoint whose logs they saw."""
        # Now, so that whoever resumes what is saved from here on closes the epoch once more. Of a part of an epoch nothing is saved after this.
        self._before_closing = BeforeClosing(self.callbacks.state_dict(self.seconds), self._live.borrow() if is_whole else None)
        checkpoint = self._make_checkpoint(epoch_ends=True)
        if self._validation.at_epoch(self.progress.epoch) or (is_whole and self._validation_schedule.due(self._moment(epoch_ends=True))):
            checkpoint = self._validate(checkpoint)
        checkpoint.logs.earlier = self._validated
        self.epoch_logs = checkpoint.logs
        self.callbacks.call("on_epoch_end", self.progress.epoch, checkpoint.logs)
        return checkpoint

    def _validate(self, checkpoint: Checkpoint) -> Checkpoint:
        waited = self._program.seconds_waited
        with self.spent.on("evaluating"):
            for evaluate in self._validation.loops:
                checkpoint = evaluate(checkpoint)
        self.spent.move("evaluating", "compiling", self._program.seconds_waited - waited)
        return checkpoint

    @property
    def _is_watched(self) -> bool:
        """Whether there is any trigger, or somebody who makes single steps."""
        return self._has_triggers or self.callbacks.has_schedules or self._stretch_end is not None

    @property
    def _has_triggers(self) -> bool:
        return self.plan.every is not None or self._validation.trigger is not None

    def _look_at_triggers(self) -> bool:
        """Returns whether anybody wants a checkpoint of this step; validates if that is due in the middle of an epoch."""
        if not self._has_triggers and not self.callbacks.has_schedules:
            self.progress.is_pending = False
            return False
        moment = self._moment(epoch_ends=not self.progress.epoch_is_open)
        if self.progress.epoch_is_open and self._validation_schedule.due(moment):
            self._made = self._validate(self._make_checkpoint())
            self._validated = {key: self._made.logs[key] for key in sorted(self._made.evaluated)}
        self.due = self.callbacks.due(moment)
        self.progress.is_pending = False
        return self._schedule.due(moment) or bool(self.due) or (self._made is not None and self.progress.epoch_is_open)

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
        completed = progress.step - self._last_yielded
        point = progress.point(n_completed_steps=completed, epoch_ends=epoch_ends, seconds=self.seconds, process_start=self.plan.process_start)
        values = self._values
        if values is not None and self._collected is not None:
            values = values.with_late(self._collected.keys, self._collected.now())
        run = RunAtStep(
            point=point,
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
        """Returns what a resume needs besides the train state; made when it is saved."""
        callbacks = self.callbacks.state_dict(self.seconds) if self._before_closing is None else self._before_closing.callbacks
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
