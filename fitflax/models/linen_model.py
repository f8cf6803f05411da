"""Models whose variables are arguments of their calls: a linen module, or custom functions such as its `init` and `apply`.

The trainer sets mode keywords of `__call__` and mode fields of the module itself. Fields of a configuration, such as `config.deterministic`, are up to the
user; this module generates the code that sets them for evaluation.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

import jax
from flax import linen as nn
from flax.linen import summary as linen_summary
from typing_extensions import override

from fitflax.errors import ModelError
from fitflax.leaves import describe_shapes, named_leaves
from fitflax.models.base import (
    ARGUMENT_HINT,
    MODE_KEYWORDS,
    Draws,
    Model,
    call_arguments,
    describe_differences,
    mode_keywords,
    parameters_of,
    plain_fields,
    tabulated,
    with_any_mesh,
    without_names,
)
from fitflax.state import PyTree

# Limits of the search for mode fields: nested levels, and objects without such fields, of which a tokenizer has many.
_MAX_DEPTH, _MAX_OBJECTS = 6, 1000
_OF_MODULES = ("parent", "name")


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A linen module with the keyword arguments of its two modes; `train_module` differs from the user's module only in a mode field."""

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
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any:
        args, kwargs = self._arguments(x, train=True)
        return self.train_module.init(rngs, *args, mutable=True, **kwargs)

    def init_for_evaluation(self, rngs: dict[str, jax.Array], x: PyTree) -> PyTree:
        """Returns the initial parameters of the module to evaluate."""
        args, kwargs = self._arguments(x, train=False)
        return with_any_mesh(lambda: without_names(self.eval_module.init(rngs, *args, mutable=True, **kwargs))).get("params", {})

    @property
    @override
    def mode_fault(self) -> str | None:
        is_told = self.has_eval_model or bool(self.eval_kwargs) or self.eval_module is not self.train_module
        # Dropout in evaluation raises, because it lacks its random stream. Batch statistics that are still updated go unnoticed.
        if is_told or evaluation_code(self.eval_module, "model", ("train", "training")) is None:
            return None
        code = evaluation_code(self.eval_module, "model")
        return (
            f"{self.name} is configured for training, but evaluation uses it unchanged. Pass a module for evaluation, Trainer(model, eval_model={code}), "
            "or pass eval_model=model if this is intended."
        )

    def check_eval_params(self, params: PyTree, own: PyTree) -> None:
        """Checks that the module to evaluate has the parameters of the one to train; `own` are the shapes of the result of `init_for_evaluation`."""
        have, want = ({f"params/{path}": leaf for path, leaf in named_leaves(tree)} for tree in (own, params))
        differences = describe_differences(have, want, (path for path in have if path not in want))
        if differences:
            raise ModelError(
                f"The eval_model {self._eval_name} must have the parameters of the model {self.name}, which it uses in evaluation ({differences}). "
                "Create it from the model and change only its mode: Trainer(model, eval_model=model.clone(...))."
            )

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
        names = [field.name for field in dataclasses.fields(self.train_module) if field.name not in _OF_MODULES]
        return plain_fields({name: getattr(self.train_module, name, None) for name in names})

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]:
        args, kwargs = self._arguments(x, train)
        module = self.train_module if train else self.eval_module
        return module.apply(variables, *args, rngs=draws.rngs, mutable=mutable, **kwargs)

    @override
    def _dropout_hint(self) -> str:
        own = "eval_model" if self.has_eval_model else "model"
        code = evaluation_code(self.eval_module, own)
        if code is not None:
            return f" Dropout is on in evaluation, because the {own} is configured that way. Pass a module for evaluation: Trainer(model, eval_model={code})."
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
        eval_fn: The same in evaluation; by default `apply_fn`.
    """

    rng_hint = " Name every random stream that is used: TrainLoop(rngs={'init': ..., 'train': ...}), or EvalLoop(rngs=...)."
    argument_hint = (
        " The functions are called as init(rngs, *inputs) and apply(variables, *inputs, rngs=..., mutable=...). "
        "Set other arguments, such as train=True, with functools.partial."
    )
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

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any:
        assert self.init_fn is not None
        known = parameters_of(self.init_fn)
        args, kwargs = call_arguments(x, {key: value for key, value in self.train_kwargs.items() if key in known}, self.keyword_inputs)
        variables = self.init_fn(rngs, *args, **kwargs)
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
    of_call = list(parameters_of(call).values())[1:]  # Without `self`.
    positions = [position for position in _static_positions(call) if position < len(of_call) and of_call[position].name in kwargs]
    placed, rest = list(args), dict(kwargs)
    for parameter in of_call[len(args) : max(positions, default=-1) + 1]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or (parameter.name not in rest and parameter.default is parameter.empty):
            return args, dict(kwargs)
        placed.append(rest.pop(parameter.name, parameter.default))
    return tuple(placed), rest


def _static_positions(call: Any) -> Iterator[int]:
    """Yields the positions, without `self`, that transformations of linen make static; they are read from the closures of the wrappers."""
    while call is not None:
        cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)) if inspect.isfunction(call) else {}
        if "trafo_kwargs" in cells and "transform" in cells:
            given = cells["trafo_kwargs"].cell_contents.get("static_argnums", ())
            # nn.remat has already subtracted 1 for `self`.
            offset = 0 if cells["transform"].cell_contents.__name__ == "checkpoint" else 1
            yield from (number - offset for number in ([given] if isinstance(given, int) else given) if number >= offset)
        call = getattr(call, "__wrapped__", None)


def evaluation_code(module: nn.Module, name: str, keywords: Collection[str] = tuple(MODE_KEYWORDS)) -> str | None:
    """Returns code that creates a copy of `module` with all mode fields, nested ones included, set for evaluation; `None` if they are set already.

    The code calls the module `name`, and `keywords` are the names of the mode fields.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     width: int = 8
    ...     deterministic: bool = False
    >>> class Net(nn.Module):
    ...     config: Config
    >>> evaluation_code(Net(Config()), "model")
    'model.clone(config=dataclasses.replace(model.config, deterministic=True))'
    >>> evaluation_code(Net(Config(deterministic=True)), "model") is None
    True
    """
    return _changed_code(module, name, keywords, (), {})


def _changed_code(value: Any, code: str, keywords: Collection[str], ancestors: tuple[int, ...], unchanged: dict[int, Any]) -> str | None:
    """Returns code for `value`, itself read as `code`, with its mode fields set for evaluation; `None` if nothing changes.

    `ancestors` are the ids of the objects that contain it, and `unchanged` has the objects that were searched without result, by id.
    """
    if len(ancestors) == _MAX_DEPTH or id(value) in ancestors or id(value) in unchanged or len(unchanged) == _MAX_OBJECTS:
        return None
    found = _members_of(value)
    if found is None:
        return None
    members, template = found
    changes: dict[str, str] = {}
    for name, member in members.items():
        if name in keywords and isinstance(member, bool):
            if member is MODE_KEYWORDS[name]:
                changes[name] = repr(not member)
        else:
            read = f"{code}[{name!r}]" if isinstance(value, Mapping) else f"{code}.{name}"
            inner = _changed_code(member, read, keywords, (*ancestors, id(value)), unchanged)
            if inner is not None:
                changes[name] = inner
    if not changes:
        unchanged[id(value)] = value
        return None
    fields = ", ".join(f"{name}={change}" for name, change in changes.items())
    items = ", ".join(f"{name!r}: {change}" for name, change in changes.items())
    return template.format(code=code, fields=fields, items=items)


def _members_of(value: Any) -> tuple[Mapping[str, Any], str] | None:
    """Returns the members of a configuration, and a template of the code that changes them; `None` for other objects."""
    if isinstance(value, type | types.ModuleType):
        return None
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        if isinstance(value, nn.Module):
            return {name: member for name, member in fields.items() if name not in _OF_MODULES}, "{code}.clone({fields})"
        return fields, "dataclasses.replace({code}, {fields})"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict(), "{code}._replace({fields})"
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):  # Those of ml_collections are not a Mapping.
        items = {name: value[name] for name in value.keys() if isinstance(name, str)}  # noqa: SIM118
        return items, "{{**{code}, {items}}}" if isinstance(value, Mapping) else "type({code})({{**{code}, {items}}})"
    if callable(value) or not hasattr(value, "__dict__"):
        return None
    has_replace = callable(getattr(value, "replace", None))
    return vars(value), "{code}.replace({fields})" if has_replace else "type({code})(**{{**vars({code}), {items}}})"
