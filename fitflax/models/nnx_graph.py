"""An NNX module without its variables, the place of each variable in the state, and the variables that the trainer reads and writes.

The trainer reads the variables of the user's module before each call and writes them back after it.
"""

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from fitflax.errors import ModelError
from fitflax.leaves import is_key, listed
from fitflax.metrics.base import snake_case
from fitflax.models.base import MODE_KEYWORDS, evaluation_code, parameters_of
from fitflax.state import AxisNames, PyTree

Path = tuple[Any, ...]

PARAMS, FROZEN, ARRAYS, STREAMS = "params", "frozen", "arrays", "rngs"


class Slot(NamedTuple):
    """The place of a variable.

    Attributes:
        path: Its path in the module; if it is shared, the path of its first occurrence.
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


def at(tree: Any, path: Path) -> Any:
    """Returns the value at a path of nested dicts, whose integer keys may have become strings."""
    for part in path:
        tree = tree[part if part in tree else str(part)]
    return tree


def by_collection(entries: Iterable[tuple[str, Path, Any]]) -> dict[str, PyTree]:
    """Returns values, given with collection and path, by collection."""
    tree: dict[str, PyTree] = unflatten_dict({(collection, *path): value for collection, path, value in entries})
    return tree


def collected(slots: Iterable[Slot], values: Iterable[Any]) -> dict[str, PyTree]:
    """Returns variables by collection; there always are parameters."""
    return {PARAMS: {}} | by_collection((slot.collection, slot.path, value) for slot, value in zip(slots, values, strict=True))


def as_state(slots: Iterable[Slot], variables: Mapping[str, PyTree]) -> Any:
    """Returns variables as a state that NNX can merge and update."""

    def value(slot: Slot) -> Any:
        array = at(variables[slot.collection], slot.path)
        return array if slot.template is None else slot.template.replace(array)

    return nnx.from_flat_state([(slot.path, value(slot)) for slot in slots])


def in_mode(module: nnx.Module, filters: Filter, *, train: bool) -> nnx.Module:
    """Returns a copy of a module in training or evaluation mode, without sown values; it shares the arrays."""
    copy = nnx.clone(module)
    nnx.pop(copy, lambda path, leaf: filters.is_sown(leaf))
    flags = {"deterministic": not train, "use_running_average": not train}
    set_mode: Any = copy.train if train else copy.eval
    if all(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters_of(set_mode).values()):
        set_mode()  # Called only on the outermost module, as in Flax. A method with parameters may do something else.
    copy.set_attributes(**flags, raise_if_not_found=False)
    copy = nnx.view(copy, **flags, raise_if_not_found=False)
    for _, node in nnx.iter_modules(copy):
        for key, value in MODE_KEYWORDS.items():
            if isinstance(vars(node).get(key), bool):
                setattr(node, key, value is train)
    return copy


def view_code(module: nnx.Module, name: str, keywords: Collection[str]) -> str | None:
    """Returns code that creates a view of a module, called `name`, whose configurations are set for evaluation, as `evaluation_code` does.

    Modules that hold the same configuration get the same one; it is read from the outermost of them.
    """
    code = name
    done: set[tuple[Path, str]] = set()
    nodes = sorted(nnx.iter_modules(module), key=lambda entry: len(entry[0]))
    for path, node in nodes:
        place = name + "".join(f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in path)
        for attribute, value in vars(node).items():
            if (path, attribute) in done or attribute.startswith("_pytree__") or nnx.has_data(value):
                continue
            change = evaluation_code(value, f"{place}.{attribute}", keywords)
            if change is None:
                continue
            holders = {path: vars(node)[attribute] for path, node in nodes if attribute in vars(node)}
            same = tuple(path for path, other in holders.items() if _are_equal(other, value))
            done.update((path, attribute) for path in same)
            only = "" if len(same) == len(holders) else f"only=nnx.filterlib.PathIn{same}, "
            code = f"nnx.with_attributes({code}, {only}{attribute}={change})"
    return code if done else None


def _are_equal(one: Any, other: Any) -> bool:
    """Returns whether two attributes are equal; attributes that contain arrays may not be comparable."""
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError):
        return False


class ModuleVariables:
    """The variables of an NNX module, whose values are the current ones between calls of the trainer.

    Attributes:
        model: The module.
        axes: The axis names in its metadata.
    """

    def __init__(self, module: nnx.Module, filters: Filter) -> None:
        self.model, self._filters = module, filters
        self.definition, leaves = filters.define(in_mode(module, filters, train=True))
        specs = [(slot, leaf) for slot, leaf in zip(self.definition.slots, leaves, strict=True) if isinstance(leaf, nnx.Variable)]
        self.axes = AxisNames({f"{slot.collection}/{slot.name}": spec for slot, leaf in specs if (spec := _axes_of(leaf)) is not None})
        # The module's last graph definition that passed `_check_same`.
        self._checked_graph = split_module(module)[0]
        self._written: list[Any] | None = None

    def copy(self) -> Self:
        """Returns the variables of a copy of the module, with its current values."""
        return type(self)(nnx.clone(self.model), self._filters)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the variables that are arrays, by path."""
        variables = dict(split_module(self.model)[1])
        values = {f"{slot.collection}/{slot.name}": raw(variables[slot.path]) for slot in self.definition.slots if slot.template is None}
        return {path: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value)) for path, value in values.items() if not is_key(value)}

    def read(self) -> dict[str, PyTree]:
        """Returns the variables, `{collection: tree}`. The arrays belong to the module and must not be donated.

        Raises a `ModelError` if the module was changed, or a variable holds neither an array nor a number.
        """
        return collected(self.definition.slots, jax.tree.map(self._as_array, self._leaves()))

    def read_changed(self) -> dict[str, PyTree] | None:
        """Returns the variables if any has changed since the last `write`, or none was written; else `None`. Errors as in `read`."""
        leaves = self._leaves()
        now, written = jax.tree.leaves(leaves), self._written
        if written is not None and len(now) == len(written) and all(old() is new for old, new in zip(written, now, strict=True)):
            return None
        return collected(self.definition.slots, jax.tree.map(self._as_array, leaves))

    def write(self, variables: dict[str, PyTree]) -> None:
        """Writes arrays into the module, which keeps them."""
        nnx.update(self.model, as_state(self.definition.slots, variables))
        self._written = [weakref.ref(leaf) for leaf in jax.tree.leaves(self._leaves())]

    def _leaves(self) -> list[Any]:
        """Returns the values of the module's variables, in the order of the slots. Raises a `ModelError` if its variables or configuration have changed."""
        graph, entries = split_module(self.model)
        variables = dict(entries)
        if graph != self._checked_graph:
            self._check_same(variables)
            self._checked_graph = graph
        return [raw(variables[slot.path]) for slot in self.definition.slots]

    def _check_same(self, variables: Mapping[Path, Any]) -> None:
        definition = self._filters.define(in_mode(self.model, self._filters, train=True))[0]
        if definition.graph == self.definition.graph:
            return  # Only its mode or sown values differ.
        before, now = ({slot.name: slot for slot in each.slots} for each in (self.definition, definition))
        changes = [f"{name} was removed" for name in before if name not in now] + [f"{name} was added" for name in now if name not in before]
        how = listed(changes) or "its configuration, or the type of a variable, differs"
        raise ModelError(f"The {type(self.model).__name__} was changed after the trainer was created: {how}. Create a new Trainer for the changed module.")

    def _as_array(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ModelError(f"The {type(self.model).__name__} holds shapes instead of arrays. Create it without nnx.eval_shape, or restore it first.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ModelError(
                f"An array of the {type(self.model).__name__} was deleted, because it was donated to a custom compiled function. "
                "Do not donate the module's arrays, or create the module again."
            )
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise ModelError(f"A variable of the {type(self.model).__name__} holds a {type(leaf).__name__}. Variables must hold arrays or numbers.")
        return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _axes_of(variable: nnx.Variable[Any]) -> tuple[Any, ...] | None:
    """Returns the axis names in a variable's metadata; `None` if there are none."""
    sharding = variable.get_metadata().get("out_sharding")
    if not sharding:
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):  # Flax reads only specifications.
        return tuple(sharding.spec)
    return tuple(nnx.spmd.get_var_pspec(variable) or ())
