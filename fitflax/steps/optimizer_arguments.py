"""Extra arguments of an optimizer's `update`, if it accepts them: the loss, and the loss as a function. Also explains errors of optimizers.

optax passes keyword arguments through chains and wrappers to the transformations that use them: line searches, Polyak step sizes,
`reduce_on_plateau`.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.errors import FitflaxError, OptimizerError, is_of_debugger
from fitflax.leaves import listed, named_leaves
from fitflax.parallel import Strategy
from fitflax.state import PyTree
from fitflax.steps.state_structure import state_faults

__all__ = ["global_loss", "loss_functions", "with_extra_arguments"]

GIVEN = ("value", "grad", "value_fn", "grad_fn", "obj_fn")
"""The loss of the batch, its gradient, the loss as a function of the parameters (under two names of optax), and the gradient as a function."""


def with_extra_arguments(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose `update` takes all of `GIVEN`, and passes on those that the given one accepts; its errors are `OptimizerError`s.

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
        # A RuntimeError is JAX's, such as one of a device without memory.
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
    try:
        parameters = list(inspect.signature(update).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
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


def loss_functions(loss: Callable[[PyTree], jax.Array]) -> dict[str, Callable[..., Any]]:
    """Returns the functions in `GIVEN`, from the loss as a function of the parameters; nothing is computed until one is called."""

    def value_fn(params: PyTree, *, grad_fn: Any = None, obj_fn: Any = None) -> jax.Array:
        # optax's line searches raise if `value_fn` does not accept their other arguments.
        return loss(params)

    def grad_fn(params: PyTree, index: Any = 0) -> PyTree:
        return jax.grad(loss)(params)

    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": loss}


def global_loss(local: Callable[[PyTree], jax.Array], strategy: Strategy, scale: jax.Array | None) -> Callable[[PyTree], jax.Array]:
    """Returns the global loss as a function of the parameters; it and its gradient are the same on all replicas.

    `local` returns this replica's share of the loss, which is multiplied by `scale` during differentiation.
    """
    if strategy.num_replicas == 1 and scale is None:
        return local
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
        return value, jax.tree.map(lambda grad: grad / factor.astype(grad.dtype), grads)

    def backward(grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
        # Differentiating through the sum over replicas would sum the gradient again.
        return (jax.tree.map(lambda grad: grad * cotangent.astype(grad.dtype), grads),)

    loss.defvjp(forward, backward)
    return lambda params: loss(params)
