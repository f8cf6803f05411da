"""Where values that are not finite come from: a traced function is run operation by operation, and what each result was made of is noted."""

import dataclasses
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

__all__ = ["Origin", "find_origins"]

# Transformations as they stand in the names of scopes, as in "transpose(jvp(Net))/Dense_0".
_WRAPPED = re.compile(r"\b[a-z_]+\(([^()]*)\)")
_BACKWARD = "transpose("
# Operations that are calls of another function, whose operands are its arguments; all others are run as they are.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    *("custom_vmap_call", "custom_lin", "linear_call"),
}
# Those that keep what was traced for an earlier call.
_CACHED = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"}
# Scopes that JAX opens itself.
_OWN_SCOPES = {"rematted_computation", "checkpoint", ""}
# Code in which nobody looks for a fault of their own.
_PACKAGES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")} | {os.path.dirname(os.path.dirname(__file__))})


class Origin(NamedTuple):
    """An operation at which NaN, or an infinity, first came up.

    Attributes:
        kind: `"NaN"` or `"infinity"`.
        operation: What was computed, by JAX's name, such as `"log"`; of a value that was there from the beginning, its name, such as `"the input x"`.
        layer: The path of the module that computed it, beginning with the name of the outermost class, such as `"Net/Dense_0"`; `""` outside of modules.
        is_backward: Whether it belongs to the backward pass.
        source: The line of the user's code that it follows from, `"model.py:31 in __call__"`; `""` where there is none.
        operands: What it was given: dtype, shape and range of each array.

    >>> print(Origin("NaN", "log", "Net/Dense_0", False, "net.py:12 in __call__", ("float32[8] of -1 to 3",)))
    NaN from log in Net/Dense_0 (net.py:12 in __call__), of float32[8] of -1 to 3
    """

    kind: str
    operation: str
    layer: str = ""
    is_backward: bool = False
    source: str = ""
    operands: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        passes = ", on the way back" if self.is_backward else ""
        of = f", of {' and '.join(self.operands)}" if self.operands else ""
        at = f" ({self.source})" if self.source else ""
        return f"{self.kind} from {self.operation}{where}{passes}{at}{of}"


_CONSTANT = "a constant"


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """What is known of an array after it has gone: what it was made of, and what came up at that."""

    has_nan: bool
    has_infinity: bool
    parents: tuple["_Node", ...] = ()
    origin: Origin | None = None


class _Value(NamedTuple):
    array: Any
    node: _Node


class _Place(NamedTuple):
    """Where in a function an inner one is called: its layer and direction, and the line, if the inner one's own lines may be those of another call."""

    layer: str = ""
    is_backward: bool = False
    source: str | None = None


def find_origins(jaxpr: core.ClosedJaxpr, arguments: Sequence[Any], names: Sequence[str]) -> list[list[Origin]]:
    """Runs a traced function on arrays, one operation after another, and returns for each result how it came to be not finite.

    Args:
        jaxpr: What `jax.make_jaxpr` returns; there must be no collectives in it.
        arguments: Arrays, as many as it takes.
        names: What they are called.

    Returns:
        For each result, in the order of cause and effect: where an infinity came up, if that is what became NaN, and where NaN did; nothing for finite ones.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.log(x - 2))(np.float32(1))
    >>> [[origin]] = find_origins(jaxpr, [np.float32(1)], ["x"])
    >>> print(origin.kind, origin.operation, *origin.operands)
    NaN log float32[] of -1
    """
    inputs = []
    for array, name in zip(arguments, names, strict=True):
        nan, infinity = _faults(array)
        inputs.append(_Value(array, _Node(nan, infinity, (), Origin("NaN" if nan else "infinity", name))))
    return [_chain(value.node) for value in _run(jaxpr.jaxpr, jaxpr.consts, inputs, _Place())]


def _chain(node: _Node) -> list[Origin]:
    """Returns what a result's faults go back to, the cause first."""
    chain: list[Origin] = []
    while node.has_nan or node.has_infinity:
        is_nan = node.has_nan
        before = next((parent for parent in node.parents if (parent.has_nan if is_nan else parent.has_infinity)), None)
        if before is None:
            if node.origin is not None:
                chain.insert(0, node.origin)
            before = next((parent for parent in node.parents if parent.has_infinity), None) if is_nan else None
        if before is None:
            return chain
        node = before
    return chain


def _faults(array: Any) -> tuple[bool, bool]:
    """Returns whether an array holds NaN, and whether it holds an infinity."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return False, False
    numbers = np.asarray(array)
    nan = bool(np.isnan(numbers).any())
    return nan, not np.isfinite(numbers).all() if not nan else bool(np.isinf(numbers).any())


def _run(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, const in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = _constant(const)
    last_use = {atom: index for index, equation in enumerate(jaxpr.eqns) for atom in equation.invars if not isinstance(atom, core.Literal)}
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    for index, equation in enumerate(jaxpr.eqns):
        operands = [_constant(atom.val) if isinstance(atom, core.Literal) else values[atom] for atom in equation.invars]
        values.update(zip(equation.outvars, _run_equation(equation, operands, place), strict=True))
        for atom in {atom for atom in equation.invars if not isinstance(atom, core.Literal)}:
            if last_use[atom] == index and atom not in needed:
                del values[atom]
    return [_constant(atom.val) if isinstance(atom, core.Literal) else values[atom] for atom in jaxpr.outvars]


def _constant(array: Any) -> _Value:
    nan, infinity = _faults(array)
    return _Value(array, _Node(nan, infinity, (), Origin("NaN" if nan else "infinity", _CONSTANT)))


def _run_equation(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    name, params = equation.primitive.name, equation.params
    if name == "sharding_constraint":
        return operands  # Everything is on one device here.
    if name == "cond":
        branch = params["branches"][int(operands[0].array)]
        return _run(branch.jaxpr, branch.consts, operands[1:], _inside(equation, place))
    if name in _CALLS:
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, _inside(equation, place))
    results = _bind(equation, [operand.array for operand in operands])
    faults = [_faults(result) for result in results]
    if any(nan or infinity for nan, infinity in faults) and name in ("scan", "while"):
        return _run_scan(equation, operands, place) if name == "scan" else _run_while(equation, operands, place)
    parents: tuple[_Node, ...] = ()  # Of what is finite nothing that follows can come.
    if any(nan or infinity for nan, infinity in faults):
        chosen = _chosen(operands, results[0]) if name == "select_n" else operands
        parents = tuple(_placed(operand.node, equation, place) for operand in chosen)
    return [
        _Value(result, _Node(nan, infinity, parents, _origin(equation, operands, place, is_nan=nan) if nan or infinity else None))
        for result, (nan, infinity) in zip(results, faults, strict=True)
    ]


def _chosen(operands: list[_Value], result: Any) -> list[_Value]:
    """Returns those of a selection's cases from which numbers that are not finite were taken."""
    which, is_bad = np.asarray(operands[0].array), ~np.isfinite(np.asarray(result))
    return [case for index, case in enumerate(operands[1:]) if ((which == index) & is_bad).any()]


def _bind(equation: Any, arrays: list[Any]) -> list[Any]:
    results = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def _run_scan(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    """Returns the results of a `scan`, round by round."""
    params, length = equation.params, equation.params["length"]
    inner = params["jaxpr"].jaxpr
    # Told by their shapes, because JAX's parameters for it have changed: what is stacked has one axis more.
    num_carry = sum(whole.aval.shape == one.aval.shape for whole, one in zip(equation.outvars, inner.outvars, strict=True))
    num_rows = sum(whole.aval.shape != one.aval.shape for whole, one in zip(equation.invars, inner.invars, strict=True))
    num_consts = len(operands) - num_carry - num_rows
    consts, carry, rows = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    stacks: list[list[_Value]] = [[] for _ in range(len(equation.outvars) - num_carry)]
    for index in reversed(range(length)) if params["reverse"] else range(length):
        slices = [_Value(row.array[index], row.node) for row in rows]
        results = _run(params["jaxpr"].jaxpr, params["jaxpr"].consts, [*consts, *carry, *slices], _inside(equation, place))
        carry = results[:num_carry]
        for stack, result in zip(stacks, results[num_carry:], strict=True):
            stack.append(result)
    whole = []
    for stack in stacks:
        ordered = stack[::-1] if params["reverse"] else stack
        array = jnp.stack([value.array for value in ordered])
        whole.append(_Value(array, _Node(*_faults(array), tuple(value.node for value in stack))))
    return [*carry, *whole]


def _run_while(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    """Returns the results of a `while`, round by round."""
    params = equation.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body, carry = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
    inside = _inside(equation, place)
    while bool(_run(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, [*of_test, *carry], inside)[0].array):
        carry = _run(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, [*of_body, *carry], inside)
    return list(carry)


# -- where it is --


def _inside(equation: Any, place: _Place) -> _Place:
    """Returns the place of what a call, or a loop, holds."""
    # A function that was traced before keeps the lines of that call.
    return _where(equation, place)._replace(source=(_source(equation, place) or None) if equation.primitive.name in _CACHED else place.source)


def _where(equation: Any, place: _Place) -> _Place:
    """Returns layer and direction of an operation."""
    scopes = str(equation.source_info.name_stack)
    layer = scopes
    while (simpler := _WRAPPED.sub(r"\1", layer)) != layer:
        layer = simpler
    names = [name for name in layer.split("/") if name not in _OWN_SCOPES]
    # What is computed once more on the way back has all of its scopes again: "transpose(jvp(Net))/jvp(Net)".
    if _BACKWARD in scopes and "/jvp(" in scopes and len(names) > 1 and names[0] == names[1]:
        del names[0]
    before = place.layer.split("/") if place.layer and names[:1] != place.layer.split("/")[:1] else []
    return _Place("/".join([*before, *names] or place.layer.split("/")), place.is_backward or _BACKWARD in scopes, place.source)


def _placed(node: _Node, equation: Any, place: _Place) -> _Node:
    """Returns what is known of an operand, of a constant with the place at which it is used."""
    if node.origin is None or node.origin.operation != _CONSTANT or not (node.has_nan or node.has_infinity):
        return node
    where = _where(equation, place)
    origin = node.origin._replace(layer=where.layer, is_backward=where.is_backward, source=_source(equation, place))
    return _Node(node.has_nan, node.has_infinity, (), origin)


def _source(equation: Any, place: _Place) -> str:
    if place.source is not None:
        return place.source
    return next((f"{os.path.basename(frame.file_name)}:{frame.line_num} in {frame.function_name}" for frame in _frames(equation) if _is_users(frame)), "")


def _frames(equation: Any) -> Iterator[Any]:
    yield from getattr(equation.source_info.traceback, "frames", ())


def _is_users(frame: Any) -> bool:
    path = os.path.realpath(frame.file_name)
    return not path.startswith(_PACKAGES) and not frame.file_name.startswith("<frozen")


def _origin(equation: Any, operands: list[_Value], place: _Place, *, is_nan: bool) -> Origin | None:
    """Returns what is to be said of an operation, where a fault of that kind came up at it."""
    if any(operand.node.has_nan if is_nan else operand.node.has_infinity for operand in operands):
        return None
    where = _where(equation, place)
    described = tuple(_describe(operand.array) for operand in operands if hasattr(operand.array, "dtype"))
    return Origin("NaN" if is_nan else "infinity", equation.primitive.name, where.layer, where.is_backward, _source(equation, place), described)


def _describe(array: Any) -> str:
    shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if not array.size or not jnp.issubdtype(array.dtype, jnp.number):
        return shape
    numbers = np.asarray(array).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return f"{shape} without a finite number"
    low, high = finite.min(), finite.max()
    values = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    infinite = " and infinities" if np.isinf(numbers).any() else ""
    return f"{shape} of {values}{infinite}"
