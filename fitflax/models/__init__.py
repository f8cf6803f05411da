"""One interface for models of all kinds: linen modules, NNX modules, and functions.

`flax.nnx` is only imported for NNX modules.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flax import linen as nn

from fitflax.errors import ConfigError
from fitflax.models.base import TRANSIENT, Model, mutable_filter
from fitflax.models.linen_model import FunctionModel, LinenModel, adapt_linen

if TYPE_CHECKING:  # It imports flax.nnx.
    from fitflax.models.nnx_graph import ModuleVariables

__all__ = ["TRANSIENT", "FunctionModel", "LinenModel", "Model", "adapt_model", "mutable_filter", "nnx_modules"]


def adapt_model(
    model: Any,
    *,
    eval_model: Any = None,
    trainable: Any = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    keyword_inputs: bool = False,
    transient: Sequence[str] = TRANSIENT,
) -> "tuple[Model, ModuleVariables | None]":
    """Returns the model behind the interface that steps use, and its variables if it holds them itself, else `None`.

    With `keyword_inputs`, inputs are a dict of keyword arguments. `train_kwargs` and `eval_kwargs` override detected mode keywords. Other arguments are as in
    `Trainer`.
    """
    _check_is_instance("Trainer", "", model)
    if eval_model is not None:
        _check_is_instance("Trainer(eval_model=...)", "eval_model=", eval_model)
        if _kind_of(eval_model) != _kind_of(model):
            raise ConfigError(
                f"The eval_model must be of the same kind as the model, because it uses the model's variables. "
                f"Received: {_kind_of(eval_model)} as the eval_model, {_kind_of(model)} as the model."
            )
    kwargs: dict[str, Any] = {"train_kwargs": train_kwargs, "eval_kwargs": eval_kwargs, "keyword_inputs": keyword_inputs}
    if _kind_of(model) == _NNX:
        from fitflax.models.nnx_model import adapt_nnx

        return adapt_nnx(model, eval_model=eval_model, trainable=trainable, transient=transient, **kwargs)
    if trainable is not None:
        raise ConfigError(
            "Trainer(trainable=...) is a filter for the variables of an NNX module. To train some of the parameters of another model, pass an optimizer "
            "that freezes the others: fitflax.optimizers.train_only(optax.adam(1e-3), patterns)."
        )
    if _kind_of(model) == _FUNCTIONS:
        return FunctionModel.of(model, eval_model, **kwargs), None
    return adapt_linen(model, eval_model=eval_model, **kwargs), None


_LINEN, _NNX, _FUNCTIONS = "a flax.linen module", "a flax.nnx module", "functions (init, apply)"


def nnx_modules() -> tuple[type, ...]:
    """Returns the class of NNX modules for `isinstance`; an empty tuple if nothing has imported `flax.nnx`."""
    nnx = sys.modules.get("flax.nnx")
    return (nnx.Module,) if nnx else ()


def _kind_of(model: Any) -> str | None:
    if isinstance(model, nn.Module):
        return _LINEN
    if isinstance(model, nnx_modules()):
        return _NNX
    return _FUNCTIONS if type(model) is tuple and len(model) == 2 and all(map(callable, model)) and not any(map(_kind_of, model)) else None


def _check_is_instance(owner: str, keyword: str, model: Any) -> None:
    if isinstance(model, type) and issubclass(model, (nn.Module, *nnx_modules())):
        arguments = "..." if issubclass(model, nn.Module) else "..., rngs=nnx.Rngs(0)"
        raise ConfigError(
            f"{owner} takes an instance of a module. Received: the class {model.__name__}. Call it: Trainer({keyword}{model.__name__}({arguments}))."
        )
    if _kind_of(model) is None:
        raise ConfigError(
            f"{owner} takes {_LINEN}, {_NNX}, or a tuple of two functions (init, apply). Received: a {type(model).__module__}.{type(model).__qualname__}."
        )
