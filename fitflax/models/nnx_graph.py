"""The static definition of an NNX module, the place of each of its variables in the state, and copies of a module in training or evaluation mode."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from fitflax.leaves import is_key
from fitflax.metrics.base import snake_case
from fitflax.models.modes import MODE_KEYWORDS, parameters_of
from fitflax.state import PyTree

__all__ = ["FROZEN", "PARAMS", "Definition", "Filter", "Path", "Slot"]
__all__ += ["as_state", "at", "collected", "collection_of", "in_mode", "nested", "place", "raw", "split_module"]

Path = tuple[Any, ...]

PARAMS, FROZEN, ARRAYS, STREAMS = "params", "frozen", "arrays", "rngs"


class Slot(NamedTuple):
    """The place of a variable.

    Attributes:
        path: Its path in the module; that of the first occurrence if it is shared.
        collection: Its collection in the state.
        template: An empty copy of the variable if its value is not a single array; else `None`.
        is_key: Whether it is the key of a random stream.
    """

    path: Path
    collection: str
    template: Any
    is_key: bool

    @property
    def name(self) -> str:
        """The path joined by `/`."""
        return "/".join(map(str, self.path))


class Definition(NamedTuple):
    """The graph definition of a module in one mode, and the slots of its variables."""

    graph: Any
    slots: tuple[Slot, ...]

    @property
    def trains(self) -> bool:
        """Whether any variable is trainable."""
        return any(slot.collection == PARAMS for slot in self.slots)


class Filter(NamedTuple):
    """Which variables of a module are trainable, by an NNX predicate `(path, variable) -> bool`, and which collections hold sown values."""

    trainable: Callable[[Path, Any], bool]
    transient: tuple[str, ...]

    def collection(self, path: Path, leaf: Any) -> str:
        """Returns the collection of a variable."""
        if self.trainable(path, leaf):
            return PARAMS
        if not isinstance(leaf, nnx.Variable):
            return ARRAYS
        return FROZEN if isinstance(leaf, nnx.Param) else collection_of(type(leaf))

    def is_sown(self, leaf: Any) -> bool:
        """Returns whether a variable holds sown values, and so is not part of the state."""
        return isinstance(leaf, nnx.Variable) and self.sows(type(leaf))

    def sows(self, kind: type[nnx.Variable[Any]]) -> bool:
        """Returns whether variables of a type hold sown values."""
        return collection_of(kind) in self.transient or issubclass(kind, nnx.Intermediate | nnx.Perturbation)

    def define(self, module: nnx.Module) -> tuple[Definition, list[Any]]:
        """Returns the definition of a module, and its variables in the order of the slots."""
        graph, leaves = split_module(module)
        slots = []
        for path, leaf in leaves:
            is_variable = isinstance(leaf, nnx.Variable)
            value = leaf.get_raw_value() if is_variable else leaf
            template = None if jax.tree_util.all_leaves([value]) else leaf.replace(None)
            slots.append(Slot(path, self.collection(path, leaf), template, isinstance(leaf, nnx.RngKey) and is_key(value)))
        return Definition(graph, tuple(slots)), [leaf for _, leaf in leaves]


def collection_of(kind: type[nnx.Variable[Any]]) -> str:
    """Returns the collection of a variable type: its registered name, else one derived from its class, such as `batch_stats` for `nnx.BatchStat`.

    >>> class Counter(nnx.Variable): ...
    >>> collection_of(nnx.BatchStat), collection_of(nnx.RngKey), collection_of(Counter)
    ('batch_stats', 'rngs', 'counter')
    """
    if issubclass(kind, nnx.RngState):
        return STREAMS
    try:
        return nnx.variablelib.variable_name_from_type(kind)
    except ValueError:
        name = snake_case(kind.__name__)
        return {"loss": "losses", "summary": "summaries", PARAMS: "variables"}.get(name, name)


def split_module(module: nnx.Module) -> tuple[Any, list[tuple[Path, Any]]]:
    """Returns the graph definition of a module, and its variables and arrays by path, shared ones once."""
    graph, state = nnx.split(module)
    return graph, [(tuple(path), leaf) for path, leaf in nnx.to_flat_state(state)]


def raw(leaf: Any) -> Any:
    """Returns the value of a variable; an array as it is."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def place(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Sets a value at a path of nested dicts."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def nested(entries: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Returns nested dicts from values by path."""
    tree: dict[Any, Any] = {}
    for path, value in entries:
        place(tree, path, value)
    return tree


def at(tree: Any, path: Path) -> Any:
    """Returns the value at a path of nested dicts, whose integer keys may have become strings."""
    for part in path:
        tree = tree[part if part in tree else str(part)]
    return tree


def collected(slots: Iterable[Slot], values: Iterable[Any]) -> dict[str, PyTree]:
    """Returns variables by collection."""
    collections: dict[str, PyTree] = {PARAMS: {}}
    for slot, value in zip(slots, values, strict=True):
        place(collections.setdefault(slot.collection, {}), slot.path, value)
    return collections


def as_state(slots: Iterable[Slot], variables: Mapping[str, PyTree]) -> Any:
    """Returns variables as a state that NNX can merge and update."""

    def value(slot: Slot) -> Any:
        found = at(variables[slot.collection], slot.path)
        return found if slot.template is None else slot.template.replace(found)

    return nnx.from_flat_state([(slot.path, value(slot)) for slot in slots])


def in_mode(module: nnx.Module, filters: Filter, *, train: bool) -> nnx.Module:
    """Returns a copy of a module in training or evaluation mode, without sown values; it shares the arrays."""
    copy = nnx.clone(module)
    nnx.pop(copy, lambda path, leaf: filters.is_sown(leaf))
    flags = {"deterministic": not train, "use_running_average": not train}
    own: Any = copy.train if train else copy.eval
    if all(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters_of(own).values()):
        own()  # A module may override train() and eval(); methods with parameters may be something else.
    copy.set_attributes(**flags, raise_if_not_found=False)
    copy = nnx.view(copy, **flags, raise_if_not_found=False)
    for _, node in nnx.iter_modules(copy):
        for key, value in MODE_KEYWORDS.items():
            if isinstance(vars(node).get(key), bool):
                setattr(node, key, value is train)
    return copy
