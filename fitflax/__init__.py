"""fitflax: `compile`, `fit`, `evaluate` and `predict` for Flax linen modules, at the speed of a hand-written loop, with runs that cannot be lost.

>>> import fitflax, optax
>>> from flax import linen as nn
>>> trainer = fitflax.Trainer(nn.Dense(1))
>>> trainer.compile(optax.adam(1e-3), loss="mse")
"""

import importlib.metadata
from typing import TYPE_CHECKING

from fitflax import callbacks, checkpoints, data, diagnostics, errors, losses, metrics, optimizers, parallel
from fitflax.callbacks.history import History
from fitflax.callbacks.serial import serial
from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.loops.modular import EvalLoop, TrainLoop
from fitflax.state import InferenceState, TrainState
from fitflax.steps.compilation import enable_compilation_cache
from fitflax.trainer import Trainer
from fitflax.triggers import at, every, first

__version__: str

if not TYPE_CHECKING:  # Type checkers would take any name for one of this module's.

    def __getattr__(name):
        """Returns the version, which takes longer to find out than most programs that import this want to wait; says where else a name is."""
        if name != "__version__":
            homes = [
                module.__name__
                for module in (callbacks, metrics, losses, optimizers, parallel, data, checkpoints, diagnostics, errors)
                if name in module.__all__
            ]
            hint = f". It is {homes[0]}.{name}" if homes else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        try:
            return importlib.metadata.version("fitflax")
        except importlib.metadata.PackageNotFoundError:  # A checkout that is on the path without being installed.
            return "0+unknown"


__all__ = [
    "Checkpoint",
    "EvalLoop",
    "History",
    "InferenceState",
    "Summary",
    "TrainLoop",
    "TrainState",
    "Trainer",
    "__version__",
    "at",
    "callbacks",
    "checkpoints",
    "data",
    "diagnostics",
    "enable_compilation_cache",
    "errors",
    "every",
    "first",
    "losses",
    "metrics",
    "optimizers",
    "parallel",
    "serial",
]
