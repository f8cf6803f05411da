"""Numerical settings of updates: the number of micro-batches, the floating-point type, and averaged parameters.

Stored arrays stay float32; only the module computes in half precision. Parameters and inputs are cast before it, so gradients have the dtype of the
stored parameters. Outputs and changed collections are cast back after it.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import ConfigError
from fitflax.integers import is_integer
from fitflax.state import PyTree, start_average
from fitflax.steps.model_outputs import map_outputs

__all__ = ["Numerics", "start_average"]

_HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
_PRECISIONS = ("float32", *_HALF)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The numerical settings of `compile`."""

    accumulate_steps: int = 1  # Number of micro-batches that a batch is split into.
    precision: str = "float32"  # Precision of the module's computation: `"float32"`, which casts nothing, `"bfloat16"` or `"float16"`.
    ema_decay: float | None = None  # Decay of the averaged parameters at each update; `None` for no average.

    def __post_init__(self) -> None:
        steps, precision, decay = self.accumulate_steps, self.precision, self.ema_decay
        if not is_integer(steps, 1):
            raise ConfigError(f"compile(accumulate_steps=...) must be a positive integer. Received: {steps!r}.")
        if not isinstance(precision, str) or precision not in _PRECISIONS:
            raise ConfigError(f"compile(precision=...) must be one of {', '.join(map(repr, _PRECISIONS))}. Received: {precision!r}.")
        is_number = isinstance(decay, int | float | np.number) and not isinstance(decay, bool)
        if decay is not None and not (is_number and 0 < decay < 1):
            raise ConfigError(f"compile(ema_decay=...) must be a number between 0 and 1, such as 0.999, or None. Received: {decay!r}.")
        # Python numbers, which can be written into a checkpoint.
        object.__setattr__(self, "accumulate_steps", int(steps))
        object.__setattr__(self, "ema_decay", None if decay is None else float(decay))

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled, because small gradients would underflow in this precision."""
        return self.precision == "float16"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name; `None` for defaults, as in checkpoints from before a setting existed."""
        default = Numerics()
        return {name: None if value == getattr(default, name) else value for name, value in dataclasses.asdict(self).items()}

    def check_custom_step(self) -> None:
        """Raises `ConfigError` if a setting cannot be applied to a custom step."""
        faults = [name for name in ("accumulate_steps", "precision") if self.settings[name] is not None]
        if faults:
            raise ConfigError(
                f"compile({', '.join(f'{name}={getattr(self, name)!r}' for name in faults)}) cannot be combined with an overridden train_step, which performs "
                "the whole update. Override compute_loss instead, or leave this out and implement it in train_step."
            )

    # -- precision --

    @property
    def is_half(self) -> bool:
        """Whether the module computes in half precision."""
        return self.precision in _HALF

    def narrow(self, tree: PyTree) -> PyTree:
        """Returns a tree with its floating-point leaves in the compute dtype."""
        dtype = _HALF.get(self.precision)
        return tree if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)

    def widen(self, tree: PyTree) -> PyTree:
        """Returns outputs with floating-point leaves in float32 or wider, in the same containers and order."""
        if not self.is_half:
            return tree
        return map_outputs(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if _is_float(leaf) else leaf, tree)

    def as_stored(self, changed: dict[str, PyTree], stored: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns collections that the module changed in their stored dtypes; new collections are unchanged."""
        if not self.is_half:
            return changed
        return {name: _cast_like(tree, stored[name]) if name in stored else tree for name, tree in changed.items()}

    # -- averaged parameters --

    def average(self, averages: PyTree, params: PyTree) -> PyTree:
        """Returns the updated averages, `d * average + (1 - d) * value`; parameters that are not floating-point are copied."""
        decay = cast(float, self.ema_decay)

        def one(average: jax.Array, value: jax.Array) -> jax.Array:
            if not jnp.issubdtype(average.dtype, jnp.inexact):
                return jnp.copy(value)
            return decay * average + (1 - decay) * value.astype(average.dtype)

        return jax.tree.map(one, averages, params)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _cast_like(tree: PyTree, stored: PyTree) -> PyTree:
    structures: list[Any] = [jax.tree.structure(each) for each in (tree, stored)]
    if structures[0] != structures[1]:
        return tree  # The error is raised where states are compared.
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype) if _is_float(leaf) and _is_float(old) else leaf, tree, stored)
