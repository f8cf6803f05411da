"""The task that `compile` creates: the objective, the optimizer, and the program that runs its steps."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from fitflax.errors import NotReadyError
from fitflax.loops.input_sources import make_feeder
from fitflax.parallel import Strategy
from fitflax.steps.loss_and_metrics import Objective
from fitflax.steps.loss_scale import with_loss_scale
from fitflax.steps.numerics import Numerics
from fitflax.steps.optimizer_arguments import with_extra_arguments
from fitflax.steps.step_dispatch import Program
from fitflax.steps.step_functions import Task

__all__ = ["CurrentTask", "MakeTask"]

MakeTask = Callable[[Objective, optax.GradientTransformationExtraArgs | None, Numerics], Task]


class CurrentTask:
    """The task of a trainer, which each call of `compile` replaces."""

    def __init__(self, make_task: MakeTask, strategy: Strategy) -> None:
        self.make_task, self._strategy = make_task, strategy
        self.optimizer: optax.GradientTransformationExtraArgs | None = None  # Before `compile`.
        self._given_optimizer: Any = None
        self.program: Program | None = None  # Until it is needed.
        self.pad = True  # Whether short batches are padded.
        self.feeder = make_feeder(strategy, pad=True)
        self.steps_per_call: int | None = 1  # `None` for one or several, whichever is faster.
        self.choice: str | None = None  # Message about which of them was.
        self.described: dict[str, Any] = {}  # Arguments of `compile` as numbers and strings.

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self.optimizer is not None

    @property
    def numerics(self) -> Numerics:
        """The numerical settings."""
        return self.any_program().task.numerics

    def need_compiled(self, what: str) -> Program:
        """Returns the program."""
        if self.optimizer is None or self.program is None:
            raise NotReadyError(f"{what} requires a compiled trainer. Call compile(optimizer, loss, metrics) first.")
        return self.program

    def any_program(self) -> Program:
        """Returns the program; before `compile`, one that can only initialize and predict."""
        if self.program is None:
            self.program = Program(self.make_task(Objective(), None, Numerics()))
        return self.program

    def replace(
        self,
        given: Any,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        *,
        pad: bool,
        numerics: Numerics,
        steps_per_call: int | None = 1,
        run_eagerly: bool = False,
        eval_params: Callable[[Any, Any], Any] | None = None,
        described: Mapping[str, Any] | None = None,
    ) -> bool:
        """Replaces the task; returns whether the optimizer is a new one, whose state must be initialized.

        `given` is the optimizer as the user gave it, and `optimizer` its optax transformation. `eval_params` is a function of the optimizer state and
        the parameters that returns the parameters for evaluation.
        """
        is_same = self.optimizer is not None and given is self._given_optimizer and not isinstance(given, str)
        whole = with_extra_arguments(optimizer)
        self.optimizer = with_loss_scale(whole) if numerics.is_scaled else whole
        self._given_optimizer = given
        self.program = Program(self.make_task(objective, self.optimizer, numerics), run_eagerly=run_eagerly, eval_params=eval_params)
        self.pad, self.steps_per_call, self.described = pad, steps_per_call, dict(described or {})
        self.feeder = make_feeder(self._strategy, pad=pad, accumulate_steps=numerics.accumulate_steps)
        return not is_same

    def discard(self) -> None:
        """Removes the optimizer and the program, so that `compile` must be called again."""
        self.optimizer = self.program = None

    def copy_from(self, other: "CurrentTask", *, compiles_again: bool) -> None:
        """Copies another one with its compiled steps, or makes a task of its own, whose steps are compiled again."""
        names = ("pad", "steps_per_call", "described", "optimizer", "_given_optimizer", "program")
        vars(self).update({name: getattr(other, name) for name in names})
        if other.program is not None:
            task = other.program.task
            if compiles_again:
                own = self.make_task(task.objective, task.optimizer, task.numerics)
                self.program = Program(own, run_eagerly=other.program.runs_eagerly, eval_params=other.program.eval_params.custom)
            self.feeder = make_feeder(self._strategy, pad=self.pad, accumulate_steps=task.numerics.accumulate_steps)
