"""Random keys of the module's streams, different for each name, step, replica, and batch of an evaluation."""

import zlib
from typing import Any, NamedTuple, Self, cast

import jax

from fitflax.errors import ConfigError
from fitflax.models.base import Draws
from fitflax.parallel import Strategy

__all__ = ["StreamKeys", "Streams", "split_key"]

# Separates the keys of evaluations from those of steps, which are folded with the step.
_EVAL = 0xE7A1


def split_key(key: jax.Array, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Returns a key for each name, independent of the other names."""
    return {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in names}


@jax.tree_util.register_pytree_with_keys_class
class StreamKeys(dict[str, jax.Array]):
    """A dict of keys by stream, with an error that says how to name a missing stream. It is registered because JAX would take it for a leaf.

    >>> StreamKeys(dropout=1)["noise"]
    Traceback (most recent call last):
    fitflax.errors.ConfigError: step_rngs(state) has no random stream 'noise'. It has: ['dropout']. Name it: Trainer(rngs=('dropout', 'noise')).
    """

    def __missing__(self, name: str) -> jax.Array:
        raise ConfigError(f"step_rngs(state) has no random stream {name!r}. It has: {list(self)}. Name it: Trainer(rngs={(*self, name)}).")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], tuple[str, ...]]:
        """Returns the keys in the order of their names, as of a plain dict."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], keys: Any) -> Self:
        """Returns the dict with other values."""
        return cls(zip(names, keys, strict=True))


class Streams(NamedTuple):
    """Names of the module's random streams at initialization, in training and in evaluation."""

    init: tuple[str, ...]
    train: tuple[str, ...]
    eval: tuple[str, ...]

    def train_keys(self, key: jax.Array, strategy: Strategy) -> dict[str, jax.Array]:
        """Returns the keys of a training pass, different on each replica."""
        return _replica_keys(self.train, key, strategy)

    def train_draws(self, key: jax.Array, strategy: Strategy) -> Draws:
        """Returns the `Draws` of a training pass, different on each replica."""
        return Draws(self.train_keys(key, strategy), None if strategy.num_replicas == 1 else strategy.replica_index)

    def eval_draws(self, key: jax.Array, index: jax.Array, strategy: Strategy) -> Draws:
        """Returns the `Draws` of batch number `index` of an evaluation, different on each replica."""

        def salt() -> jax.Array:
            return cast(jax.Array, index * strategy.num_replicas + strategy.replica_index())

        return Draws(_replica_keys(self.eval, jax.random.fold_in(jax.random.fold_in(key, _EVAL), index), strategy), salt)


def _replica_keys(names: tuple[str, ...], key: jax.Array, strategy: Strategy) -> dict[str, jax.Array]:
    return split_key(jax.random.fold_in(key, strategy.replica_index()), names) if names else {}
