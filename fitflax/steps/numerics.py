"""How updates are computed, whatever they minimize: in how many parts, in which floating-point type, and whether their parameters are averaged.

What is stored stays float32. Half precision is that of the module's own computation: parameters and inputs are cast on the way in, so gradients arrive
in the parameters' own type; outputs and what the module changed are cast on the way out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import ConfigError
from fitflax.integers import is_integer
from fitflax.state import PyTree

__all__ = ["Numerics", "start_average"]

_HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
_PRECISIONS = ("float32", *_HALF)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The settings of `compile` that change numbers, and nothing else.

    Attributes:
        accumulate_steps: Into how many micro-batches a batch is split.
        precision: What the module computes in: `"float32"`, which leaves everything as it is, `"bfloat16"` or `"float16"`.
        ema_decay: How much of the averaged parameters stays at each update; `None` for no average.

    Raises:
        ConfigError: One is out of its range.

    >>> Numerics(precision="bfloat16").narrow({"w": jnp.ones(2), "n": jnp.arange(2)})
    {'n': Array([0, 1], dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}
    """

    accumulate_steps: int = 1
    precision: str = "float32"
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        steps, precision, decay = self.accumulate_steps, self.precision, self.ema_decay
        if not is_integer(steps, 1):
            raise ConfigError(f"compile(accumulate_steps=...) must be a positive integer. Received: {steps!r}.")
        if not isinstance(precision, str) or precision not in _PRECISIONS:
            raise ConfigError(f"compile(precision=...) must be one of {', '.join(map(repr, _PRECISIONS))}. Received: {precision!r}.")
        is_number = isinstance(decay, int | float | np.number) and not isinstance(decay, bool)
        if decay is not None and not (is_number and 0 < decay < 1):
            raise ConfigError(f"compile(ema_decay=...) must be a number between 0 and 1, such as 0.999, or None. Received: {decay!r}.")
        # As Python's own numbers, which can be written into a checkpoint.
        object.__setattr__(self, "accumulate_steps", int(steps))
        object.__setattr__(self, "ema_decay", None if decay is None else float(decay))

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled, because gradients of ordinary size would vanish in the precision."""
        return self.precision == "float16"

    @property
    def settings(self) -> dict[str, Any]:
        """By name what the bits of a run follow from; `None` for what is not used, as in checkpoints from before there was such a setting."""
        default = Numerics()
        return {name: None if value == getattr(default, name) else value for name, value in dataclasses.asdict(self).items()}

    def check_custom_step(self) -> None:
        """Checks that nothing is asked for that cannot be done to an update of the user's own.

        Raises:
            ConfigError: Something is.
        """
        faults = [name for name in ("accumulate_steps", "precision") if self.settings[name] is not None]
        if faults:
            raise ConfigError(
                f"compile({', '.join(f'{name}={getattr(self, name)!r}' for name in faults)}) cannot be applied to an overridden train_step, which is a whole "
                "update. Override compute_loss instead, or leave this out and do it in train_step."
            )

    # -- precision --

    def narrow(self, tree: PyTree) -> PyTree:
        """Returns a tree with its floating-point leaves in the compute dtype."""
        dtype = _HALF.get(self.precision)
        return tree if dtype is None else _each(tree, lambda leaf: leaf.astype(dtype))

    def widen(self, tree: PyTree) -> PyTree:
        """Returns a tree with its floating-point leaves in float32 or wider; a dict keeps its order."""
        if self.precision not in _HALF:
            return tree
        if isinstance(tree, dict):
            return {key: self.widen(value) for key, value in tree.items()}
        return _each(tree, lambda leaf: leaf.astype(_at_least_float32(leaf.dtype)))

    def as_stored(self, changed: dict[str, PyTree], stored: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns collections that the module changed in the dtypes in which they are stored; what is not stored is left as it is."""
        if self.precision not in _HALF:
            return changed
        return {name: _like(tree, stored[name]) if name in stored else tree for name, tree in changed.items()}

    # -- averaged parameters --

    def average(self, averages: PyTree, params: PyTree) -> PyTree:
        """Returns the averages with one more value of the parameters: `d * average + (1 - d) * value`; what has no average is the value itself."""
        decay = cast(float, self.ema_decay)

        def one(average: jax.Array, value: jax.Array) -> jax.Array:
            if not jnp.issubdtype(average.dtype, jnp.inexact):
                return jnp.copy(value)
            return decay * average + (1 - decay) * value.astype(average.dtype)

        return jax.tree.map(one, averages, params)


def start_average(params: PyTree) -> PyTree:
    """Returns the average of one value of the parameters: a copy, float32 or wider, because an average in half precision would stand still.

    >>> start_average({"w": jnp.ones(2, jnp.bfloat16)})
    {'w': Array([1., 1.], dtype=float32)}
    """

    def one(value: jax.Array) -> jax.Array:
        # A copy: the step takes each buffer only once.
        return jnp.copy(value.astype(_at_least_float32(value.dtype)) if jnp.issubdtype(value.dtype, jnp.inexact) else value)

    return jax.tree.map(one, params)


def _at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _each(tree: PyTree, cast_leaf: Callable[[Any], Any]) -> PyTree:
    """Returns a tree with `cast_leaf` applied to its floating-point leaves."""
    return jax.tree.map(lambda leaf: cast_leaf(leaf) if _is_float(leaf) else leaf, tree)


def _like(tree: PyTree, stored: PyTree) -> PyTree:
    """Returns a tree with its floating-point leaves in the dtypes of `stored`."""
    structures: list[Any] = [jax.tree.structure(each) for each in (tree, stored)]
    if structures[0] != structures[1]:
        return tree  # What is wrong with it is said where states are compared.
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype) if _is_float(leaf) and _is_float(old) else leaf, tree, stored)
