"""The base class of callbacks: hooks with Keras's names, called positionally, and attributes that describe a callback to the training loop."""

import enum
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax

import fitflax.keras_names as keras_names
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.checkpoints.saver import Saver
from fitflax.errors import CallbackError, NotReadyError, no_attribute
from fitflax.logs import Logs
from fitflax.state import TrainState
from fitflax.storage import Location
from fitflax.triggers import Schedule, Trigger


class TrainerView(Protocol):
    """The part of a trainer that callbacks may use.

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
        """All readable learning rates, by the label of their parameter group. Assign a dict to set the rates in it."""

    @learning_rates.setter
    def learning_rates(self, values: Mapping[str, float]) -> None: ...

    @property
    def state(self) -> TrainState:
        """The latest state. It stays valid after later steps."""

    @property
    def step(self) -> int:
        """The number of finished steps."""

    @property
    def model(self) -> Any:
        """The module that was passed to the trainer."""

    @property
    def stop_reason(self) -> str | None:
        """Why training stopped or is about to stop."""

    def stop(self, reason: str) -> None:
        """Stops training after the current step."""

    def replace_state(self, state: TrainState) -> None:
        """Replaces the trainer's state."""

    def replace_params(self, params: Any) -> None:
        """Replaces the parameters, and initializes the optimizer state again."""

    @property
    def evaluate(self) -> Callable[..., dict[str, Any]]:
        """`Trainer.evaluate`. It does not affect training."""

    @property
    def predict(self) -> Callable[..., Any]:
        """`Trainer.predict`. It does not affect training."""


class Phase(enum.IntEnum):
    """The order in which callbacks are called within an event.

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
    """Base class of callbacks. Subclass it and override hooks; a hook that is not overridden costs nothing.

    `logs` is never `None`. It is one mapping per event, shared by all callbacks, whose values are copied to the host only when they are read. In batch hooks
    they are running values of the epoch. Subclasses need not call `super().__init__()`.

    Attributes:
        trainer: The trainer that runs; see `TrainerView`.
        params: Facts about the running call, `None` if unknown: `epochs`, `first_epoch`, `first_step_in_epoch` (0 unless a resume starts inside the epoch),
            `steps` (per epoch), `test_steps`, `log_every`, `validation_sets`, `num_examples` (per pass), `hyperparameters`, `model_flops` (of a training step
            on one device), `resumed_step`, `is_done` (whether a resume has nothing left to do), `note` (a sentence to show to the user), `time_spent` (its
            `seconds` by category).
        every: The trigger of `on_checkpoint`; `None` for the end of each epoch, each validation, the last step, and each step at which another trigger fires.
        phase: When the callback is called within an event.
        needs_trainer: Whether the callback cannot be called as a plain function with a checkpoint.
        may_repeat: Whether a run may have several of these callbacks with the same `state_key`. Their keys in checkpoints are then numbered, from the second
            on, in the order of the list.
        may_skip_batches: Whether batch hooks may be called for only some batches, about 20 times per second. This makes the loop faster, and lets it
            compute several small batches of an evaluation or prediction in one call.
        may_prefetch: Whether the first batch of an epoch may be requested before `on_epoch_begin`, because the hook does not change the data. This is faster:
            the batch is read while the device finishes the previous epoch.
        main_process_only: Whether only the first process calls it, as for callbacks that write or display something.
        writes_files: Whether it writes files. `fit(fast_dev_run=...)` leaves such callbacks out.
        needs_gradients_norm: Whether it reads `checkpoint.gradients_norm`, without which some steps are faster. By default, true if it overrides
            `on_checkpoint`.
        needs_grads: Whether it reads `checkpoint.grads`. The run then keeps the gradient of each step, which takes as much memory as the parameters.
        needs_sown: Collections of sown values that it reads from `checkpoint.sown`.
        needs_culprit: Whether it reads the name of the first value that was not finite. Each step then checks all gradients and parameters.

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
    may_repeat: ClassVar[bool] = False
    needs_gradients_norm: bool | None = None
    needs_grads: bool = False
    needs_sown: str | tuple[str, ...] = ()
    needs_culprit: bool = False
    may_skip_batches: bool = False
    may_prefetch: bool = False
    _plain_schedule: Schedule | None = None
    _is_run_saved = True  # Whether a callback of this run saves the whole run.
    # The arguments in `state_key`, and the attributes that hold them. Only the name of a path, because a run's directory may be moved before a resume.
    _key_arguments: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds hints about Keras's argument names to the constructors of fitflax's callbacks."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("fitflax.") and "__init__" in vars(cls):
            cls.__init__ = keras_names.with_hints(cls.__name__, keras_names.CALLBACKS, CallbackError)(vars(cls)["__init__"])  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes to pickle: all except the trainer and those of its current call."""
        attributes = {name: value for name, value in vars(self).items() if name not in ("trainer", "params", "_plain_schedule")}
        return {name: None if isinstance(value, Saver) else value for name, value in attributes.items()}

    if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute.

        def __getattr__(self, name):
            """Raises an error that says where to find an attribute of Keras's callbacks."""
            if hasattr(type(self), name):  # A property raised AttributeError: call it again for its own message.
                return object.__getattribute__(self, name)
            hints = {
                "model": "Use self.trainer: self.trainer.predict(x), self.trainer.learning_rate, self.trainer.model, self.trainer.state, self.trainer.stop()",
                "trainer": "It is set before the first hook is called",
            }
            raise no_attribute(self, name, hints)

    # -- hooks --

    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        """Called once before the first step. Reset what an earlier run left here. `logs` is empty."""

    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        """Called once at the end of a run, even if it failed. `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called before an epoch's first batch is requested, but not when a resume starts inside the epoch. `logs` is empty.

        Workers of a PyTorch `DataLoader` with `persistent_workers` see a change of the data set only if it is in shared memory.
        """

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called before a step. `batch` counts from 0 in each epoch; `logs` is empty."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a step was dispatched; reading `logs` waits for it."""

    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        """Called before an evaluation or validation."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after an evaluation or validation, with its results."""

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
        """Called after a batch of a prediction. `logs["outputs"]` are its outputs as NumPy arrays."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Called with a checkpoint when `every` fires."""

    # -- a callback as a plain function --

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Calls `on_checkpoint` if `every` fires, and returns `checkpoint`. Use it in loops without a trainer.

        Raises:
            CallbackError: This callback does not override `on_checkpoint`, or needs a trainer.
        """
        self.check_alone()
        if self.main_process_only and jax.process_index():
            return checkpoint
        if self.every is not None:
            moment = checkpoint.run.position.moment
            if self._plain_schedule is None:
                self._plain_schedule = Schedule(self.every, moment.seconds)
            if not self._plain_schedule.due(moment) and not self.wants(checkpoint):
                return checkpoint
        self.on_checkpoint(checkpoint)
        return checkpoint

    def check_alone(self) -> None:
        """Raises a `CallbackError` if this callback does not work as a plain function."""
        if not overrides(self, "on_checkpoint") or (self.needs_trainer and not hasattr(self, "trainer")):
            raise CallbackError(f"{type(self).__name__} cannot be called with a checkpoint. Pass it to fit(callbacks=[...]).")

    def wants(self, checkpoint: Checkpoint) -> bool:
        """Returns whether to call `on_checkpoint` although `every` did not fire."""
        return False

    # -- state --

    @property
    def state_key(self) -> str:
        """The key under which `state_dict` is saved: the class, and the arguments that distinguish two instances."""
        arguments = ", ".join(f"{name}={operator.attrgetter(path)(self)!r}" for name, path in self._key_arguments)
        return f"{type(self).__name__}({arguments})" if arguments else type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save in checkpoints: a dict of arrays, numbers, strings, `None`, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Called after `on_train_begin` on a resume."""

    # -- files --

    @property
    def copies_state(self) -> bool:
        """Whether it saves copies of the state while training continues. The run reserves memory for them."""
        return False

    def enter_run(self, saver: Saver) -> None:
        """Called when `fit` begins, before any data is read. Locks files that only one run may use at a time; `saver.close()` releases the lock."""

    def open_run(self, run_id: str, step: int) -> None:
        """Prepares files before a run's first step. Drop what they contain beyond `step`, from which the run resumes."""

    def on_closing(self, checkpoint: Checkpoint, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called when a run ends inside an epoch, after the metrics and validation of the partial epoch.

        `checkpoint` is the last step's checkpoint again, now with validation values; `logs` is the epoch's row. If a resume continues the epoch, the event
        is forgotten.
        """

    @property
    def saves_as(self) -> tuple[Location, str] | None:
        """The directory in which this callback saves every checkpoint that it gets, and the owner name under which it keeps them."""
        return None

    def before_saves(self, checkpoint: Checkpoint) -> None:
        """Decides whether `on_checkpoint` will save. Called before any callback saves, because each checkpoint contains the states of all callbacks."""

    def drop_unsaved(self) -> None:
        """Discards the decision of `before_saves` if `on_checkpoint` has not saved. Called before the whole run is saved, with the states of all callbacks."""

    def run_was_saved(self) -> None:
        """Called after a checkpoint of the whole run, with the states of all callbacks, is saved."""

    def drop_closing(self) -> None:
        """Discards what an earlier process wrote in `on_closing`. Called when a resume continues that epoch."""

    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        """Restores what an earlier process logged in `on_closing`. Called when a resume has nothing left to do."""

    def load_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Compares files with the `rows` of the resumed run's `History`. Called on a resume after `load_state_dict`."""

    def sync(self) -> Callable[[], None] | None:
        """Flushes everything to disk. Called before the checkpoint of this step is saved.

        May return a function that waits for uploads. Any thread may call it before the checkpoint is completed, any number of times, or not at all.
        """

    def close(self) -> None:
        """Waits for writers and closes files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_") and name != "on_closing")
"""The hooks that `CallbackList.call` and `LambdaCallback` know by name."""


class PlainRun:
    """Tracks the run of a callback that is used as a plain function. `step` is that of the last checkpoint."""

    def __init__(self) -> None:
        self._run: tuple[str, int] | None = None
        self.step = 0

    def continues(self, checkpoint: Checkpoint) -> bool:
        """Records a checkpoint, and returns whether it continues the run of the previous one, so that no written data has to be dropped."""
        run = checkpoint.run_id, checkpoint.run.position.moment.start_step
        follows = run == self._run and checkpoint.step >= self.step
        self._run, self.step = run, checkpoint.step
        return follows


def overrides(callback: Callback, hook: str) -> bool:
    """Returns whether `callback` overrides `hook`."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


def failure_since(before: BaseException | None) -> BaseException | None:
    """Returns the exception that ends a run. `before` is `sys.exception()` at its beginning, because `fit` may run in an `except` block."""
    error = sys.exception()
    return None if error is before else error


def has_state(trainer: TrainerView) -> bool:
    """Returns whether the trainer has a state. It has none after a step that failed while it was updating the state in place."""
    try:
        return trainer.state is not None
    except NotReadyError:
        return False


def check_trigger(owner: str, trigger: Any, argument: str = "every", example: str = "every(steps=100)") -> None:
    """Raises a `CallbackError` if an argument is neither a trigger nor `None`."""
    if trigger is not None and not isinstance(trigger, Trigger):
        raise CallbackError(f"{owner}({argument}=...) takes a trigger, such as fitflax.{example}. Received: {trigger!r}.")


def check_number(owner: str, argument: str, value: Any, requirement: str, *, zero: bool = False, finite: bool = False) -> None:
    """Raises a `CallbackError` if an argument is not a positive number or, with `zero`, 0. `requirement` completes "must be"."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 or (zero and value == 0)) or (finite and value == math.inf):
        raise CallbackError(f"{owner}({argument}=...) must be {requirement}. Received: {value!r}.")
