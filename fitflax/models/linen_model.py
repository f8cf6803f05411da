"""Models whose variables are arguments of their calls: a linen module, or custom functions such as its `init` and `apply`.

The trainer sets mode keywords of `__call__` and mode fields of the module itself.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

import jax
from flax import linen as nn
from flax.linen import summary as linen_summary
from typing_extensions import override

from fitflax.errors import ModelError
from fitflax.leaves import describe_shapes
from fitflax.models.base import (
    ARGUMENT_HINT,
    LINEN_FIELDS,
    MODE_KEYWORDS,
    Draws,
    Model,
    call_arguments,
    evaluation_code,
    mode_keywords,
    parameters_of,
    plain_fields,
    tabulated,
    with_any_mesh,
)
from fitflax.state import PyTree


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A linen module with the keyword arguments of its two modes; `train_module` differs from the user's module only in mode fields."""

    argument_hint = ARGUMENT_HINT + "Trainer(model, train_kwargs={'is_training': True}, eval_kwargs={'is_training': False})."
    train_module: nn.Module
    eval_module: nn.Module
    train_kwargs: Mapping[str, Any]
    eval_kwargs: Mapping[str, Any]
    keyword_inputs: bool = False
    has_eval_model: bool = False

    @property
    @override
    def name(self) -> str:
        return type(self.train_module).__name__

    @property
    @override
    def _eval_name(self) -> str:
        return type(self.eval_module).__name__

    def _arguments(self, x: PyTree, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module, mode = (self.train_module, self.train_kwargs) if train else (self.eval_module, self.eval_kwargs)
        return static_by_position(type(module).__call__, *call_arguments(x, mode, self.keyword_inputs))

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree, *, train: bool) -> Any:
        args, kwargs = self._arguments(x, train)
        return (self.train_module if train else self.eval_module).init(rngs, *args, mutable=True, **kwargs)

    @override
    def _evaluation_code(self, keywords: Collection[str] = tuple(MODE_KEYWORDS)) -> str | None:
        return evaluation_code(self.eval_module, "eval_model" if self.has_eval_model else "model", keywords)

    @property
    @override
    def _has_eval_mode(self) -> bool:
        return self.has_eval_model or bool(self.eval_kwargs) or self.eval_module is not self.train_module

    @override
    def tabulate(self, rngs: dict[str, jax.Array], x: PyTree) -> str:
        args, kwargs = self._arguments(x, train=True)
        with self._explain_errors(x, "tabulated", train=True):
            return tabulated(
                lambda console: with_any_mesh(lambda: linen_summary.tabulate(self.train_module, rngs, mutable=True, console_kwargs=console)(*args, **kwargs))
            )

    @property
    @override
    def hyperparameters(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self.train_module) if field.name not in LINEN_FIELDS]
        return plain_fields({name: getattr(self.train_module, name, None) for name in names})

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]:
        args, kwargs = self._arguments(x, train)
        module = self.train_module if train else self.eval_module
        return module.apply(variables, *args, rngs=draws.rngs, mutable=mutable, **kwargs)

    @override
    def _dropout_hint(self) -> str:
        configured = self._configured_dropout("eval_model" if self.has_eval_model else "model")
        if configured is not None:
            return configured
        named = next((name for name in MODE_KEYWORDS if name in self.eval_kwargs), None)
        if named is not None:
            off = named if named == "deterministic" else f"not {named}"
            return (
                f" Dropout is on in evaluation, although the trainer passes {named}={self.eval_kwargs[named]}. Use that argument: "
                f"nn.Dropout(rate, deterministic={off}). If it is off for another argument, pass Trainer(eval_kwargs={{...}})."
            )
        return (
            " Dropout is on in evaluation. Add an argument `train` or `deterministic` to __call__, which the trainer sets; or set another argument with "
            "Trainer(eval_kwargs={...}); or pass a module with the same parameters, Trainer(model, eval_model=model.clone(...))."
        )


def adapt_linen(
    model: nn.Module,
    *,
    eval_model: nn.Module | None = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    keyword_inputs: bool = False,
) -> LinenModel:
    """Returns `model` with its mode keywords; arguments as in `adapt_model`.

    A parameter of `__call__` named `train`, `training` or `deterministic` is passed (`**kwargs` does not count). If there is none, a field of the module
    with such a name is set on a clone.
    """
    train_module, train_kwargs = _in_mode(model, train_kwargs, train=True)
    eval_module, eval_kwargs = _in_mode(model if eval_model is None else eval_model, eval_kwargs, train=False)
    return LinenModel(train_module, eval_module, train_kwargs, eval_kwargs, keyword_inputs, has_eval_model=eval_model is not None)


def _in_mode(model: nn.Module, kwargs: Mapping[str, Any] | None, *, train: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a module with its mode fields set, and its keyword arguments in that mode."""
    named = mode_keywords(type(model).__call__, train=train)
    fields = {} if named else {field.name: MODE_KEYWORDS[field.name] is train for field in dataclasses.fields(model) if field.name in MODE_KEYWORDS}
    clone: Any = model.clone
    return clone(**fields) if fields else model, {**named, **(kwargs or {})}


@dataclasses.dataclass(frozen=True)
class FunctionModel(Model):
    """A model from custom functions, such as a module's `init` and `apply`.

    Attributes:
        init_fn: `(rngs, *inputs) -> variables`; `None` if nothing is initialized.
        apply_fn: `(variables, *inputs, rngs=, mutable=) -> (outputs, changed)`.
        eval_init_fn: `init_fn` of the model to evaluate, which shows its parameters.
        eval_fn: `apply_fn` in evaluation; by default the same.
    """

    rng_hint = " Name every random stream that is used: TrainLoop(rngs={'init': ..., 'train': ...}), or EvalLoop(rngs=...)."
    argument_hint = (
        " The functions are called as init(rngs, *inputs) and apply(variables, *inputs, rngs=..., mutable=...). "
        "Set other arguments, such as train=True, with functools.partial."
    )
    init_fn: Callable[..., Any] | None
    apply_fn: Callable[..., Any]
    eval_init_fn: Callable[..., Any] | None = None
    eval_fn: Callable[..., Any] | None = None
    train_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keyword_inputs: bool = False

    @classmethod
    def of(
        cls, functions: tuple[Any, Any], evaluation: tuple[Any, Any] | None, *, train_kwargs: Any = None, eval_kwargs: Any = None, keyword_inputs: bool = False
    ) -> Self:
        """Returns a model from `(init, apply)` and, optionally, the `(init, apply)` for evaluation, whose `init` is only used to compare the parameters.

        A parameter of `apply` named `train`, `training` or `deterministic` is set by the mode.
        """
        eval_init_fn, eval_fn = evaluation or (None, functions[1])
        train_mode = {**mode_keywords(functions[1], train=True), **(train_kwargs or {})}
        eval_mode = {**mode_keywords(eval_fn, train=False), **(eval_kwargs or {})}
        return cls(functions[0], functions[1], eval_init_fn, eval_fn, train_mode, eval_mode, keyword_inputs)

    @property
    @override
    def name(self) -> str:
        return _name_of(self.apply_fn)

    @property
    @override
    def _eval_name(self) -> str:
        return _name_of(self.eval_fn or self.apply_fn)

    @property
    @override
    def has_eval_model(self) -> bool:  # type: ignore[override]
        return self.eval_init_fn is not None

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree, *, train: bool) -> Any:
        init, mode = (self.init_fn, self.train_kwargs) if train else (self.eval_init_fn, self.eval_kwargs)
        assert init is not None
        known = parameters_of(init)
        args, kwargs = call_arguments(x, {key: value for key, value in mode.items() if key in known}, self.keyword_inputs)
        variables = init(rngs, *args, **kwargs)
        if not isinstance(variables, Mapping):
            raise ModelError(f"init(rngs, *inputs) must return a dict of collections, as module.init does. It returned {describe_shapes(variables)}.")
        return variables

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]:
        fn, mode = (self.apply_fn, self.train_kwargs) if train else (self.eval_fn or self.apply_fn, self.eval_kwargs)
        args, kwargs = call_arguments(x, mode, self.keyword_inputs)
        result = fn(variables, *args, rngs=draws.rngs, mutable=mutable, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise ModelError(
                "apply(variables, *inputs, rngs=..., mutable=...) must return (outputs, changed collections), as module.apply does. "
                f"It returned {describe_shapes(result)}."
            )
        return result

    @override
    def _dropout_hint(self) -> str:
        return (
            " Dropout is on in evaluation. Pass a function that turns it off: functools.partial(module.apply, deterministic=True), or the apply of a module "
            "that is configured for evaluation."
        )


def _name_of(fn: Any) -> str:
    """Returns the name of a function or, for a method of a module, the name of the module's class."""
    fn = getattr(fn, "func", fn)  # Unwraps a functools.partial.
    owner = getattr(fn, "__self__", None)
    return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(fn, "__name__", repr(fn))


def static_by_position(call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a module's call with keywords moved to positions that `nn.remat` or `nn.jit` makes static (`static_argnums`).

    Such an argument must be passed by position, because these transformations trace keywords. Missing arguments before it get their defaults.

    >>> class Net(nn.Module):
    ...     def __call__(self, x, mask=None, train=False): ...
    >>> static_by_position(nn.remat(Net, static_argnums=(3,)).__call__, (1,), {"train": True})
    ((1, None, True), {})
    >>> static_by_position(Net.__call__, (1,), {"train": True})
    ((1,), {'train': True})
    """
    parameters = list(parameters_of(call).values())[1:]  # Without `self`.
    positions = [position for position in _static_positions(call) if position < len(parameters) and parameters[position].name in kwargs]
    placed, rest = list(args), dict(kwargs)
    for parameter in parameters[len(args) : max(positions, default=-1) + 1]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or (parameter.name not in rest and parameter.default is parameter.empty):
            return args, dict(kwargs)
        placed.append(rest.pop(parameter.name, parameter.default))
    return tuple(placed), rest


def _static_positions(call: Any) -> Iterator[int]:
    """Yields the positions, not counting `self`, that linen's transformations make static; they are read from the closures of the wrappers."""
    while call is not None:
        cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)) if inspect.isfunction(call) else {}
        if "trafo_kwargs" in cells and "transform" in cells:
            static_argnums = cells["trafo_kwargs"].cell_contents.get("static_argnums", ())
            # nn.remat has already subtracted 1 for `self`.
            offset = 0 if cells["transform"].cell_contents.__name__ == "checkpoint" else 1
            yield from (number - offset for number in ([static_argnums] if isinstance(static_argnums, int) else static_argnums) if number >= offset)
        call = getattr(call, "__wrapped__", None)
