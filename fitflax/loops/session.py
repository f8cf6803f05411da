"""What a trainer keeps between calls: the compiled task, the live state, where its passes over the data are, and who asked to stop."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.checkpoints.partial import RestoreReport, check_mapping, match, moved, report_of
from fitflax.checkpoints.resume import check_fits, fit_to, restored_state, warn_of_changes
from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.saving import NICENESS_ON_HOST, Saver
from fitflax.checkpoints.trees import refit
from fitflax.data import Position, Source
from fitflax.data.streams import OneShotSource
from fitflax.errors import ConfigError, NotReadyError, OptimizerError, RestoreError, warn
from fitflax.loops.intake import Intake, make_feeder
from fitflax.loops.plan import Progress
from fitflax.parallel import Strategy
from fitflax.state import Batch, InferenceState, TrainState, shapes_of
from fitflax.steps.live import LiveState
from fitflax.steps.loss_scale import LossScaled, scaled_state, with_loss_scale
from fitflax.steps.numerics import Numerics, start_average
from fitflax.steps.objective import Objective
from fitflax.steps.preflight import check_places
from fitflax.steps.program import Program
from fitflax.steps.structure import state_faults
from fitflax.steps.task import Task

__all__ = ["Session"]

MakeTask = Callable[[Objective, optax.GradientTransformationExtraArgs | None, Numerics], Task]


class Session:
    """The parts that `Trainer` puts to work; each of its calls takes them from here and leaves them here.

    Args:
        make_task: Makes the task for an objective, an optimizer and how updates are computed.
        strategy: Where steps run.
        seed: What all randomness follows from.
    """

    def __init__(self, make_task: MakeTask, strategy: Strategy, seed: int) -> None:
        self._make_task = make_task
        self.strategy = strategy
        self.seed = seed
        self.intake = Intake(strategy, seed)
        self.feeder = make_feeder(strategy, pad=True)
        self.run_id = secrets.token_hex(8)
        self.stop_reason: str | None = None
        self.is_stopping = False
        self.live: LiveState | None = None
        self.pad = True
        # None for whichever is faster; what was found then, in words.
        self.steps_per_call: int | None = 1
        self.choice: str | None = None
        # The shapes of the last batch that a call began with.
        self.sample: Batch | None = None
        # Whether fit() is at work.
        self.is_fitting = False
        # What compile() was given, in words.
        self.described: dict[str, Any] = {}
        self._optimizer: optax.GradientTransformationExtraArgs | None = None
        self._given_optimizer: Any = None
        self._program: Program | None = None
        # Where the last run is in its data.
        self.last_progress: Progress | None = None
        # A restored optimizer state, until compile() says what it is of.
        self._unplaced: tuple[Any, Saved] | None = None
        # Where a state came from that was restored without knowing the module's own; the first batch shows whether it fits.
        self._unchecked: str | None = None
        # The shapes of a batch that the state is known to fit, and which version of the live state is as `build` made it.
        self._built_from: Batch | None = None
        self._fresh_version: int | None = None
        # Whether the state came without an optimizer's.
        self.is_serving = False

    # -- what must be there --

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._optimizer is not None

    def need_compiled(self, what: str) -> Program:
        """Returns the program.

        Raises:
            NotReadyError: Before `compile`.
        """
        if self._optimizer is None or self._program is None:
            raise NotReadyError(f"{what} needs to know what to minimize. Call compile(optimizer, loss, metrics) first.")
        return self._program

    def need_trainable(self, what: str) -> Program:
        """Returns the program.

        Raises:
            NotReadyError: Before `compile`.
            OptimizerError: The state is an `InferenceState`.
        """
        if self.is_serving:
            raise OptimizerError(
                f"{what} needs the optimizer's state, and the trainer has an InferenceState. restore(path) goes on with a training, restore(path, "
                "weights_only=True) begins another with its parameters."
            )
        return self.need_compiled(what)

    def need_idle(self, what: str) -> Program:
        """Returns the program for another run.

        Raises:
            ConfigError: `fit` is at work.
            NotReadyError, OptimizerError: As of `need_trainable`.
        """
        if self.is_fitting:
            advice = "Train another trainer there, or this one after its fit has ended."
            raise ConfigError(f"{what}() was called while fit() is at work, by a callback or another thread. {advice}")
        return self.need_trainable(what)

    def need_state(self, what: str) -> LiveState:
        """Returns the live state.

        Raises:
            NotReadyError: There is none yet.
        """
        if self.live is None:
            raise NotReadyError(f"{what}: there is no state yet. Call build(batch), fit(...) or restore(path) first.")
        return self.live

    def any_program(self) -> Program:
        """Returns the program; before `compile` one that can only initialize and predict."""
        if self._program is None:
            self._program = Program(self._make_task(Objective(), None, Numerics()))
        return self._program

    # -- stopping --

    def stop(self, reason: str) -> None:
        """Notes that training is to stop; the first reason counts."""
        if not self.is_stopping:
            self.is_stopping, self.stop_reason = True, reason

    def make_saver(self) -> Saver:
        """Returns what saves for one run."""
        return Saver(niceness=NICENESS_ON_HOST if self.strategy.is_on_host else 0)

    def clear_stop(self) -> None:
        """Forgets that anybody asked to stop."""
        self.is_stopping, self.stop_reason = False, None

    def note_exhausted(self) -> None:
        """Notes, and warns, that the data ended before the training did."""
        self.stop("data_exhausted")
        advice = "For more, give data that can be passed over again: arrays, or a function that makes an iterator, `lambda: ...`."
        warn(f"The data ended before the training did. {advice}")

    # -- the task and its state --

    def compile(
        self,
        given: Any,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        *,
        pad: bool,
        numerics: Numerics,
        steps_per_call: int | None = 1,
        described: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes a new task; parameters and collections stay, and the optimizer's state where the optimizer is the same object.

        A failure leaves the session as it was; but where the optimizer's state had to be let go of for another one, it is not compiled then.

        Args:
            given: What the user gave as optimizer.
            optimizer: The transformation that it means.
            objective: Losses and metrics.
            pad: Whether short batches are padded.
            numerics: How updates are computed.
            steps_per_call: How many steps a call makes; `None` for whichever is faster.
            described: What the user gave, in words.
        """
        before = {name: getattr(self, name) for name in ("_optimizer", "_given_optimizer", "_program", "pad", "feeder", "steps_per_call", "described")}
        is_same = self._optimizer is not None and given is self._given_optimizer and not isinstance(given, str)
        whole = optax.with_extra_args_support(optimizer)
        self._optimizer = with_loss_scale(whole) if numerics.is_scaled else whole
        self._given_optimizer = given
        self._program = Program(self._make_task(objective, self._optimizer, numerics))
        self.pad, self.steps_per_call, self.described = pad, steps_per_call, dict(described or {})
        self.feeder = make_feeder(self.strategy, pad=pad, accumulate_steps=numerics.accumulate_steps)
        if self.is_serving:
            return
        try:
            if self.live is not None and (not is_same or self._unplaced is not None):
                self._start_optimizer()
            self._match_numerics()
        except BaseException:
            if self._optimizer is not None:
                vars(self).update(before)
            raise

    def _start_optimizer(self) -> None:
        """Gives the state an optimizer state: the restored one that waits for it, or a fresh one."""
        assert self._optimizer is not None
        live = self.need_state("compile")
        state = live.borrow()
        if self._unplaced is not None:
            saved_state, saved = self._unplaced
            self._check_scale(saved)
            target = jax.eval_shape(self._optimizer.init, state.params)
            fitted = fit_to(target, saved_state, saved, "train/opt_state")
            opt_state = self.strategy.put_at(fitted, self.strategy.abstract_state(_only(state, opt_state=target)).opt_state)
            warn_of_changes(saved, self.described, to_resume=False)
            self._unplaced = None
        else:
            init, strategy = self._optimizer.init, self.strategy
            shapes = jax.eval_shape(init, state.params)  # Its errors come before anything is let go of.
            places = strategy.places(strategy.abstract_state(_only(state, opt_state=shapes)).opt_state)
            # Copied, because an optimizer may keep the parameters themselves, whose buffers the step takes only once.
            fresh = strategy.compile(lambda params: jax.tree.map(jnp.copy, init(params)), inputs=(strategy.places(state.params),), outputs=places)
            state = dataclasses.replace(state, opt_state=())
            live.replace(state, live.step)  # The two need not fit on the devices together.
            try:
                opt_state = fresh(state.params)
            except BaseException:
                self._optimizer = self._program = None  # So that the next compile() starts it again.
                raise
        live.replace(dataclasses.replace(state, opt_state=opt_state), live.step)

    def _match_numerics(self) -> None:
        """Gives the live state what compile() asks for besides, a scale of the loss and averaged parameters, and takes from it what it does not ask for."""
        live = self.live
        if live is None or self._optimizer is None or not live.is_intact:
            return
        numerics, state = self.any_program().task.numerics, live.borrow()
        is_scaled = isinstance(state.opt_state, LossScaled)
        if is_scaled and not numerics.is_scaled:
            live.replace(dataclasses.replace(state, opt_state=state.opt_state.inner_state), live.step)
        elif numerics.is_scaled and not is_scaled:
            scaled = self.strategy.put(scaled_state(()))._replace(inner_state=state.opt_state)
            live.replace(dataclasses.replace(state, opt_state=scaled), live.step)
        state = live.borrow()
        if (numerics.ema_decay is None) != (state.ema_params is None):
            places = self.strategy.places(state.params)
            start = self.strategy.compile(start_average, inputs=(places,), outputs=places)
            live.replace(dataclasses.replace(state, ema_params=start(state.params) if state.ema_params is None else None), live.step)

    def twin(self) -> "Session":
        """Returns a session with a copy of the state, and the same compiled steps: whatever is done with it, this one stays as it is."""
        other = self.fresh(self.seed)
        if self.live is not None:
            names = ("_built_from", "_fresh_version", "_unchecked", "_unplaced", "is_serving", "sample")
            vars(other).update({name: getattr(self, name) for name in names})
            other.live = LiveState(self.strategy, self.strategy.copy(self.live.borrow()), self.live.step)
            other.live.version = self.live.version
        return other

    def fresh(self, seed: int, make_task: MakeTask | None = None) -> "Session":
        """Returns a session of the same task and compiled steps without a state; with `make_task` it makes its own task, and compiles for it."""
        other = Session(make_task or self._make_task, self.strategy, seed)
        names = ("pad", "steps_per_call", "described", "_optimizer", "_given_optimizer")
        vars(other).update({name: getattr(self, name) for name in names})
        other._program = self._program
        if self._program is not None:
            if make_task is not None:
                task = self._program.task
                other._program = Program(make_task(task.objective, task.optimizer, task.numerics))
            other.feeder = make_feeder(self.strategy, pad=self.pad, accumulate_steps=self._program.task.numerics.accumulate_steps)
        return other

    def begin_run(self) -> None:
        """Gives what comes a name of its own, by which directories tell runs apart."""
        self.run_id = secrets.token_hex(8)

    def build(self, batch: Batch) -> None:
        """Initializes the state from the shapes of a batch."""
        self.sample = shapes_of(batch)
        program, key = self.need_compiled("build"), jax.random.key(self.seed)
        check_places(program, program.abstract_state(key, batch))
        with self._making_room():
            state = program.init(key, batch)
        self.live = LiveState(self.strategy, state, 0)
        self._built_from, self._fresh_version = self.sample, self.live.version
        self.last_progress = self._unplaced = self._unchecked = None
        self.is_serving = False

    def place(
        self, saved: Saved, batch: Batch | None, *, weights_only: bool = False, partial: bool = False, mapping: Mapping[str, str | None] | None = None
    ) -> RestoreReport:
        """Puts a saved state in place of the live one; the two are never on the devices together.

        What it must look like follows from the live state, or from a batch; without either the file's own structure is taken, and the first batch shows
        whether it fits. A failure leaves everything as it was.

        Args:
            saved: The checkpoint.
            batch: A batch that the module runs on.
            weights_only: Whether only parameters and collections are taken.
            partial: Whether only those are taken that match, and the others initialized.
            mapping: Paths in the model -> paths in the checkpoint.

        Raises:
            ConfigError: `mapping` makes no sense.
            NotReadyError: `partial`, and the module's own shapes are not known.
            RestoreError: It does not fit.
        """
        names = check_mapping(mapping, partial=partial)
        key = jax.random.key(self.seed)
        target = self._own_shapes(key, batch)
        if partial:
            if target is None or self._built_from is None:
                raise NotReadyError(
                    "restore(partial=True) initializes what the checkpoint does not have, so it must know what the module has. Call compile(...) and "
                    "build(batch) first; shapes are enough, as in build((jax.ShapeDtypeStruct((1, 28, 28, 1), 'float32'),))."
                )
            parts, report = match(saved, target, names)
            restored = TrainState(step=np.int32(0), key=key, opt_state=(), **parts)  # type: ignore[arg-type]
        else:
            if not weights_only and self._optimizer is not None:
                self._check_scale(saved)
            saved, target = self._with_averages(moved(saved, target, names), target)
            restored = restored_state(saved, target=target, optimizer=self._optimizer, key=key, weights_only=weights_only)
            if weights_only and saved.train["ema_params"] is not None:
                averages = jax.eval_shape(start_average, restored.params)
                restored = dataclasses.replace(restored, ema_params=fit_to(averages, saved.train["ema_params"], saved, "train/ema_params"))
            report = report_of(restored)
        afresh, optimizer = weights_only or partial, self._optimizer
        if afresh and optimizer is not None:
            jax.eval_shape(optimizer.init, jax.tree.map(_shape_of, restored.params))  # Its errors, too, come before anything changes.
        if target is not None:
            restored = dataclasses.replace(restored, axes=target.axes)
        self._swap_in(restored)
        self.is_serving = False
        if batch is not None:
            self._built_from = shapes_of(batch)
        self._unchecked = str(saved.path) if target is None else None
        self._unplaced = None if afresh or optimizer is not None else (saved.train["opt_state"], saved)
        if afresh and optimizer is not None:
            self._start_optimizer()
        self._match_numerics()
        if not afresh:
            self.run_id = str(saved.metadata.get("run_id", self.run_id))
        return report

    def _check_scale(self, saved: Saved) -> None:
        """Checks that a checkpoint has a scale of the loss if the trainer is compiled with one, and has none otherwise.

        Raises:
            RestoreError: It has not.
        """
        opt_state = saved.train.get("opt_state", {})
        has_scale = isinstance(opt_state, dict) and set(opt_state) == set(LossScaled._fields)
        if "opt_state" in saved.train and has_scale != self.any_program().task.numerics.is_scaled:
            has = "has a scale of the loss, so it is of a run with" if has_scale else "has no scale of the loss, which there is with"
            raise RestoreError(f"{saved.path} {has} precision='float16'. Compile with the checkpoint's precision, or restore it with weights_only=True.")

    def _with_averages(self, saved: Saved, target: TrainState | None) -> tuple[Saved, TrainState | None]:
        """Returns a checkpoint, and what it must look like, with averaged parameters where it has them and the trainer is not compiled without."""
        averages = saved.train.get("ema_params")
        if self._optimizer is not None and self.any_program().task.numerics.ema_decay is None:
            averages = None
        if target is not None:
            target = dataclasses.replace(target, ema_params=None if averages is None else jax.eval_shape(start_average, target.params))
        return dataclasses.replace(saved, train={**saved.train, "ema_params": averages}), target

    def _own_shapes(self, key: jax.Array, batch: Batch | None) -> TrainState | None:
        """Returns the shapes of the module's own state, or `None` if they are not known."""
        if self.live is not None and self.live.is_intact and self._unchecked is None:
            shapes = cast(TrainState, jax.tree.map(_shape_of, self.live.borrow()))
            return dataclasses.replace(shapes, opt_state=jax.eval_shape(self._optimizer.init, shapes.params)) if self.is_serving and self._optimizer else shapes
        known = self._built_from if batch is None else batch
        return None if known is None else self.any_program().abstract_state(key, known)

    def _swap_in(self, restored: TrainState) -> None:
        """Puts a state in place of the live one; where it has shapes alone, leaves are initialized."""
        live, step = self.live, int(restored.step)
        leaves, treedef = jax.tree.flatten(restored)
        missing = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
        known: list[Any] = []
        if missing and live is not None and live.is_intact and live.version == self._fresh_version:
            # Nothing but `build` has been at them: they are what initializing them again would give.
            now = jax.tree.leaves(dataclasses.replace(live.borrow(), opt_state=()))
            known = [now[index] for index in missing]
            del now  # It holds the others, too.
        self._fresh_version = None
        with self._making_room():
            there = jax.tree.unflatten(treedef, [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves])
            placed = iter(jax.tree.leaves(self.strategy.put_state(there)))
            initialized = iter(known or self._initialize(missing, restored))
            state = jax.tree.unflatten(treedef, [next(initialized if isinstance(leaf, jax.ShapeDtypeStruct) else placed) for leaf in leaves])
        if live is None:
            self.live = LiveState(self.strategy, state, step)
        else:
            live.replace(state, step)

    def _initialize(self, numbers: list[int], state: TrainState) -> list[Any]:
        """Returns leaves of the state at step 0 by their numbers among those of all but the optimizer's; no others are kept in memory, or computed.

        Args:
            numbers: Which leaves.
            state: The shapes of a state without an optimizer's.
        """
        if not numbers:
            return []
        task, strategy = self.any_program().task, self.strategy

        def init(key: jax.Array, batch: Batch) -> list[Any]:
            leaves = jax.tree.leaves(dataclasses.replace(task.init_state(key, batch), opt_state=()))
            return [leaves[number] for number in numbers]

        placed = jax.tree.leaves(strategy.abstract_state(state))
        batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._built_from)
        compiled = strategy.compile(init, inputs=("replicated", "split"), outputs=strategy.places([placed[number] for number in numbers]))
        return cast(list[Any], compiled(strategy.put(jax.random.key(self.seed)), strategy.feed(batch)))

    @contextlib.contextmanager
    def _making_room(self) -> Iterator[None]:
        """Lets go of the live state for a block that makes another one, so that the two need not fit on the devices together.

        What was lent stays with those to whom it was lent. If the block fails, there is no state: better none than a part of one.
        """
        if self.live is not None:
            self.live.release()
        try:
            yield
        except BaseException:
            self.live = None
            raise

    def see_batch(self, batch: Batch) -> None:
        """Notes a batch's shapes, and checks a state that was restored without knowing the module's own; it takes the module's own containers.

        Raises:
            RestoreError: It does not fit the module.
        """
        self.sample = shapes_of(batch)
        if self._unchecked is None:
            return
        live = self.need_state("restore")
        target = self.any_program().abstract_state(jax.random.key(self.seed), batch)
        if self.is_serving:
            target = dataclasses.replace(target, opt_state=())
        state = check_fits(target, live.borrow(), self._unchecked)
        if state.ema_params is not None:
            averages = refit(jax.eval_shape(start_average, state.params), state.ema_params, where=self._unchecked, root="train/ema_params")
            state = dataclasses.replace(state, ema_params=averages)
        placed, treedef = self.strategy.abstract_state(state), jax.tree.structure(state)
        if self.strategy.places(state) == self.strategy.places(placed):
            live.replace(state, live.step)
        else:
            live.replace(state, live.step)
            leaves = jax.tree.leaves(live.take().state())  # Copied, where somebody has the old one.
            del state
            with self._making_room():
                moved = jax.tree.unflatten(treedef, self.strategy.move(leaves, jax.tree.leaves(placed)))
            live.replace(moved, int(moved.step))
        self._built_from, self._unchecked = self.sample, None

    def state_or_shapes(self, batch: Batch) -> TrainState:
        """Returns the live state, borrowed, where it is known to fit the module; else the shapes of what such a batch would initialize.

        Raises:
            ModelError: The module does not run on it.
        """
        if self.live is not None and self._unchecked is None:  # What a restored state without a batch looks like may not last.
            return self.live.borrow()
        return self.any_program().abstract_state(jax.random.key(self.seed), batch)

    def serve(self, state: InferenceState) -> None:
        """Puts a state without an optimizer in place of the live one, on the devices.

        Raises:
            RestoreError: It does not fit the module.
        """
        target = self._own_shapes(jax.random.key(self.seed), None)
        given = TrainState(step=np.int32(state.step), params=state.params, model_state=state.model_state, opt_state=(), key=jax.random.key(self.seed))  # type: ignore[arg-type]
        if target is not None:
            given = check_fits(dataclasses.replace(target, opt_state=(), ema_params=None), given, "The InferenceState")
        self._swap_in(given)
        self._unchecked = "The InferenceState" if target is None else None
        self._unplaced, self.is_serving = None, True

    def replace_state(self, state: TrainState) -> None:
        """Puts another state in place of the live one; its arrays are copied.

        Raises:
            RestoreError: It differs in structure, shapes or dtypes.
        """
        live = self.need_state("replace_state")
        now = live.borrow()
        faults = state_faults(now, state)
        if faults:
            raise RestoreError(f"The new state is none of this trainer's: {'; '.join(faults)}.")
        state = jax.tree.unflatten(jax.tree.structure(now), jax.tree.leaves(state))
        live.replace(self.strategy.put_state(state), int(state.step))

    # -- runs --

    def next_position(self, source: Source) -> Position:
        """Returns where the passes over the data go on: a new run begins a new pass, an iterator goes on where it is."""
        if isinstance(source, OneShotSource):
            return Position(examples=source.taken)
        last = Position() if self.last_progress is None else self.last_progress.position
        return Position(last.passes + (last.examples > 0))


def _only(state: TrainState, **parts: Any) -> TrainState:
    """Returns a state with the parameters, whose places others follow, and with other `parts` in place of the rest."""
    return dataclasses.replace(state, **{"model_state": {}, "opt_state": (), "ema_params": None, **parts})


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
