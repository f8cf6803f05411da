"""Turns a raw batch into a `Batch` of fixed shape: selects inputs and targets, checks lengths, applies class weights, and pads.

This module uses NumPy on the host and does not know about devices.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fitflax.data.whole_batches import Form, boxed, describe_leaves, form_of, joined
from fitflax.errors import ConfigError, DataError, did_you_mean, warn
from fitflax.integers import is_integer
from fitflax.leaves import listed
from fitflax.state import Batch, PyTree

__all__ = [
    *("DEFAULT_BATCH_SIZE", "Batcher", "FedBatch", "Position", "Selection", "Triple"),
    *("check_fits", "count_examples", "fingerprint", "full_mask", "in_one_piece", "refit"),
]

DEFAULT_BATCH_SIZE = 32
_MAX_HASHED_BYTES = 2**20
# The beginning of errors about inputs that are passed whole.
_WHOLE = "The inputs share no axis of examples, so the module receives each batch whole."


class Triple(NamedTuple):
    """A batch as a source yields it, not yet padded: inputs, targets (`()` for none) and sample weights (`None` for none)."""

    x: PyTree
    y: PyTree
    weights: Any


class Position(NamedTuple):
    """The position of a run in its data, counted in what finished steps have used.

    Attributes:
        passes: Finished passes over the data.
        examples: Examples of the current pass that were used, without padding; of this process's shard, if it has one. A batch that is passed whole counts as
            at least one, so that each batch has its own position.

    >>> Position(passes=1).examples
    0
    """

    passes: int = 0
    examples: int = 0


class FedBatch(NamedTuple):
    """A batch that is ready for the device, with what the host needs to know about it.

    Attributes:
        batch: The padded batch.
        num_real: The number of real rows of the global batch. They are the first ones, unless `real` says which.
        position: The position of the data after this batch.
        block: The full batches that were read together with this one, concatenated; `None` if it was read alone.
        number: The index of this batch in `block`.
        size: The rows of the global batch, of which `batch` may be one process's part.
        own: The number of real rows of this process, if each process has its own shard.
        used: For each process, its `position.examples` after this batch, if each process has its own shard.
        real: For inputs that are passed whole: which rows of the global batch, or of this process's shard of it, are real.
        is_counted: Whether the examples of such inputs can be counted; if not, `real` has one entry for each device.

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
    real: Any = None
    is_counted: bool = True

    @property
    def num_rows(self) -> int:
        """The rows of the global batch over all processes, including padding."""
        return len(self.batch.mask) if self.size is None else self.size


def in_one_piece(group: Sequence[FedBatch]) -> Triple | None:
    """Returns consecutive batches as one `Triple` of views of the block that they were read in; `None` if they are not consecutive parts of one block.

    >>> whole = Triple(np.arange(6.0), (), None)
    >>> fed = [FedBatch(Batch(whole.x[i : i + 2], (), full_mask(2)), 2, Position(examples=i + 2), whole, i // 2) for i in (0, 2, 4)]
    >>> in_one_piece(fed[1:]).x.tolist(), in_one_piece(fed[::2])
    ([2.0, 3.0, 4.0, 5.0], None)
    """
    first, last = group[0], group[-1]
    # Batches of a pass come in order, so it is enough to check the first and the last one.
    if first.block is None or last.block is not first.block or last.number - first.number != len(group) - 1:
        return None
    rows = slice(first.number * first.num_real, (last.number + 1) * first.num_real)
    return Triple(*jax.tree.map(lambda leaf: leaf[rows], tuple(first.block)))


# Creating the tuples in C takes a fifth of the time of calling the classes.
_batch: Callable[[Any], Batch] = functools.partial(tuple.__new__, Batch)
_position: Callable[[Any], Position] = functools.partial(tuple.__new__, Position)
_fed: Callable[[Any], FedBatch] = functools.partial(tuple.__new__, FedBatch)


@functools.lru_cache(maxsize=64)
def full_mask(size: int) -> np.ndarray[Any, Any]:
    """Returns the mask of a batch without padding, always the same array for a size, so that its copy on the device is reused."""
    mask = np.ones(size, bool)
    mask.flags.writeable = False
    return mask


def to_numpy(tree: PyTree, *, name: str) -> PyTree:
    """Returns `tree` with its leaves as NumPy arrays; JAX arrays are kept.

    Raises:
        DataError: A leaf is not numeric, or holds an integer that JAX's dtype cannot hold.
    """

    def convert(path: Any, leaf: Any) -> Any:
        where = name + jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array):
            return leaf
        try:
            array = np.asarray(leaf)
        except Exception as error:
            raise DataError(f"{where} cannot be converted to an array: {error}") from error
        if array.dtype.kind in "OUSMm":
            hint = "; encode them as numbers first" if array.dtype.kind in "OUS" else ""
            raise DataError(f"{where} must hold numbers, but its dtype is {array.dtype}{hint}.")
        if array.dtype.itemsize == 8 and array.dtype.kind in "iu":
            check_fits(array, jax.dtypes.canonicalize_dtype(array.dtype), name=where, advice="Encode it in a smaller range, or set JAX_ENABLE_X64=1.")
        return array

    return jax.tree_util.tree_map_with_path(convert, tree)


def check_fits(array: np.ndarray[Any, Any], dtype: np.dtype[Any], *, name: str, advice: str) -> None:
    """Raises a `DataError` if an array holds an integer that does not fit `dtype`, because converting it would change its value without an error."""
    if array.dtype == dtype or not array.size:
        return
    least, most, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
    if least < limits.min or most > limits.max:
        raise DataError(f"{name} holds the integer {most if most > limits.max else least}, which does not fit {np.dtype(dtype).name}. {advice}")


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which parts of a batch that is a dict are inputs and targets."""

    inputs: str | tuple[str, ...] | dict[str, str] | None = None  # A key (one positional argument), several, or `{argument: key}` (keywords).
    targets: str | tuple[str, ...] | dict[str, str] | None = None  # A key, several, or `{name: key}`; `None` for no targets.

    def __post_init__(self) -> None:
        for name, spec in (("inputs", self.inputs), ("targets", self.targets)):
            keys = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else (spec,)
            if spec is not None and not all(isinstance(key, str) for key in keys):
                raise ConfigError(f"Trainer({name}=...) must be a key, a tuple of keys or a dict {{name: key}}. Received: {spec!r}.")
        if self.inputs is None and self.targets is not None:
            raise ConfigError(f"Trainer(targets={self.targets!r}) also needs inputs=, because both select keys of batches that are dicts.")

    def columns(self, known: list[Any] | None = None, *, inputs_only: bool = False, name: str = "data") -> list[str]:
        """Returns the selected keys without duplicates, after checking that they are among the `known` columns, if these are given.

        >>> Selection(("a", "b"), {"y": "c"}).columns()
        ['a', 'b', 'c']
        """
        found: dict[str, None] = {}
        for spec in (self.inputs, None if inputs_only else self.targets):
            found.update(dict.fromkeys(() if spec is None else spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else (spec,)))
        missing = [] if known is None else [column for column in found if column not in known]
        if missing:
            hints = "".join(did_you_mean(column, map(str, known or ())) for column in missing)
            columns = listed([repr(column) for column in known or ()])
            raise DataError(f"Trainer(inputs=..., targets=...) selects columns that `{name}` does not have: {missing}.{hints} Its columns: {columns}.")
        return list(found)

    def split(self, raw: Any, *, inputs_only: bool = False) -> Triple:
        """Returns the inputs, targets and weights of a raw batch.

        It is `x`, `(x,)`, `(x, y)`, `(x, y, sample_weight)`, or a dict if `inputs` names keys. Only a plain tuple or list is split; any other value, such as a
        NamedTuple, a dataclass, an array or a dict, is the inputs.
        """
        if self.inputs is not None and (isinstance(raw, Mapping) or hasattr(raw, "keys")):
            y = () if self.targets is None or inputs_only else self._pick(raw, self.targets, "targets")
            return Triple(self._pick(raw, self.inputs, "inputs"), y, None)
        if self.inputs is not None and not inputs_only:
            raise DataError(f"Trainer(inputs={self.inputs!r}) needs batches that are dicts. Received: a {type(raw).__name__}.")
        if type(raw) not in (tuple, list):
            return Triple(raw, (), None)
        if type(raw) is list and any(type(part) in (bool, int, float) for part in raw):
            raise DataError(f"A batch cannot be a list of Python numbers. Received: a list of {len(raw)} elements. Convert it to an array: np.asarray(batch).")
        if not 1 <= len(raw) <= 3:
            raise DataError(
                f"A batch must be x, (x,), (x, y) or (x, y, sample_weight). Received: a {type(raw).__name__} of {len(raw)} elements. "
                "Nest several inputs: ((x1, x2), y)."
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
            keys = listed([repr(key) for key in known])
            raise DataError(f"Trainer({name}=...) selects the key {spec!r}, which the batches do not have.{did_you_mean(spec, known)} Their keys: {keys}.")
        return raw[spec]


class Batcher:
    """Turns triples of any length into batches of one fixed shape.

    Short batches are padded by repeating their own rows with mask False. This avoids recompilation, and zeros that could turn into NaN gradients. Inputs that
    are passed whole (`fitflax.data.whole_batches`) are not padded but concatenated, one batch for each shard; missing ones repeat the last batch with mask
    False.

    Args:
        num_shards: The number of shards; the fixed size is a multiple of `num_shards * accumulate_steps`.
        accumulate_steps: The number of micro-batches into which each replica's part is split.
        size: The batch size if it is known; otherwise the first batch decides.
        pad: Whether to pad; without padding each batch size has its own shape.
        class_weight: `{label: weight}`, for labels `[batch]`, `[batch, 1]` or one-hot; labels without a weight have weight 1.
        part: Which of several equal parts of each batch to create, `(index, count)`: that of this process, if all processes read the same data.
        compare: Called with the rows of the first batch, to check that all processes do read the same data.
        divides: Whether a step divides the rows of a batch over all devices, as on a mesh, instead of giving each device its own batch.
        must_count: Whether the examples of inputs that are passed whole must be counted; prediction does not need it.

    Raises:
        ConfigError: `class_weight` is not a dict of integer labels and weights of at least 0.

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
        divides: bool = False,
        must_count: bool = True,
    ) -> None:
        self._part = part
        self._divides = divides
        self._must_count = must_count
        self._compare = compare
        self.num_shards = num_shards
        self._accumulate_steps = accumulate_steps
        self._multiple = num_shards * accumulate_steps
        self.size = None if size is None else self._round_up(size)
        self._pad = pad
        self._has_batched = False
        self._class_weight = None if class_weight is None else _check_class_weight(class_weight)

    def _round_up(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def __call__(self, triple: Triple, *, is_checked: bool = False, more: Callable[[], Triple | None] = lambda: None) -> FedBatch:
        """Returns the padded batch; its `position` is the one after it if it is the first batch.

        Args:
            triple: The batch.
            is_checked: Whether it is known to hold numeric arrays of one length. Checking a small batch takes as long as slicing it.
            more: Returns the next batch of the pass, `None` at its end. Called for the other shards if inputs are passed whole.

        Raises:
            DataError: Lengths differ, the batch is empty, values are not numbers, or inputs cannot be passed whole.
            ConfigError: Inputs that are passed whole would have to be split.
        """
        if not is_checked:
            triple, form = self._check(triple)
            if form.real is not None:
                return self._join_whole(triple, form, more)
        x, y, weights = self._apply_class_weight(triple)
        self._compare_once((x, y, weights))
        rows = len(jax.tree.leaves(x)[0])
        size = self._size_for(rows)
        return FedBatch(self._pad_rows((x, y, weights), rows, size), rows, Position(examples=rows), size=size)

    def _check(self, triple: Triple) -> tuple[Triple, Form]:
        x, y = to_numpy(triple.x, name="x"), to_numpy(triple.y, name="y")
        check_weights(triple.weights)
        weights = None if triple.weights is None else to_numpy(triple.weights, name="sample_weight")
        if not isinstance(weights, jax.Array):  # Reading it would wait for the device in each batch.
            check_not_negative(weights)
        form = form_of(x, y, weights, must_count=self._must_count)
        if form.rows == 0:
            raise DataError("The data yielded a batch of 0 examples. Leave empty batches out.")
        return Triple(x, y, weights), form

    def _join_whole(self, triple: Triple, form: Form, more: Callable[[], Triple | None]) -> FedBatch:
        """Returns a batch whose inputs are passed whole, concatenated with those that follow it so that each shard has one."""
        shards, (index, count) = self.num_shards, self._part
        if self._divides and shards > 1:
            raise ConfigError(
                f"{_WHOLE} This strategy splits the rows of each batch over {shards} devices. Use DataParallel, which gives each device its own batch, "
                "or Sharded with rules=[('batch', None)], where all devices process the same batch."
            )
        if self._accumulate_steps > 1:
            raise ConfigError(f"{_WHOLE} It cannot be split into micro-batches. Leave accumulate_steps={self._accumulate_steps} out, and yield larger batches.")
        self._compare_once(tuple(triple))
        triples, reals = [triple], [form.real]
        while len(triples) < shards and (following := more()) is not None:
            other, form = self._check(following)
            _check_same_shapes(triple, other, shards)
            triples.append(other)
            reals.append(form.real)
        if len(triples) < shards and not self._pad:
            raise DataError(
                f"{_WHOLE} Each step needs {shards} batches, one for each device, but the last step has {len(triples)}. Yield a multiple of {shards} batches, "
                "or leave out compile(pad=False) to fill the last step with padding."
            )
        num_real = sum(max(1, int(real.sum())) for real in reals)
        missing = shards - len(triples)
        real = np.concatenate([*reals, *[np.zeros(len(reals[0]), bool)] * missing])
        own = [*triples, *[triples[-1]] * missing][shards // count * index : shards // count * (index + 1)]
        x, y, weights = self._apply_class_weight(Triple(*joined([(boxed(each.x), each.y, each.weights) for each in own])))
        mask = real.reshape(count, -1)[index]
        batch = Batch(x, y, full_mask(len(mask)) if mask.all() else mask, weights)
        return FedBatch(batch, num_real, Position(examples=num_real), size=len(real), real=real, is_counted=form.is_counted)

    def _pad_rows(self, triple: tuple[PyTree, PyTree, Any], rows: int, size: int) -> Batch:
        """Returns this process's part of the first `rows` rows, padded to `size`."""
        index, count = self._part
        if rows == size and count == 1:
            return Batch(triple[0], triple[1], full_mask(size), triple[2])
        own = np.arange(size // count * index, size // count * (index + 1))
        taken: Any = slice(own[0], own[-1] + 1) if rows == size else own % rows
        x, y, weights = jax.tree.map(lambda leaf: leaf[taken], triple)
        return Batch(x, y, full_mask(len(own)) if own[-1] < rows else own < rows, weights)

    def _apply_class_weight(self, triple: Triple) -> Triple:
        x, y, weights = triple
        weights = None if weights is None else np.asarray(weights, np.float32)
        if self._class_weight is not None:
            by_class = class_weights_of(y, self._class_weight)
            weights = by_class if weights is None else weights * by_class.reshape(-1, *(1,) * (weights.ndim - 1))
        return Triple(x, y, weights)

    def cut(self, triple: Triple, rows: int, position: Position) -> list[FedBatch]:
        """Returns the batches of which `triple` is the concatenation: several full ones, or a single shorter one.

        Args:
            triple: The rows of all batches, known to hold numeric arrays of one length.
            rows: Rows of a batch.
            position: The position of the data before them.
        """
        leaves, structure = jax.tree.flatten(tuple(self._apply_class_weight(triple)))
        self._compare_once(leaves)
        count, (passes, seen) = len(leaves[0]), position
        rows = min(rows, count)
        size, is_part = self._size_for(rows), self._part[1] > 1
        # Fast path: a step may take only some microseconds, so there is little work for each batch.
        pieces = [list(leaf.reshape(count // rows, rows, *leaf.shape[1:])) for leaf in leaves]
        positions = map(_position, zip(itertools.repeat(passes), range(seen + rows, seen + count + 1, rows), strict=False))
        if size != rows or is_part:
            return [
                FedBatch(self._pad_rows(jax.tree.unflatten(structure, piece), rows, size), rows, position, size=size)
                for piece, position in zip(zip(*pieces, strict=True), positions, strict=True)
            ]
        whole = Triple(*jax.tree.unflatten(structure, leaves))
        masks = itertools.repeat(full_mask(size))
        if len(leaves) == 2 and leaves[0] is whole.x and leaves[1] is whole.y:
            batches = map(_batch, zip(*pieces, masks, itertools.repeat(None), strict=False))
        else:
            triples = [jax.tree.unflatten(structure, piece) for piece in zip(*pieces, strict=True)]
            batches = map(_batch, ((x, y, mask, weights) for (x, y, weights), mask in zip(triples, masks, strict=False)))
        defaults = map(itertools.repeat, (None, None, (), None, True))
        numbers = range(count // rows)
        return list(map(_fed, zip(batches, itertools.repeat(rows), positions, itertools.repeat(whole), numbers, *defaults, strict=False)))

    def _compare_once(self, tree: PyTree) -> None:
        if self._compare is not None:
            self._compare(tree)
            self._compare = None

    def _size_for(self, rows: int) -> int:
        if not self._pad:
            if rows % self._multiple:
                raise DataError(
                    f"With compile(pad=False), the number of examples in a batch must be a multiple of {self._multiple} "
                    f"(devices: {self.num_shards}, accumulate_steps: {self._accumulate_steps}). Received: {rows} examples. "
                    "Choose another batch size, and pass drop_remainder=True if the last batch is shorter."
                )
            return rows
        is_first, self._has_batched = not self._has_batched, True
        if self.size is None or (is_first and rows > self.size):  # A loader's batch size may be wrong with custom collation.
            self.size = self._round_up(rows)
        elif rows > self.size:
            warn(f"A batch of {rows} examples follows batches of {self.size}, so the step is compiled again. Yield the largest batch first, or equal sizes.")
            self.size = self._round_up(rows)
        return self.size


def refit(batch: Batch, size: int, rows: int) -> Batch:
    """Returns a batch resized to `size` rows, of which the first `rows` are real.

    >>> refit(Batch(np.arange(4.0), (), np.array([True, True, False, False])), 6, 2).x.tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    taken = np.arange(size) % max(rows, 1)
    x, y, weights = jax.tree.map(lambda leaf: leaf[taken], (batch.x, batch.y, batch.weights))
    return Batch(x, y, np.arange(size) < rows, weights)


def fingerprint(tree: PyTree) -> int:
    """Returns a checksum of the structure and the beginning of arrays, to detect that processes read different data.

    >>> fingerprint({"x": np.zeros(3)}) == fingerprint({"x": np.zeros(3)}), fingerprint(np.zeros(3)) == fingerprint(np.ones(3))
    (True, False)
    """
    found = 0
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(leaf)
        found = zlib.crc32(f"{array.dtype}{array.shape}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8)[:_MAX_HASHED_BYTES].data, found)
    return found


def _check_same_shapes(one: Triple, other: Triple, shards: int) -> None:
    """Checks that two batches that are passed whole have the same structure, shapes and dtypes, so that one step can use them."""
    structures: list[Any] = [jax.tree.structure(triple) for triple in (one, other)]
    first, second = (describe_leaves(*triple) for triple in (one, other))
    if first != second or structures[0] != structures[1]:
        different = [path for path in {**first, **second} if first.get(path) != second.get(path)]
        received = listed([f"{path}: {first.get(path)} and {second.get(path)}" for path in different]) or "different structures"
        raise DataError(
            f"{_WHOLE} The {shards} batches of a step, one for each device, must have equal shapes: {received}. Pad all batches to one size, for example with "
            "jraph.dynamically_batch or jraph.pad_with_graphs."
        )


def count_examples(triple: Triple) -> int:
    """Returns by how many examples a raw batch advances the position of the data."""
    return form_of(*triple, must_count=False).examples


def check_weights(weights: Any) -> None:
    """Checks that sample weights are one array, or `None`."""
    if weights is not None and not hasattr(weights, "shape"):
        hint = " To pass a list of batches, use a function: `lambda: batches`."
        if isinstance(weights, int | float):
            hint = " Pass sizes by name: batch_size=32."
        elif isinstance(weights, Mapping | list | tuple):
            hint = f" It applies to all outputs; to weight a single output, use a custom loss.{hint}"
        raise DataError(f"sample_weight must be one array, [examples] or [examples, ...]. Received: {type(weights).__name__}.{hint}")


def check_not_negative(weights: Any) -> None:
    """Checks that sample weights, NumPy or `None`, are at least 0: a loss over a negative total weight has no meaning.

    Arrays in memory are checked once, on the host, and NumPy weights of other data with each batch; JAX arrays of other data are not checked.
    """
    if weights is not None and weights.size and weights.min() < 0:
        place = np.unravel_index(int(weights.argmin()), weights.shape)
        raise DataError(
            f"sample_weight must be at least 0. Received: {weights[place]:g} at index {list(map(int, place))}. To leave out an example, give it weight 0."
        )


def _check_class_weight(class_weight: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(class_weight, Mapping):
        raise ConfigError(f"class_weight must be a dict {{label: weight}}. Received: {class_weight!r}.")
    for key, value in class_weight.items():
        if not is_integer(key) or not isinstance(value, int | float | np.number) or not value >= 0:
            raise ConfigError(f"class_weight must map integer labels to weights of at least 0. Received: {key!r}: {value!r}.")
    return {int(key): float(value) for key, value in class_weight.items()}


def class_weights_of(y: PyTree, class_weight: Mapping[int, float]) -> np.ndarray[Any, Any]:
    """Returns the weight of each example, float32 `[batch]`, by its label, `[batch]`, `[batch, 1]` or one-hot `[batch, classes]`; 1 for labels without one."""
    if not hasattr(y, "ndim"):
        raise DataError("class_weight needs targets that are one array of labels. For several targets, pass sample_weight.")
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
