"""`TrainState`, `InferenceState` and `Batch`: plain pytrees of arrays; and the logical axis names of a state, from linen's metadata."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization, struct
from flax.core import meta, unfreeze
from flax.linen.partitioning import AxisMetadata, get_axis_names
from flax.linen.spmd import LogicallyPartitioned
from jax.sharding import PartitionSpec

from fitflax.errors import ConfigError, ModelError, OptimizerError, RestoreError, no_attribute
from fitflax.leaves import describe_shapes, key_of, listed, named_leaves, path_name

PyTree = Any
Name = str | tuple[str, ...] | None

_AXES = "_axes"


def is_axes_collection(name: str, tree: Any) -> bool:
    """Returns whether a collection holds only axis names, such as `params_axes` of `flax.linen.partitioning.param_with_axes`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, AxisMetadata))
    return name.endswith(_AXES) and bool(leaves) and all(isinstance(leaf, AxisMetadata) for leaf in leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class AxisNames:
    """The logical axis names of a module's variables by path, such as `params/Dense_0/kernel`.

    A static field of states. All instances are equal, so neither tree structures nor compiled functions depend on the names. As a result, a user's compiled
    function that returns a state returns the names of the state that it was compiled for.

    Attributes:
        by_path: One name, a tuple of names or `None` for each axis of an array with metadata.
        is_known: Whether the names were read from the module.
        of_mesh: The paths of arrays whose names are axes of the mesh, as those of `nn.with_partitioning` are.
    """

    by_path: Mapping[str, tuple[Name, ...]] = dataclasses.field(default_factory=dict)
    is_known: bool = True
    of_mesh: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisNames)

    def __hash__(self) -> int:
        return hash(AxisNames)

    def __repr__(self) -> str:
        return f"AxisNames({len(self.by_path)} arrays)"

    @classmethod
    def of(cls, boxed: Mapping[str, Any]) -> "AxisNames":
        """Returns the names in the metadata of variables from `init`, as set by `nn.with_logical_partitioning` or `param_with_axes`."""
        leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda node: isinstance(node, meta.AxisMetadata))
        specs = {
            path_name(path): leaf.get_partition_spec() for path, leaf in leaves if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec")
        }
        for collection, tree in boxed.items():
            if is_axes_collection(collection, tree):
                names = jax.tree_util.tree_leaves_with_path(get_axis_names(tree), is_leaf=lambda node: isinstance(node, PartitionSpec))
                specs |= {f"{collection.removesuffix(_AXES)}/{path_name(path)}": spec for path, spec in names}
        of_mesh = {path_name(path) for path, leaf in leaves if isinstance(leaf, meta.Partitioned) and not isinstance(leaf, LogicallyPartitioned)}
        return cls({path: tuple(spec) for path, spec in specs.items()}, of_mesh=frozenset(of_mesh))

    def without_missing(self, axes: Collection[str], named: Collection[str]) -> "AxisNames":
        """Returns the names without axes that the mesh lacks, for arrays in `of_mesh`. `axes` are the axes of the mesh, and `named` are names that have rules.

        >>> names = AxisNames({"a": (None, "model"), "b": (("data", "model"),), "c": ("model",)}, of_mesh=frozenset("ab"))
        >>> names.without_missing(["data"], []).by_path
        {'a': (None, None), 'b': (('data',),), 'c': ('model',)}
        """

        def kept(name: Name) -> Name:
            return tuple(axis for axis in name if axis in axes) if isinstance(name, tuple) else name if name in axes or name in named else None

        by_path = {path: tuple(map(kept, names)) if path in self.of_mesh else names for path, names in self.by_path.items()}
        return dataclasses.replace(self, by_path=by_path)

    def missing(self, axes: Collection[str], named: Collection[str]) -> dict[str, list[str]]:
        """Returns the axes that `without_missing` removes, with the paths of the arrays that name them.

        >>> names = AxisNames({"a": (None, "model"), "b": (("data", "model"),), "c": ("model",)}, of_mesh=frozenset("ab"))
        >>> names.missing(["data"], [])
        {'model': ['a', 'b']}
        """
        missing_axes: dict[str, list[str]] = {}
        for path in sorted(self.of_mesh):
            for name in self.by_path[path]:
                for axis in name if isinstance(name, tuple) else () if name is None or name in named else (name,):
                    if axis not in axes:
                        missing_axes.setdefault(axis, []).append(path)
        return missing_axes

    def each(self, fn: Callable[[str, Any, "tuple[Name, ...] | None"], Any], params: Any, model_state: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        """Returns parameters, collections and optimizer state with each array replaced by `fn(path, array, names)`.

        `names` is `None` for arrays without names. An optimizer array has the names of a parameter if its path ends with the parameter's path and the shapes
        are equal.
        """

        def of_variable(path: Any, leaf: Any) -> Any:
            return fn(path_name(path), leaf, self.by_path.get(path_name(path)))

        shapes = {path: leaf.shape for path, leaf in named_leaves(params)}

        def of_optimizer(path: Any, leaf: Any) -> Any:
            parts = [path_name((entry,)) for entry in path]
            param = next((name for start in range(len(parts) + 1) if (name := "/".join(parts[start:])) in shapes), None)
            has_param_shape = param is not None and shapes[param] == leaf.shape
            return fn(f"opt_state/{path_name(path)}", leaf, self.by_path.get(f"params/{param}") if has_param_shape else None)

        return (
            jax.tree_util.tree_map_with_path(of_variable, {"params": params})["params"],
            jax.tree_util.tree_map_with_path(of_variable, model_state),
            jax.tree_util.tree_map_with_path(of_optimizer, opt_state),
        )

    def specs(self, params: Any, model_state: Any, opt_state: Any, *, strict: bool) -> tuple[Any, Any, Any]:
        """Returns the `PartitionSpec` of each array of the parameters, collections and optimizer state, by logical names, in their structures.

        Raises a `ModelError` if an array has more names than axes or, if `strict`, no names.
        """
        faults: list[str] = []

        def spec(path: str, leaf: Any, names: tuple[Name, ...] | None) -> PartitionSpec:
            is_variable = not path.startswith("opt_state/")
            if is_variable and names is not None and len(names) > leaf.ndim:
                faults.append(f"{path} {list(leaf.shape)} has the names {list(names)}")
            elif is_variable and names is None and leaf.ndim and strict:
                faults.append(f"{path} {list(leaf.shape)} has no names")
            return PartitionSpec(*(names or ()), *[None] * (leaf.ndim - len(names or ())))

        trees = self.each(spec, params, model_state, opt_state)
        if faults:
            raise ModelError(f"Each axis of an array needs one logical name: {listed(faults, '; ')}. Set names with nn.with_logical_partitioning(init, names).")
        return trees


@struct.dataclass
class TrainState:
    """Everything that training changes, as a frozen pytree of arrays, without the module, the optimizer or the data.

    Attributes:
        step: The number of finished steps; int32, shape `[]`.
        params: The module's `"params"` collection.
        model_state: The module's other persistent collections, `{collection: tree}`, such as `"batch_stats"`.
        opt_state: The optax state.
        key: The typed key that all randomness of training is derived from, by folding in the step; it never changes.
        ema_params: Averaged parameters, which are used for evaluation; `None` without `compile(ema_decay=...)`.
        axes: The logical axis names from the module's metadata; not an array, and ignored when states are compared.

    >>> import jax.numpy as jnp
    >>> state = TrainState(step=jnp.int32(0), params={"w": jnp.ones(3)}, model_state={}, opt_state=(), key=jax.random.key(0))
    >>> state.params["w"].shape
    (3,)
    """

    step: jax.Array
    params: PyTree
    model_state: dict[str, PyTree]
    opt_state: PyTree
    key: jax.Array
    ema_params: PyTree | None = None
    axes: AxisNames = dataclasses.field(default=AxisNames(is_known=False), metadata={"pytree_node": False})

    if not TYPE_CHECKING:  # Otherwise type checkers would accept any attribute name.

        def __getattr__(self, name):
            """Raises an error that says where to find an attribute of other libraries' states."""
            if hasattr(type(self), name):  # A property raised an AttributeError; its message is more helpful.
                return object.__getattribute__(self, name)
            hints = {"apply_gradients": "Use apply_gradient(grads, optimizer, model_state)", "batch_stats": "Use model_state['batch_stats']"}
            raise no_attribute(self, name, hints)

    @property
    def param_states(self) -> PyTree:
        """T5X's name for `opt_state`."""
        return self.opt_state

    @property
    def flax_mutables(self) -> dict[str, PyTree]:
        """T5X's name for `model_state`."""
        return self.model_state

    def replace_params(self, params: PyTree) -> Self:
        """Returns the state with other parameters; averaged parameters start over from them.

        The optimizer state is kept. It may depend on the old parameters, as the moments of Adam do; `Trainer.replace_params` initializes it again.

        Args:
            params: Parameters with the structure, shapes and dtypes of `params`; a `FrozenDict` is accepted for a dict.

        Raises:
            ConfigError: The structure, shapes or dtypes differ.

        >>> state = TrainState(step=jnp.int32(7), params={"w": jnp.ones(2)}, model_state={}, opt_state=(), key=jax.random.key(0))
        >>> state = state.replace_params({"w": jnp.zeros(2)})
        >>> int(state.step), state.params["w"].tolist()
        (7, [0.0, 0.0])
        """
        params = _with_structure("replace_params", self.params, params)
        return dataclasses.replace(self, params=params, ema_params=None if self.ema_params is None else start_average(params))

    def replace_step(self, step: Any) -> Self:
        """Returns the state with another number of finished steps.

        Args:
            step: The number, an integer or a scalar array `[]`.

        >>> state = TrainState(step=jnp.int32(7), params={"w": jnp.ones(2)}, model_state={}, opt_state=(), key=jax.random.key(0))
        >>> int(state.replace_step(0).step)
        0
        """
        return dataclasses.replace(self, step=jnp.asarray(step, self.step.dtype))

    def apply_gradient(self, grads: PyTree, optimizer: optax.GradientTransformation, model_state: Mapping[str, PyTree] | None = None, **extra: Any) -> Self:
        """Returns the state after one update; a custom `train_step` usually ends with it.

        Args:
            grads: The gradient, with the structure of `params`. Pass zeros for parameters that have none.
            optimizer: The transformation that `opt_state` belongs to.
            model_state: Collections that the module has changed; other collections are kept.
            **extra: Extra arguments of the transformation's `update`.

        Raises:
            ConfigError: `grads` has another structure than `params`.

        >>> import jax.numpy as jnp
        >>> sgd, params = optax.sgd(0.5), {"w": jnp.ones(2)}
        >>> state = TrainState(step=jnp.int32(0), params=params, model_state={"a": {}, "b": {}}, opt_state=sgd.init(params), key=jax.random.key(0))
        >>> state = state.apply_gradient({"w": jnp.ones(2)}, sgd, {"a": {"mean": jnp.zeros(())}})
        >>> state.params["w"].tolist(), int(state.step), sorted(state.model_state)
        ([0.5, 0.5], 1, ['a', 'b'])
        """
        _check_gradient(grads, self.params)
        updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, self.opt_state, self.params, **extra)
        params, collections = optax.apply_updates(self.params, updates), {**self.model_state, **(model_state or {})}
        return dataclasses.replace(self, step=self.step + 1, params=params, opt_state=opt_state, model_state=collections)

    def logical_axes(self, *, strict: bool = True) -> "TrainState":
        """Returns a state of the same structure in which each array is replaced by the logical names of its axes, from linen's metadata.

        The names are those of `nn.with_logical_partitioning` or `nn.with_partitioning`, as a `jax.sharding.PartitionSpec` for each array, which
        `nn.logical_to_mesh` takes. An optimizer array with the shape of its parameter has the parameter's names; others have none.

        Args:
            strict: Whether all parameters and arrays of the collections must have names; if not, arrays without names have `None` for each axis.

        Raises:
            ModelError: Arrays have more names than axes or, if `strict`, no names. The message lists all of them.

        >>> import fitflax, numpy as np
        >>> from flax import linen as nn
        >>> trainer = fitflax.Trainer(nn.Dense(3, use_bias=False, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))))
        >>> trainer.compile("adam", "mse")
        >>> trainer.build(np.ones((4, 2)))
        >>> trainer.state.logical_axes().params["kernel"]
        P('embed', 'mlp')
        """
        params, model_state, opt_state = self.axes.specs(self.params, self.model_state, self.opt_state, strict=strict)
        averages = None if self.ema_params is None else params
        none = cast(jax.Array, PartitionSpec())
        return dataclasses.replace(self, step=none, params=params, model_state=model_state, opt_state=opt_state, key=none, ema_params=averages)

    def for_inference(self) -> "InferenceState":
        """Returns the state for evaluation and prediction: parameters (the averaged ones if there are any) and collections.

        >>> averages = {"w": jnp.zeros(2)}
        >>> state = TrainState(step=jnp.int32(7), params={"w": jnp.ones(2)}, model_state={}, opt_state=(), key=jax.random.key(0), ema_params=averages)
        >>> state.for_inference().params["w"].tolist()
        [0.0, 0.0]
        """
        return InferenceState(step=self.step, params=self.params if self.ema_params is None else self.ema_params, model_state=self.model_state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as nested dicts with string keys, as in `flax.serialization`; the random key is stored as key data.

        >>> state = TrainState(step=jnp.int32(7), params={"w": jnp.ones(2)}, model_state={}, opt_state=(), key=jax.random.key(0))
        >>> sorted(state.state_dict())
        ['ema_params', 'key', 'model_state', 'opt_state', 'params', 'step']
        """
        return dict(serialization.to_state_dict({**arrays_of(self), "key": jax.random.key_data(self.key)}))

    def restore_state(self, state_dict: Mapping[str, Any]) -> Self:
        """Returns this state with the values of a `state_dict`.

        Args:
            state_dict: The result of `state_dict`, of a state with the same structure, shapes and dtypes.

        Raises:
            RestoreError: The structure, shapes or dtypes differ.

        >>> state = TrainState(step=jnp.int32(7), params={"w": jnp.ones(2)}, model_state={}, opt_state=(), key=jax.random.key(0))
        >>> int(state.replace_step(0).restore_state(state.state_dict()).step)
        7
        """
        target = {**arrays_of(self), "key": jax.random.key_data(self.key)}
        try:
            saved = serialization.to_state_dict(dict(state_dict))
            faults = state_faults(serialization.to_state_dict(target), saved)
            restored = {} if faults else serialization.from_state_dict(target, saved)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise RestoreError(f"The state_dict does not fit this state: {error}") from error
        if faults:
            raise RestoreError(f"The state_dict does not fit this state: {faults}.")
        key = key_of(restored.pop("key"), jax.random.key_impl(self.key))
        return dataclasses.replace(self, key=key, **restored)


@struct.dataclass
class InferenceState:
    """The part of the state that evaluation and prediction need, without an optimizer state; loading it does not read optimizer data.

    Created by `TrainState.for_inference`, `Trainer.inference_state` and `checkpoints.load_inference_state`.

    Attributes:
        step: The number of finished steps; int32, shape `[]`.
        params: The parameters; the averaged ones if the run had them.
        model_state: The module's other collections.

    >>> import jax.numpy as jnp
    >>> state = InferenceState(step=jnp.int32(7), params={"w": jnp.ones(3)}, model_state={"batch_stats": {"mean": jnp.zeros(3)}})
    >>> sorted(state.variables)
    ['batch_stats', 'params']
    """

    step: jax.Array
    params: PyTree
    model_state: dict[str, PyTree]

    @property
    def flax_mutables(self) -> dict[str, PyTree]:
        """T5X's name for `model_state`."""
        return self.model_state

    @property
    def variables(self) -> dict[str, PyTree]:
        """The variables for the module's `apply`."""
        return {"params": self.params, **self.model_state}

    @property
    def opt_state(self) -> NoReturn:
        """Not available; raises `OptimizerError`."""
        raise OptimizerError("An InferenceState has no optimizer. Restore the checkpoint into a compiled Trainer to continue training.")

    param_states = opt_state


def arrays_of(state: Any) -> dict[str, Any]:
    """Returns the array fields of a state by name."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.metadata.get("pytree_node", True)}


def parts_of(variables: Mapping[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the parameters and the other collections, `{collection: tree}`, of variables."""
    return variables["params"], {name: tree for name, tree in variables.items() if name != "params"}


def only_params(state: TrainState, **parts: Any) -> TrainState:
    """Returns a state with only the parameters, and with `parts` as its other fields."""
    return dataclasses.replace(state, **{"model_state": {}, "opt_state": (), "ema_params": None, **parts})


def start_average(params: PyTree) -> PyTree:
    """Returns the initial averages: a copy of the parameters in float32 or wider, because half precision would round small changes away."""

    def one(value: jax.Array) -> jax.Array:
        # Copied, because a step can donate each buffer only once.
        return jnp.copy(value.astype(jnp.promote_types(value.dtype, jnp.float32)) if jnp.issubdtype(value.dtype, jnp.inexact) else value)

    return jax.tree.map(one, params)


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the global L2 norm of a tree. It is computed in float32 or wider, because squares overflow float16 for values above 255."""

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    def sums_of_squares(leaf: jax.Array) -> jax.Array:
        # Without barriers, XLA would store squares that an optimizer needs too, and would join this sum with the next, which is slower.
        squares = jnp.square(jnp.abs(wide(jax.lax.optimization_barrier(leaf))))
        return cast(jax.Array, jax.lax.optimization_barrier(squares.sum(axis=-1 if leaf.ndim else None)))

    return cast(
        jax.Array,
        jax.lax.platform_dependent(
            tree,
            cpu=lambda tree: jnp.sqrt(optax.tree.sum(jax.tree.map(sums_of_squares, tree))),
            default=lambda tree: optax.tree.norm(jax.tree.map(wide, tree)),
        ),
    )


def shapes_in(tree: PyTree) -> PyTree:
    """Returns the shapes and dtypes of arrays, without their shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def shapes_key(tree: PyTree) -> Any:
    """Returns a key of caches: structure, shapes and dtypes. The text of a tree is not one, because a class without a repr shows its address."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _with_structure(caller: str, old: PyTree, new: PyTree) -> PyTree:
    """Returns `new` in the containers of `old`, after checking that structure, shapes and dtypes are the same."""
    structures: list[Any] = [jax.tree.structure(unfreeze(tree)) for tree in (old, new)]
    if structures[0] != structures[1]:
        raise ConfigError(f"{caller}: the structure must not change. Expected: {structures[0]}. Received: {structures[1]}.")
    for (path, have), want in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            where = jax.tree_util.keystr(path)
            raise ConfigError(f"{caller}: {where} must be {want.dtype}{list(want.shape)}. Received: {have.dtype}{list(have.shape)}.")
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))


def _check_gradient(grads: PyTree, params: PyTree) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (grads, params)]
    if structures[0] == structures[1]:
        return
    have, want = ([name for name, _ in named_leaves(tree)] for tree in (grads, params))
    missing, unknown = ([name for name in one if name not in other] for one, other in ((want, have), (have, want)))
    faults = [f"{what}: {listed(names)}." for what, names in (("Missing", missing), ("Not in params", unknown)) if names]
    advice = (
        " For gradients of only a part, add zeros: {**jax.tree.map(jnp.zeros_like, state.params), 'head': head_grads}. To leave the other parameters "
        "unchanged, compile with optimizers.train_only(optimizer, 'head')."
    )
    raise ConfigError(
        "apply_gradient(grads, ...) takes a gradient for each parameter, with the structure of params. "
        f"{' '.join(faults) or f'Received: {structures[0]}. Expected: {structures[1]}.'}{advice if missing else ''}"
    )


def state_faults(old: PyTree, new: PyTree) -> str:
    """Returns where `new`, a state or a part of one, differs from `old` in structure, shapes or dtypes; an empty string if nowhere."""
    before, after = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (old, new))
    faults = []
    for path in {**before, **after}:
        was, now, name = before.get(path), after.get(path), jax.tree_util.keystr(path)
        if was is None or now is None:
            faults.append(f"{name} is {'new' if was is None else 'missing'}")
        elif not hasattr(now, "dtype") or was.shape != now.shape or was.dtype != now.dtype:
            faults.append(f"{name} is {describe_shapes(now)} instead of {describe_shapes(was)}")
    return listed(faults, "; ")


class Batch(NamedTuple):
    """One batch of fixed shape.

    Attributes:
        x: The inputs of the module: the elements of a plain tuple are positional arguments; anything else, including a NamedTuple, is one argument.
        y: The targets; `()` if there are none.
        mask: bool `[batch]`; False marks padding, which repeats real rows and has weight zero.
        weights: Sample weight times class weight, `[batch]` or `[batch, ...]`; `None` if there are none. A real example with weight 0 is not padding.

    >>> import numpy as np
    >>> Batch(x=np.ones((2, 3)), y=np.zeros(2), mask=np.array([True, False])).mask.sum()
    np.int64(1)
    """

    x: PyTree
    y: PyTree
    mask: Any
    weights: Any = None

    @property
    def nbytes(self) -> int:
        """The size of all parts except the mask, in bytes."""
        x, y, _, weights = self
        if type(x) is np.ndarray and type(y) is np.ndarray and weights is None:  # A fast path, because this is computed in each step.
            return int(x.nbytes + y.nbytes)
        return sum(leaf.nbytes for leaf in jax.tree.leaves((x, y, weights)))


def shapes_of(batch: Batch) -> Batch:
    """Returns a batch with the shapes of the inputs and the mask."""
    x, mask = shapes_in((batch.x, batch.mask))
    return Batch(x, (), mask)
