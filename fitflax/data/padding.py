"""`Batcher`, which turns raw batches into batches of fixed shape: checks lengths, applies class weights, and pads.

Short batches are padded by repeating rows. Batches that are passed whole are concatenated instead, one for each device. This module uses NumPy on the host and
does not know about devices.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.data.batch import FedBatch, Form, Position, Triple, check_wide, describe_leaves, form_of, full_mask, is_wide, leaf_paths, to_numpy
from fitflax.errors import ConfigError, DataError, is_integer, warn
from fitflax.leaves import listed
from fitflax.state import Batch, PyTree

# The beginning of errors about inputs that are passed whole.
_WHOLE = "The inputs share no axis of examples, so the module receives each batch whole."

# The number of kinds of batches that are remembered, limited in case each batch has another length.
_MAX_KINDS = 64

# Creating the tuples in C takes a fifth of the time of calling the classes.
_batch: Callable[[Any], Batch] = functools.partial(tuple.__new__, Batch)
_position: Callable[[Any], Position] = functools.partial(tuple.__new__, Position)
_fed: Callable[[Any], FedBatch] = functools.partial(tuple.__new__, FedBatch)


class _Checked(NamedTuple):
    """What is known about all batches of one structure, with arrays of the same shapes and dtypes, once one of them was checked."""

    form: Form
    wide: list[tuple[int, str]]  # The index and path of each leaf whose values must be checked in every batch.


class Batcher:
    """Turns triples of any length into batches of one fixed shape.

    Short batches are padded by repeating their own rows with mask False. This avoids recompilation, and zeros that could turn into NaN gradients. Inputs that
    are passed whole (`fitflax.data.batch`) are not padded but concatenated, one batch for each shard; missing ones repeat the last batch with mask False.

    Args:
        num_shards: The number of shards; the fixed size is a multiple of `num_shards * accumulate_steps`.
        accumulate_steps: The number of micro-batches into which each replica's part is split.
        size: The batch size if it is known; otherwise the first batch decides.
        pad: Whether to pad; without padding each batch size has its own shape.
        class_weight: `{label: weight}`, for labels `[batch]`, `[batch, 1]` or one-hot; labels without a weight have weight 1.
        part: Which of several equal parts of each batch to create, `(index, count)`: that of this process, if all processes read the same data.
        compare: Called with the rows of the first batch, to check that all processes do read the same data.
        combines: Whether several batches that are passed whole are combined, one for each shard. If not, padding fills the other shards.
        why_not_whole: Returns why these devices cannot train on inputs that are passed whole, or with False evaluate them; `None` if they can.
        is_training: Whether the batches are those of a run, in which a step on several batches differs from several steps.
        must_count: Whether the examples of inputs that are passed whole must be counted; prediction does not need it.
        inputs_only: Whether to leave out targets.

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
        combines: bool = True,
        why_not_whole: Callable[[bool], str | None] = lambda is_training: None,
        is_training: bool = False,
        must_count: bool = True,
        inputs_only: bool = False,
    ) -> None:
        self.num_shards, self._accumulate_steps, self._multiple = num_shards, accumulate_steps, num_shards * accumulate_steps
        self._part, self._compare, self._must_count, self._pad, self._inputs_only = part, compare, must_count, pad, inputs_only
        self._why_not_whole = functools.partial(why_not_whole, is_training)
        self.num_combined = num_shards if combines else 1  # How many batches that are passed whole form one.
        self.size = None if size is None else self._round_up(size)
        self._has_batched = False
        self._checked: dict[Any, _Checked] = {}  # By structure, shapes and dtypes.
        self._class_weight = None if class_weight is None else _check_class_weight(class_weight)

    def _round_up(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def __call__(
        self,
        triple: Triple,
        position: Position = Position(),  # noqa: B008 (frozen)
        *,
        is_checked: bool = False,
        more: Callable[[], Triple | None] = lambda: None,
    ) -> FedBatch:
        """Returns the padded batch.

        Args:
            triple: The batch.
            position: The position of the data before it.
            is_checked: Whether it is known to hold numeric arrays of one length. Checking a small batch takes as long as slicing it.
            more: Returns the next batch of the pass, `None` at its end. Called for the other shards if inputs are passed whole.

        Raises:
            DataError: Lengths differ, the batch or its inputs are empty, values are not numbers, or inputs cannot be passed whole.
            ConfigError: Inputs that are passed whole would have to be split.
        """
        if is_checked:
            rows = len(jax.tree.leaves(triple.x)[0])
        else:
            triple, form = self._check(triple)
            if form.real is not None:
                return self._join_whole(triple, position, form, more)
            rows = form.rows
        triple = self.apply_class_weight(triple)
        self._compare_once(tuple(triple))
        size = self._size_for(rows)
        return FedBatch(pad_batch(triple, rows, size, self._part), rows, Position(position.passes, position.examples + rows), size=size)

    def _check(self, triple: Triple) -> tuple[Triple, Form]:
        """Returns a batch as arrays, and its form. Only values are checked in every batch, because the other checks can take longer than a step."""
        if self._inputs_only:
            triple = triple._replace(y=())
        x, y, weights = triple
        kind: Any
        if type(x) is type(y) is np.ndarray and weights is None:  # Fast path.
            leaves, kind = [x, y], (x.shape, x.dtype, y.shape, y.dtype)
        else:
            leaves, structure = jax.tree.flatten(tuple(triple))
            are_arrays = all(type(leaf) is np.ndarray or isinstance(leaf, jax.Array) for leaf in leaves)
            kind = (structure, *((type(leaf), leaf.shape, leaf.dtype) for leaf in leaves)) if are_arrays else None
        checked = None if kind is None else self._checked.get(kind)
        if checked is not None:
            for index, path in checked.wide:
                check_wide(leaves[index], name=path)
            if isinstance(triple.weights, np.ndarray):
                check_not_negative(triple.weights)
            return triple, checked.form
        triple, form = self._check_all(triple)
        # Otherwise, the form depends on the weights, or arrays of this kind must be converted.
        if kind is not None and form.real is None and all(map(operator.is_, leaves, jax.tree.leaves(tuple(triple)))):
            if len(self._checked) == _MAX_KINDS:
                self._checked.clear()
            named = [*leaf_paths(triple.x, "x"), *leaf_paths(triple.y, "y"), *leaf_paths(triple.weights, "sample_weight")]
            self._checked[kind] = _Checked(form, [(index, path) for index, (path, leaf) in enumerate(named) if is_wide(leaf)])
        return triple, form

    def _check_all(self, triple: Triple) -> tuple[Triple, Form]:
        x, y = to_numpy(triple.x, name="x"), to_numpy(triple.y, name="y")
        check_weights(triple.weights)
        weights = None if triple.weights is None else to_numpy(triple.weights, name="sample_weight")
        if not isinstance(weights, jax.Array):  # Reading it would wait for the device in each batch.
            check_not_negative(weights)
        form = form_of(x, y, weights, must_count=self._must_count)
        if form.real is None and not jax.tree.leaves(x):
            raise DataError("`x` holds no arrays.")
        if form.rows == 0:
            raise DataError("The data yielded a batch of 0 examples. Leave empty batches out.")
        return Triple(x, y, weights), form

    def _join_whole(self, triple: Triple, position: Position, form: Form, more: Callable[[], Triple | None]) -> FedBatch:
        """Returns a batch whose inputs are passed whole, concatenated with those that follow it, or with padding, so that each shard has one."""
        shards, (index, count) = self.num_shards, self._part
        if (reason := self._why_not_whole()) is not None:
            raise ConfigError(f"{_WHOLE} {reason}")
        if self._accumulate_steps > 1:
            raise ConfigError(f"{_WHOLE} It cannot be split into micro-batches. Leave accumulate_steps={self._accumulate_steps} out, and yield larger batches.")
        self._compare_once(tuple(triple))
        triples, reals = [triple], [form.real]
        while len(triples) < self.num_combined and (following := more()) is not None:
            other, form = self._check(following)
            _check_same_shapes(triple, other, shards)
            triples.append(other)
            reals.append(form.real)
        missing = shards - len(triples)
        if missing and not self._pad:
            advice = f"Yield a multiple of {shards} batches" if self.num_combined > 1 else "Use one device"
            raise DataError(
                f"{_WHOLE} Each step needs {shards} batches, one for each device, but this one has {len(triples)}. {advice}, or leave out compile(pad=False) "
                "to fill the step with padding."
            )
        num_real = sum(max(1, int(real.sum())) for real in reals)
        real = np.concatenate([*reals, *[np.zeros(len(reals[0]), bool)] * missing])
        local_triples = [*triples, *[triples[-1]] * missing][shards // count * index : shards // count * (index + 1)]
        x, y, weights = self.apply_class_weight(Triple(*joined([(boxed(each.x), each.y, each.weights) for each in local_triples])))
        mask = real.reshape(count, -1)[index]
        batch = Batch(x, y, full_mask(len(mask)) if mask.all() else mask, weights)
        after = Position(position.passes, position.examples + num_real)
        return FedBatch(batch, num_real, after, size=len(real), real=real, is_counted=form.is_counted)

    def apply_class_weight(self, triple: Triple) -> Triple:
        """Returns the rows with float32 weights that include the class weights."""
        x, y, weights = triple
        if weights is None and self._class_weight is None:
            return triple
        if weights is not None:  # Reading a JAX array would wait for the device.
            weights = weights.astype(jnp.float32) if isinstance(weights, jax.Array) else np.asarray(weights, np.float32)
        if self._class_weight is not None:
            by_class = class_weights_of(y, self._class_weight)
            if isinstance(weights, jax.Array):
                by_class = jax.device_put(by_class)
            weights = by_class if weights is None else weights * by_class.reshape(-1, *(1,) * (weights.ndim - 1))
        return Triple(x, y, weights)

    def cut(self, triple: Triple, rows: int, position: Position) -> list[FedBatch]:
        """Returns the batches of which `triple` is the concatenation: several full ones, or a single shorter one.

        Args:
            triple: The rows of all batches, known to hold numeric arrays of one length.
            rows: Rows of a batch.
            position: The position of the data before them.
        """
        triple = self.apply_class_weight(triple)
        self._compare_once(tuple(triple))
        count, (passes, seen) = len(jax.tree.leaves(triple.x)[0]), position
        rows = min(rows, count)
        size = self._size_for(rows)
        # Fast path: a step may take only some microseconds, so there is little work for each batch.
        x, y, weights = (_pieces(part, rows) for part in triple)
        positions = map(_position, zip(itertools.repeat(passes), range(seen + rows, seen + count + 1, rows), strict=False))
        if size != rows or self._part[1] > 1:
            padded = [pad_batch(Triple(*each), rows, size, self._part) for each in zip(x, y, weights, strict=False)]
            return [FedBatch(batch, rows, position, size=size) for batch, position in zip(padded, positions, strict=True)]
        batches = map(_batch, zip(x, y, itertools.repeat(full_mask(size)), weights, strict=False))
        defaults = map(itertools.repeat, (None, None, (), None, True))
        return list(map(_fed, zip(batches, itertools.repeat(rows), positions, itertools.repeat(triple), range(count // rows), *defaults, strict=False)))

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
        if self.size is None or rows > self.size:
            # A loader's batch size may be wrong with custom collation, so its first batch may be larger without a warning.
            if self.size is not None and not is_first:
                warn(
                    f"A batch of {rows} examples follows batches of {self.size}, so the step is compiled again. Yield the largest batch first, or equal sizes."
                )
            self.size = self._round_up(rows)
        return self.size


def pad_batch(triple: Triple, rows: int, size: int, part: tuple[int, int] = (0, 1)) -> Batch:
    """Returns the first `rows` rows padded to `size` rows by repeating them, or one of several equal parts of that, `(index, count)`.

    >>> pad_batch(Triple(np.arange(4.0), (), None), 2, 6).x.tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    index, count = part
    if rows == size and count == 1:
        return Batch(triple.x, triple.y, full_mask(size), triple.weights)
    local_rows = np.arange(size // count * index, size // count * (index + 1))
    taken: Any = slice(local_rows[0], local_rows[-1] + 1) if rows == size else local_rows % rows
    x, y, weights = jax.tree.map(lambda leaf: leaf[taken], tuple(triple))
    return Batch(x, y, full_mask(len(local_rows)) if local_rows[-1] < rows else local_rows < rows, weights)


def _pieces(tree: PyTree, rows: int) -> Iterable[PyTree]:
    """Returns consecutive parts of `rows` rows; the same tree again and again if it has no arrays."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return itertools.repeat(tree)
    pieces = [list(leaf.reshape(len(leaf) // rows, rows, *leaf.shape[1:])) for leaf in leaves]
    return pieces[0] if leaves[0] is tree else [jax.tree.unflatten(structure, piece) for piece in zip(*pieces, strict=True)]


# -- inputs that are passed whole --


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A scalar of a batch that is passed whole, with an axis so that each device can have its own value; a step sees it without that axis."""

    value: Any  # `[devices]`; in several batches for one call of a step, devices are the last axis.


# The key adds nothing to a path, because this class is invisible to users.
jax.tree_util.register_pytree_with_keys(Scalar, lambda scalar: ((("", scalar.value),), None), lambda _, children: Scalar(*children))


def unboxed(tree: PyTree) -> PyTree:
    """Returns a tree as a device sees it: scalars without their extra axis."""
    return jax.tree.map(lambda node: node.value[..., 0] if isinstance(node, Scalar) else node, tree, is_leaf=lambda node: isinstance(node, Scalar))


def boxed(tree: PyTree) -> PyTree:
    """Returns a tree whose scalars have an extra axis, as `Scalar`."""
    return jax.tree.map(lambda leaf: leaf if leaf.shape else Scalar(leaf.reshape(1)), tree)


def joined(trees: Sequence[PyTree]) -> PyTree:
    """Returns trees of the same structure with their arrays concatenated."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: (jnp if isinstance(leaves[0], jax.Array) else np).concatenate(leaves), *trees)


def without_padding(outputs: PyTree, real: Any) -> PyTree:
    """Returns the rows of outputs that are examples, for a batch that is passed whole.

    `outputs` are NumPy arrays with one row, or an equal number of rows, for each entry of `real`, which is bool, as in `Form`.

    >>> without_padding(np.arange(6), np.array([True, False])).tolist()
    [0, 1, 2]
    """
    return jax.tree.map(lambda leaf: leaf[np.repeat(real, len(leaf) // len(real))], outputs)


def _check_same_shapes(one: Triple, other: Triple, shards: int) -> None:
    """Checks that two batches that are passed whole have the same structure, shapes and dtypes, so that one step can use them."""
    structures: list[Any] = [jax.tree.structure(triple) for triple in (one, other)]
    first, second = describe_leaves(*one), describe_leaves(*other)
    if first != second or structures[0] != structures[1]:
        different = [path for path in {**first, **second} if first.get(path) != second.get(path)]
        received = listed([f"{path}: {first.get(path)} and {second.get(path)}" for path in different]) or "different structures"
        raise DataError(
            f"{_WHOLE} The {shards} batches of a step, one for each device, must have equal shapes: {received}. Pad all batches to one size, for example with "
            "jraph.dynamically_batch or jraph.pad_with_graphs."
        )


# -- weights --


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
