"""Which activation a traced function ends with: what a loss that takes logits must not be given."""

from typing import Any

from jax.extend import core

__all__ = ["last_activations"]

# What changes the form of an array and none of its numbers.
_TRANSPARENT = {"convert_element_type", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "transpose"}


def last_activations(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> list[str]:
    """Returns for each output of a traced function `"softmax"`, `"sigmoid"`, or `""` where it is neither.

    Args:
        jaxpr: What `jax.make_jaxpr` returns.

    >>> import jax
    >>> import numpy as np
    >>> last_activations(jax.make_jaxpr(lambda x: (jax.nn.softmax(2 * x), jax.nn.sigmoid(x), x + 1))(np.ones((2, 3))))
    ['softmax', 'sigmoid', '']
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    made_by = {variable: (equation, index) for equation in jaxpr.eqns for index, variable in enumerate(equation.outvars)}
    return [_activation(variable, made_by) for variable in jaxpr.outvars]


def _activation(variable: Any, made_by: dict[Any, Any]) -> str:
    while (found := _maker(variable, made_by)) is not None:
        equation, index = found
        name = equation.primitive.name
        if name in _TRANSPARENT:
            variable = equation.invars[0]
            continue
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None and name not in ("scan", "while", "pallas_call"):
            return str(last_activations(inner)[index])
        if name == "logistic":
            return "sigmoid"
        return "softmax" if name == "div" and _is_softmax(equation, made_by) else ""
    return ""


def _is_softmax(division: Any, made_by: dict[Any, Any]) -> bool:
    """Returns whether what is divided are exponentials, and what they are divided by is a sum."""
    above, below = (_maker(variable, made_by) for variable in division.invars)
    while below is not None and below[0].primitive.name in ("broadcast_in_dim", *_TRANSPARENT):
        below = _maker(below[0].invars[0], made_by)
    return above is not None and above[0].primitive.name == "exp" and below is not None and below[0].primitive.name == "reduce_sum"


def _maker(variable: Any, made_by: dict[Any, Any]) -> Any:
    return None if isinstance(variable, core.Literal) else made_by.get(variable)
