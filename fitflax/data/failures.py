"""Tells errors of the user's data, such as a worker process of a loader that died, from other errors.

It marks the exception, because the error must reach the user unchanged, and the code that ends a run does not know where it was raised.
"""

__all__ = ["is_dead_worker", "is_from_data", "mark_as_from_data"]

_MARK = "_fitflax_is_from_data"
# PyTorch raises this in a handler of SIGCHLD, so at any line of the program.
_DEAD_WORKER = "DataLoader worker (pid"


def mark_as_from_data(error: Exception) -> None:
    """Marks an error that was raised while a batch was being read."""
    error.__dict__[_MARK] = True  # Not `setattr`, which a frozen dataclass rejects.


def is_from_data(error: BaseException) -> bool:
    """Returns whether an error, or the cause that it was raised from, was raised by the user's data.

    An error that was raised while this one was handled, such as one of a save, is a different failure.

    >>> error = ValueError("no such file")
    >>> mark_as_from_data(error)
    >>> is_from_data(error), is_from_data(ValueError("no such file")), is_from_data(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."))
    (True, False, True)
    """
    return is_dead_worker(error) or hasattr(error, _MARK) or (error.__cause__ is not None and is_from_data(error.__cause__))


def is_dead_worker(error: BaseException) -> bool:
    """Returns whether an error is PyTorch's for a worker process that ended."""
    return isinstance(error, RuntimeError) and str(error).startswith(_DEAD_WORKER)
