"""fitflax: `compile`, `fit`, `evaluate` and `predict` for Flax linen modules, at the speed of a hand-written loop, with runs that cannot be lost.

>>> import fitflax, optax
>>> from flax import linen as nn
>>> trainer = fitflax.Trainer(nn.Dense(1))
>>> trainer.compile(optax.adam(1e-3), loss="mse")
"""

import importlib.metadata

from fitflax import callbacks, checkpoints, data, errors, losses, metrics, optimizers, parallel
from fitflax.callbacks.history import History
from fitflax.callbacks.serial import serial
from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.evaluation import EvalLoop
from fitflax.loop import TrainLoop
from fitflax.state import TrainState
from fitflax.trainer import Trainer
from fitflax.triggers import at, every, first

try:
    __version__ = importlib.metadata.version("fitflax")
except importlib.metadata.PackageNotFoundError:  # A checkout that is on the path without being installed.
    __version__ = "0+unknown"

__all__ = [
    "Checkpoint",
    "EvalLoop",
    "History",
    "Summary",
    "TrainLoop",
    "TrainState",
    "Trainer",
    "__version__",
    "at",
    "callbacks",
    "checkpoints",
    "data",
    "errors",
    "every",
    "first",
    "losses",
    "metrics",
    "optimizers",
    "parallel",
    "serial",
]
