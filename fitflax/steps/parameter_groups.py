"""Parameter groups: parameters that an optimizer treats alike, as with `optax.multi_transform`, and those that it never changes."""

import types
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import optax

from fitflax.leaves import named_leaves
from fitflax.state import PyTree, shapes_in

__all__ = ["Group", "parameter_groups"]

_OTHERS = "others"
_EMPTY = types.CellType()


class Group(NamedTuple):
    """Parameters that are treated alike."""

    name: str  # The label; "frozen" or "others" if the optimizer has no labels.
    paths: list[str]
    is_frozen: bool  # Whether their updates are always zero.


def parameter_groups(optimizer: optax.GradientTransformation, params: PyTree) -> list[Group]:
    """Returns the groups of parameters, or none if all are treated alike. Only shapes are evaluated.

    A parameter is frozen if its traced update does not depend on gradients, parameters or the optimizer state. Labels are those of the only
    `optax.multi_transform` (`partition`) in the optimizer; optax does not expose them, so they are read from its closures. If the update needs more
    than gradients and parameters, such as the loss, there are no groups.

    >>> import jax.numpy as jnp
    >>> halves = {"backbone": optax.set_to_zero(), "head": optax.sgd(0.1)}
    >>> parameter_groups(optax.multi_transform(halves, {"a": "backbone", "b": "head"}), {"a": jnp.ones(2), "b": jnp.ones(3)})
    [Group(name='backbone', paths=['a'], is_frozen=True), Group(name='head', paths=['b'], is_frozen=False)]
    """
    params = shapes_in(params)
    paths = [path for path, _ in named_leaves(params)]
    try:
        frozen = _frozen_flags(optimizer, params)
    except Exception:  # noqa: BLE001 (whatever it needs, only training can give it)
        return []
    labels = _labels(optimizer, params) or ["frozen" if is_frozen else _OTHERS for is_frozen in frozen]
    members: dict[tuple[str, bool], list[str]] = {}
    for path, label, is_frozen in zip(paths, labels, frozen, strict=True):
        members.setdefault((label, is_frozen), []).append(path)
    groups = [Group(name, found, is_frozen) for (name, is_frozen), found in sorted(members.items())]
    return groups if len(groups) > 1 or any(group.is_frozen for group in groups) else []


def _frozen_flags(optimizer: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """Returns for each parameter whether its update is a constant, such as optax's zeros."""
    whole = optax.with_extra_args_support(optimizer)
    opt_state = jax.eval_shape(whole.init, params)
    closed = jax.make_jaxpr(lambda grads, state, params: jax.tree.leaves(whole.update(grads, state, params)[0]))(params, opt_state, params)
    return [not depends for depends in _dependent_outputs(closed.jaxpr, [True] * len(closed.jaxpr.invars))]


def _dependent_outputs(jaxpr: Any, inputs: list[bool]) -> list[bool]:
    """Returns which outputs of a jaxpr depend on the marked inputs."""
    marked = {variable for variable, is_marked in zip(jaxpr.invars, inputs, strict=True) if is_marked}

    def is_marked(atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in marked  # Literals have `val` and are not hashable.

    for equation in jaxpr.eqns:
        given = [is_marked(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and equation.primitive.name in ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call"):
            results = _dependent_outputs(inner, given)
        else:
            results = [any(given)] * len(equation.outvars)
        marked |= {variable for variable, result in zip(equation.outvars, results, strict=True) if result}
    return [is_marked(atom) for atom in jaxpr.outvars]


def _labels(optimizer: optax.GradientTransformation, params: PyTree) -> list[str] | None:
    """Returns each parameter's label; `None` if there is not exactly one `multi_transform`, or it does not label all parameters."""
    found = list(_label_trees(optimizer.init, set()))
    if len(found) != 1:
        return None
    try:
        labels = found[0](params) if callable(found[0]) else found[0]
        whole = jax.tree.map(lambda label, part: jax.tree.map(lambda _: str(label), part), labels, params)
    except Exception:  # noqa: BLE001 (a function of the user's that is made for other trees)
        return None
    return cast(list[str], jax.tree.leaves(whole))


def _label_trees(node: Any, seen: set[int]) -> Iterator[Any]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, optax.GradientTransformation):
        yield from _label_trees(node.init, seen)  # Its update has the same labels.
    elif isinstance(node, tuple | list):
        for entry in node:
            yield from _label_trees(entry, seen)
    elif isinstance(node, dict):
        yield from _label_trees(list(node.values()), seen)
    elif hasattr(node, "__closure__"):
        cells = dict(zip(node.__code__.co_freevars, node.__closure__ or (), strict=True))
        contents = {name: cell.cell_contents for name, cell in cells.items() if cell != _EMPTY}
        if "param_labels" in contents:
            yield contents["param_labels"]
        else:
            yield from _label_trees(list(contents.values()), seen)
    elif hasattr(node, "func"):  # A functools.partial.
        yield from _label_trees(node.func, seen)
