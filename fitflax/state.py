"""What is trained, what is served and what is fed: `TrainState`, `InferenceState` and `Batch`, all plain pytrees of arrays."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, cast

import jax
import numpy as np
import optax
from flax import serialization, struct
from jax.sharding import PartitionSpec

from fitflax.axes import AxisNames
from fitflax.errors import ConfigError, OptimizerError, RestoreError, no_attribute

__all__ = ["Batch", "InferenceState", "PyTree", "TrainState", "arrays_of", "shapes_of"]

PyTree = Any


@struct.dataclass
class TrainState:
    """Everything that training changes, as a frozen pytree of arrays; no module, no optimizer, no loader.

    Attributes:
        step: Finished updates; int32, shape `[]`.
        params: The module's `"params"` collection.
        model_state: The module's other collections that last from step to step, `{collection: tree}`, such as `"batch_stats"`.
        opt_state: The optax state.
        key: The typed key that all randomness of training is derived from; it never changes, the step is folded into it.
        ema_params: Averaged parameters, which are what is evaluated; `None` unless `compile(ema_decay=...)` asked for them.
        axes: The logical names of the arrays' axes, as far as the module gives any; no array, and no part of what makes two states equal.

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

    if not TYPE_CHECKING:  # Or every name would be an attribute.

        def __getattr__(self, name):
            """Says where to find what other libraries' states have under this name."""
            if hasattr(type(self), name):  # A property that failed: its own error says more.
                return object.__getattribute__(self, name)
            hints = {"apply_gradients": "Here it is apply_gradient(grads, optimizer, model_state)", "batch_stats": "Here it is model_state['batch_stats']"}
            raise no_attribute(self, name, hints)

    @property
    def param_states(self) -> PyTree:
        """T5X's name of `opt_state`."""
        return self.opt_state

    @property
    def flax_mutables(self) -> dict[str, PyTree]:
        """T5X's name of `model_state`."""
        return self.model_state

    def replace_params(self, params: PyTree) -> Self:
        """Returns the state with other parameters.

        Raises:
            ConfigError: They differ in structure, shapes or dtypes.
        """
        _check_alike("replace_params", self.params, params)
        return dataclasses.replace(self, params=params)

    def replace_step(self, step: Any) -> Self:
        """Returns the state with another number of finished updates; an integer, or an array of one."""
        return dataclasses.replace(self, step=jax.numpy.asarray(step, self.step.dtype))

    def apply_gradient(self, grads: PyTree, optimizer: optax.GradientTransformation, model_state: Mapping[str, PyTree] | None = None, **extra: Any) -> Self:
        """Returns the state after one update; what an overridden `train_step` usually ends with.

        Args:
            grads: The gradient, as `params`.
            optimizer: The transformation that `opt_state` is of.
            model_state: Collections that the module has changed; those that are not among them stay.
            **extra: What the transformation's `update` takes besides.

        >>> import jax.numpy as jnp
        >>> sgd, params = optax.sgd(0.5), {"w": jnp.ones(2)}
        >>> state = TrainState(step=jnp.int32(0), params=params, model_state={"a": {}, "b": {}}, opt_state=sgd.init(params), key=jax.random.key(0))
        >>> state = state.apply_gradient({"w": jnp.ones(2)}, sgd, {"a": {"mean": jnp.zeros(())}})
        >>> state.params["w"].tolist(), int(state.step), sorted(state.model_state)
        ([0.5, 0.5], 1, ['a', 'b'])
        """
        updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, self.opt_state, self.params, **extra)
        params, collections = optax.apply_updates(self.params, updates), {**self.model_state, **(model_state or {})}
        return dataclasses.replace(self, step=self.step + 1, params=params, opt_state=opt_state, model_state=collections)

    def logical_axes(self, *, strict: bool = True) -> "TrainState":
        """Returns a state of the same structure with the logical names of each array's axes in place of it, from linen's metadata.

        The names are those of `nn.with_logical_partitioning` or `nn.with_partitioning`, each array's in a `jax.sharding.PartitionSpec`, as
        `nn.logical_to_mesh` takes them. An array of the optimizer has its parameter's names where it has its shape; others, and numbers, have none.

        Args:
            strict: Whether every parameter and every array of the collections must have names; otherwise those without have `None` for each axis.

        Raises:
            ModelError: Arrays without names, all of them listed, or with more or fewer names than axes.

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
        """Returns what evaluation and prediction need: the averaged parameters where there are any, and collections."""
        return InferenceState(step=self.step, params=self.params if self.ema_params is None else self.ema_params, model_state=self.model_state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as nested dicts with strings for keys, as `flax.serialization` makes them; the key as its data."""
        return dict(serialization.to_state_dict({**arrays_of(self), "key": jax.random.key_data(self.key)}))

    def restore_state(self, state_dict: Mapping[str, Any]) -> Self:
        """Returns this state with the values of what `state_dict` returned for one of the same structure.

        Raises:
            RestoreError: It is of another structure.
        """
        target = {**arrays_of(self), "key": jax.random.key_data(self.key)}
        try:
            restored = serialization.from_state_dict(target, dict(state_dict))
        except (KeyError, ValueError, TypeError) as error:
            raise RestoreError(f"The state_dict is not that of such a state: {error}") from error
        key = jax.random.wrap_key_data(jax.numpy.asarray(restored.pop("key")), impl=jax.random.key_impl(self.key))
        return dataclasses.replace(self, key=key, **restored)


_NO_OPTIMIZER = "An InferenceState has no optimizer. Restore the checkpoint into a compiled Trainer to train on."


@struct.dataclass
class InferenceState:
    """What of a training is needed to evaluate and predict: no optimizer, of which not even the bytes are read.

    Made by `TrainState.for_inference`, `Trainer.inference_state` and `checkpoints.load_inference_state`.

    Attributes:
        step: Finished updates; int32, shape `[]`.
        params: The parameters; the averaged ones where the training had such.
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
        """T5X's name of `model_state`."""
        return self.model_state

    @property
    def variables(self) -> dict[str, PyTree]:
        """What the module's `apply` takes."""
        return {"params": self.params, **self.model_state}

    @property
    def opt_state(self) -> NoReturn:
        """There is none.

        Raises:
            OptimizerError: Always.
        """
        raise OptimizerError(_NO_OPTIMIZER)

    @property
    def param_states(self) -> NoReturn:
        """There are none.

        Raises:
            OptimizerError: Always.
        """
        raise OptimizerError(_NO_OPTIMIZER)


def arrays_of(state: Any) -> dict[str, Any]:
    """Returns a state's fields that hold arrays, by name."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.metadata.get("pytree_node", True)}


def _check_alike(caller: str, old: PyTree, new: PyTree) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (old, new)]
    if structures[0] != structures[1]:
        raise ConfigError(f"{caller}: the structure differs: {structures[1]} in place of {structures[0]}.")
    for (path, have), want in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            where = jax.tree_util.keystr(path)
            raise ConfigError(f"{caller}: {where} is {have.dtype}{list(have.shape)} in place of {want.dtype}{list(want.shape)}.")


class Batch(NamedTuple):
    """One batch of fixed shape.

    Attributes:
        x: What the module is called with: a tuple is spread over positional arguments, anything else is one argument.
        y: The targets; `()` where there are none.
        mask: bool `[batch]`; False marks padding, which repeats real rows and counts nowhere.
        weights: Sample weight times class weight, `[batch]` or `[batch, ...]`; `None` where none were given. A real example of weight 0 is not padding.

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
        """The bytes of all but the mask."""
        x, y, _, weights = self
        if type(x) is np.ndarray and type(y) is np.ndarray and weights is None:  # Asked at each step.
            return int(x.nbytes + y.nbytes)
        return sum(leaf.nbytes for leaf in jax.tree.leaves((x, y, weights)))


def shapes_of(batch: Batch) -> Batch:
    """Returns the shapes of the parts of a batch that the module is called with."""
    x, mask = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (batch.x, batch.mask))
    return Batch(x, (), mask)
