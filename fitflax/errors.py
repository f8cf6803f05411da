"""Every exception and warning that fitflax raises on purpose.

How to choose and word one: the class says *whose* mistake it is (data, model, loss, checkpoint file, ...), the message says what is wrong, where
(argument, tree path, shape, value) and what to do, in that order. All faults found at once go into one message. Each class also derives from the
built-in that fits, so that `except ValueError` in users' scripts keeps working::

    FitflaxError
    +-- ConfigError (ValueError)            an argument, or a combination of arguments, makes no sense
    +-- NotReadyError (RuntimeError)        something was used before the call that makes it available
    +-- DataError (ValueError)              the data cannot be turned into batches
    +-- ModelError (ValueError)             the module does not run on the batch
    +-- ShardingError (ValueError)          arrays that cannot lie on a mesh as they should
    +-- LossError (ValueError)              the loss does not fit the outputs and targets
    +-- MetricError (ValueError)            a metric does not fit the outputs and targets
    +-- OptimizerError (ValueError)         an optimizer or learning rate that cannot be used
    +-- CallbackError (ValueError)          callbacks that cannot work together
    |   +-- MonitorError                    a monitored key that nobody logs
    +-- ReplicaError (RuntimeError)         replicas, or processes, that should be equal differ
    +-- CheckpointError (RuntimeError)      anything about checkpoint files
        +-- CheckpointNotFoundError (FileNotFoundError)
        +-- CorruptCheckpointError          a file that fails its checks
        +-- RestoreError (ValueError)       a good file that does not fit this model or run
        +-- DirectoryInUseError (FileExistsError)
"""

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping

__all__ = [
    "CallbackError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "DataError",
    "DirectoryInUseError",
    "FitflaxError",
    "FitflaxWarning",
    "LossError",
    "MetricError",
    "ModelError",
    "MonitorError",
    "NotReadyError",
    "OptimizerError",
    "ReplicaError",
    "RestoreError",
    "ShardingError",
]


class FitflaxError(Exception):
    """The base class of all errors that fitflax raises on purpose.

    >>> issubclass(DataError, FitflaxError) and issubclass(DataError, ValueError)
    True
    """


class FitflaxWarning(UserWarning):
    """The category of all warnings that fitflax gives; filter on it to silence or to raise them.

    >>> import warnings
    >>> warnings.simplefilter("error", FitflaxWarning)
    """


class ConfigError(FitflaxError, ValueError):
    """An argument, or a combination of arguments, makes no sense.

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
    """The module does not run on the batch; the message holds the shapes and the module's own error.

    >>> issubclass(ModelError, ValueError)
    True
    """


class ShardingError(FitflaxError, ValueError):
    """Arrays that cannot lie on a mesh as their axis names and the rules say; the message holds the path of each.

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
    """An optimizer, or a learning rate, that cannot be used.

    >>> issubclass(OptimizerError, ValueError)
    True
    """


class CallbackError(FitflaxError, ValueError):
    """Callbacks that cannot work, or cannot work together.

    >>> issubclass(CallbackError, ValueError)
    True
    """


class MonitorError(CallbackError):
    """A callback monitors a key that nobody logs; the message lists the keys that are logged.

    >>> issubclass(MonitorError, CallbackError)
    True
    """


class ReplicaError(FitflaxError, RuntimeError):
    """Replicas that should hold equal values differ, or processes that should do the same do not.

    >>> issubclass(ReplicaError, RuntimeError)
    True
    """


class CheckpointError(FitflaxError, RuntimeError):
    """Anything that goes wrong with checkpoint files.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint is where one was asked for.

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
    """A directory holds another run's checkpoints.

    >>> issubclass(DirectoryInUseError, FileExistsError)
    True
    """


# Where no line of the user's stands.
_NOT_USERS = frozenset({"concurrent", "contextlib", "flax", "functools", "fitflax", "jax", "optax", "threading"})


def warn(message: str) -> None:
    """Gives a `FitflaxWarning` at the line of the user's code that is being done, so that Python shows it once for each such line.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     exec("warn('Too hot.')", {"warn": warn, "__name__": "users"})
    >>> [(str(warning.message), warning.filename, warning.lineno) for warning in caught]
    [('Too hot.', '<string>', 1)]
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FitflaxWarning, stacklevel=level)


def no_attribute(owner: object, name: str, hints: Mapping[str, str]) -> AttributeError:
    """Returns the error for an attribute that is not there, with a hint if there is one for it.

    >>> str(no_attribute([], "add", {"add": "Use append()"}))
    "'list' object has no attribute 'add'. Use append()."
    """
    hint = f". {hints[name]}." if name in hints else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=owner)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest of `known`, or an empty string when none is close.

    Args:
        name: What the user wrote.
        known: What would have been right.

    >>> did_you_mean("val_acc", ["loss", "val_accuracy"])
    " Did you mean 'val_accuracy'?"
    >>> did_you_mean("zzz", ["loss"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
