"""Checks of the shapes of outputs and targets that losses and metrics share. Errors begin with `name`, that of the loss; for a metric it is `IT`."""

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fitflax.errors import LossError, is_of_debugger
from fitflax.leaves import describe_shapes

IT = "It"
"""Stands for a metric, whose functions do not know its name; `metrics.base.naming` prepends that."""

TO_ONE_HOT = "Make integer labels one-hot: jax.nn.one_hot(labels, classes)."
_CHECK_LAYER = "Check the model's last layer."

# Each is used only once, because a jitted function within a custom one warns only when it is first traced on shapes. They are multiples of 8, because a
# function may split rows into groups.
_NUMBERS_OF_ROWS = itertools.count(1048, step=8)

# The shapes on which custom functions were checked, because steps without jit check each batch.
_without_fault: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def same_shape(name: str, outputs: Any, targets: Any, *, takes_complex: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns both in float32 and one shape; restores a missing trailing axis of length 1, so that `[N, 1]` and `[N]` never broadcast to `[N, N]`.

    If the loss or metric `takes_complex` and one of them is complex, both are complex64.
    """
    outputs, targets = arrays(name, outputs, targets, takes_complex=takes_complex)
    # Add the axis rather than remove it: for [batch, time, 1] and [batch, time] there must be one value per token, for token weights.
    if outputs.shape == (*targets.shape, 1):
        targets = targets[..., None]
    elif targets.shape == (*outputs.shape, 1):
        outputs = outputs[..., None]
    if outputs.shape != targets.shape:
        takes, advice = "outputs and targets of the same shape (a last axis of length 1 may be missing)", _CHECK_LAYER
        if _have_label_shape(outputs, targets):
            labels = "For integer class labels use 'sparse_categorical_crossentropy' and 'accuracy'"
            advice = f"{labels}; otherwise the model's last layer must have as many features as the targets."
        raise mismatch(name, outputs, targets, takes, advice)
    dtype = jnp.complex64 if jnp.iscomplexobj(outputs) or jnp.iscomplexobj(targets) else jnp.float32
    return outputs.astype(dtype), targets.astype(dtype)


def mean_of_last_axis(values: jax.Array) -> jax.Array:
    """Returns the mean over the last axis; values `[batch]` are returned unchanged."""
    return values.mean(axis=-1) if values.ndim > 1 else values


def vectors(name: str, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in float32, `[batch, ..., features]`, with at least two features: the direction of a single number has no gradient."""
    outputs, targets = same_shape(name, outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        advice = "For one number per example use 'mean_squared_error'."
        raise mismatch(name, outputs, targets, "vectors [batch, ..., features] with at least two features", advice)
    return outputs, targets


def class_rows(name: str, outputs: Any, targets: Any, *, binary: str, labels: str, role: str = "one-hot targets") -> tuple[jax.Array, jax.Array]:
    """Returns both in float32, of one shape `[batch, ..., classes]`, with at least two classes.

    For errors, `binary` is the name of the loss for one number per example, `labels` is advice for integer labels, and `role` says what the targets are.
    """
    outputs, targets = _with_classes(name, outputs, targets, binary)
    if outputs.shape != targets.shape:
        if _have_label_shape(outputs, targets):
            raise mismatch(name, outputs, targets, f"{role} [..., classes]", labels)
        raise mismatch(name, outputs, targets, f"outputs and {role} of the same shape [..., classes]")
    return outputs.astype(jnp.float32), targets.astype(jnp.float32)


def class_labels(name: str, outputs: Any, targets: Any, *, binary: str, one_hot: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns float32 outputs `[batch, ..., classes]`, labels `[batch, ...]`, and whether each label is in range.

    Targets are `[batch, ...]` or `[batch, ..., 1]`. For errors, `binary` is as in `class_rows`, and `one_hot` is advice for one-hot targets.
    """
    outputs, targets = _with_classes(name, outputs, targets, binary)
    if targets.shape == (*outputs.shape[:-1], 1):
        targets = targets[..., 0]
    elif targets.shape == outputs.shape:
        raise mismatch(name, outputs, targets, "integer targets [...] for logits [..., classes]", one_hot)
    elif targets.shape != outputs.shape[:-1]:
        raise mismatch(name, outputs, targets, "integer targets [...] or [..., 1] for logits [..., classes]")
    if jnp.issubdtype(targets.dtype, jnp.inexact):
        raise LossError(f"{name} takes integer class labels. Received: targets of dtype {targets.dtype}. Cast them: targets.astype('int32').")
    # Labels may be int8, which cannot hold the number of classes.
    labels = targets.astype(jnp.int32) if targets.dtype.itemsize < 4 else targets
    # In Optax, negative labels count from the end.
    known = (labels >= 0) & (labels < outputs.shape[-1])
    return outputs.astype(jnp.float32), labels, known


def broadcast_fault(fn: Callable[[Any, Any], Any], values: Any, outputs: Any, targets: Any) -> str | None:
    """Returns a message if a custom function, which returned `values`, broadcasts `[N, 1]` against `[N]`, which pairs each output with each target.

    The function is traced again on other numbers of rows for outputs and targets, because the mean of all pairs has the shape of the mean of the right ones.
    A function that also pairs outputs of other shapes with targets is assumed to intend it. Arrays may be leaves of trees.

    >>> outputs, targets = jnp.ones((3, 1)), jnp.ones(3)
    >>> square = lambda outputs, targets: jnp.mean((outputs - targets) ** 2, axis=-1)
    >>> broadcast_fault(square, square(outputs, targets), outputs, targets)
    'returned [3] for outputs [3, 1] and targets [3]: each output was combined with each target. Give both the same shape: use outputs[:, 0]'
    >>> broadcast_fault(square, square(outputs, outputs), outputs, outputs)
    """
    mine, theirs = _shapes(outputs), _shapes(targets)
    for rows in {shape[0] for shape in (*mine, *theirs) if shape is not None and len(shape) == 1 and shape[0] > 1}:
        is_mixed = ((rows, 1) in mine and (rows,) in theirs) or ((rows, 1) in theirs and (rows,) in mine)
        if is_mixed and _pairs_rows(fn, outputs, targets, rows):
            name, tree = ("outputs", outputs) if (rows, 1) in mine else ("targets", targets)
            received, advice = f"{_described(values)} for outputs {_described(outputs)} and targets {_described(targets)}", f": use {name}[:, 0]"
            return f"returned {received}: each output was combined with each target. Give both the same shape{advice if hasattr(tree, 'shape') else ''}"
    return None


def _shapes(tree: Any) -> tuple[Any, ...]:
    return tuple(getattr(leaf, "shape", None) for leaf in jax.tree.leaves(tree))


def _described(tree: Any) -> str:
    return str(list(tree.shape)) if hasattr(tree, "shape") else describe_shapes(tree)


def _pairs_rows(fn: Callable[[Any, Any], Any], outputs: Any, targets: Any, rows: int) -> bool:
    """Returns whether a function broadcasts `[rows, 1]` against `[rows]` because outputs and targets have these two shapes."""

    def pairs(*column: int, alike: bool = False) -> bool:
        """Returns whether it does so if columns have this shape after their first axis; with `alike`, for as many outputs as targets."""
        size = next(_NUMBERS_OF_ROWS)
        sizes = size, size if alike else next(_NUMBERS_OF_ROWS)
        return _promotes_columns(fn, sizes, *(_with_rows(tree, rows, size, column) for tree, size in zip((outputs, targets), sizes, strict=True)))

    checked: set[Any] = set()
    with contextlib.suppress(TypeError):  # An object without hash or weak references is checked each time.
        checked = _without_fault.setdefault(fn, checked)
    shapes = rows, _shapes(outputs), _shapes(targets)
    # A function may compare shapes, to give both the same one.
    if shapes not in checked and pairs(1) and pairs(1, alike=True) and not pairs() and not pairs(2):
        return True
    checked.add(shapes)
    return False


def _with_rows(tree: Any, rows: int, size: int, column: tuple[int, ...]) -> Any:
    """Returns the shapes of arrays, with `size` instead of `rows`, and `[size, *column]` instead of `[rows, 1]`."""

    def changed(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        rest = column if leaf.shape == (rows, 1) else leaf.shape[1:]
        return jax.ShapeDtypeStruct((size, *rest) if leaf.shape[:1] == (rows,) else leaf.shape, leaf.dtype)

    return jax.tree.map(changed, tree)


def _promotes_columns(fn: Callable[[Any, Any], Any], sizes: tuple[int, int], outputs: Any, targets: Any) -> bool:
    """Returns whether a function broadcasts a column with the first number of rows against a row with the second, or the reverse.

    Arrays with different numbers of rows fit each other only in such broadcasts. The function may fail after them, or where it combines the output and the
    target of each row.
    """
    equations: list[Any] = []
    with warnings.catch_warnings(record=True, action="always") as caught, jax.numpy_rank_promotion("warn"):
        try:
            equations += _equations(jax.make_jaxpr(fn)(outputs, targets).jaxpr)
        except Exception as error:
            if is_of_debugger(error):
                raise
    messages = [str(warning.message) for warning in caught if "rank promotion" in str(warning.message)]
    # jnp.where and jnp.broadcast_arrays do not warn.
    added = [(one.invars[0].aval.shape, one.outvars[0].aval.shape) for one in equations if one.primitive.name == "broadcast_in_dim"]
    return any(
        ((row,), (column, row)) in added or any(f"({column}, 1)" in message and f"({row},)" in message for message in messages)
        for column, row in (sizes, sizes[::-1])
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of the functions in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def nan_unless(known: jax.Array, values: jax.Array) -> jax.Array:
    """Returns floating-point `values`, with NaN and no gradient where `known`, bool of the same shape, is false.

    The NaN is computed, because a NaN constant would trigger `jax_debug_nans` in every eager step.

    >>> nan_unless(jnp.array([True, False]), jnp.ones(2)).tolist()
    [1.0, nan]
    """
    return jnp.where(known, values, jnp.sqrt(jnp.where(known, 0.0, -1.0)).astype(values.dtype))


def mismatch(name: str, outputs: jax.Array, targets: jax.Array, takes: str, advice: str = _CHECK_LAYER) -> LossError:
    """Returns the error for shapes that do not match."""
    return LossError(f"{name} takes {takes}. Received: outputs {list(outputs.shape)}, targets {list(targets.shape)}. {advice}")


def _have_label_shape(outputs: jax.Array, targets: jax.Array) -> bool:
    """Returns whether the targets have the shape of integer labels for these outputs."""
    return targets.shape in (outputs.shape[:-1], (*outputs.shape[:-1], 1))


def arrays(name: str, outputs: Any, targets: Any, *, takes_complex: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays with a batch axis; complex numbers are an error unless the loss or metric `takes_complex`."""
    for role, value in (("outputs", outputs), ("targets", targets)):
        if isinstance(value, (dict, list, tuple)):
            raise LossError(
                f"{name} takes one array of {role}. Received: a {type(value).__name__} of length {len(value)}. "
                "Pass a loss and metrics for each output, or concatenate them into one array."
            )
        if jnp.ndim(value) == 0:
            raise LossError(f"{name} takes {role} with a leading batch axis. Received: a scalar.")
        if jnp.iscomplexobj(value) and not takes_complex:
            advice = "Use 'mse' or 'mae', which take magnitudes of errors, or convert them in a custom function."
            raise LossError(f"{name} takes real {role}. Received: {role} of dtype {jnp.result_type(value)}. {advice}")
    return jnp.asarray(outputs), jnp.asarray(targets)


def _with_classes(name: str, outputs: Any, targets: Any, binary: str) -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays, after checking that the outputs have an axis of at least two classes."""
    outputs, targets = arrays(name, outputs, targets)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        takes = "logits [batch, ..., classes]" if outputs.ndim < 2 else "at least two classes"
        raise mismatch(name, outputs, targets, takes, f"For one logit per example use {binary!r}.")
    return outputs, targets
