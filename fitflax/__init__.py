"""fitflax: `compile`, `fit`, `evaluate` and `predict` for Flax linen and NNX modules, with runs that resume bit for bit.

>>> import fitflax, optax
>>> from flax import linen as nn
>>> trainer = fitflax.Trainer(nn.Dense(1))
>>> trainer.compile(optax.adam(1e-3), loss="mse")
"""

import importlib.metadata
from typing import TYPE_CHECKING

from fitflax import adapters, callbacks, checkpoints, data, diagnostics, errors, keras_names, losses, metrics, optimizers, parallel
from fitflax.callbacks.callback_list import serial
from fitflax.callbacks.history import History
from fitflax.checkpoints.checkpoint import Checkpoint, Summary
from fitflax.loops.user_loops import EvalLoop, TrainLoop
from fitflax.state import InferenceState, TrainState
from fitflax.steps.compile import enable_compilation_cache
from fitflax.trainer import Trainer
from fitflax.triggers import at, every, first

__version__: str

if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute name.

    def __getattr__(name):
        """Returns the version, read only when needed because that is slow; for other names, the error says which submodule has them."""
        if name != "__version__":
            modules = (callbacks, metrics, losses, optimizers, parallel, data, checkpoints, diagnostics, adapters, errors)
            homes = [module.__name__ for module in modules if name in module.__all__]
            hint = f". It is {homes[0]}.{name}" if homes else f". {keras_names.MODULE[name]}." if name in keras_names.MODULE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        try:
            return importlib.metadata.version("fitflax")
        except importlib.metadata.PackageNotFoundError:  # A checkout that is on the path but not installed.
            return "0+unknown"


__all__ = ["Checkpoint", "EvalLoop", "History", "InferenceState", "Summary", "TrainLoop", "TrainState", "Trainer", "__version__", "adapters", "at"]
__all__ += ["callbacks", "checkpoints", "data", "diagnostics", "enable_compilation_cache", "errors", "every", "first", "losses", "metrics", "optimizers"]
__all__ += ["parallel", "serial"]
