"""Shows which arrays of two checkpoints differ, and by how much.

A and B are checkpoints, directories of them (the newest intact one is used), or safetensors files; paths or URLs. The exit status is 0 if all arrays are equal,
1 if not. NaN equals NaN.
"""

import argparse
import dataclasses
import json
import math
from typing import Any

import numpy as np

from fitflax.checkpoints.formats.checkpoint_files import Saved
from fitflax.checkpoints.formats.plain_tree import shown, walk
from fitflax.checkpoints.restore.load import load_checkpoint
from fitflax.commands.plain import aligned, without_nan
from fitflax.errors import CheckpointError
from fitflax.path_patterns import matching

__all__ = ["Difference", "add_arguments", "compare", "run"]

# The parts of `metadata.json` that describe how a run was configured.
_SETTINGS = ("settings", "compiled", "config", "versions")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How an array of two checkpoints differs.

    Attributes:
        path: Its path, such as `params/Dense_0/kernel`.
        what: `"values"`, `"shape"`, `"dtype"`, `"only in A"` or `"only in B"`.
        a: Its dtype and shape in A, or its value if it is not an array; empty if A does not have it.
        b: The same for B.
        largest: The largest absolute difference of two elements.
        relative: `largest` divided by the largest absolute element of A.
    """

    path: str
    what: str
    a: str
    b: str
    num_different: int = 0
    num_elements: int = 0
    largest: float = math.nan
    relative: float = math.nan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("a", metavar="A", help="a checkpoint, a directory of checkpoints, or a safetensors file")
    parser.add_argument("b", metavar="B", help="another one, to compare with A")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="compare only these paths, such as 'params' or 'params/**/bias'; may be repeated")
    parser.add_argument("--rtol", type=float, default=0.0, help="elements are equal up to atol + rtol * |b|; 0 by default")
    parser.add_argument("--atol", type=float, default=0.0, help="see --rtol; 0 by default")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the differences. Returns 1 if an array differs, else 0."""
    one, other = load_checkpoint(options.a), load_checkpoint(options.b)
    first, second = _arrays(one), _arrays(other)
    if options.only:
        paths = list(dict.fromkeys([*first, *second]))
        kept = {path for path, is_kept in zip(paths, matching(paths, options.only, owner="--only", error=CheckpointError), strict=True) if is_kept}
        first, second = ({path: leaf for path, leaf in arrays.items() if path in kept} for arrays in (first, second))
    found = compare(first, second, rtol=options.rtol, atol=options.atol)
    settings = _settings(one, other)
    if options.json:
        print(json.dumps(without_nan({"differences": [dataclasses.asdict(each) for each in found], "settings": settings}), indent=2, allow_nan=False))
        return int(bool(found))
    print(f"A: {_name(one)}\nB: {_name(other)}")
    for name, values in settings.items():
        print(f"{name}: {values[0]} in A, {values[1]} in B")
    if found:
        print(aligned([("path", "difference", "A", "B", "elements", "largest", "relative"), *map(_row, found)]))
    print(f"{len(found)} of {len({*first, *second})} arrays differ.")
    return int(bool(found))


def compare(first: dict[str, Any], second: dict[str, Any], *, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """Returns how arrays with the same paths differ, with tolerances as in `numpy.isclose`; equal ones are omitted.

    >>> compare({"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, 2.5])})[0].largest
    0.5
    """
    found = []
    for path in dict.fromkeys([*first, *second]):
        if path not in second:
            found.append(Difference(path, "only in A", _describe(first[path]), ""))
        elif path not in first:
            found.append(Difference(path, "only in B", "", _describe(second[path])))
        elif (difference := _difference(path, first[path], second[path], rtol, atol)) is not None:
            found.append(difference)
    return found


def _difference(path: str, one: Any, other: Any, rtol: float, atol: float) -> Difference | None:
    words = _describe(one), _describe(other)
    a, b = np.asarray(one), np.asarray(other)
    if not (_is_numeric(a) and _is_numeric(b)):
        return None if words == words[::-1] else Difference(path, "values", *words)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(path, "shape" if a.shape != b.shape else "dtype", *words)
    # A dtype that holds all values exactly; integers are compared without conversion.
    wide = a.dtype if a.dtype.kind in "iub" else np.result_type(a.dtype if a.dtype.kind == "c" else np.float32, np.float64)
    a, b = (array.astype(wide, copy=False) for array in (a, b))
    is_same = (a == b) | ((a != a) & (b != b))
    if rtol or atol:
        is_same |= np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if is_same.all():
        return None
    numbers = (a, b) if wide.kind == "c" else (a.astype(np.float64), b.astype(np.float64))
    with np.errstate(all="ignore"):
        largest = float(np.max(np.abs(numbers[0] - numbers[1]), where=~is_same, initial=0.0))
        relative = float(largest / np.max(np.abs(numbers[0])))
    return Difference(path, "values", *words, int((~is_same).sum()), a.size, largest, relative)


def _is_numeric(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "iufcb" or array.dtype.name.startswith(("bfloat", "float", "int", "uint"))


def _arrays(saved: Saved) -> dict[str, Any]:
    return {shown(path): leaf for path, leaf in walk(saved.train, "train") if leaf is not None}


def _settings(one: Saved, other: Saved) -> dict[str, list[Any]]:
    """Returns the settings in which two runs differ, by name."""
    first, second = ({path: value for name in _SETTINGS for path, value in walk(saved.metadata.get(name, {}), name)} for saved in (one, other))
    return {name: [first.get(name), second.get(name)] for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)}


def _name(saved: Saved) -> str:
    return f"{saved.path}, step {saved.metadata.get('step', 0)}"


def _describe(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic) and leaf.ndim:
        return f"{leaf.dtype.name}{list(leaf.shape)}"
    return f"{leaf}"


def _row(difference: Difference) -> tuple[str, ...]:
    if difference.what != "values" or not difference.num_elements:
        return (difference.path, difference.what, difference.a, difference.b, "", "", "")
    share = f"{difference.num_different} of {difference.num_elements}"
    return (difference.path, difference.what, difference.a, difference.b, share, f"{difference.largest:.3g}", f"{difference.relative:.3g}")
