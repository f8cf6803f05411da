"""From a raw batch to a `Batch` of fixed shape: choosing inputs and targets, checking lengths, weights, padding by repetition.

All of it is NumPy on the host; nothing here knows the device.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fitflax.errors import ConfigError, DataError, did_you_mean, warn
from fitflax.integers import is_integer
from fitflax.state import Batch, PyTree

__all__ = [
    *("DEFAULT_BATCH_SIZE", "Batcher", "FedBatch", "Position", "Selection", "Triple"),
    *("fingerprint", "full_mask", "in_one_piece", "leaf_paths", "num_examples", "refit"),
]

DEFAULT_BATCH_SIZE = 32
# Of each array of a batch, in bytes.
_MOST_COMPARED = 2**20


class Triple(NamedTuple):
    """What a source yields: inputs, targets (`()` for none) and sample weights (`None` for none), rows not yet padded."""

    x: PyTree
    y: PyTree
    weights: Any


class Position(NamedTuple):
    """Where in its data a run is, counted in what finished steps have used.

    Attributes:
        passes: Finished passes over the data.
        examples: Real examples used of the present pass; of this process's part, where each has one of its own.

    >>> Position(passes=1).examples
    0
    """

    passes: int = 0
    examples: int = 0


class FedBatch(NamedTuple):
    """A batch ready for the device, and what the host must know of it.

    Attributes:
        batch: The padded batch.
        num_real: How many rows of the whole batch are real.
        position: The position of the data after this batch.
        block: The full batches that were read in one piece with it, rows one behind the other; `None` where there are none.
        number: Which of them it is, from 0.
        size: The rows of the whole batch, of which `batch` may be one process's part.
        own: How many real rows are this process's own, where each has a part of its own.
        used: By process, what `position.examples` is after it, where each has a part of its own.

    >>> FedBatch(Batch(x=np.ones((2, 3)), y=(), mask=full_mask(2)), num_real=2, position=Position(examples=2)).num_real
    2
    """

    batch: Batch
    num_real: int
    position: Position
    block: Triple | None = None
    number: int = 0
    size: int | None = None
    own: int | None = None
    used: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """The rows of the whole batch, padding included, over all processes."""
        return len(self.batch.mask) if self.size is None else self.size


def in_one_piece(group: Sequence[FedBatch]) -> Triple | None:
    """Returns batches as views of what they were read in, rows one behind the other; `None` if they do not lie so.

    >>> whole = Triple(np.arange(6.0), (), None)
    >>> fed = [FedBatch(Batch(whole.x[i : i + 2], (), full_mask(2)), 2, Position(examples=i + 2), whole, i // 2) for i in (0, 2, 4)]
    >>> in_one_piece(fed[1:]).x.tolist(), in_one_piece(fed[::2])
    ([2.0, 3.0, 4.0, 5.0], None)
    """
    first, last = group[0], group[-1]
    # Batches of one pass come in its order, so that the first and the last tell enough.
    if first.block is None or last.block is not first.block or last.number - first.number != len(group) - 1:
        return None
    rows = slice(first.number * first.num_real, (last.number + 1) * first.num_real)
    return Triple(*jax.tree.map(lambda leaf: leaf[rows], tuple(first.block)))


@functools.lru_cache(maxsize=64)
def full_mask(size: int) -> np.ndarray[Any, Any]:
    """Returns the mask of a batch without padding; always the same array for a size, so that its copy on the device can be reused."""
    mask = np.ones(size, bool)
    mask.flags.writeable = False
    return mask


def leaf_paths(tree: PyTree, name: str) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` for every leaf, paths written as in Python: `x['image'][0]`."""
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def num_examples(tree: PyTree, *, name: str) -> int:
    """Returns the length of the leading axis that all leaves of `tree` share.

    Args:
        tree: Arrays of shape `[examples, ...]`.
        name: What the caller calls this tree; used in the error only.

    Raises:
        DataError: `tree` has no leaves, a leaf is a scalar, or two leaves disagree.

    >>> num_examples({"image": np.zeros((8, 28, 28)), "label": np.zeros(8)}, name="x")
    8
    """
    leaves = leaf_paths(tree, name)
    if not leaves:
        raise DataError(f"`{name}` holds no arrays.")
    for path, leaf in leaves:
        if not getattr(leaf, "shape", ()):
            raise DataError(f"Every array must have a leading axis of examples: {path} is {_describe(leaf)}. Single examples must be put into batches first.")
    lengths = {path: int(leaf.shape[0]) for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise DataError(f"All arrays must have the same number of examples: {listed}.")
    return next(iter(lengths.values()))


def _describe(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return f"a {type(leaf).__name__}" if shape is None else f"a {type(leaf).__name__} of shape {tuple(shape)}"


def to_numpy(tree: PyTree, *, name: str) -> PyTree:
    """Returns `tree` with every leaf a NumPy array (JAX arrays stay what they are), checked to be numeric.

    Raises:
        DataError: A leaf cannot become an array of numbers.
    """

    def convert(path: Any, leaf: Any) -> Any:
        where = name + jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array):
            return leaf
        try:
            array = np.asarray(leaf)
        except Exception as error:
            raise DataError(f"{where} cannot become an array: {error}") from error
        if array.dtype.kind in "OUSMm":
            hint = "; encode them as numbers first" if array.dtype.kind in "OUS" else ""
            raise DataError(f"{where} must hold numbers, but its dtype is {array.dtype}{hint}.")
        return array

    return jax.tree_util.tree_map_with_path(convert, tree)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which parts of a batch that is a dict are inputs and targets.

    Attributes:
        inputs: A key (one positional argument), a tuple of keys (several), `{argument: key}` (keywords), or `None`.
        targets: A key, a tuple of keys, `{name: key}`, or `None` for no targets.
    """

    inputs: str | tuple[str, ...] | dict[str, str] | None = None
    targets: str | tuple[str, ...] | dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name, spec in (("inputs", self.inputs), ("targets", self.targets)):
            keys = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else (spec,)
            if spec is not None and not all(isinstance(key, str) for key in keys):
                raise ConfigError(f"Trainer({name}=...) must be a key, a tuple of keys or a dict {{name: key}}. Received: {spec!r}.")
        if self.inputs is None and self.targets is not None:
            raise ConfigError(f"Trainer(targets={self.targets!r}) needs inputs= as well: both pick from batches that are dicts.")

    def columns(self, known: list[Any] | None = None, *, inputs_only: bool = False, name: str = "data") -> list[str]:
        """Returns the keys that are picked, each once.

        Args:
            known: The columns that there are; `None` if that is not known.
            inputs_only: Whether nothing but inputs is needed.
            name: What the caller calls the data, for errors.

        Raises:
            DataError: A column is missing.

        >>> Selection(("a", "b"), {"y": "c"}).columns()
        ['a', 'b', 'c']
        """
        found: dict[str, None] = {}
        for spec in (self.inputs, None if inputs_only else self.targets):
            found.update(dict.fromkeys(() if spec is None else spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else (spec,)))
        missing = [] if known is None else [column for column in found if column not in known]
        if missing:
            hints = "".join(did_you_mean(column, map(str, known or ())) for column in missing)
            raise DataError(f"Trainer(inputs=..., targets=...) asks for the columns {missing}, but `{name}` has {list(known or ())}.{hints}")
        return list(found)

    def split(self, raw: Any, *, inputs_only: bool = False) -> Triple:
        """Returns the inputs, targets and weights of a raw batch.

        Args:
            raw: `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)`, or a dict where keys were given.
            inputs_only: Whether nothing but inputs is needed.

        Raises:
            DataError: The wrong number of elements, no dict where one is needed, or a key that it lacks.
        """
        # A table has keys as well: its columns' names.
        if self.inputs is not None and (isinstance(raw, Mapping) or hasattr(raw, "keys")):
            y = () if self.targets is None or inputs_only else self._pick(raw, self.targets, "targets")
            return Triple(self._pick(raw, self.inputs, "inputs"), y, None)
        if self.inputs is not None and not inputs_only:
            raise DataError(f"Trainer(inputs={self.inputs!r}) picks from batches that are dicts. Received: a {type(raw).__name__}.")
        if not isinstance(raw, tuple):
            return Triple(raw, (), None)
        if not 1 <= len(raw) <= 3:
            raise DataError(
                f"A batch must be x, (x,), (x, y) or (x, y, sample_weight). Received: a tuple of {len(raw)} elements. Several inputs are nested: ((x1, x2), y)."
            )
        x, y, weights = (*raw, None, None)[:3]
        return Triple(x, () if y is None else y, weights)

    def _pick(self, raw: Mapping[str, Any], spec: Any, name: str) -> PyTree:
        if isinstance(spec, tuple):
            return tuple(self._pick(raw, key, name) for key in spec)
        if isinstance(spec, dict):
            return {argument: self._pick(raw, key, name) for argument, key in spec.items()}
        if spec not in raw:
            known = [str(key) for key in raw]
            raise DataError(f"Trainer({name}=...) asks for the key {spec!r}, but batches have {known}.{did_you_mean(spec, known)}")
        return raw[spec]


class Batcher:
    """Turns triples of any length into batches of one fixed shape.

    Short batches are filled up by repeating their own real rows, in turn, with mask False: no second compilation, and no zeros that would poison
    gradients.

    Args:
        num_shards: The fixed size is a multiple of this.
        accumulate_steps: And of this times as many: into how many micro-batches each replica's share is split.
        size: The batch size if it is known; otherwise the first batch decides.
        pad: Whether to pad at all; without it every size has a shape of its own.
        class_weight: `{label: weight}`, for labels `[batch]`, `[batch, 1]` or one-hot; labels without a weight count 1.
        part: Which of how many equal parts of each batch is made, `(index, count)`: that of this process, where all of them read the same data.
        compare: Called with the rows of the first batch, to see that this is so.

    Raises:
        ConfigError: A key of `class_weight` that is no integer.

    >>> fed = Batcher(num_shards=2, size=4)(Triple(np.arange(3.0), (), None))
    >>> fed.batch.x.tolist(), fed.batch.mask.tolist(), fed.num_real
    ([0.0, 1.0, 2.0, 0.0], [True, True, True, False], 3)
    """

    def __init__(
        self,
        *,
        num_shards: int = 1,
        accumulate_steps: int = 1,
        size: int | None = None,
        pad: bool = True,
        class_weight: Mapping[int, float] | None = None,
        part: tuple[int, int] = (0, 1),
        compare: Callable[[PyTree], None] | None = None,
    ) -> None:
        self._part = part
        self._compare = compare
        self._shards = num_shards
        self._accumulate_steps = accumulate_steps
        self._multiple = num_shards * accumulate_steps
        self.size = None if size is None else self._round_up(size)
        self._pad = pad
        self._has_batched = False
        self._class_weight = None if class_weight is None else _check_class_weight(class_weight)

    def _round_up(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def __call__(self, triple: Triple, *, is_checked: bool = False) -> FedBatch:
        """Returns the padded batch, with the position after it if it is the first.

        Args:
            triple: The batch.
            is_checked: Whether it is known to hold arrays of numbers of one length; checking a small batch takes as long as cutting it out.

        Raises:
            DataError: Lengths that differ, an empty batch, values that are no numbers.
        """
        x, y, weights = self._weigh(triple if is_checked else _checked(triple))
        self._see((x, y, weights))
        rows = len(jax.tree.leaves(x)[0])
        size = self._size_for(rows)
        return FedBatch(self._padded((x, y, weights), rows, size), rows, Position(examples=rows), size=size)

    def _padded(self, weighed: tuple[PyTree, PyTree, Any], rows: int, size: int) -> Batch:
        """Returns this process's part of so many rows, filled up to `size`."""
        index, count = self._part
        if rows == size and count == 1:
            return Batch(weighed[0], weighed[1], full_mask(size), weighed[2])
        own = np.arange(size // count * index, size // count * (index + 1))
        taken: Any = slice(own[0], own[-1] + 1) if rows == size else own % rows
        x, y, weights = jax.tree.map(lambda leaf: leaf[taken], weighed)
        return Batch(x, y, full_mask(len(own)) if own[-1] < rows else own < rows, weights)

    def _weigh(self, triple: Triple) -> Triple:
        x, y, weights = triple
        weights = None if weights is None else np.asarray(weights, np.float32)
        if self._class_weight is not None:
            by_class = class_weights_of(y, self._class_weight)
            weights = by_class if weights is None else weights * by_class.reshape(-1, *(1,) * (weights.ndim - 1))
        return Triple(x, y, weights)

    def cut(self, triple: Triple, rows: int, position: Position) -> list[FedBatch]:
        """Returns the batches of so many rows that lie one behind the other in `triple`, known to hold arrays of numbers of one length; or the one shorter one.

        Args:
            triple: The rows of all of them.
            rows: Of a batch.
            position: The position of the data before them.
        """
        leaves, structure = jax.tree.flatten(tuple(self._weigh(triple)))
        self._see(leaves)
        count, (passes, seen) = len(leaves[0]), position
        rows = min(rows, count)
        size, is_part = self._size_for(rows), self._part[1] > 1
        mask = full_mask(size)
        whole = Triple(*jax.tree.unflatten(structure, leaves))
        is_plain = len(leaves) == 2 and leaves[0] is whole.x and leaves[1] is whole.y
        cut = []
        for begin in range(0, count, rows):  # As little as possible: a batch may be trained on in some microseconds.
            end = begin + rows
            if size != rows or is_part:
                batch = self._padded(jax.tree.unflatten(structure, [leaf[begin:end] for leaf in leaves]), rows, size)
                cut.append(FedBatch(batch, rows, Position(passes, seen + end), size=size))
            elif is_plain:
                cut.append(FedBatch(Batch(leaves[0][begin:end], leaves[1][begin:end], mask), rows, Position(passes, seen + end), whole, begin // rows))
            else:
                x, y, weights = jax.tree.unflatten(structure, [leaf[begin:end] for leaf in leaves])
                cut.append(FedBatch(Batch(x, y, mask, weights), rows, Position(passes, seen + end), whole, begin // rows))
        return cut

    def _see(self, tree: PyTree) -> None:
        if self._compare is not None:
            self._compare(tree)
            self._compare = None

    def _size_for(self, rows: int) -> int:
        if not self._pad:
            if rows % self._multiple:
                over = f"{self._shards} device{'s' if self._shards > 1 else ''}"
                if self._accumulate_steps > 1:
                    over += f", each share in {self._accumulate_steps} micro-batches (accumulate_steps={self._accumulate_steps}),"
                raise DataError(
                    f"A batch of {rows} examples cannot be split over {over} with compile(pad=False). Choose a batch size that is a multiple of "
                    f"{self._multiple}, and drop_remainder=True where the last batch is shorter."
                )
            return rows
        is_first, self._has_batched = not self._has_batched, True
        if self.size is None or (is_first and rows > self.size):  # A loader's batch size says little where batches are put together by the user.
            self.size = self._round_up(rows)
        elif rows > self.size:
            warn(f"A batch of {rows} examples follows batches of {self.size}: the step is compiled again. Yield the largest batch first, or equal sizes.")
            self.size = self._round_up(rows)
        return self.size


def refit(batch: Batch, size: int, rows: int) -> Batch:
    """Returns a batch with another number of rows, of which the first `rows` are real.

    >>> refit(Batch(np.arange(4.0), (), np.array([True, True, False, False])), 6, 2).x.tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    taken = np.arange(size) % max(rows, 1)
    x, y, weights = jax.tree.map(lambda leaf: leaf[taken], (batch.x, batch.y, batch.weights))
    return Batch(x, y, np.arange(size) < rows, weights)


def fingerprint(tree: PyTree) -> int:
    """Returns a number that tells arrays from others, as far as their beginning does.

    >>> fingerprint({"x": np.zeros(3)}) == fingerprint({"x": np.zeros(3)}), fingerprint(np.zeros(3)) == fingerprint(np.ones(3))
    (True, False)
    """
    found = 0
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(leaf)
        found = zlib.crc32(f"{array.dtype}{array.shape}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8)[:_MOST_COMPARED].data, found)
    return found


def _checked(triple: Triple) -> Triple:
    x, y = to_numpy(triple.x, name="x"), to_numpy(triple.y, name="y")
    check_weights(triple.weights)
    weights = None if triple.weights is None else to_numpy(triple.weights, name="sample_weight")
    if num_examples({"x": x, "y": y} | ({} if weights is None else {"sample_weight": weights}), name="batch") == 0:
        raise DataError("The data yielded a batch of 0 examples.")
    return Triple(x, y, weights)


def check_weights(weights: Any) -> None:
    """Checks that sample weights are one array, or `None`.

    Raises:
        DataError: They are something else.
    """
    if weights is not None and not hasattr(weights, "shape"):
        hint = " Batches are given as a function: `lambda: batches`."
        if isinstance(weights, int | float):
            hint = " Sizes go by their names: batch_size=32."
        elif isinstance(weights, Mapping | list | tuple):
            hint = " It counts for all outputs; weigh one output by itself in a loss of your own. Batches are given as a function: `lambda: batches`."
        raise DataError(f"sample_weight must be one array, [examples] or [examples, ...]. Received: {type(weights).__name__}.{hint}")


def _check_class_weight(class_weight: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(class_weight, Mapping):
        raise ConfigError(f"class_weight must be a dict {{label: weight}}. Received: {class_weight!r}.")
    for key, value in class_weight.items():
        if not is_integer(key) or not isinstance(value, int | float | np.number) or not value >= 0:
            raise ConfigError(f"class_weight must map integer labels to weights of at least 0. Received: {key!r}: {value!r}.")
    return {int(key): float(value) for key, value in class_weight.items()}


def class_weights_of(y: PyTree, class_weight: Mapping[int, float]) -> np.ndarray[Any, Any]:
    """Returns the weight of every example's class, float32 `[batch]`.

    Args:
        y: Labels: `[batch]`, `[batch, 1]`, or one-hot `[batch, classes]`.
        class_weight: Weights by label; 1 for others.

    Raises:
        DataError: `y` is not one array of such labels.

    >>> class_weights_of(np.array([0, 1, 0, 2]), {0: 1, 1: 2, 2: 3}).tolist()
    [1.0, 2.0, 1.0, 3.0]
    """
    if not hasattr(y, "ndim"):
        raise DataError("class_weight needs targets that are one array of labels. Give sample_weight for several targets.")
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    elif labels.ndim == 2 and np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all():
        labels = labels.argmax(axis=1)
    if labels.ndim != 1:
        raise DataError(f"class_weight needs labels [batch], [batch, 1] or one-hot [batch, classes]. Received: y of shape {labels.shape}.")
    weights = np.ones(len(labels), np.float32)
    for label, weight in class_weight.items():
        weights[labels == label] = weight
    return weights
