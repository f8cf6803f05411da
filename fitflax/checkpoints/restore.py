"""Fits the contents of a checkpoint to a model, all of them or, with `partial=True`, the arrays that match. Errors list the differences.

A partial restore matches arrays by their paths and the user's mapping, and finds those to initialize. Paths are those in errors: `params/Dense_0/kernel`, and
for other collections `batch_stats/BatchNorm_0/mean`. This module neither initializes arrays nor uses devices.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.plain_tree import join, leaf_paths, map_leaves, nested, put, shown, walk
from fitflax.checkpoints.weight_rules import cast_array, has_overflowed, is_weights
from fitflax.errors import ConfigError, RestoreError, did_you_mean
from fitflax.leaves import key_of, listed
from fitflax.parallel.placement import RemoteArray
from fitflax.state import PyTree, TrainState

# The dtypes that `cast` converts.
_CASTABLE = frozenset({"bfloat16", "float16", "float32", "float64"})

Advice = Callable[[Mapping[str, tuple[Any, Any]], Collection[str]], str]
"""What to do about an error, given the expected and the saved arrays by path, and the paths of those that differ."""


def _fit_leaf(target: Any, saved: Any, impl: str | None, *, cast: bool = False) -> tuple[Any, str | None]:
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
            leaf, original = cast_array(leaf, target.dtype), leaf
            if has_overflowed(leaf, original):
                return original, f"has numbers that are too large for {target.dtype}"
    return _converted(target, leaf), _difference(leaf, target)


def _dtype_name(leaf: Any) -> str:
    return str(getattr(getattr(leaf, "dtype", None), "name", ""))


class _CastArray(RemoteArray):
    """An array that is stored elsewhere, in another floating dtype."""

    def __init__(self, stored: RemoteArray, dtype: Any) -> None:
        self._stored, self.shape, self.dtype = stored, stored.shape, np.dtype(dtype)

    @override
    def read(self, index: Sequence[slice]) -> np.ndarray[Any, Any]:
        part = self._stored.read(index)
        converted: np.ndarray[Any, Any] = cast_array(part, self.dtype)
        if has_overflowed(converted, part):
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
    saved_leaves = {path: leaf for path, leaf in walk(saved, root) if leaf is not None}
    different: dict[str, str] = {}
    pairs: dict[str, tuple[Any, Any]] = {}
    for path in sorted(paths.keys() & saved_leaves):
        wanted = leaves[paths[path]]
        leaves[paths[path]], difference = _fit_leaf(wanted, _as_hyperparam(path, wanted, saved_leaves[path]), key_impls.get(path), cast=cast)
        pairs[shown(path)] = wanted, saved_leaves[path]
        different |= {path: f"{shown(path)} {difference}"} if difference else {}
    missing, unexpected = (_without_averages(dict.fromkeys(each)) for each in (paths.keys() - saved_leaves, saved_leaves.keys() - paths))
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
    """Returns a hyperparameter of the optimizer in the dtype of the target. In checkpoints of version 0.1, it has the dtype of the parameters."""
    is_hyperparam = path.startswith("train/opt_state/") and path.split("/")[-2] == "hyperparams"
    is_cast = is_hyperparam and _is_floating(target) and _is_floating(saved) and saved.dtype != target.dtype
    return np.asarray(saved).astype(target.dtype) if is_cast else saved


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


PathMapping = Mapping[str, str | None]
"""Paths in the model -> paths in the checkpoint, or `None` to initialize. A path applies to everything below it; the longest match wins."""

# The number of paths that a report lists.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, repr=False)
class RestoreReport:
    """Reports which parameters and collections `Trainer.restore` restored, by path.

    Attributes:
        restored: Sorted paths in the model that came from the checkpoint.
        initialized: Sorted paths in the model that the checkpoint does not have, or that were mapped to `None`; initialized as by `build`.
        unused: Sorted paths in the checkpoint that no part of the model used, without optimizer state, step, key and averaged parameters.

    >>> print(RestoreReport(restored=("params/body/bias", "params/body/kernel"), initialized=("params/head/kernel",), unused=("params/old_head/kernel",)))
    Restored 2 of 3 arrays.
    Initialized: params/head/kernel
    Unused: params/old_head/kernel
    """

    restored: tuple[str, ...]
    initialized: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"Restored {len(self.restored)} of {len(self.restored) + len(self.initialized)} arrays."]
        for title, paths in (("Initialized", self.initialized), ("Unused", self.unused)):
            lines += [f"{title}: {listed(paths, most=_SHOWN)}"] if paths else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.restored)} restored, {len(self.initialized)} initialized, {len(self.unused)} unused>"


def check_mapping(mapping: Any, *, partial: bool) -> PathMapping:
    """Returns the mapping, or `{}` for `None`. Raises `ConfigError` if it is not a dict of paths, or contains `None` without `partial`."""
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) and isinstance(value, str | None) for key, value in mapping.items()):
        raise ConfigError(f"mapping must be a dict {{path in the model: path in the checkpoint, or None}}. Received: {mapping!r}.")
    left_out = sorted(key for key, value in mapping.items() if value is None)
    if left_out and not partial:
        raise ConfigError(f"mapping[{left_out[0]!r}] is None, which initializes that part of the model. Pass partial=True as well.")
    return mapping


def match(saved: Saved, target: TrainState, mapping: PathMapping, *, cast: bool = False) -> tuple[dict[str, PyTree], RestoreReport]:
    """Returns the parameters and collections of a checkpoint that fit a model, and a report.

    They have the structure of `target`, which has the shapes of the module's own state. Where the checkpoint has no array, the `jax.ShapeDtypeStruct` of
    `target` stays. With `cast`, floating dtypes are converted.
    """
    leaves, treedef, model_paths = _model_leaves(target)
    saved_leaves = {shown(path): (path, leaf) for path, leaf in _leaves_of(saved.train, "params", "model_state", "ema_params")}
    wanted = {path: leaves[index] for path, index in model_paths.items()}
    source_of = _resolve_paths(saved_leaves, mapping, model_paths, where=str(saved.path), partial=True)
    restored = {path: source for path, source in source_of.items() if path in model_paths}
    impls = saved.metadata["key_impls"]
    faults: dict[str, str] = {}
    for path, source in sorted(restored.items()):
        in_file, leaf = saved_leaves[source]
        leaves[model_paths[path]], difference = _fit_leaf(leaves[model_paths[path]], leaf, impls.get(in_file), cast=cast)
        if difference:
            faults[path] = f"{path if path == source else f'{path} (from {source})'} {difference}"
    if faults:
        pairs = {path: (wanted[path], saved_leaves[source][1]) for path, source in restored.items()}
        advice = advice_on(pairs, faults, saved.metadata, is_weights=is_weights(saved))
        raise RestoreError(f"{saved.path} does not fit this model. {advice} Different: {listed(faults.values(), separator='; ', most=3)}.")
    if not restored:
        sides = "path in the model: path in the checkpoint" if "names" not in saved.metadata else "name in the file: path in the model"
        raise RestoreError(
            f"{saved.path} has no arrays with the paths of this model. Pass mapping={{{sides}}}. "
            f"It has {listed(sorted(saved_leaves), most=3) or 'nothing'}; the model has {listed(sorted(model_paths), most=3) or 'nothing'}."
        )
    unused = {path for path in saved_leaves if not path.startswith("ema_params/")}.difference(restored.values())
    report = RestoreReport(tuple(sorted(restored)), tuple(sorted(model_paths.keys() - restored)), tuple(sorted(unused)))
    return jax.tree.unflatten(treedef, leaves), report


def moved(saved: Saved, target: TrainState | None, mapping: PathMapping) -> Saved:
    """Returns a checkpoint with its arrays at the model's paths. Optimizer state and averaged parameters follow the parameters.

    `target` has the shapes of the module's own state, if known.
    """
    if not mapping:
        return saved
    model_paths = None if target is None else _model_leaves(target)[2]
    saved_leaves = {shown(path): (path, leaf) for path, leaf in _leaves_of(saved.train, "params", "model_state")}
    source_of = _resolve_paths(saved_leaves, mapping, model_paths, where=str(saved.path), partial=False)
    left = sorted(saved_leaves.keys() - set(source_of.values()))
    if left:
        raise RestoreError(f"{saved.path}: the mapping leaves out arrays. To allow this, pass partial=True. Left out: {listed(left, most=3)}.")
    impls = saved.metadata["key_impls"]
    new_impls = {path: impl for path, impl in impls.items() if not path.startswith("train/")}
    leaves: dict[str, Any] = {}
    for new, old, leaf in _moved_leaves(saved.train, source_of, saved_leaves):
        leaves[new] = leaf
        new_impls |= {new: impls[old]} if old in impls else {}
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if not put(tree, path, leaf):
            fault = f"{shown(path)} conflicts with the path of another array, because one contains the other"
            raise RestoreError(f"{saved.path}: the mapping does not fit: {fault}.")
    train = {**{name: {} for name, part in saved.train.items() if isinstance(part, dict)}, **tree.get("train", {})}
    return dataclasses.replace(saved, train=train, metadata={**saved.metadata, "key_impls": new_impls})


def needs_shapes(saved: Saved) -> str:
    """Returns the error message for a partial restore into a module whose shapes are not known."""
    owner, what = ("restore", "checkpoint") if "names" not in saved.metadata else ("load_weights", "file")
    return (
        f"{owner}(partial=True) needs the module's shapes to initialize what the {what} does not have. Call compile(...) and build(batch) first. "
        "Shapes are enough: build((jax.ShapeDtypeStruct((1, 28, 28, 1), 'float32'),))."
    )


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def advice_on(pairs: Mapping[str, tuple[Any, Any]], different: Collection[str], metadata: Mapping[str, Any], *, is_weights: bool) -> str:
    """Returns how to restore what matches; `pairs` are the expected and the saved arrays by path, and `metadata` is the checkpoint's."""
    dtypes = {str(want.dtype) for want, _ in pairs.values() if _is_floating(want)}
    by_dtype = {path for path in different if all(map(_is_floating, pairs[path])) and pairs[path][0].shape == pairs[path][1].shape}
    dtype = repr(next(iter(dtypes))) if len(dtypes) == 1 else None
    # With several dtypes, converting to one would only move the error.
    is_loaded = is_weights and "names" in metadata
    casts = not is_loaded and (dtype is not None or len(by_dtype) == len(different))
    left = [path for path in different if not (path in by_dtype and (dtype if is_loaded else casts))]
    advice = []
    if by_dtype and is_loaded:
        advice.append(f"To convert dtypes, pass {f'dtype={dtype} to Trainer.load_weights' if dtype else 'WeightRules with load= to Trainer.load_weights'}.")
    elif by_dtype and casts:
        advice.append("To convert dtypes, pass cast=True to Trainer.restore.")
    if left or not by_dtype:
        advice.append(_leaving_out(left, metadata.get("names")))
    return " ".join(advice)


def _leaving_out(paths: Collection[str], names: Mapping[str, tuple[str, ...]] | None) -> str:
    """Returns advice to call `restore` with a mapping that initializes some paths of the model, or `load_weights` if `names` has their names in a file."""
    what = "To restore only what matches, call Trainer.restore" if names is None else "To load only what matches, call Trainer.load_weights"
    sources = list(paths if names is None else dict.fromkeys(name for path in paths for name in names.get(path, ())))
    if not sources:
        return f"{what}(path, partial=True)."
    entries = ", ".join([f"{name!r}: None" for name in sources[:3]] + ["..."] * (len(sources) > 3))
    return f"{what}(path, partial=True, mapping={{{entries}}}). If you pass a mapping, map these to None in it."


STREAMS = "rngs"
"""The collection of an NNX module's random streams."""


def match_streams(saved: Saved, target: TrainState | None, *, is_nnx: bool) -> tuple[Saved, list[str]]:
    """Returns a checkpoint with random streams added for an NNX module, or removed for a linen module, and the paths of removed ones.

    Those added are the shapes in `target`, so that the module keeps its own streams if the checkpoint has none.
    """
    root, collections = f"train/model_state/{STREAMS}", dict(saved.train.get("model_state") or {})
    expected = {} if target is None else target.model_state
    has_keys = any(path.startswith(f"{root}/") for path in saved.metadata["key_impls"])  # A linen module may have a collection of this name.
    left_out = []
    if is_nnx and STREAMS in expected and STREAMS not in collections:
        collections[STREAMS] = nested(expected[STREAMS], root)[0]
    elif not is_nnx and has_keys and STREAMS not in expected:
        left_out = [shown(path) for path, _ in walk(collections.pop(STREAMS), root)]
    return dataclasses.replace(saved, train={**saved.train, "model_state": collections}), left_out


def report_of(state: TrainState, unused: Sequence[str]) -> RestoreReport:
    """Returns the report of a full restore; leaves that are only shapes are initialized."""
    leaves, _, paths = _model_leaves(state)
    initialized = {path for path, index in paths.items() if isinstance(leaves[index], jax.ShapeDtypeStruct)}
    return RestoreReport(tuple(sorted(paths.keys() - initialized)), tuple(sorted(initialized)), tuple(sorted(unused)))


def _model_leaves(state: TrainState) -> tuple[list[Any], Any, dict[str, int]]:
    """Returns the leaves and the structure of parameters and collections, and the index of each leaf by its path in errors."""
    leaves, treedef, paths = leaf_paths({"params": state.params, "model_state": state.model_state}, "train")
    return leaves, treedef, {shown(path): index for path, index in paths.items()}


def _leaves_of(train: Mapping[str, Any], *fields: str) -> Iterator[tuple[str, Any]]:
    for name in fields:
        yield from ((path, leaf) for path, leaf in walk(train.get(name), f"train/{name}") if leaf is not None)


def _resolve_paths(saved_paths: Collection[str], mapping: PathMapping, model_paths: Collection[str] | None, *, where: str, partial: bool) -> dict[str, str]:
    """Returns `{path in the model: path in the checkpoint}`, including paths that the model may not have.

    `saved_paths` are the paths of the checkpoint, and `model_paths` those of the model, if known. With `partial`, parts of the model may be initialized.
    """
    decided = collections.Counter(_longest_match(path, mapping) for path in model_paths or ())
    by_name = {path for path in saved_paths if _longest_match(path, mapping) is None}
    source_of: dict[str, str] = {}
    faults: list[str] = []
    for key, source in mapping.items():
        if model_paths is not None and not decided[key]:
            faults.append(f"{key!r}: {_shadowed_or_unknown(key, model_paths, 'the model')}")
        if source is None:
            continue
        below = {key + path.removeprefix(source): path for path in saved_paths if _is_below(path, source)}
        mine = {path: each for path, each in below.items() if _longest_match(path, mapping) == key}
        source_of |= mine
        if not mine:
            faults.append(f"{key!r}: {_shadowed_or_unknown(source, saved_paths, 'the checkpoint')}")
        elif model_paths is not None and decided[key]:
            faults += _conflicts(
                key, source, {path: each for path, each in mine.items() if path in model_paths}, model_paths, by_name, below=below, partial=partial
            )
    if faults:
        raise RestoreError(f"{where}: the mapping does not fit: {listed(dict.fromkeys(faults), separator='; ', most=3)}.")
    gone = set(source_of.values())
    return {**{path: path for path in by_name if partial or path not in gone}, **source_of}


def _shadowed_or_unknown(path: str, known: Collection[str], what: str) -> str:
    """Returns why an entry has no effect on one of its two sides."""
    if any(_is_below(each, path) for each in known):
        return "longer paths of the mapping cover everything below it"
    prefixes = {"/".join(keys[:end]) for keys in (each.split("/") for each in known) for end in range(1, len(keys) + 1)}
    hint = did_you_mean(path, sorted(prefixes))
    return f"{what} has no {path!r}{f' ({hint.strip()})' if hint else ''}"


def _conflicts(
    key: str, source: str, taken: Mapping[str, str], model_paths: Collection[str], by_name: Collection[str], *, below: Mapping[str, str], partial: bool
) -> Iterator[str]:
    if not taken:
        want = sorted(path for path in model_paths if _is_below(path, key))
        yield f"{key!r}: no array of {source!r} matches (the model has {listed(want, most=3)}; the checkpoint has {listed(sorted(below.values()), most=3)})"
    # An inserted layer shifts flax's numbers, so equal names need not mean equal layers.
    elif any(each in by_name and each in model_paths for each in taken.values()):
        ways = f"{source!r}: {source!r} to use it for both" + (f", or {source!r}: None to initialize it" if partial else "")
        yield f"{key!r} uses {source!r}, and so does the model's own {source!r}; add {ways}"


def _moved_leaves(train: Mapping[str, Any], source_of: Mapping[str, str], saved_leaves: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yields `(new path, old path, leaf)` of the whole state; optimizer state and averages of a parameter follow it."""
    new_paths: dict[str, list[str]] = collections.defaultdict(list)
    for path, source in source_of.items():
        old, leaf = saved_leaves[source]
        is_param = path.startswith("params/")
        yield f"train/{path}" if is_param else f"train/model_state/{path}", old, leaf
        if is_param and source.startswith("params/"):
            new_paths[source.removeprefix("params/")].append(path.removeprefix("params/"))
    for name in train.keys() - {"params", "model_state"}:
        for path, leaf in _leaves_of(train, name):
            keys = path.split("/")
            # `opt_state/0/mu/Dense_0/kernel` belongs to `params/Dense_0/kernel`: the longest suffix that is a parameter's path.
            ends = ("/".join(keys[start:]) for start in range(2, len(keys)))
            end = next((end for end in ends if end in new_paths), None)
            news = [path] if end is None else [path.removesuffix(end) + new for new in new_paths[end]]
            yield from ((new, path, leaf) for new in news)


def _longest_match(path: str, mapping: PathMapping) -> str | None:
    """Returns the longest key of `mapping` that is `path` or an ancestor of it."""
    while path and path not in mapping:
        path = path.rpartition("/")[0]
    return path or None


def _is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")
