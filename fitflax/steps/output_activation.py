"""Finds the activation that a traced function ends with, for losses that take logits."""

from typing import Any

from jax.extend import core

__all__ = ["last_activations"]

# Primitives that change the shape or dtype of an array but not its values.
_TRANSPARENT = {"convert_element_type", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "transpose"}


def last_activations(jaxpr: core.ClosedJaxpr | core.Jaxpr, num: int | None = None) -> list[str]:
    """Returns `"softmax"`, `"sigmoid"` or `""` for each output of a traced function, or for its last `num` outputs.

    >>> import jax
    >>> import numpy as np
    >>> last_activations(jax.make_jaxpr(lambda x: (jax.nn.softmax(2 * x), jax.nn.sigmoid(x), x + 1))(np.ones((2, 3))))
    ['softmax', 'sigmoid', '']
    """
    count = len(jaxpr.jaxpr.outvars if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr.outvars)
    return [_activation(jaxpr, index) for index in range(0 if num is None else count - num, count)]


def _activation(jaxpr: Any, output: int) -> str:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    producers = {variable: (equation, index) for equation in jaxpr.eqns for index, variable in enumerate(equation.outvars)}
    variable = jaxpr.outvars[output]
    while (found := _producer(variable, producers)) is not None:
        equation, index = found
        name = equation.primitive.name
        if name in _TRANSPARENT:
            variable = equation.invars[0]
            continue
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None and name not in ("scan", "while", "pallas_call"):
            return _activation(inner, index)
        if name == "logistic":
            return "sigmoid"
        return "softmax" if name == "div" and _is_softmax(equation, producers) else ""
    return ""


def _is_softmax(division: Any, producers: dict[Any, Any]) -> bool:
    """Returns whether a division is that of exponentials by their sum."""
    above, below = (_producer(variable, producers) for variable in division.invars)
    while below is not None and below[0].primitive.name in ("broadcast_in_dim", *_TRANSPARENT):
        below = _producer(below[0].invars[0], producers)
    return above is not None and above[0].primitive.name == "exp" and below is not None and below[0].primitive.name == "reduce_sum"


def _producer(variable: Any, producers: dict[Any, Any]) -> Any:
    return None if isinstance(variable, core.Literal) else producers.get(variable)
