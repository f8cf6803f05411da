"""A model from custom functions, such as a module's `init` and `apply`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from flax import linen as nn
from typing_extensions import override

from fitflax.errors import ModelError
from fitflax.leaves import describe_shapes
from fitflax.models.base import Draws, Model, positional
from fitflax.models.modes import mode_keywords, parameters_of
from fitflax.state import PyTree

__all__ = ["FunctionModel"]


@dataclasses.dataclass(frozen=True)
class FunctionModel(Model):
    """A model from custom functions, such as a module's `init` and `apply`.

    Attributes:
        init_fn: `(rngs, *inputs) -> variables`; `None` if nothing is initialized.
        apply_fn: `(variables, *inputs, rngs=, mutable=) -> (outputs, changed)`.
        eval_fn: The same in evaluation; by default `apply_fn`.
    """

    init_fn: Callable[..., Any] | None
    apply_fn: Callable[..., Any]
    eval_fn: Callable[..., Any] | None = None
    train_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keyword_inputs: bool = False

    @classmethod
    def of(
        cls, functions: tuple[Any, Any], evaluation: tuple[Any, Any] | None, *, train_kwargs: Any = None, eval_kwargs: Any = None, keyword_inputs: bool = False
    ) -> Self:
        """Returns a model from `(init, apply)` and, optionally, the `(init, apply)` for evaluation, whose `init` is not used.

        A parameter of `apply` named `train`, `training` or `deterministic` is set by the mode.
        """
        eval_fn = functions[1] if evaluation is None else evaluation[1]
        train_mode = {**mode_keywords(functions[1], train=True), **(train_kwargs or {})}
        eval_mode = {**mode_keywords(eval_fn, train=False), **(eval_kwargs or {})}
        return cls(functions[0], functions[1], eval_fn, train_mode, eval_mode, keyword_inputs)

    @property
    @override
    def name(self) -> str:
        fn = getattr(self.apply_fn, "func", self.apply_fn)  # Unwraps a functools.partial.
        owner = getattr(fn, "__self__", None)
        return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(fn, "__name__", repr(fn))

    def _arguments(self, x: PyTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((), x) if self.keyword_inputs else (positional(x), {})

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any:
        assert self.init_fn is not None
        args, kwargs = self._arguments(x)
        variables = self.init_fn(rngs, *args, **kwargs, **{key: value for key, value in self.train_kwargs.items() if key in parameters_of(self.init_fn)})
        if not isinstance(variables, Mapping):
            raise ModelError(f"init(rngs, *inputs) must return a dict of collections, as module.init does. It returned {describe_shapes(variables)}.")
        return variables

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]:
        args, kwargs = self._arguments(x)
        fn, mode = (self.apply_fn, self.train_kwargs) if train else (self.eval_fn or self.apply_fn, self.eval_kwargs)
        result = fn(variables, *args, rngs=draws.rngs, mutable=mutable, **kwargs, **mode)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise ModelError(
                "apply(variables, *inputs, rngs=..., mutable=...) must return (outputs, changed collections), as module.apply does. "
                f"It returned {describe_shapes(result)}."
            )
        return result

    @property
    @override
    def _rng_hint(self) -> str:
        return " Name every random stream that is used: TrainLoop(rngs={'init': ..., 'train': ...}), or EvalLoop(rngs=...)."

    @property
    @override
    def _dropout_hint(self) -> str:
        return (
            " Dropout is on in evaluation. Pass a function that turns it off: functools.partial(module.apply, deterministic=True), or the apply of a module "
            "that is configured for evaluation."
        )

    @property
    @override
    def _argument_hint(self) -> str:
        return (
            " The functions are called as init(rngs, *inputs) and apply(variables, *inputs, rngs=..., mutable=...). "
            "Set other arguments, such as train=True, with functools.partial."
        )
