"""The base class of callbacks: hooks with Keras's names, called positionally, and what a callback says of itself to those who call it."""

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax

import fitflax.keras_names as keras_names
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.saving import Saver
from fitflax.errors import CallbackError, no_attribute
from fitflax.logs import Logs
from fitflax.state import TrainState
from fitflax.triggers import Moment, Schedule, Trigger

__all__ = ["Callback", "Phase", "PlainRun", "TrainerView"]

HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
    "on_checkpoint",
)


class TrainerView(Protocol):
    """What callbacks may use of a trainer.

    >>> TrainerView.__name__
    'TrainerView'
    """

    stop_training: bool

    @property
    def learning_rate(self) -> float:
        """The learning rate; it may be set."""

    @learning_rate.setter
    def learning_rate(self, value: float) -> None: ...

    @property
    def learning_rates(self) -> dict[str, float]:
        """All rates that can be read, by the label of their parameters' group; those assigned are set."""

    @learning_rates.setter
    def learning_rates(self, values: Mapping[str, float]) -> None: ...

    @property
    def state(self) -> TrainState:
        """The newest state, which stays valid after later steps."""

    @property
    def step(self) -> int:
        """Finished updates."""

    @property
    def model(self) -> Any:
        """The module, as the user gave it."""

    @property
    def stop_reason(self) -> str | None:
        """Why training stopped or is to stop."""

    def stop(self, reason: str) -> None:
        """Asks training to stop after the present step."""

    def replace_state(self, state: TrainState) -> None:
        """Puts another state in place of the newest one."""

    @property
    def evaluate(self) -> Callable[..., dict[str, Any]]:
        """`Trainer.evaluate`; training goes on as it would have."""

    @property
    def predict(self) -> Callable[..., Any]:
        """`Trainer.predict`; training goes on as it would have."""


class Phase(enum.IntEnum):
    """When a callback is called within an event, by the kind of its work.

    >>> Phase.CHANGE < Phase.USER < Phase.DECIDE < Phase.RECORD < Phase.SAVE_BEST < Phase.SAVE
    True
    """

    CHANGE = 0
    USER = 1
    DECIDE = 2
    RECORD = 3
    SAVE_BEST = 4
    SAVE = 5


class Callback:
    """Something to do at certain points of a run. Subclass it and override hooks; a hook nobody overrides costs nothing.

    `logs` is never `None`: it is one mapping per event, shared by all callbacks, and its values come to the host only when read. In batch hooks they are
    running values of the epoch. Subclasses need not call `super().__init__()`.

    Attributes:
        trainer: The trainer that runs; see `TrainerView`.
        params: What is known of the running call: `epochs`, `first_epoch`, `first_step_in_epoch` (0 unless a resume enters that epoch in its middle), `steps`
            (of an epoch), `test_steps`, `log_every`, `validation_sets`, `num_examples` (of a pass), `hyperparameters`, `model_flops` (of a training step on
            a device), `resumed_step`, `is_done` (whether a resume has nothing left to do), `note` (a sentence for whoever watches), `time_spent` (its
            `seconds` by what they went to); `None` for what is not known.
        every: When `on_checkpoint` is due; `None` for each checkpoint that the loop makes.
        phase: When it is called within an event.
        needs_trainer: Whether it can do nothing with a checkpoint alone.
        may_skip_batches: Whether its hooks of batches may be called for some of them only, some twenty times a second. Batches between which nobody must see
            anything take the loop less time, and several small ones of an evaluation or prediction are computed in one call.
        main_process_only: Whether it does nothing in processes but the first, as whoever writes or shows something.
        writes_files: Whether it writes files, which `fit(fast_dev_run=...)` does without.
        needs_gradients_norm: Whether it reads `checkpoint.gradients_norm`, without which some steps take less time; by default wherever it has `on_checkpoint`.
        needs_grads: Whether it reads `checkpoint.grads`; the run then keeps the gradient of each step, which takes as much memory as the parameters.
        needs_sown: Collections of sown values that it reads from `checkpoint.sown`.
        needs_culprit: Whether it reads what first was not finite, for which each step looks at all gradients and parameters.

    >>> class PrintLoss(Callback):
    ...     def on_epoch_end(self, epoch, logs):
    ...         print(epoch, logs["loss"])
    >>> PrintLoss().on_epoch_end(0, {"loss": 0.5})
    0 0.5
    """

    trainer: TrainerView
    params: Mapping[str, Any] = {}
    every: Trigger | None = None
    phase: ClassVar[Phase] = Phase.USER
    needs_trainer: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = False
    writes_files: ClassVar[bool] = False
    needs_gradients_norm: bool | None = None
    needs_grads: bool = False
    needs_sown: str | tuple[str, ...] = ()
    needs_culprit: bool = False
    may_skip_batches: bool = False
    _own_schedule: Schedule | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Has the library's own callbacks say what is here in place of what Keras's take."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("fitflax.") and "__init__" in vars(cls):
            cls.__init__ = keras_names.with_hints(cls.__name__, keras_names.CALLBACKS, CallbackError)(vars(cls)["__init__"])  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: all but the trainer, and what belongs to its call."""
        own = {name: value for name, value in vars(self).items() if name not in ("trainer", "params", "_own_schedule")}
        return {name: None if isinstance(value, Saver) else value for name, value in own.items()}

    if not TYPE_CHECKING:  # Or every name would be an attribute.

        def __getattr__(self, name):
            """Says where to find what Keras's callbacks have."""
            if hasattr(type(self), name):  # A property that failed: its own error says more.
                return object.__getattribute__(self, name)
            hints = {
                "model": "What runs it is self.trainer: self.trainer.model, self.trainer.state, self.trainer.stop()",
                "trainer": "It is there from the first hook on",
            }
            raise no_attribute(self, name, hints)

    # -- hooks --

    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        """Called once before the first step; resets what an earlier run left. `logs` is empty."""

    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        """Called once at the end, whatever ended the run. `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called before an epoch's first batch, not when a resume enters an epoch in its middle. `logs` is empty."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a step. `batch` counts from 0 in each epoch; `logs` is empty."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a step was dispatched; reading `logs` waits for it."""

    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        """Called before an evaluation, also one that validates."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after an evaluation, with its results."""

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a batch of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a batch of an evaluation was dispatched."""

    def on_predict_begin(self, logs: Mapping[str, Any]) -> None:
        """Called before a prediction."""

    def on_predict_end(self, logs: Mapping[str, Any]) -> None:
        """Called after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a batch of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after a batch of a prediction; `logs["outputs"]` are its outputs, NumPy."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Called with a checkpoint when `every` is due."""

    # -- a callback as a plain function --

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Acts on `checkpoint` if `every` is due, and returns it; for loops without a trainer.

        Raises:
            CallbackError: This callback consumes no checkpoints, or needs a trainer.
        """
        self.check_alone()
        if self.main_process_only and jax.process_index():
            return checkpoint
        if self.every is not None:
            moment = moment_of(checkpoint)
            if self._own_schedule is None:
                self._own_schedule = Schedule(self.every, moment.seconds)
            if not self._own_schedule.due(moment) and not self.wants(checkpoint):
                return checkpoint
        self.on_checkpoint(checkpoint)
        return checkpoint

    def check_alone(self) -> None:
        """Checks that this callback can be called with a checkpoint.

        Raises:
            CallbackError: It consumes no checkpoints, or needs a trainer.
        """
        if not overrides(self, "on_checkpoint") or (self.needs_trainer and not hasattr(self, "trainer")):
            raise CallbackError(f"{type(self).__name__} works in fit(callbacks=[...]) only: it can do nothing with a checkpoint alone.")

    def wants(self, checkpoint: Checkpoint) -> bool:
        """Returns whether this callback wants `checkpoint` although `every` is not due, because no other follows."""
        return False

    # -- state --

    @property
    def state_key(self) -> str:
        """Under which key `state_dict` is saved: the class and the arguments that tell two instances apart."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resume needs: arrays, numbers, strings, `None`, lists and dicts of them. Empty for nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned; called after `on_train_begin` on a resume."""

    # -- files --

    def enter_run(self, saver: Saver) -> None:
        """Locks what only one run may use at a time, before anything of it is read; `saver.close()` gives it back."""

    def open_run(self, run_id: str, step: int) -> None:
        """Prepares files before a run's first step.

        Args:
            run_id: Which run.
            step: The step that it goes on from; what files hold beyond it is dropped.
        """

    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called when a run ended inside an epoch, after that epoch was closed over the part seen.

        `checkpoint` is that of the last step again, now with the validation's values; `logs` is the row of the epoch. A resume that goes on knows nothing
        of this event.
        """

    @property
    def saves_as(self) -> tuple[Path, str] | None:
        """Where this callback saves whatever checkpoint it is given, and under which name it wants it there."""
        return None

    def run_was_saved(self) -> None:
        """Called when a checkpoint that the run can be resumed from, with the states of all callbacks, is complete."""

    def drop_closing(self) -> None:
        """Forgets what an earlier process did when it closed an epoch in its middle, on a resume that goes on."""

    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        """Takes what an earlier process logged when it closed the epoch, on a resume that has nothing left to do."""

    def sync(self) -> None:
        """Puts everything up to now on disk; called before the checkpoint of this step is completed."""

    def close(self) -> None:
        """Waits for writers and closes files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class PlainRun:
    """Which run a callback serves as a plain function, and how far that is.

    Attributes:
        step: The step of the last checkpoint.
    """

    def __init__(self) -> None:
        self._run: tuple[str, int] | None = None
        self.step = 0

    def goes_on(self, checkpoint: Checkpoint) -> bool:
        """Notes a checkpoint; returns whether it follows the last one in the same run, so that nothing of what was written lies beyond it."""
        run = checkpoint.run_id, checkpoint.run.point.process_start
        follows = run == self._run and checkpoint.step >= self.step
        self._run, self.step = run, checkpoint.step
        return follows


def moment_of(checkpoint: Checkpoint) -> Moment:
    """Returns the moment of a checkpoint, for triggers."""
    return Moment(
        step=checkpoint.step,
        start_step=checkpoint.run.point.process_start,
        epochs_done=checkpoint.epoch + checkpoint.epoch_ends,
        epoch_ends=checkpoint.epoch_ends,
        seconds=checkpoint.run.point.seconds,
    )


def overrides(callback: Callback, hook: str) -> bool:
    """Returns whether `callback` does anything in `hook`."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


def check_trigger(owner: str, every: Any) -> None:
    """Checks an argument `every`.

    Raises:
        CallbackError: It is neither a trigger nor `None`.
    """
    if every is not None and not isinstance(every, Trigger):
        raise CallbackError(f"{owner}(every=...) takes a trigger, such as fitflax.every(steps=100). Received: {every!r}.")
