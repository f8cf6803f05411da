"""All exceptions and warnings that fitflax raises on purpose.

The class says *where* the mistake is (data, model, loss, checkpoint file, ...). The message says what is wrong, where (argument, tree path, shape, value)
and what to do, in that order; one message covers all faults found. Each class also derives from the matching built-in exception, so that `except ValueError`
in user scripts keeps working::

    FitflaxError
    +-- ConfigError (ValueError)            an argument, or a combination of arguments, is invalid
    +-- NotReadyError (RuntimeError)        something was used before the call that makes it available
    +-- DataError (ValueError)              the data cannot be turned into batches
    +-- ModelError (ValueError)             the module does not run on the batch
    +-- ShardingError (ValueError)          arrays cannot be placed on the mesh
    +-- LossError (ValueError)              the loss does not fit the outputs and targets
    +-- MetricError (ValueError)            a metric does not fit the outputs and targets
    +-- OptimizerError (ValueError)         an optimizer or learning rate cannot be used
    +-- CallbackError (ValueError)          callbacks cannot work together
    |   +-- MonitorError                    a monitored key is not logged
    +-- ReplicaError (RuntimeError)         replicas, or processes, that should be equal differ
    +-- CheckpointError (RuntimeError)      a problem with checkpoint files
        +-- CheckpointNotFoundError (FileNotFoundError)
        +-- CorruptCheckpointError          a file fails its checks
        +-- RestoreError (ValueError)       an intact file does not fit this model or run
        +-- DirectoryInUseError (FileExistsError)
"""

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["CallbackError", "CheckpointError", "CheckpointNotFoundError", "ConfigError", "CorruptCheckpointError", "DataError", "DirectoryInUseError"]
__all__ += ["FitflaxError", "FitflaxWarning", "LossError", "MetricError", "ModelError", "MonitorError", "NotReadyError", "OptimizerError", "ReplicaError"]
__all__ += ["RestoreError", "ShardingError"]


class FitflaxError(Exception):
    """The base class of all errors that fitflax raises on purpose.

    >>> issubclass(DataError, FitflaxError) and issubclass(DataError, ValueError)
    True
    """


class FitflaxWarning(UserWarning):
    """The category of all warnings of fitflax; filter on it to silence them or to turn them into errors.

    >>> import warnings
    >>> warnings.simplefilter("error", FitflaxWarning)
    """


class ConfigError(FitflaxError, ValueError):
    """An argument, or a combination of arguments, is invalid.

    >>> raise ConfigError("steps must be at least 1. Received: 0.")
    Traceback (most recent call last):
    fitflax.errors.ConfigError: steps must be at least 1. Received: 0.
    """


class NotReadyError(FitflaxError, RuntimeError):
    """Something was used before the call that makes it available; the message names that call.

    >>> issubclass(NotReadyError, RuntimeError)
    True
    """


class DataError(FitflaxError, ValueError):
    """The data cannot be turned into batches.

    >>> issubclass(DataError, ValueError)
    True
    """


class ModelError(FitflaxError, ValueError):
    """The module does not run on the batch; the message has the shapes and the module's own error.

    >>> issubclass(ModelError, ValueError)
    True
    """


class ShardingError(FitflaxError, ValueError):
    """Arrays cannot be placed on a mesh as their axis names and the rules require; the message lists their paths.

    >>> issubclass(ShardingError, ValueError)
    True
    """


class LossError(FitflaxError, ValueError):
    """The loss does not fit the module's outputs and the targets.

    >>> issubclass(LossError, ValueError)
    True
    """


class MetricError(FitflaxError, ValueError):
    """A metric does not fit the module's outputs and the targets.

    >>> issubclass(MetricError, ValueError)
    True
    """


class OptimizerError(FitflaxError, ValueError):
    """An optimizer or a learning rate cannot be used.

    >>> issubclass(OptimizerError, ValueError)
    True
    """


class CallbackError(FitflaxError, ValueError):
    """A callback cannot work, or callbacks cannot be combined.

    >>> issubclass(CallbackError, ValueError)
    True
    """


class MonitorError(CallbackError):
    """A callback monitors a key that is not logged; the message lists the keys that are logged.

    >>> issubclass(MonitorError, CallbackError)
    True
    """


class ReplicaError(FitflaxError, RuntimeError):
    """Replicas that should hold equal values differ, or processes that should behave alike do not.

    >>> issubclass(ReplicaError, RuntimeError)
    True
    """


class CheckpointError(FitflaxError, RuntimeError):
    """A problem with checkpoint files; the base class of the errors below.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given path.

    >>> issubclass(CheckpointNotFoundError, FileNotFoundError)
    True
    """


class CorruptCheckpointError(CheckpointError):
    """A checkpoint file is damaged: it fails one of its checks.

    >>> issubclass(CorruptCheckpointError, CheckpointError)
    True
    """


class RestoreError(CheckpointError, ValueError):
    """A checkpoint is intact but does not fit this model, optimizer or run.

    >>> issubclass(RestoreError, ValueError)
    True
    """


class DirectoryInUseError(CheckpointError, FileExistsError):
    """A directory has the checkpoints of another run, or another run is using it.

    >>> issubclass(DirectoryInUseError, FileExistsError)
    True
    """


# Errors of JAX's debugging options and Python's debugger, by class, or by message if the class is not specific.
_DEBUG_ERRORS = frozenset({"BdbQuit", "FloatingPointError", "JaxRuntimeError", "KeyReuseError", "TypePromotionError", "XlaRuntimeError"})
_DEBUG_MESSAGES = ("Leaked trace", "jax_numpy_rank_promotion", "jax_legacy_prng_key", "jax_check_static_indices")


def is_of_debugger(error: BaseException) -> bool:
    """Returns whether an error comes from a debugging tool, such as `jax_debug_nans`; such errors reach the user unchanged.

    >>> is_of_debugger(FloatingPointError("invalid value (nan) encountered in log")), is_of_debugger(ValueError("negative"))
    (True, False)
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _DEBUG_ERRORS) or any(words in str(error) for words in _DEBUG_MESSAGES)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its chain of causes, each once, even if the chain has a cycle.

    >>> error = ValueError("a")
    >>> error.__cause__ = error
    >>> list(chain_of(error))
    [ValueError('a')]
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# Packages whose lines are not user code.
_LIBRARY_PACKAGES = frozenset({"concurrent", "contextlib", "flax", "functools", "fitflax", "jax", "optax", "threading"})


def warn(message: str) -> None:
    """Emits a `FitflaxWarning` at the current line of the user's code, so that Python shows it once for each line.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     exec("warn('Too hot.')", {"warn": warn, "__name__": "users"})
    >>> [(str(warning.message), warning.filename, warning.lineno) for warning in caught]
    [('Too hot.', '<string>', 1)]
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARY_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FitflaxWarning, stacklevel=level)


def no_attribute(owner: object, name: str, hints: Mapping[str, str]) -> AttributeError:
    """Returns the error for a missing attribute, with a hint if there is one.

    >>> str(no_attribute([], "add", {"add": "Use append()"}))
    "'list' object has no attribute 'add'. Use append()."
    """
    hint = f". {hints[name]}." if name in hints else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=owner)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest of `known`, or an empty string if none is close.

    >>> did_you_mean("val_acc", ["loss", "val_accuracy"])
    " Did you mean 'val_accuracy'?"
    >>> did_you_mean("zzz", ["loss"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def is_integer(value: object, at_least: int | None = None) -> bool:
    """Returns whether an argument is a Python or NumPy integer, not a boolean, and not less than `at_least` if given.

    >>> is_integer(3, 1), is_integer(np.int64(3), 1), is_integer(True), is_integer(0, 1), is_integer(3.0)
    (True, True, False, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and (at_least is None or bool(value >= at_least))


def integer_of(name: str, value: Any, *, at_least: int = 0, otherwise: str = "", error: type[FitflaxError] = ConfigError) -> int:
    """Returns an argument as a Python integer; raises `error` if it is not an integer or too small. `otherwise` names what else the argument may be.

    >>> integer_of("steps", np.int64(3), at_least=1)
    3
    >>> integer_of("save(keep=...)", 0, at_least=1, otherwise=" or None")
    Traceback (most recent call last):
    fitflax.errors.ConfigError: save(keep=...) must be a positive integer or None. Received: 0.
    """
    if not is_integer(value, at_least):
        kind = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
        raise error(f"{name} must be {kind}{otherwise}. Received: {value!r}.")
    return int(value)
