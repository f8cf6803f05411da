"""Finds what controls whether a module is in training mode: mode keywords, and fields with such names in configurations that a module holds.

The trainer sets keywords of `__call__` and fields of the module itself. Fields of a configuration, such as `config.deterministic`, are up to the user; this
module generates the code that sets them for evaluation.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flax import linen as nn

__all__ = ["MODE_KEYWORDS", "evaluation_code", "mode_keywords", "parameters_of", "static_by_position"]

# The value of each mode keyword when training; its negation otherwise.
MODE_KEYWORDS = {"train": True, "training": True, "deterministic": False}

# Limits of the search: nested levels, and objects without mode fields, of which a tokenizer has many.
_MAX_DEPTH, _MAX_OBJECTS = 6, 1000
_OF_MODULES = ("parent", "name")


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; empty if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def mode_keywords(function: Any, *, train: bool) -> dict[str, bool]:
    """Returns the mode keywords of a function with their values; `**kwargs` does not count.

    >>> mode_keywords(lambda x, *, deterministic: x, train=False)
    {'deterministic': True}
    """
    parameters = parameters_of(function)
    return {key: value is train for key, value in MODE_KEYWORDS.items() if key in parameters}


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
    kind = _accessors(value)
    if kind is None:
        return None
    members, at, changed = kind
    changes: dict[str, str] = {}
    for name, member in members.items():
        if name in keywords and isinstance(member, bool):
            if member is MODE_KEYWORDS[name]:
                changes[name] = repr(not member)
        elif (inner := _changed_code(member, at(code, name), keywords, (*ancestors, id(value)), unchanged)) is not None:
            changes[name] = inner
    if not changes:
        unchanged[id(value)] = value
        return None
    return changed(code, changes)


_Accessors = tuple[Mapping[str, Any], Callable[[str, str], str], Callable[[str, dict[str, str]], str]]


def _accessors(value: Any) -> _Accessors | None:
    """Returns the members of a configuration, and functions that return code to read and to change members; `None` for other objects."""
    if isinstance(value, type | types.ModuleType):
        return None
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        if isinstance(value, nn.Module):
            own = {name: member for name, member in fields.items() if name not in _OF_MODULES}
            return own, _attribute, lambda code, changes: f"{code}.clone({_keywords(changes)})"
        return fields, _attribute, lambda code, changes: f"dataclasses.replace({code}, {_keywords(changes)})"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict(), _attribute, lambda code, changes: f"{code}._replace({_keywords(changes)})"
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):  # Those of ml_collections are not a Mapping.
        items = {name: value[name] for name in value.keys() if isinstance(name, str)}  # noqa: SIM118
        if isinstance(value, Mapping):
            return items, _item, lambda code, changes: f"{{**{code}, {_items(changes)}}}"
        return items, _attribute, lambda code, changes: f"type({code})({{**{code}, {_items(changes)}}})"
    if callable(value) or not hasattr(value, "__dict__"):
        return None
    if callable(getattr(value, "replace", None)):
        return vars(value), _attribute, lambda code, changes: f"{code}.replace({_keywords(changes)})"
    return vars(value), _attribute, lambda code, changes: f"type({code})(**{{**vars({code}), {_items(changes)}}})"


def _attribute(code: str, name: str) -> str:
    return f"{code}.{name}"


def _item(code: str, name: str) -> str:
    return f"{code}[{name!r}]"


def _keywords(changes: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _items(changes: dict[str, str]) -> str:
    return ", ".join(f"{name!r}: {value}" for name, value in changes.items())
