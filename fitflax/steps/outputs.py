"""What a module returns, by name, and what a step returns besides the state: sums of metrics, rows of examples, and values on request.

Only this module distinguishes tuples, mappings and classes with named attributes. Losses, metrics and checks select outputs by name; code that
handles all outputs uses `Returned`. Steps add metrics by log key to the sums of earlier steps. Metrics with `collect` return rows instead, which the host
concatenates.
"""

import collections
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict
from typing_extensions import override

from fitflax.errors import MetricError, RestoreError
from fitflax.leaves import describe_shapes
from fitflax.logs import UNDEFINED
from fitflax.metrics import Mean, Metric
from fitflax.state import PyTree


def named_outputs(outputs: PyTree) -> dict[Any, PyTree] | None:
    """Returns outputs by name, in the module's order, or `None` for a single output, which has no name.

    The names are the keys of a mapping, or the attributes of a registered class: a NamedTuple, `flax.struct.dataclass`, `chex.dataclass`, or a
    `ModelOutput` of transformers. The members of a tuple or list are `output_1`, `output_2`. Members that are `None` are left out.

    >>> named_outputs((1, 2)), named_outputs({"b": 1, "a": None}), named_outputs(3)
    ({'output_1': 1, 'output_2': 2}, {'b': 1}, None)
    """
    members = members_of(outputs)
    return None if members is None else {name: output for name, output in members.items() if output is not None}


def members_of(outputs: PyTree) -> dict[Any, PyTree] | None:
    """Returns the same as `named_outputs`, but keeps outputs that are `None`, which have a position in lists of losses, metrics and targets."""
    if type(outputs) in (list, tuple):
        return {f"output_{number}": output for number, output in enumerate(outputs, 1)}
    children = jax.tree_util.tree_leaves_with_path(outputs, is_leaf=lambda node: node is not outputs)
    by_name = {_name_of(path[0]): child for path, child in children if path}
    if isinstance(outputs, Mapping):  # JAX sorts the keys.
        return {name: by_name.get(name, output) for name, output in outputs.items()}
    return None if not by_name or None in by_name else by_name


def _name_of(key: Any) -> Any:
    """Returns the attribute or key of a child; `None` if it has only an index."""
    return getattr(key, "name", getattr(key, "key", None)) if not isinstance(key, jax.tree_util.FlattenedIndexKey) else None


class _Members(NamedTuple):
    """The positions of the leaves of outputs with names."""

    places: "tuple[tuple[Any, _Place], ...]"  # By name.


# The index of an array, the indices of the arrays in a container without names, the members of one with names, or `None` for `None`.
_Place = int | tuple[int, ...] | _Members | None


@dataclasses.dataclass(frozen=True)
class _Form:
    """The structure of outputs without their leaves; static in JAX transformations."""

    treedef: Any = dataclasses.field(hash=False)  # JAX's structure of the outputs. Not hashed, because a class may have static parts that are not hashable.
    orders: Any  # The order of keys, which JAX does not keep; see `_order_of`.
    place: _Place


@jax.tree_util.register_pytree_node_class
class Returned:
    """The outputs of a module as a pytree of the same leaves that remembers their containers.

    JAX transformations rebuild containers, sort the keys of dicts, and fill classes with shapes or placeholders, which a user's class may reject.
    This class can be mapped and traced, and rebuilds the module's containers once, with arrays.

    >>> returned = Returned.of({"b": 1, "a": (2, None)})
    >>> jax.tree.map(lambda leaf: 10 * leaf, returned).rebuilt()
    {'b': 10, 'a': (20, None)}
    """

    def __init__(self, leaves: tuple[Any, ...], form: _Form) -> None:
        self._leaves = leaves
        self._form = form

    @classmethod
    def of(cls, outputs: PyTree) -> Self:
        """Returns the outputs in this form."""
        leaves, treedef = jax.tree.flatten(outputs)
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        return cls(tuple(leaves), _Form(treedef, _order_of(outputs), _place_of(outputs, numbers)))

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Form]:
        """Returns the leaves and the static form."""
        return self._leaves, self._form

    @classmethod
    def tree_unflatten(cls, form: _Form, leaves: Any) -> Self:
        """Returns an instance with other leaves of any type."""
        return cls(tuple(leaves), form)

    def rebuilt(self) -> PyTree:
        """Returns the outputs in the module's containers, with keys in their original order."""
        return _in_order(jax.tree.unflatten(self._form.treedef, self._leaves), self._form.orders)

    def by_name(self) -> PyTree:
        """Returns the outputs in plain containers, with leaves of any type: nested dicts of leaves and lists of leaves by name, or a single output."""
        return self if type(self._form.place) is tuple else self._at(self._form.place)

    def _at(self, place: _Place) -> PyTree:
        if isinstance(place, _Members):
            return {name: self._at(member) for name, member in place.places}
        if isinstance(place, tuple):
            return [self._leaves[number] for number in place]
        return None if place is None else self._leaves[place]

    def __repr__(self) -> str:
        return repr(self._at(self._form.place))


def map_outputs(fn: Callable[[Any], Any], outputs: PyTree) -> PyTree:
    """Returns outputs with `fn` applied to their arrays; they keep their containers, and dicts their order, which `jax.tree.map` would sort."""
    return jax.tree.map(fn, Returned.of(outputs)).rebuilt()


def in_plain_containers(outputs: PyTree) -> PyTree:
    """Returns outputs with nested mappings and classes replaced by dicts, for readers without these classes.

    >>> from flax.core import FrozenDict
    >>> in_plain_containers((FrozenDict(b=1), 2))
    ({'b': 1}, 2)
    """
    if type(outputs) in (list, tuple):
        return type(outputs)(map(in_plain_containers, outputs))
    named = named_outputs(outputs)
    return outputs if named is None else {name: in_plain_containers(output) for name, output in named.items()}


def _place_of(output: PyTree, numbers: Mapping[int, int]) -> _Place:
    if output is None:
        return None
    members = members_of(output)
    if members is not None:
        return _Members(tuple((name, _place_of(member, numbers)) for name, member in members.items()))
    leaves = jax.tree.leaves(output)
    return numbers[id(output)] if len(leaves) == 1 and leaves[0] is output else tuple(numbers[id(leaf)] for leaf in leaves)


def _order_of(tree: PyTree) -> Any:
    """Returns the order of keys of nested dicts, which JAX sorts, also inside tuples and lists; `None` if there are no dicts."""
    if type(tree) in (dict, FrozenDict):
        return tuple((key, _order_of(value)) for key, value in tree.items())
    if isinstance(tree, tuple) or type(tree) is list:
        orders = tuple(map(_order_of, tree))
        return orders if any(order is not None for order in orders) else None
    return None


def _in_order(tree: PyTree, order: Any) -> PyTree:
    if order is None:
        return tree
    if isinstance(tree, tuple | list):
        members = [_in_order(member, one) for member, one in zip(tree, order, strict=True)]
        return type(tree)(*members) if hasattr(tree, "_fields") else type(tree)(members)
    return type(tree)({key: _in_order(tree[key], one) for key, one in order})


@struct.dataclass
class TrainSums:
    """Sums over the batches of an epoch so far."""

    metrics: dict[str, Metric]  # By log key.
    steps_since_bad: jax.Array  # Steps since the loss or gradient first was not finite; -1 if it never was. int32.
    culprit: jax.Array  # Index in `Suspects` of what was not finite; -1 if there is none or it was not checked. int32.


@struct.dataclass
class EvalSums:
    """Sums over the batches of an evaluation so far."""

    metrics: dict[str, Metric]  # By log key.
    index: jax.Array  # Index of the next batch; its random keys follow from it. int32.


@struct.dataclass
class TotalLoss(Metric):
    """The logged loss: the sum of the weighted means of its parts."""

    parts: dict[str, Mean]
    name: str = struct.field(pytree_node=False, default="loss")
    direction: Any = struct.field(pytree_node=False, default="min")
    additive = True

    @override
    def empty(self) -> "TotalLoss":
        return dataclasses.replace(self, parts={key: part.empty() for key, part in self.parts.items()})

    @override
    def update(self, outputs: PyTree, targets: PyTree, weights: jax.Array) -> "TotalLoss":
        raise NotImplementedError("The step creates the parts of the loss.")

    @override
    def merge(self, other: "TotalLoss") -> "TotalLoss":
        return dataclasses.replace(self, parts={key: part.merge(other.parts[key]) for key, part in self.parts.items()})

    @override
    def compute(self) -> jax.Array:
        return sum((part.compute() for part in self.parts.values()), start=jnp.float32(0))


def collects(metric: Any) -> bool:
    """Returns whether a metric collects rows instead of summing."""
    return bool(getattr(metric, "collect", False))


def summed(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics that are summed from step to step."""
    return {key: metric for key, metric in metrics.items() if not collects(metric)}


def rows_of(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics that collect rows."""
    return {key: metric for key, metric in metrics.items() if collects(metric)}


def computed(metric: Metric) -> tuple[jax.Array, jax.Array]:
    """Returns a metric's value, float32 `[...]`, and whether it is NaN because the total weight is 0, bool `[...]`."""
    with jax.debug_nans(False):  # NaN is valid here, but in steps without jit `jax_debug_nans` would raise an error.
        value = metric.compute()
        if jnp.iscomplexobj(value):
            raise MetricError(f"Its value must be real. Received: {describe_shapes(value)}.")
        value = jnp.asarray(value, jnp.float32)
        return value, jnp.isnan(value) & _is_empty(metric)


def _is_empty(metric: Metric) -> Any:
    """Returns whether all sums of a metric are 0. For a loss with parts, returns whether all sums of at least one part are 0."""
    parts = getattr(metric, "parts", None)
    if parts:
        return functools.reduce(operator.or_, map(_is_empty, parts.values()))
    leaves = [leaf for leaf in jax.tree.leaves(metric) if jnp.issubdtype(leaf.dtype, jnp.number)]
    return functools.reduce(operator.and_, (jnp.all(leaf == 0) for leaf in leaves), jnp.bool_(True))


def as_vector(values: list[jax.Array], metrics: Mapping[str, Metric]) -> jax.Array:
    """Returns all values that a step logs as one vector: `values`, then the metrics by key, with arrays flattened."""
    # Sorted, because JAX transformations sort the keys of dicts. `Program` knows the order in which they are shown.
    computed_metrics = [computed(metrics[key]) for key in sorted(metrics)]
    parts = [*values, *(jnp.where(is_undefined, UNDEFINED, value) for value, is_undefined in computed_metrics)]
    if any(part.ndim for part in parts):
        return jnp.concatenate([part.ravel() for part in parts])
    return jnp.stack(parts) if parts else jnp.zeros(0, jnp.float32)


@struct.dataclass
class Suspects:
    """Names of the checked values of a step, such as "the gradient of Dense_0/kernel"; `TrainSums.culprit` is an index of them.

    It has no arrays, so it is a static part of what a compiled step returns.
    """

    names: tuple[str, ...] = struct.field(pytree_node=False, default=())


class Keep(NamedTuple):
    """What a step returns besides its loss and metrics."""

    # Whether to compute the gradient's norm and check the gradient for NaN and infinity; `None` for a custom step, which returns no gradient. XLA must
    # then write the gradient to memory and read it again: a step of 100 MB of parameters and little else takes 1.4 times as long, one of 2000 arrays
    # 1.3 times.
    norm: bool | None = False
    grads: bool = False  # Whether to keep the gradient, which takes as much memory as the parameters.
    sown: tuple[str, ...] = ()  # Names of collections of sown values.
    # Whether to find what first was not finite: parts of the loss, the gradient and the updated parameters. This reads all of them.
    culprit: bool = False


NOTHING = Keep()


class Kept(NamedTuple):
    """What a step returned besides its loss and metrics, equal on all replicas."""

    grads: PyTree  # The gradient, or `()`.
    sown: dict[str, PyTree]  # Sown values by collection: numbers averaged over replicas, arrays of all replicas concatenated along their first axis.
    suspects: Suspects = Suspects()  # Names of the values that were checked for NaN and infinity.


class Collected:
    """Rows of an epoch or of an evaluation.

    `empty` are metrics by log key. `join` copies the rows of a call to the host, in the order of the batches; its second argument is the call's number of
    steps, or `None` for a single step. `most_pending` is the maximum number of calls whose rows wait on the devices; more than the calls in flight, so
    that reading the oldest does not wait.
    """

    def __init__(self, empty: Mapping[str, Metric], join: Callable[[PyTree, int | None], PyTree], *, most_pending: int = 16) -> None:
        self._empty, self._join, self._most_pending = dict(empty), join, most_pending
        self._parts: list[dict[str, Metric]] = []
        self._pending: collections.deque[tuple[dict[str, Metric], int | None]] = collections.deque()
        self._lock = threading.Lock()  # A thread that writes logs may read values.
        self._count = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Log keys of the metrics in the order in which they are shown."""
        return tuple(self._empty)

    def add(self, rows: dict[str, Metric], steps: int | None = None) -> None:
        """Appends the rows of a step, or of a call of several `steps`."""
        if not rows:
            return
        self._count += 1  # A separate count, because the lengths of the lists exclude a part that another thread is copying to the host.
        with self._lock:
            self._pending.append((rows, steps))
            if len(self._pending) > self._most_pending:
                self._join_oldest(1)

    def _join_oldest(self, count: int) -> None:
        for _ in range(count):
            self._parts.append(self._join(*self._pending.popleft()))

    def now(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that computes the metrics over the current rows, regardless of rows that are added later."""
        count = self._count
        return lambda: {key: _computed(key, metric) for key, metric in self._joined(count).items()}

    def _joined(self, count: int) -> dict[str, Metric]:
        with self._lock:
            self._join_oldest(max(count - len(self._parts), 0))
        if not count:
            return dict(self._empty)
        # The same as merging the parts one by one, but in linear time.
        return {key: jax.tree.map(functools.partial(_concatenated, key), *(part[key] for part in self._parts[:count])) for key in self._empty}

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the rows by log key, for a checkpoint."""
        return {key: jax.tree.leaves(metric) for key, metric in self._joined(self._count).items()} if self._count else {}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Restores what `state_dict` returned; raises `RestoreError` if it is of other metrics, or of none."""
        if set(state) != set(self._empty):
            raise RestoreError(
                f"The checkpoint has collected rows of the metrics {sorted(state)}, but the compiled metrics that collect rows are {sorted(self._empty)}. "
                "Compile with the metrics of the checkpoint."
            )
        structures = {key: jax.tree.structure(metric) for key, metric in self._empty.items()}
        self._parts = [{key: jax.tree.unflatten(structures[key], [np.asarray(leaf) for leaf in state[key]]) for key in self._empty}]
        self._count = 1


def _concatenated(key: str, *leaves: Any) -> np.ndarray[Any, Any]:
    shapes = sorted({tuple(leaf.shape[1:]) for leaf in leaves})
    if len(shapes) > 1:
        raise MetricError(
            f"The metric {key!r} collects rows, which must have the same shape in all batches. Received rows of shapes {shapes}. Pad them to one shape."
        )
    return np.concatenate(leaves)


def _computed(key: str, metric: Metric) -> Any:
    """Returns a metric's value for logs: a Python float, or an array of float32 or uint8."""
    value = np.asarray(metric.compute())
    if value.dtype.kind not in "fiub":
        raise MetricError(f"The metric {key!r} must compute a number or an array of numbers. Received: {value!r}.")
    if value.ndim == 0:
        return float(value)
    return value if value.dtype == np.uint8 else value.astype(np.float32)  # Images are often uint8.
