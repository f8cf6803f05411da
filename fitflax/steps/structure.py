"""The structure of a state, which must stay the same from step to step: another one would have the step compiled again."""

from typing import cast

import jax

from fitflax.errors import ModelError
from fitflax.leaves import is_key
from fitflax.state import PyTree, TrainState
from fitflax.steps.model import describe_shapes

__all__ = ["same_types", "state_faults", "strong_types"]


def strong_types(tree: PyTree) -> PyTree:
    """Returns `tree` without weakly typed leaves, which the first update would turn into others and so compile the step twice."""

    def strong(leaf: jax.Array) -> jax.Array:
        return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(strong, tree)


def state_faults(old: TrainState, new: TrainState) -> list[str]:
    """Returns, in words, where `new` differs from `old` in structure, shapes or dtypes."""
    before, after = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (old, new))
    faults = []
    for path in {**before, **after}:
        was, now, name = before.get(path), after.get(path), jax.tree_util.keystr(path)
        if was is None or now is None:
            faults.append(f"{name} {'appears' if was is None else 'disappears'}")
        elif was.shape != now.shape or was.dtype != now.dtype:
            faults.append(f"{name} changes from {describe_shapes(was)} to {describe_shapes(now)}")
    return faults


def same_types(new: TrainState, old: TrainState) -> TrainState:
    """Returns `new`, checked to have the structure, shapes and dtypes of `old`.

    Raises:
        ModelError: It has not: the step would be compiled again and again.
    """
    new = strong_types(new)
    faults = state_faults(old, new)
    if faults:
        raise ModelError(f"The state must keep its structure from step to step: {'; '.join(faults)}.")
    # Containers may still differ in kind (a FrozenDict for a dict), which would compile twice as well.
    return cast(TrainState, jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)))
