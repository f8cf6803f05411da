"""Short messages between processes over the key-value store of JAX's distributed runtime, without devices."""

import math
import time
from typing import Any

import jax
from jax._src import distributed  # The client has no public name; Orbax uses this one, too.

__all__ = ["Board"]

# For slow processes only: the heartbeat detects lost ones.
_TIMEOUT_MILLISECONDS = 24 * 3600 * 1000
# Waits in C++ do not react to Ctrl-C.
_UNINTERRUPTIBLE_SECONDS = 2.0
_ROOT = "fitflax"


class Board:
    """Messages by name that every process can post and read, from any thread. Boards with the same name share their messages."""

    def __init__(self, name: str) -> None:
        client: Any = distributed.global_state.client
        if client is None:
            raise RuntimeError("Processes are not connected. Call parallel.initialize() first.")
        self._client = client
        self._root = f"{_ROOT}/{name}"

    @staticmethod
    def is_there() -> bool:
        """Returns whether processes are connected."""
        return distributed.global_state.client is not None

    def post(self, key: str, message: bytes) -> None:
        """Posts a message, and replaces an earlier one with this key."""
        self._client.key_value_set_bytes(f"{self._root}/{key}", message, allow_overwrite=True)

    def settle(self, key: str, message: bytes) -> bytes:
        """Posts a message unless any process has posted one with this key; returns the first one, the same in all processes."""
        try:
            self._client.key_value_set_bytes(f"{self._root}/{key}", message, allow_overwrite=False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self.read(key)
        return message

    def read(self, key: str) -> bytes:
        """Returns a message; waits until it is posted."""
        return bytes(self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", _TIMEOUT_MILLISECONDS))

    def read_within(self, key: str, seconds: float) -> bytes:
        """Returns a message; raises `TimeoutError` if it is not posted within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            wait = min(max(end - time.monotonic(), 0.001), _UNINTERRUPTIBLE_SECONDS)
            try:
                return bytes(self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", math.ceil(1000 * wait)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() >= end:
                    raise TimeoutError(f"No message {key} within {seconds:g} s.") from error

    def read_all(self, folder: str) -> dict[str, bytes]:
        """Returns the messages whose keys begin with `folder/`, by the rest of the key, without waiting."""
        found = self._client.key_value_dir_get_bytes(f"{self._root}/{folder}")
        return {key.rsplit("/", 1)[-1]: bytes(message) for key, message in found}

    def remove(self, key: str) -> None:
        """Removes a message, or a folder of them."""
        self._client.key_value_delete(f"{self._root}/{key}")
