"""The board: short messages between the processes of a program, over the key-value store of JAX's distributed runtime; no device takes part."""

import math
import time
from typing import Any

import jax
from jax._src import distributed  # Its client has no public name; Orbax takes it from there, too.

__all__ = ["Board"]

# In milliseconds: as long as a process may be slow. One that is lost is found by its heartbeat, which ends all others.
_PATIENCE = 24 * 3600 * 1000
# How long a wait is in which Ctrl-C is not heard.
_DEAF_SECONDS = 2.0
_ROOT = "fitflax"


class Board:
    """Messages by name, which every process can post and read, from any thread.

    Args:
        name: What tells these messages from others. Two boards of one name are one board.

    Raises:
        RuntimeError: `jax.distributed` has not been initialized.
    """

    def __init__(self, name: str) -> None:
        client: Any = distributed.global_state.client
        if client is None:
            raise RuntimeError("There is no board in a process that was started alone.")
        self._client = client
        self._root = f"{_ROOT}/{name}"

    @staticmethod
    def is_there() -> bool:
        """Returns whether processes have been connected.

        >>> Board.is_there()
        False
        """
        return distributed.global_state.client is not None

    def post(self, key: str, message: bytes) -> None:
        """Posts a message; one that is there under this key is replaced."""
        self._client.key_value_set_bytes(f"{self._root}/{key}", message, allow_overwrite=True)

    def settle(self, key: str, message: bytes) -> bytes:
        """Posts a message unless there is one under this key, whoever posted it; returns the one that is there in the end, the same for all who ask."""
        try:
            self._client.key_value_set_bytes(f"{self._root}/{key}", message, allow_overwrite=False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self.read(key)
        return message

    def read(self, key: str) -> bytes:
        """Returns a message; waits until it is there."""
        return bytes(self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", _PATIENCE))

    def read_within(self, key: str, seconds: float) -> bytes:
        """Returns a message; waits until it is there, but not longer than so many seconds.

        Raises:
            TimeoutError: It did not come.
        """
        end = time.monotonic() + seconds
        while True:
            wait = min(max(end - time.monotonic(), 0.001), _DEAF_SECONDS)
            try:
                return bytes(self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", math.ceil(1000 * wait)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() >= end:
                    raise TimeoutError(f"No message {key} within {seconds:g} s.") from error

    def read_all(self, folder: str) -> dict[str, bytes]:
        """Returns the messages whose keys begin with `folder/`, by what follows; waits for nothing."""
        found = self._client.key_value_dir_get_bytes(f"{self._root}/{folder}")
        return {key.rsplit("/", 1)[-1]: bytes(message) for key, message in found}

    def remove(self, key: str) -> None:
        """Removes a message, or a folder of them."""
        self._client.key_value_delete(f"{self._root}/{key}")
