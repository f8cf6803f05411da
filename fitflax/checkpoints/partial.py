"""Restoring into a model that is not the saved one: which arrays go where by their paths and the user's mapping, and what is left to initialize.

Paths are those that errors list: `params/Dense_0/kernel`, and for other collections `batch_stats/BatchNorm_0/mean`. Nothing is initialized and nothing
reaches a device here.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax

from fitflax.checkpoints.saved import Saved
from fitflax.checkpoints.trees import fit_leaf, leaf_paths, shown, walk
from fitflax.errors import ConfigError, RestoreError, did_you_mean
from fitflax.state import PyTree, TrainState

__all__ = ["RestoreReport", "check_mapping", "match", "moved", "report_of"]

PathMapping = Mapping[str, str | None]
"""Paths in the model -> paths in the checkpoint, or `None`: initialize it. A path stands for everything below it; the longest that fits decides."""

# How many paths an error or a report writes out.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, repr=False)
class RestoreReport:
    """What `Trainer.restore` did with parameters and collections, by their paths.

    Attributes:
        restored: What of the model came from the checkpoint; paths in the model, sorted.
        initialized: What of the model the checkpoint did not have, or was mapped to `None`: initialized as `build` would; sorted.
        unused: What of the checkpoint no part of the model took; paths in the checkpoint, sorted. Optimizer state, step, key and averaged parameters are not
            listed.

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
            lines += [f"{title}: {_listed(paths)}"] if paths else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.restored)} restored, {len(self.initialized)} initialized, {len(self.unused)} unused>"


def check_mapping(mapping: Any, *, partial: bool) -> PathMapping:
    """Returns the mapping, `{}` for `None`.

    Raises:
        ConfigError: It is no dict of paths, or has a `None` although everything has to be restored.
    """
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) and isinstance(value, str | None) for key, value in mapping.items()):
        raise ConfigError(f"mapping must be a dict {{path in the model: path in the checkpoint, or None}}. Received: {mapping!r}.")
    left_out = sorted(key for key, value in mapping.items() if value is None)
    if left_out and not partial:
        raise ConfigError(f"mapping[{left_out[0]!r}] is None, so part of the model is to be initialized. Pass partial=True as well.")
    return mapping


def match(saved: Saved, target: TrainState, mapping: PathMapping) -> tuple[dict[str, PyTree], RestoreReport]:
    """Returns what of a checkpoint a model can take.

    Args:
        saved: The checkpoint.
        target: The shapes of the module's own state.
        mapping: Other names.

    Returns:
        `params` and `model_state` in the structure of `target`: NumPy arrays, and the `jax.ShapeDtypeStruct` of `target` where the checkpoint has nothing;
        and the same in words.

    Raises:
        RestoreError: Arrays of the same path differ in shape or dtype, an entry of `mapping` has no effect or contradicts a path, or nothing matches.
    """
    leaves, treedef, paths = leaf_paths({"params": target.params, "model_state": target.model_state}, "train")
    own = {shown(path): index for path, index in paths.items()}
    found = {shown(path): (path, leaf) for path, leaf in _leaves_of(saved.train, "params", "model_state", "ema_params")}
    placed = _placed(found, mapping, own, where=str(saved.path), partial=True)
    taken = {path: source for path, source in placed.items() if path in own}
    impls = saved.metadata["key_impls"]
    faults: dict[str, str] = {}
    for path, source in sorted(taken.items()):
        in_file, leaf = found[source]
        leaves[own[path]], difference = fit_leaf(leaves[own[path]], leaf, impls.get(in_file))
        if difference:
            faults[path] = f"{path if path == source else f'{path} (from {source})'} {difference}"
    if faults:
        advice = f"Initialize what differs: mapping={{{', '.join(f'{path!r}: None' for path in faults)}}}."
        raise RestoreError(f"{saved.path} does not fit this model: {'; '.join(faults.values())}. {advice}")
    if not taken:
        raise RestoreError(
            f"{saved.path} has nothing that this model could take. It has {_listed(sorted(found))}; the model has {_listed(sorted(own))}. "
            "Say which is which: mapping={path in the model: path in the checkpoint}."
        )
    unused = {path for path in found if not path.startswith("ema_params/")}.difference(taken.values())
    report = RestoreReport(tuple(sorted(taken)), tuple(sorted(own.keys() - taken)), tuple(sorted(unused)))
    return jax.tree.unflatten(treedef, leaves), report


def moved(saved: Saved, target: TrainState | None, mapping: PathMapping) -> Saved:
    """Returns a checkpoint with its arrays where the model has them; the optimizer's and the averaged parameters' trees follow the parameters.

    Args:
        saved: The checkpoint.
        target: The shapes of the module's own state, as far as they are known.
        mapping: Other names.

    Raises:
        RestoreError: An entry of `mapping` has no effect or contradicts another or a path, or something of the checkpoint is left without a place.
    """
    if not mapping:
        return saved
    own = None
    if target is not None:
        own = [shown(path) for path in leaf_paths({"params": target.params, "model_state": target.model_state}, "train")[2]]
    found = {shown(path): (path, leaf) for path, leaf in _leaves_of(saved.train, "params", "model_state")}
    placed = _placed(found, mapping, own, where=str(saved.path), partial=False)
    left = sorted(found.keys() - set(placed.values()))
    if left:
        raise RestoreError(f"{saved.path}: the mapping leaves no place for {_listed(left)}. Pass partial=True to leave out what this model does not have.")
    impls = saved.metadata["key_impls"]
    new_impls = {path: impl for path, impl in impls.items() if not path.startswith("train/")}
    leaves: dict[str, Any] = {}
    for new, old, leaf in _with_followers(saved.train, placed, found):
        leaves[new] = leaf
        new_impls |= {new: impls[old]} if old in impls else {}
    train = {**{name: {} for name, tree in saved.train.items() if isinstance(tree, dict)}, **_nested(leaves, where=str(saved.path)).get("train", {})}
    return dataclasses.replace(saved, train=train, metadata={**saved.metadata, "key_impls": new_impls})


def report_of(state: TrainState) -> RestoreReport:
    """Returns the report of a checkpoint that was restored whole."""
    return RestoreReport(tuple(sorted(map(shown, leaf_paths({"params": state.params, "model_state": state.model_state}, "train")[2]))))


def _leaves_of(train: Mapping[str, Any], *fields: str) -> Iterator[tuple[str, Any]]:
    for name in fields:
        yield from ((path, leaf) for path, leaf in walk(train.get(name), f"train/{name}") if leaf is not None)


def _placed(found: Collection[str], mapping: PathMapping, own: Collection[str] | None, *, where: str, partial: bool) -> dict[str, str]:
    """Returns `{path in the model: path in the checkpoint}`, also of paths that the model may not have.

    Args:
        found: The paths of the checkpoint.
        mapping: Other names.
        own: The paths of the model, as far as they are known.
        where: What errors call the checkpoint.
        partial: Whether parts of the model may be initialized.

    Raises:
        RestoreError: Entries of `mapping` that have no effect or contradict a path; all of them are named.
    """
    decided = collections.Counter(_deciding(path, mapping) for path in own or ())
    by_name = {path for path in found if _deciding(path, mapping) is None}
    placed: dict[str, str] = {}
    faults: list[str] = []
    for key, source in mapping.items():
        if own is not None and not decided[key]:
            faults.append(f"{key!r}: {_shadowed_or_unknown(key, own, 'the model')}")
        if source is None:
            continue
        below = {key + path.removeprefix(source): path for path in found if _is_below(path, source)}
        mine = {path: each for path, each in below.items() if _deciding(path, mapping) == key}
        placed |= mine
        if not mine:
            faults.append(f"{key!r}: {_shadowed_or_unknown(source, found, 'the checkpoint')}")
        elif own is not None and decided[key]:
            faults += _disagreements(key, source, {path: each for path, each in mine.items() if path in own}, own, by_name, below=below, partial=partial)
    if faults:
        raise RestoreError(f"{where}: the mapping does not fit: {'; '.join(dict.fromkeys(faults))}.")
    gone = set(placed.values())
    return {**{path: path for path in by_name if partial or path not in gone}, **placed}


def _shadowed_or_unknown(path: str, known: Collection[str], what: str) -> str:
    """Returns why an entry has no effect on one of its two sides."""
    if any(_is_below(each, path) for each in known):
        return "longer paths of the mapping decide for all below it"
    prefixes = {"/".join(keys[:end]) for keys in (each.split("/") for each in known) for end in range(1, len(keys) + 1)}
    hint = did_you_mean(path, sorted(prefixes))
    return f"{what} has no {path!r}{f' ({hint.strip()})' if hint else ''}"


def _disagreements(
    key: str, source: str, taken: Mapping[str, str], own: Collection[str], by_name: Collection[str], *, below: Mapping[str, str], partial: bool
) -> Iterator[str]:
    if not taken:
        want = sorted(path for path in own if _is_below(path, key))
        yield f"{key!r}: {source!r} gives it nothing, the model has {_listed(want)}, the checkpoint {_listed(sorted(below.values()))}"
    # A layer put in between shifts flax's numbers, so what has the old name need not be what had it when that was saved.
    elif any(each in by_name and each in own for each in taken.values()):
        ways = f"{source!r}: {source!r} to take it for both" + (f", or {source!r}: None to initialize it" if partial else "")
        yield f"{key!r} takes {source!r}, and so does this model's own {source!r} by its name; add {ways}"


def _with_followers(train: Mapping[str, Any], placed: Mapping[str, str], found: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yields `(new path, old path, leaf)` of the whole state; what is named after a parameter goes where the parameter goes."""
    goes: dict[str, list[str]] = collections.defaultdict(list)
    for path, source in placed.items():
        old, leaf = found[source]
        is_param = path.startswith("params/")
        yield f"train/{path}" if is_param else f"train/model_state/{path}", old, leaf
        if is_param and source.startswith("params/"):
            goes[source.removeprefix("params/")].append(path.removeprefix("params/"))
    for name in train.keys() - {"params", "model_state"}:
        for path, leaf in _leaves_of(train, name):
            keys = path.split("/")
            # `opt_state/0/mu/Dense_0/kernel` is about `params/Dense_0/kernel`: the longest end that is a parameter's path.
            ends = ("/".join(keys[start:]) for start in range(2, len(keys)))
            end = next((end for end in ends if end in goes), None)
            news = [path] if end is None else [path.removesuffix(end) + new for new in goes[end]]
            yield from ((new, path, leaf) for new in news)


def _nested(leaves: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Returns the nested dicts that `walk` yields `leaves` of."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = (key.replace("~1", "/").replace("~0", "~") for key in path.split("/"))
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise RestoreError(f"{where}: the mapping does not fit: {shown(path)} lies above or below another array.")
        node[last] = leaf
    return tree


def _deciding(path: str, mapping: PathMapping) -> str | None:
    """Returns the longest key of `mapping` that is `path` or lies above it."""
    end = len(path)
    while end > 0:
        if path[:end] in mapping:
            return path[:end]
        end = path.rfind("/", 0, end)
    return None


def _is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def _listed(paths: Collection[str]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join([*list(paths)[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]) or "nothing"
