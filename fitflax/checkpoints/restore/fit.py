"""Fits the contents of a checkpoint to a target structure, and reports every difference."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from fitflax.checkpoints.formats.plain_tree import join, leaf_paths, map_leaves, nested, shown, walk
from fitflax.errors import RestoreError
from fitflax.leaves import key_of, listed
from fitflax.parallel.placement import RemoteArray
from fitflax.state import PyTree

__all__ = ["Advice", "fit_leaf", "from_saved", "refit", "restore_tree"]

# The dtypes that `cast` converts.
_CASTABLE = frozenset({"bfloat16", "float16", "float32", "float64"})

Advice = Callable[[Mapping[str, tuple[Any, Any]], Collection[str]], str]
"""What to do about an error, given the expected and the saved arrays by path, and the paths of those that differ."""


def fit_leaf(target: Any, saved: Any, impl: str | None, *, cast: bool = False) -> tuple[Any, str | None]:
    """Returns a saved leaf converted to the kind of `target`, and how the two differ, as the end of a sentence that begins with its path, or `None`.

    A typed key is saved as key data of the implementation `impl`. With `cast`, a floating dtype is converted to that of `target`.
    """
    try:
        leaf = saved if impl is None else key_of(saved, impl)
    except (TypeError, ValueError) as error:
        return saved, f"is a random key that this version of JAX cannot create ({error})"
    if cast and {_dtype_name(leaf), _dtype_name(target)} <= _CASTABLE and leaf.dtype != target.dtype:
        if isinstance(leaf, RemoteArray):
            leaf = _CastArray(leaf, target.dtype)
        else:
            leaf, original = _cast(leaf, target.dtype), leaf
            if _has_overflowed(leaf, original):
                return original, f"has numbers that are too large for {target.dtype}"
    return _converted(target, leaf), _difference(leaf, target)


def _dtype_name(leaf: Any) -> str:
    return str(getattr(getattr(leaf, "dtype", None), "name", ""))


def _cast(array: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def _has_overflowed(cast: Any, original: Any) -> bool:
    """Returns whether finite numbers have become infinite."""
    library: Any = jnp if isinstance(cast, jax.Array) else np
    return bool(jax.device_get(library.any(~library.isfinite(cast) & library.isfinite(original))))


class _CastArray(RemoteArray):
    """An array that is stored elsewhere, in another floating dtype."""

    def __init__(self, stored: RemoteArray, dtype: Any) -> None:
        self._stored, self.shape, self.dtype = stored, stored.shape, np.dtype(dtype)

    @override
    def read(self, index: Sequence[slice]) -> np.ndarray[Any, Any]:
        part = self._stored.read(index)
        converted: np.ndarray[Any, Any] = _cast(part, self.dtype)
        if _has_overflowed(converted, part):
            raise RestoreError(f"The checkpoint has numbers that are too large for {self.dtype}. Restore it into a model with a wider dtype.")
        return converted


def restore_tree(
    target: PyTree, saved: Any, *, where: str, root: str, key_impls: Mapping[str, str], advice: Advice | None = None, cast: bool = False
) -> PyTree:
    """Returns `saved`, nested dicts as returned by `read_state`, in the structure of `target`. `None` and empty containers match each other.

    `target` is a tree of arrays, `jax.ShapeDtypeStruct` or Python values, which are not read. `where` is the name of the checkpoint in errors, and
    `root` the path of `saved` in the file, such as `train` or `train/params`. With `cast`, floating dtypes are converted.

    >>> target = {"w": jax.ShapeDtypeStruct((2,), np.float32), "b": 0}
    >>> restore_tree(target, {"w": np.ones(3, np.float32)}, where="runs/a/step_00000001", root="train", key_impls={})
    Traceback (most recent call last):
    fitflax.errors.RestoreError: runs/a/step_00000001 does not fit this model. Missing: b. Different: w has shape (3,), expected (2,).
    """
    leaves, treedef, paths = leaf_paths(target, root)
    found = {path: leaf for path, leaf in walk(saved, root) if leaf is not None}
    different: dict[str, str] = {}
    pairs: dict[str, tuple[Any, Any]] = {}
    for path in sorted(paths.keys() & found):
        wanted = leaves[paths[path]]
        leaves[paths[path]], difference = fit_leaf(wanted, _as_hyperparam(path, wanted, found[path]), key_impls.get(path), cast=cast)
        pairs[shown(path)] = wanted, found[path]
        different |= {path: f"{shown(path)} {difference}"} if difference else {}
    missing, unexpected = (_without_averages(dict.fromkeys(each)) for each in (paths.keys() - found, found.keys() - paths))
    different = _without_averages(different)
    if missing or unexpected or different:
        what, to_do = "model", advice(pairs, [shown(path) for path in different]) if advice else ""
        if root in ("train", "train/opt_state") and all(path.startswith("train/opt_state") for path in [*missing, *unexpected, *different]):
            # The parameters fit, but the state is another optimizer's.
            what, to_do = "optimizer", "Compile with the optimizer of the checkpoint, or restore it with weights_only=True."
        lists = {"Missing": listed(sorted(map(shown, missing)), most=3), "Unexpected": listed(sorted(map(shown, unexpected)), most=3)}
        lists["Different"] = listed(different.values(), separator="; ", most=3)
        faults = "".join(f" {title}: {texts}." for title, texts in lists.items() if texts)
        raise RestoreError(f"{where} does not fit this {what}.{f' {to_do}' if to_do else ''}{faults}")
    return jax.tree.unflatten(treedef, leaves)


def _as_hyperparam(path: str, target: Any, saved: Any) -> Any:
    """Returns a hyperparameter of the optimizer in the dtype of the target. In version 0.1, it had that of the parameters."""
    is_hyperparam = path.startswith("train/opt_state/") and path.split("/")[-2] == "hyperparams"
    if not is_hyperparam or not all(hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (target, saved)):
        return saved
    return saved if saved.dtype == target.dtype else np.asarray(saved).astype(target.dtype)


def _without_averages(paths: dict[str, Any]) -> dict[str, Any]:
    """Returns paths without those of averaged parameters if the parameters themselves are among them."""
    averages = "train/ema_params/"
    return {path: each for path, each in paths.items() if not path.startswith(averages) or f"train/params/{path.removeprefix(averages)}" not in paths}


def refit(target: PyTree, tree: PyTree, *, where: str, root: str, advice: Advice | None = None, cast: bool = False) -> PyTree:
    """Returns the leaves of `tree`, on any device, in the structure of `target`, which has the same paths. Arguments and errors are those of `restore_tree`."""
    return restore_tree(target, nested(tree, root)[0], where=where, root=root, key_impls={}, advice=advice, cast=cast)


def from_saved(saved: Any, *, root: str = "run", key_impls: Mapping[str, str] | None = None, integer_keys: Collection[str] = ()) -> Any:
    """Returns a tree that was saved without a target, as new dicts and lists of Python values and NumPy arrays.

    Tuples have become lists, and keys strings, except in the dicts with paths in `integer_keys`. Without `key_impls`, typed keys stay key data.
    """

    def restore(path: str, leaf: Any) -> Any:
        impl = (key_impls or {}).get(path)
        try:
            return leaf if impl is None else key_of(leaf, impl)
        except (TypeError, ValueError) as error:
            raise RestoreError(f"{path} is a random key that this version of JAX cannot create ({error}).") from error

    return _with_integers(map_leaves(saved, root, restore), root, frozenset(integer_keys))


def _with_integers(node: Any, path: str, paths: frozenset[str]) -> Any:
    if not paths or not isinstance(node, dict):
        return node
    children = {key: _with_integers(child, join(path, key), paths) for key, child in node.items()}
    return {int(key): child for key, child in children.items()} if path in paths else children


def _difference(saved: Any, target: Any) -> str | None:
    (saved_type, saved_shape), (target_type, target_shape) = _describe(saved), _describe(target)
    if saved_type == target_type:
        return None if saved_shape == target_shape else f"has shape {saved_shape}, expected {target_shape}"
    if saved_shape == target_shape:
        return f"is {saved_type}, expected {target_type}"
    return f"is {f'{saved_type} {saved_shape}'.strip()}, expected {f'{target_type} {target_shape}'.strip()}"


def _describe(leaf: Any) -> tuple[str, str]:
    if hasattr(leaf, "dtype"):
        return str(leaf.dtype.name), str(tuple(leaf.shape))
    return type(leaf).__name__, ""


def _converted(target: Any, saved: Any) -> Any:
    if isinstance(target, np.generic):
        return np.asarray(saved)[()]
    return np.asarray(saved) if isinstance(saved, np.generic) else saved
