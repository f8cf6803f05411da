"""Weights in safetensors files: rules that map names and layouts in a file to those of a model, in both directions, and weights read as a checkpoint.

Names in a file are unchanged, such as `h.0.attn.c_attn.weight`; paths in a model are those in errors, such as `params/block_0/attention/query/kernel`. In
fitflax's own files, names are paths joined by `.`, such as `params.Dense_0.kernel` or `batch_stats.BatchNorm_0.mean`, and the metadata says so. In other
files, all arrays are parameters if no name begins with `params.`. All arrays are NumPy arrays; no device is used.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.directories import disk_errors
from fitflax.checkpoints.plain_tree import MAX_DEPTH, join, keys_of, put, walk
from fitflax.checkpoints.safetensors_format import INDEX_SUFFIX, read_weights
from fitflax.errors import CheckpointError, ConfigError, CorruptCheckpointError, RestoreError, did_you_mean
from fitflax.leaves import listed
from fitflax.storage import Location

Array = np.ndarray[Any, Any]
_FIELD = re.compile(r"\{(\w*)\}")


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """Maps one or several arrays of a file to the model and back.

    Names and paths may have fields such as `{layer}`. A field matches any text without `.` and `/`, and has the same value on both sides, so one rule
    covers all layers. In a list of rules, the first one that matches a name applies.

    Args:
        theirs: The name in the file, or several names whose arrays `load` receives together.
        ours: The path in the model, `params/...` or that of another collection, or several paths, for which `load` returns a tuple. `None` drops the
            array, such as a buffer that the model does not have.
        load: The function `load(array, ...)` that converts their arrays to ours. By default, the array is unchanged.
        save: The function that converts our arrays to theirs, for `save_weights`. A rule with `load` and without `save` cannot be used to save.
        optional: Whether the rule may match nothing.

    Raises:
        ConfigError: A name is invalid, or the two sides have different fields.

    >>> rule = WeightRule("encoder.{layer}.weight", "params/layer_{layer}/kernel", load=np.transpose, save=np.transpose)
    >>> from_file({"encoder.0.weight": np.ones((2, 3))}, [rule], where="a file")[0]["params/layer_0/kernel"].shape
    (3, 2)
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...] | None
    load: Callable[..., Any] | None = None
    save: Callable[..., Any] | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        names, paths = _tuple(self.theirs), _tuple(self.ours)
        received = f"Received: theirs={self.theirs!r}, ours={self.ours!r}."
        if not names or not all(isinstance(each, str) and each for each in (*names, *paths)) or (self.ours is not None and not paths):
            raise ConfigError(f"A WeightRule takes names of arrays in a file, and paths in the model. {received}")
        if len(set(names)) < len(names) or len(set(paths)) < len(paths):
            raise ConfigError(f"A WeightRule must not name an array twice. {received}")
        if not all(field.isidentifier() for each in (*names, *paths) for field in _FIELD.findall(each)):
            raise ConfigError(f"A field of a WeightRule must be an identifier in braces, such as {{layer}}. {received}")
        fields = [set(_FIELD.findall(each)) for each in (*names, *paths)]
        if any(each != fields[0] for each in fields):
            raise ConfigError(f"All names and paths of a WeightRule must have the same fields in braces. {received}")
        if paths and max(len(names), len(paths)) > 1 and self.load is None:
            raise ConfigError(f"A WeightRule for several arrays needs a function load=. {received}")


WeightMapping = Mapping[str, Any] | Sequence[WeightRule] | Callable[[str], str | None]
"""Rules, or `{name in the file: path in the model, (path, load), or None}`, or a function from a name in the file to a path or `None`."""


def rules_of(mapping: Any, names: Sequence[str]) -> list[WeightRule]:
    """Returns a user's mapping as rules. A function is called with the names in the file."""
    wrong = ConfigError(
        "mapping must be a list of WeightRule, a dict {name in the file: path in the model, (path, transform), or None}, or a function from a name to a path "
        f"or None. Received: {mapping!r}."
    )
    if isinstance(mapping, WeightRule):
        return [mapping]
    if isinstance(mapping, Mapping):
        rules = []
        for name, value in mapping.items():
            path, load = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
            if not isinstance(name, str) or not isinstance(path, str | None) or not (load is None or callable(load)):
                raise wrong
            rules.append(WeightRule(_escaped(name), path and _escaped(path), load))
        return rules
    if callable(mapping):
        paths = {name: mapping(name) for name in names}
        if not all(isinstance(path, str | None) for path in paths.values()):
            raise wrong
        return [WeightRule(_escaped(name), None if path is None else _escaped(path)) for name, path in paths.items()]
    if not isinstance(mapping, Sequence) or isinstance(mapping, str) or not all(isinstance(rule, WeightRule) for rule in mapping):
        raise wrong
    return list(mapping)


def leaves_out_only(mapping: Any) -> bool:
    """Returns whether a mapping is a dict that only names arrays to leave out, as in `{"head.bias": None}`. All others then keep their default paths."""
    return isinstance(mapping, Mapping) and all(isinstance(name, str) and path is None for name, path in mapping.items())


def from_file(
    arrays: Mapping[str, Array], rules: Sequence[WeightRule], *, where: str, partial: bool = False, origins: dict[str, tuple[str, ...]] | None = None
) -> tuple[dict[str, Array], list[str]]:
    """Returns a file's arrays by their paths in the model, and the names that match no rule, which is an error without `partial`.

    The first rule that matches wins. `origins` receives, by path, the names from which each array was made.
    """
    by_path, unmatched = _apply(arrays, rules, where=where, to_ours=True, origins=origins)
    if unmatched and not partial:
        raise RestoreError(
            f"{where}: the mapping does not cover all arrays. Add rules (None leaves an array out), or pass partial=True. "
            f"Not covered: {listed(unmatched, most=3)}."
        )
    return by_path, unmatched


def to_file(arrays: Mapping[str, Array], rules: Sequence[WeightRule], *, where: str) -> dict[str, Array]:
    """Returns a model's arrays by their names in a file. Raises `ConfigError` if a rule has `load` but not `save`."""
    one_way = [rule for rule in rules if rule.load is not None and rule.save is None and rule.ours is not None]
    one_way = [rule for rule in one_way if not rule.optional or any(True for _ in _matches(_tuple(rule.ours)[0], arrays))]
    if one_way:
        raise ConfigError(
            f"{where} cannot be written with this mapping: the rule for {_shown(one_way[0].theirs)} has load= but no save=. Add save=, the inverse of load=."
        )
    by_name, unmatched = _apply(arrays, [rule for rule in rules if rule.ours is not None], where=where, to_ours=False)
    if unmatched:
        raise RestoreError(f"{where}: the mapping does not cover all arrays. Add rules for {listed(unmatched, most=3)}.")
    return by_name


def _apply(
    arrays: Mapping[str, Array], rules: Sequence[WeightRule], *, where: str, to_ours: bool, origins: dict[str, tuple[str, ...]] | None = None
) -> tuple[dict[str, Array], list[str]]:
    unmatched = dict.fromkeys(arrays)
    by_target: dict[str, Array] = {}
    faults: list[str] = []
    dropped = set[str]()  # A rule that drops an array may precede the one that maps it.
    for rule in rules:
        sources, targets = (_tuple(rule.theirs), _tuple(rule.ours)) if to_ours else (_tuple(rule.ours), _tuple(rule.theirs))
        count = 0
        for fields in _matches(sources[0], unmatched):
            count += 1
            names = [_filled(each, fields) for each in sources]
            lacking = [name for name in names if name not in unmatched]
            if lacking:
                faults.append(f"the rule for {names[0]!r} also needs {', '.join(map(repr, lacking))}, which is missing")
                continue
            for name in names:
                del unmatched[name]
            dropped.update(names if not targets else ())
            paths = [_filled(each, fields) for each in targets]
            twice = [path for path in paths if path in by_target]
            faults += [f"two rules produce {path!r}" for path in twice]
            try:
                results = _transformed(rule.load if to_ours else rule.save, [arrays[name] for name in names], len(paths))
            except Exception as error:
                shapes = ", ".join(f"{name} {arrays[name].dtype}{list(arrays[name].shape)}" for name in names)
                raise RestoreError(f"{where}: the mapping of {shapes} failed: {type(error).__name__}: {error}") from error
            by_target |= dict(zip(paths, results, strict=True))
            if origins is not None:
                origins.update(dict.fromkeys(paths, tuple(names)))
        first = _filled(sources[0], {}) if not _FIELD.search(sources[0]) else sources[0]
        if not count and first in arrays:
            faults += [] if rule.optional or first in dropped else [f"two rules use {first!r}"]
        elif not count and not rule.optional:
            hint = did_you_mean(first, arrays)
            backwards = " (keys are names in the file, and values are paths in the model)" if to_ours and first.startswith("params/") else ""
            faults.append(f"there is no {first!r}{f' ({hint.strip()})' if hint else ''}{backwards}")
    if faults:
        raise RestoreError(f"{where}: the mapping does not fit: {listed(dict.fromkeys(faults), separator='; ', most=3)}.")
    return by_target, sorted(unmatched)


def _transformed(function: Callable[..., Any] | None, arrays: list[Array], count: int) -> list[Array]:
    if not count:
        return []
    result = arrays[0] if function is None else function(*arrays)
    if count > 1 and (isinstance(result, np.ndarray) or not isinstance(result, Sequence)):
        raise ValueError(f"it must return {count} arrays as a tuple, but returned a {type(result).__name__}")
    results = [result] if count == 1 else list(result)
    if len(results) != count:
        raise ValueError(f"it must return {count} arrays, but returned {len(results)}")
    converted = [np.asarray(each) for each in results]
    if any(each.dtype == object for each in converted):
        kinds = ", ".join(type(each).__name__ for each in results)
        raise ValueError(f"it must return {'an array' if count == 1 else f'{count} arrays'}, but returned {kinds}")
    return converted


def _matches(template: str, names: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields the values of the fields for each name that matches."""
    if not _FIELD.search(template):
        if _filled(template, {}) in names:
            yield {}
        return
    seen = set[str]()
    parts = []
    for index, piece in enumerate(_FIELD.split(template)):
        if index % 2 == 0:
            parts.append(re.escape(_filled(piece, {})))
        else:
            parts.append(f"(?P={piece})" if piece in seen else f"(?P<{piece}>[^./]+)")
            seen.add(piece)
    pattern = re.compile("".join(parts))
    yield from [match.groupdict() for name in names if (match := pattern.fullmatch(name))]


# Stand-ins for literal braces in names.
_OPEN, _CLOSE = "\ue000", "\ue001"


def _escaped(name: str) -> str:
    return name.replace("{", _OPEN).replace("}", _CLOSE)


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: fields[match[1]], template).replace(_OPEN, "{").replace(_CLOSE, "}")


def _shown(names: Any) -> str:
    return repr(names).replace(repr(_OPEN)[1:-1], "{").replace(repr(_CLOSE)[1:-1], "}")


def _tuple(names: Any) -> tuple[Any, ...]:
    return () if names is None else names if isinstance(names, tuple) else (names,)


WRITTEN_BY = "safetensors"
# The metadata entry which says that names begin with a collection, even if none is `params`.
PATHS, COLLECTIONS = "paths", "collections"


def saved_weights(
    path: Location, *, mapping: WeightMapping | None = None, partial: bool = False, dtype: Any = None, suggests_mapping: bool = False
) -> tuple[Saved, list[str]]:
    """Returns weights as a checkpoint of only parameters and collections, and the names that match no rule of the mapping.

    `path` is a result of `find_weights`. By default, names are paths joined by `.`. With `partial`, the mapping may omit names. Floating-point arrays are
    converted to `dtype`. With `suggests_mapping`, errors suggest a mapping of the file's names, as for `load_weights`, instead of one for `restore`.
    """
    arrays, about = read_weights(path)
    unmatched: list[str] = []
    origins: dict[str, tuple[str, ...]] = {}
    if mapping is not None and leaves_out_only(mapping):
        arrays = _without(arrays, dict(mapping), where=str(path))  # type: ignore[arg-type]
        mapping = None
    if mapping is None:
        has_collections = about.get(PATHS) == COLLECTIONS or any(name.startswith("params.") for name in arrays)
        paths = {name: functools.reduce(join, name.split("."), "" if has_collections else "params") for name in arrays}
        by_path = {paths[name]: array for name, array in arrays.items()}
        origins = {place: (name,) for name, place in paths.items()}
    else:
        by_path, unmatched = from_file(arrays, rules_of(mapping, list(arrays)), where=str(path), partial=partial, origins=origins)
    tree = _nested(as_floats(by_path, dtype, where=str(path)), path)
    train = {"params": tree.pop("params", {}), "model_state": tree}
    loose = [name for name, child in tree.items() if not isinstance(child, dict)]
    if loose or not isinstance(train["params"], dict):
        raise RestoreError(
            f"{path}: every path must start with `params/` or another collection's name, followed by at least one more part. Received: "
            f"{listed(loose or ['params'], most=3)}."
        )
    metadata = {"step": 0, "metrics": {}, "key_impls": {}, "written_by": WRITTEN_BY, "path": str(path), "left_out": [], "metadata": about}
    metadata["digest"] = _digest(by_path, about, path)
    if suggests_mapping:
        metadata["names"] = origins
    return Saved(path=path, metadata=metadata, train=train, run={}), unmatched


def _digest(arrays: Mapping[str, Array], about: Mapping[str, str], path: Location) -> str:
    """Returns a fingerprint of weights without reading all data: names, shapes, dtypes, metadata, and the file's size or the index."""
    digest = hashlib.sha256(repr((sorted((name, str(array.dtype), array.shape) for name, array in arrays.items()), sorted(about.items()))).encode())
    with disk_errors("read", path):
        digest.update(path.read_bytes() if path.name.endswith(INDEX_SUFFIX) else str(path.stat().st_size).encode())
    return digest.hexdigest()


def is_weights(saved: Saved) -> bool:
    """Returns whether a checkpoint is only weights."""
    return bool(saved.metadata.get("written_by") == WRITTEN_BY)


def as_floats(arrays: Mapping[str, Array], dtype: Any, *, where: str) -> dict[str, Array]:
    """Returns arrays with floating-point ones converted to `dtype`, unless it is `None`. Raises `CheckpointError` if finite numbers are too large for it."""
    if dtype is None:
        return dict(arrays)
    converted: dict[str, Array] = {}
    overflowing: list[str] = []
    for name, array in arrays.items():
        is_cast = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype != dtype
        converted[name] = cast_array(array, dtype) if is_cast else array
        overflowing += [name] if is_cast and has_overflowed(converted[name], array) else []
    if overflowing:
        advice = "Pass a dtype with a larger range, such as 'bfloat16'."
        raise CheckpointError(f"{where}: numbers are too large for dtype={jnp.dtype(dtype).name!r}. {advice} Arrays: {listed(overflowing, most=3)}.")
    return converted


def cast_array(array: Any, dtype: Any) -> Any:
    """Returns an array of NumPy or JAX in another floating dtype, without warnings."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def has_overflowed(cast: Any, original: Any) -> bool:
    """Returns whether finite numbers have become infinite."""
    limits: list[Any] = [jnp.finfo(array.dtype) for array in (cast, original)]  # type: ignore[no-untyped-call]
    if float(limits[0].max) >= float(limits[1].max):
        return False
    library: Any = jnp if isinstance(cast, jax.Array) else np
    return bool(jax.device_get(library.any(~library.isfinite(cast) & library.isfinite(original))))


def name_of(path: str, where: str) -> str:
    """Returns the name in a file for a path in a model, such as `batch_stats.BatchNorm_0.mean`. Raises `CheckpointError` if a key contains a `.`."""
    keys = keys_of(path)
    if any("." in key for key in keys):
        raise CheckpointError(f"{where} cannot be written: {path} contains a '.', which separates names in the file. Rename it with mapping=.")
    return ".".join(keys)


def _without(arrays: Mapping[str, Array], names: Mapping[str, Any], *, where: str) -> dict[str, Array]:
    """Returns the arrays without the named ones, which must exist."""
    gone = [name for name in names if name not in arrays]
    if gone:
        hint = did_you_mean(gone[0], arrays)
        raise RestoreError(f"{where}: the mapping does not fit: there is no {gone[0]!r}{f' ({hint.strip()})' if hint else ''}.")
    return {name: array for name, array in arrays.items() if name not in names}


def _nested(arrays: Mapping[str, Array], where: Location) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        if path.count("/") >= MAX_DEPTH:
            raise CorruptCheckpointError(f"{where} is not a model: {path[:80]}... is nested more than {MAX_DEPTH} levels deep.")
        if not put(tree, path, array):
            others = [each for each, _ in walk(tree, "") if each.startswith(f"{path}/") or path.startswith(f"{each}/")]
            raise RestoreError(f"{where}: {path} conflicts with {listed(others, most=3)}, because one path contains the other. Use mapping= to rename them.")
    return tree
