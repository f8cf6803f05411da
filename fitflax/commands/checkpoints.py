"""`python -m fitflax checkpoints` lists the checkpoints of a directory, `python -m fitflax compare` compares two of them."""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.checkpoint_store import Listed, list_checkpoints
from fitflax.checkpoints.plain_tree import shown, walk
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import CheckpointError, CheckpointNotFoundError
from fitflax.leaves import as_json, matching
from fitflax.storage import locate

# The parts of `metadata.json` that describe how a run was configured.
_SETTINGS = ("settings", "compiled", "config", "versions")


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoints` to its parser."""
    parser.add_argument("directory", metavar="DIR", help="a path, or a URL such as s3://bucket/run")
    parser.add_argument("--verify", action="store_true", help="check every byte of each checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_list(options: argparse.Namespace) -> int:
    """Lists the checkpoints of a directory: step, age, size, metrics, which callbacks keep each, and whether it is damaged.

    The exit status is 1 if a checkpoint is damaged, else 0.
    """
    directory = locate(options.directory, owner="checkpoints", error=CheckpointNotFoundError)
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory} is not a directory.")
    rows = list_checkpoints(directory, verify=options.verify)
    if options.json:
        _print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(table(rows) if rows else f"{directory} contains no checkpoints.")
    return int(any(row.is_damaged for row in rows))


def table(rows: Sequence[Listed]) -> str:
    """Returns a table of checkpoints as text."""
    lines = [("step", "age", "size", "metrics", "kept by", "state")]
    for row in rows:
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in row.metrics.items() if isinstance(value, int | float))
        step = f"{row.step}{' (latest)' if row.is_latest else ''}"
        lines.append((step, _age(row.age_seconds), _size(row.num_bytes), numbers, ", ".join(row.kept_by), row.state))
    return _aligned(lines)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes} B" if power == 0 else f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}B"


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

    def cells(self) -> tuple[str, ...]:
        """Returns the row of a table."""
        if not self.num_elements:
            return (self.path, self.what, self.a, self.b, "", "", "")
        share = f"{self.num_different} of {self.num_elements}"
        return (self.path, self.what, self.a, self.b, share, f"{self.largest:.3g}", f"{self.relative:.3g}")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `compare` to its parser."""
    parser.add_argument("a", metavar="A", help="a checkpoint, a directory of checkpoints, or a safetensors file")
    parser.add_argument("b", metavar="B", help="another one, to compare with A")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="compare only these paths, such as 'params' or 'params/**/bias'; may be repeated")
    parser.add_argument("--rtol", type=float, default=0.0, help="elements are equal up to atol + rtol * |b|; 0 by default")
    parser.add_argument("--atol", type=float, default=0.0, help="see --rtol; 0 by default")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_compare(options: argparse.Namespace) -> int:
    """Shows which arrays of two checkpoints differ, and by how much.

    A and B are checkpoints, directories of them (the newest intact one is used), or safetensors files; paths or URLs. The exit status is 0 if all arrays
    are equal, 1 if not. NaN equals NaN.
    """
    one, other = load_checkpoint(options.a), load_checkpoint(options.b)
    first, second = ({shown(path): leaf for path, leaf in walk(saved.train, "train") if leaf is not None} for saved in (one, other))
    if options.only:
        paths = list(dict.fromkeys([*first, *second]))
        kept = {path for path, is_kept in zip(paths, matching(paths, options.only, owner="--only", error=CheckpointError), strict=True) if is_kept}
        first, second = ({path: leaf for path, leaf in arrays.items() if path in kept} for arrays in (first, second))
    differences = compare(first, second, rtol=options.rtol, atol=options.atol)
    settings = _differing_settings(one, other)
    if options.json:
        _print_json({"differences": [dataclasses.asdict(each) for each in differences], "settings": settings})
        return int(bool(differences))
    for name, saved in (("A", one), ("B", other)):
        print(f"{name}: {saved.path}, step {saved.metadata.get('step', 0)}")
    for name, values in settings.items():
        print(f"{name}: {values[0]} in A, {values[1]} in B")
    if differences:
        print(_aligned([("path", "difference", "A", "B", "elements", "largest", "relative"), *(each.cells() for each in differences)]))
    print(f"{len(differences)} of {len({*first, *second})} arrays differ.")
    return int(bool(differences))


def compare(first: dict[str, Any], second: dict[str, Any], *, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """Returns how arrays with the same paths differ, with tolerances as in `numpy.isclose`; equal ones are omitted.

    >>> compare({"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, 2.5])})[0].largest
    0.5
    """
    differences = []
    for path in dict.fromkeys([*first, *second]):
        if path not in second:
            differences.append(Difference(path, "only in A", _describe(first[path]), ""))
        elif path not in first:
            differences.append(Difference(path, "only in B", "", _describe(second[path])))
        elif (difference := _difference(path, first[path], second[path], rtol, atol)) is not None:
            differences.append(difference)
    return differences


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


def _differing_settings(one: Saved, other: Saved) -> dict[str, list[Any]]:
    """Returns the settings in which two runs differ, by name."""
    first, second = ({path: value for name in _SETTINGS for path, value in walk(saved.metadata.get(name, {}), name)} for saved in (one, other))
    return {name: [first.get(name), second.get(name)] for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)}


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}" if isinstance(leaf, np.ndarray | np.generic) and leaf.ndim else f"{leaf}"


def _print_json(value: Any) -> None:
    print(json.dumps(as_json(value), indent=2, allow_nan=False))


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as text with aligned columns.

    >>> print(_aligned([("step", "loss"), ("1000", "0.5")]))
    step  loss
    1000  0.5
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
