"""What a step adds to an optimizer: numerical settings, the loss scale of float16, arguments of its update, and the groups of its parameters.

Stored arrays stay float32; with `precision`, only the module computes in half precision. Parameters and inputs are cast before it, so gradients have the
dtype of the stored parameters. Outputs and changed collections are cast back after it.

The smallest number of float16 is 6e-8, so the loss is multiplied by a scale before differentiation, and the gradient divided by it after. If a gradient
is not finite, the update is skipped and the scale is halved. After many good steps in a row, the scale is doubled. It is part of the optimizer state, so it
is saved and restored with it.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.errors import ConfigError, FitflaxError, OptimizerError, integer_of, is_of_debugger
from fitflax.leaves import listed, named_leaves
from fitflax.models.base import parameters_of
from fitflax.parallel import Strategy
from fitflax.state import PyTree, shapes_in, state_faults
from fitflax.steps.outputs import map_outputs

_HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
_PRECISIONS = ("float32", *_HALF)

FIRST_SCALE = 2.0**15
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24
# Number of good steps in a row after which the scale is doubled.
PATIENCE = 2000

GIVEN = ("value", "grad", "value_fn", "grad_fn", "obj_fn")
"""The loss of the batch, its gradient, the loss as a function of the parameters (under two names of optax), and the gradient as a function."""

_EMPTY = types.CellType()


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The numerical settings of `compile`."""

    accumulate_steps: int = 1  # Number of micro-batches that a batch is split into.
    precision: str = "float32"  # Precision of the module's computation: `"float32"`, which casts nothing, `"bfloat16"` or `"float16"`.
    ema_decay: float | None = None  # Decay of the averaged parameters at each update; `None` for no average.

    def __post_init__(self) -> None:
        precision, decay = self.precision, self.ema_decay
        steps = integer_of("compile(accumulate_steps=...)", self.accumulate_steps, at_least=1)
        if not isinstance(precision, str) or precision not in _PRECISIONS:
            raise ConfigError(f"compile(precision=...) must be one of {', '.join(map(repr, _PRECISIONS))}. Received: {precision!r}.")
        is_number = isinstance(decay, int | float | np.number) and not isinstance(decay, bool)
        if decay is not None and not (is_number and 0 < decay < 1):
            raise ConfigError(f"compile(ema_decay=...) must be a number between 0 and 1, such as 0.999, or None. Received: {decay!r}.")
        # Python numbers, which can be written into a checkpoint.
        object.__setattr__(self, "accumulate_steps", steps)
        object.__setattr__(self, "ema_decay", None if decay is None else float(decay))

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled, because small gradients would underflow in this precision."""
        return self.precision == "float16"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name; `None` for defaults, as in checkpoints that are older than a setting."""
        default = Numerics()
        return {name: None if value == getattr(default, name) else value for name, value in dataclasses.asdict(self).items()}

    def check_custom_step(self) -> None:
        """Raises `ConfigError` if a setting cannot be applied to a custom step."""
        faults = [name for name in ("accumulate_steps", "precision") if self.settings[name] is not None]
        if faults:
            raise ConfigError(
                f"compile({', '.join(f'{name}={getattr(self, name)!r}' for name in faults)}) cannot be combined with an overridden train_step, which performs "
                "the whole update. Override compute_loss instead, or leave this out and implement it in train_step."
            )

    # -- precision --

    @property
    def is_half(self) -> bool:
        """Whether the module computes in half precision."""
        return self.precision in _HALF

    def narrow(self, tree: PyTree) -> PyTree:
        """Returns a tree with its floating-point leaves in the compute dtype."""
        dtype = _HALF.get(self.precision)
        return tree if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)

    def widen(self, tree: PyTree) -> PyTree:
        """Returns outputs with floating-point leaves in float32 or wider, in the same containers and order."""
        if not self.is_half:
            return tree
        return map_outputs(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if _is_float(leaf) else leaf, tree)

    def as_stored(self, changed: dict[str, PyTree], stored: dict[str, PyTree], given: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns collections that the module changed in their stored dtypes; new collections are unchanged.

        `given` are the values that the module received. Where it did not change them, the stored values are returned, which are not rounded.
        """
        if not self.is_half:
            return changed
        return {name: _cast_like(tree, stored[name], given[name]) if name in stored else tree for name, tree in changed.items()}

    # -- averaged parameters --

    def average(self, averages: PyTree, params: PyTree) -> PyTree:
        """Returns the updated averages, `d * average + (1 - d) * value`; parameters that are not floating-point are copied."""
        decay = cast(float, self.ema_decay)

        def one(average: jax.Array, value: jax.Array) -> jax.Array:
            if not jnp.issubdtype(average.dtype, jnp.inexact):
                return jnp.copy(value)
            return decay * average + (1 - decay) * value.astype(average.dtype)

        return jax.tree.map(one, averages, params)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _cast_like(tree: PyTree, stored: PyTree, given: PyTree) -> PyTree:
    structures: list[Any] = [jax.tree.structure(each) for each in (tree, stored)]
    if structures[0] != structures[1]:
        return tree  # The error is raised where states are compared.

    def one(leaf: Any, old: Any, narrowed: Any) -> Any:
        if leaf is narrowed or not (_is_float(leaf) and _is_float(old)):
            return old if leaf is narrowed else leaf
        new, is_rounded = leaf.astype(old.dtype), narrowed.dtype != old.dtype and leaf.shape == old.shape
        return jnp.where(leaf == narrowed, old, new) if is_rounded else new

    return jax.tree.map(one, tree, stored, given)


class LossScaled(NamedTuple):
    """An optimizer state with the loss scale."""

    inner_state: PyTree  # State of the wrapped optimizer.
    scale: jax.Array  # Factor of the loss in the next step, a power of two; float32 `[]`.
    good_steps: jax.Array  # Steps with a finite gradient since the last change of the scale; int32 `[]`.


def scaled_state(opt_state: PyTree) -> LossScaled:
    """Returns an optimizer state with the initial scale."""
    return LossScaled(opt_state, jnp.float32(FIRST_SCALE), jnp.int32(0))


def unscaled(grads: PyTree, scale: jax.Array) -> PyTree:
    """Returns the gradient of the loss, given that of the loss times `scale`; exact up to underflow, because the scale is a power of two."""

    def one(grad: jax.Array) -> jax.Array:
        wide = jnp.promote_types(grad.dtype, scale.dtype)  # Large scales are infinite in float16.
        return (grad.astype(wide) / scale.astype(wide)).astype(grad.dtype)

    return jax.tree.map(one, grads)


def are_finite(leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns for each array whether all of its values are finite; bool `[leaves]`."""

    def on_cpu(leaf: jax.Array) -> jax.Array:
        # The difference is 0, or NaN if a value is not finite. Sums over all axes are slower, and `jnp.max` may ignore NaN.
        return jnp.isfinite(jnp.sum(leaf - leaf, axis=-1 if leaf.ndim else None)).all()

    def each(is_finite: Callable[[jax.Array], jax.Array]) -> Callable[[Sequence[jax.Array]], jax.Array]:
        return lambda leaves: jnp.array([is_finite(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else True for leaf in leaves], bool)

    # Other compilers may replace the difference by 0. On a CPU, `jnp.isfinite` takes four times as long.
    return cast(jax.Array, jax.lax.platform_dependent(leaves, cpu=each(on_cpu), default=each(lambda leaf: jnp.isfinite(leaf).all())))


def with_loss_scale(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that adds a loss scale to its state, and does not change the wrapped state if the gradient is not finite.

    It takes gradients that are already `unscaled`. If a gradient is not finite, its updates are invalid, and the caller must skip them.

    >>> optimizer = with_loss_scale(optax.sgd(0.1, momentum=0.9))
    >>> state = optimizer.init({"w": jnp.zeros(1)})
    >>> _, state = optimizer.update({"w": jnp.array([jnp.inf])}, state, {"w": jnp.zeros(1)})
    >>> float(state.scale), state.inner_state[0].trace
    (16384.0, {'w': Array([0.], dtype=float32)})
    """

    def init(params: PyTree) -> LossScaled:
        return scaled_state(optimizer.init(params))

    def update(grads: PyTree, state: LossScaled, params: PyTree = None, **extra: Any) -> tuple[PyTree, LossScaled]:
        updates, inner_state = optimizer.update(grads, state.inner_state, params, **extra)
        is_good = are_finite(jax.tree.leaves(grads)).all()
        good_steps = jnp.where(is_good, state.good_steps + 1, 0)
        grows = good_steps >= PATIENCE
        grown = jnp.where(grows, jnp.minimum(state.scale * 2, MAX_SCALE), state.scale)
        scale = jnp.where(is_good, grown, jnp.maximum(state.scale / 2, MIN_SCALE))
        return updates, LossScaled(optax.tree.where(is_good, inner_state, state.inner_state), scale, jnp.where(grows, 0, good_steps))

    return optax.GradientTransformationExtraArgs(init, update)


def with_extra_arguments(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose `update` takes all of `GIVEN`, and passes on those that the given one accepts.

    Errors of the optimizer are raised as `OptimizerError`.

    >>> tx = with_extra_arguments(optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau()))
    >>> params = {"w": jnp.ones(1)}
    >>> updates, _ = tx.update(params, tx.init(params), params, value=1.0, grad=params, value_fn=None)
    >>> float(updates["w"][0])
    -0.5
    """
    # Check the signature, not the class: the update of `optax.MultiSteps` passes arguments on, but is not a `GradientTransformationExtraArgs`.
    accepted = _accepted_arguments(optimizer.update)

    def init(params: PyTree) -> PyTree:
        with _explain_errors("could not be initialized", params):
            return _as_arrays(optimizer.init(params))

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        passed = extra if accepted is None else {name: value for name, value in extra.items() if name in accepted}
        with _explain_errors("failed in its update", grads):
            updates, new_state = optimizer.update(grads, state, params, **passed)
            new_state = _as_arrays(new_state)
        structures: list[Any] = [jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None) for tree in (grads if params is None else params, updates)]
        if structures[0] != structures[1]:
            raise OptimizerError(f"The optimizer must return an update for each parameter. Expected: {structures[0]}. Received: {structures[1]}.")
        if faults := state_faults(state, new_state):
            raise OptimizerError(f"The optimizer's update must return a state with the same structure, shapes and dtypes. Differences: {faults}.")
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def _explain_errors(what: str, params: PyTree) -> Iterator[None]:
    """Wraps exceptions of an optimizer in an `OptimizerError` that explains them; `params` has the structure of the parameters."""
    try:
        yield
    except Exception as error:
        # A RuntimeError comes from JAX, for example if a device is out of memory.
        if is_of_debugger(error) or isinstance(error, FitflaxError | RuntimeError | MemoryError):
            raise
        text = " ".join(str(error).partition("\nThe error occurred while tracing")[0].split())  # JAX appends a page of details.
        if isinstance(error, TypeError) and "required keyword-only argument" in text:
            raise _unknown_argument(text) from error
        text, hint = f"{type(error).__name__}: {text}", ""
        if "'fast'" in text or "LookaheadParams" in text:
            hint = (
                " optax.lookahead takes LookaheadParams, but a trainer passes parameters. Keep the slow parameters in the optimizer state (see the guide "
                "'Average the parameters'), or use compile(ema_decay=0.99)."
            )
        elif "FrozenDict" in text:
            text = "a mask or labels are a FrozenDict, but the parameters are dicts"
            hint = " Convert them: flax.core.unfreeze(mask)."
        elif "pytree structure" in text:
            names = listed([name for name, _ in named_leaves(params)])
            hint = f" Masks and labels must have the structure of the parameters, or of the upper part of it: {names}."
        period = "." if hint and not text.endswith((".", "!", "?")) else ""
        raise OptimizerError(f"The optimizer {what}: {text}{period}{hint}") from error


def _as_arrays(state: PyTree) -> PyTree:
    """Returns an optimizer state as arrays; a custom optimizer may keep Python numbers."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), state)


def _accepted_arguments(update: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the keyword arguments that `update` accepts; `None` if it accepts any."""
    parameters = list(parameters_of(update).values())
    required = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    unknown = [name for name in required if name not in GIVEN]
    if unknown:
        raise _unknown_argument(f"update() requires {', '.join(map(repr, unknown))}")
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters[3:])


def _unknown_argument(fault: str) -> OptimizerError:
    return OptimizerError(
        f"The optimizer's update requires an argument that a training step does not pass: {fault}. A step passes {', '.join(GIVEN)}. "
        "To pass others, override train_step: state.apply_gradient(grads, self.optimizer, name=...)."
    )


def loss_functions(local: Callable[[PyTree], jax.Array], strategy: Strategy, scale: jax.Array | None) -> dict[str, Callable[..., Any]]:
    """Returns the functions in `GIVEN`, which are the same on all replicas; nothing is computed until one is called.

    `local` returns a replica's share of the loss as a function of the parameters; it is multiplied by `scale` during differentiation.
    """
    loss = local if strategy.num_replicas == 1 and scale is None else _global_loss(local, strategy, scale)

    def value_fn(params: PyTree, *, grad_fn: Any = None, obj_fn: Any = None) -> jax.Array:
        # optax's line searches raise if `value_fn` does not accept their other arguments.
        return loss(params)

    def grad_fn(params: PyTree, index: Any = 0) -> PyTree:
        return jax.grad(loss)(params)

    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": loss}


def _global_loss(local: Callable[[PyTree], jax.Array], strategy: Strategy, scale: jax.Array | None) -> Callable[[PyTree], jax.Array]:
    factor = jnp.float32(1) if scale is None else scale

    @jax.custom_vjp
    def loss(params: PyTree) -> jax.Array:
        value: jax.Array = strategy.sum(local(params))
        return value

    def forward(params: PyTree) -> tuple[jax.Array, PyTree]:
        def scaled(params: PyTree) -> tuple[jax.Array, jax.Array]:
            value = local(params)
            return value * factor, value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        value, grads = strategy.sum((value, grads))
        return value, unscaled(grads, factor)

    def backward(grads: PyTree, cotangent: jax.Array | float) -> tuple[PyTree]:
        # Differentiating through the sum over replicas would sum the gradient again. The cotangent is a Python number in optax's backtracking line search.
        return (jax.tree.map(lambda grad: grad * jnp.asarray(cotangent, grad.dtype), grads),)

    loss.defvjp(forward, backward)
    return lambda params: loss(params)


class Group(NamedTuple):
    """Parameters that the optimizer treats in the same way."""

    name: str  # The label; "frozen" or "others" if the optimizer has no labels.
    paths: list[str]
    is_frozen: bool  # Whether their updates are always zero.


def parameter_groups(optimizer: optax.GradientTransformation, params: PyTree) -> list[Group]:
    """Returns the groups of parameters, or none if all are treated in the same way. Only shapes are evaluated.

    A parameter is frozen if its traced update does not depend on gradients, parameters or the optimizer state. Labels are those of the only
    `optax.multi_transform` (`partition`) in the optimizer; optax does not expose them, so they are read from its closures. If the update needs more
    than gradients and parameters, such as the loss, there are no groups.

    >>> import jax.numpy as jnp
    >>> halves = {"backbone": optax.set_to_zero(), "head": optax.sgd(0.1)}
    >>> parameter_groups(optax.multi_transform(halves, {"a": "backbone", "b": "head"}), {"a": jnp.ones(2), "b": jnp.ones(3)})
    [Group(name='backbone', paths=['a'], is_frozen=True), Group(name='head', paths=['b'], is_frozen=False)]
    """
    params = shapes_in(params)
    paths = [path for path, _ in named_leaves(params)]
    try:
        frozen = _frozen_flags(optimizer, params)
    except Exception:  # noqa: BLE001 (the update needs arguments that only a training step passes)
        return []
    labels = _labels(optimizer, params) or ["frozen" if is_frozen else "others" for is_frozen in frozen]
    members: dict[tuple[str, bool], list[str]] = {}
    for path, label, is_frozen in zip(paths, labels, frozen, strict=True):
        members.setdefault((label, is_frozen), []).append(path)
    groups = [Group(name, found, is_frozen) for (name, is_frozen), found in sorted(members.items())]
    return groups if len(groups) > 1 or any(group.is_frozen for group in groups) else []


def _frozen_flags(optimizer: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """Returns for each parameter whether its update is a constant, such as optax's zeros."""
    whole = optax.with_extra_args_support(optimizer)
    opt_state = jax.eval_shape(whole.init, params)
    closed = jax.make_jaxpr(lambda grads, state, params: jax.tree.leaves(whole.update(grads, state, params)[0]))(params, opt_state, params)
    return [not depends for depends in _dependent_outputs(closed.jaxpr, [True] * len(closed.jaxpr.invars))]


def _dependent_outputs(jaxpr: Any, inputs: list[bool]) -> list[bool]:
    """Returns which outputs of a jaxpr depend on the marked inputs."""
    marked = {variable for variable, is_marked in zip(jaxpr.invars, inputs, strict=True) if is_marked}

    def is_marked(atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in marked  # Literals have `val` and are not hashable.

    for equation in jaxpr.eqns:
        marked_inputs = [is_marked(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and equation.primitive.name in ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call"):
            results = _dependent_outputs(inner, marked_inputs)
        else:
            results = [any(marked_inputs)] * len(equation.outvars)
        marked |= {variable for variable, result in zip(equation.outvars, results, strict=True) if result}
    return [is_marked(atom) for atom in jaxpr.outvars]


def _labels(optimizer: optax.GradientTransformation, params: PyTree) -> list[str] | None:
    """Returns each parameter's label; `None` if there is not exactly one `multi_transform`, or it does not label all parameters."""
    label_trees = list(_label_trees(optimizer.init, set()))
    if len(label_trees) != 1:
        return None
    try:
        labels = label_trees[0](params) if callable(label_trees[0]) else label_trees[0]
        whole = jax.tree.map(lambda label, part: jax.tree.map(lambda _: str(label), part), labels, params)
    except Exception:  # noqa: BLE001 (a custom function may not accept this tree)
        return None
    return cast(list[str], jax.tree.leaves(whole))


def _label_trees(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the `param_labels` that the functions of an optimizer hold in their closures."""
    if id(node) in seen:
        return
    seen.add(id(node))
    children: Iterable[Any] = ()
    if isinstance(node, optax.GradientTransformation):
        children = (node.init,)  # Its update has the same labels.
    elif isinstance(node, tuple | list):
        children = node
    elif isinstance(node, dict):
        children = node.values()
    elif hasattr(node, "__closure__"):
        cells = dict(zip(node.__code__.co_freevars, node.__closure__ or (), strict=True))
        contents = {name: cell.cell_contents for name, cell in cells.items() if cell != _EMPTY}
        if "param_labels" in contents:
            yield contents["param_labels"]
        else:
            children = contents.values()
    elif hasattr(node, "func"):  # A functools.partial.
        children = (node.func,)
    for child in children:
        yield from _label_trees(child, seen)
