"""The structure of a state, which must not change from step to step, because the step would be compiled again."""

from typing import cast

import jax

from fitflax.errors import ModelError
from fitflax.leaves import describe_shapes, is_key, listed
from fitflax.models import TRANSIENT
from fitflax.state import PyTree, TrainState

__all__ = ["same_types", "state_faults", "strong_types"]


def strong_types(tree: PyTree) -> PyTree:
    """Returns `tree` without weakly typed leaves, which the first update would change, so that the step would be compiled twice."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype), tree)


def state_faults(old: PyTree, new: PyTree) -> str:
    """Returns where `new`, a state or a part of one, differs from `old` in structure, shapes or dtypes; an empty string if nowhere."""
    before, after = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (old, new))
    faults = []
    for path in {**before, **after}:
        was, now, name = before.get(path), after.get(path), jax.tree_util.keystr(path)
        if was is None or now is None:
            faults.append(f"{name} is {'new' if was is None else 'missing'}")
        elif was.shape != now.shape or was.dtype != now.dtype:
            faults.append(f"{name} is {describe_shapes(now)} instead of {describe_shapes(was)}")
    return listed(faults, "; ")


def _sow_hint(old: TrainState, new: TrainState) -> str:
    """Returns a hint for collections that have other arrays or shapes after each call, as those of sown values do."""
    before, after = ({path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state)} for state in (old, new))
    names = sorted({str(path[0].key) for path, shape in after.items() if before.get(path) != shape})
    if not names:
        return ""
    return f" If the module sows into {', '.join(map(repr, names))}, keep it out of the state: Trainer(transient={(*TRANSIENT, *names)})."


def same_types(new: TrainState, old: TrainState) -> TrainState:
    """Returns `new` after checking that it has the structure, shapes and dtypes of `old`."""
    new = strong_types(new)
    faults = state_faults(old, new)
    if faults:
        raise ModelError(f"A step must return a state with the same structure, shapes and dtypes. Differences: {faults}.{_sow_hint(old, new)}")
    # Containers may still differ (a FrozenDict for a dict), which would also compile the step again.
    return cast(TrainState, jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)))
