"""Finds where NaN and infinities come from, by evaluating a traced function operation by operation."""

import dataclasses
import os
import re
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

__all__ = ["Origin", "find_origins"]

# Transformations in the names of scopes, as in "transpose(jvp(Net))/Dense_0".
_WRAPPED = re.compile(r"\b[a-z_]+\(([^()]*)\)")
_BACKWARD = "transpose("
# Operations that call another function with their operands; all others are evaluated as they are.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    *("custom_vmap_call", "custom_lin", "linear_call"),
}
# Calls whose jaxpr may be cached from an earlier call.
_CACHED = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"}
# Scopes that JAX adds.
_JAX_SCOPES = {"rematted_computation", "checkpoint", ""}
# Code that is not the user's.
_PACKAGES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")} | {os.path.dirname(os.path.dirname(__file__))})


class Origin(NamedTuple):
    """An operation at which NaN, or an infinity, first appeared.

    Attributes:
        kind: `"NaN"` or `"infinity"`.
        operation: The name of the JAX operation, such as `"log"`; for a value that was not finite from the beginning, its name, such as `"the input x"`.
        layer: The path of the module, beginning with the class of the outermost one, such as `"Net/Dense_0"`; `""` outside of modules.
        is_backward: Whether it belongs to the backward pass.
        source: The line of user code, such as `"model.py:31 in __call__"`; `""` if there is none.
        operands: The dtype, shape and range of each operand.

    >>> print(Origin("NaN", "log", "Net/Dense_0", False, "net.py:12 in __call__", ("float32[8] from -1 to 3",)))
    NaN from log in Net/Dense_0 (net.py:12 in __call__); operands: float32[8] from -1 to 3
    """

    kind: str
    operation: str
    layer: str = ""
    is_backward: bool = False
    source: str = ""
    operands: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        passes = ", in the backward pass" if self.is_backward else ""
        of = f"; operands: {', '.join(self.operands)}" if self.operands else ""
        at = f" ({self.source})" if self.source else ""
        return f"{self.kind} from {self.operation}{where}{passes}{at}{of}"


_CONSTANT = "a constant"


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """What is known about an array after it was freed: whether it was finite, what it was computed from, and the origin of its NaN or infinities."""

    has_nan: bool
    has_infinity: bool
    parents: tuple["_Node", ...] = ()
    origin: Origin | None = None


class _Value(NamedTuple):
    array: Any
    node: _Node


class _Place(NamedTuple):
    """Where an inner function is called: layer and direction, and the source line if the function's own lines may belong to another call."""

    layer: str = ""
    is_backward: bool = False
    source: str | None = None


def find_origins(jaxpr: core.ClosedJaxpr, arguments: Sequence[Any], names: Sequence[str]) -> list[list[Origin]]:
    """Evaluates a function that `jax.make_jaxpr` traced, without collectives, operation by operation, and returns the origins of each result.

    These are, from cause to effect: where an infinity came up, if it became NaN, and where NaN came up; empty for finite results.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.log(x - 2))(np.float32(1))
    >>> [[origin]] = find_origins(jaxpr, [np.float32(1)], ["x"])
    >>> print(origin.kind, origin.operation, *origin.operands)
    NaN log float32[] equal to -1
    """
    inputs = [_given(array, name) for array, name in zip(arguments, names, strict=True)]
    return [_trace_back(value.node) for value in _evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, _Place())]


def _trace_back(node: _Node) -> list[Origin]:
    """Returns the origins of a result, the cause first."""
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


def _nonfinite_kinds(array: Any) -> tuple[bool, bool]:
    """Returns whether an array holds NaN, and whether it holds an infinity."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return False, False
    numbers = np.asarray(array)
    nan = bool(np.isnan(numbers).any())
    return nan, not np.isfinite(numbers).all() if not nan else bool(np.isinf(numbers).any())


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, const in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = _given(const)
    last_use = {atom: index for index, equation in enumerate(jaxpr.eqns) for atom in equation.invars if not isinstance(atom, core.Literal)}
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    for index, equation in enumerate(jaxpr.eqns):
        operands = [_given(atom.val) if isinstance(atom, core.Literal) else values[atom] for atom in equation.invars]
        values.update(zip(equation.outvars, _evaluate_equation(equation, operands, place), strict=True))
        for atom in {atom for atom in equation.invars if not isinstance(atom, core.Literal)}:
            if last_use[atom] == index and atom not in needed:
                del values[atom]
    return [_given(atom.val) if isinstance(atom, core.Literal) else values[atom] for atom in jaxpr.outvars]


def _given(array: Any, name: str = _CONSTANT) -> _Value:
    """Returns an array that no operation computed: an argument or a constant."""
    nan, infinity = _nonfinite_kinds(array)
    return _Value(array, _Node(nan, infinity, (), Origin("NaN" if nan else "infinity", name)))


def _evaluate_equation(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    name, params = equation.primitive.name, equation.params
    if name == "sharding_constraint":
        return operands  # All arrays are on one device here.
    if name == "cond":
        branch = params["branches"][int(operands[0].array)]
        return _evaluate(branch.jaxpr, branch.consts, operands[1:], _inner_place(equation, place))
    if name in _CALLS:
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, _inner_place(equation, place))
    results = _bind(equation, [operand.array for operand in operands])
    faults = [_nonfinite_kinds(result) for result in results]
    if any(nan or infinity for nan, infinity in faults) and name in ("scan", "while"):
        return _evaluate_scan(equation, operands, place) if name == "scan" else _evaluate_while(equation, operands, place)
    parents: tuple[_Node, ...] = ()  # Finite results need no parents.
    if any(nan or infinity for nan, infinity in faults):
        chosen = _selected_cases(operands, results[0]) if name == "select_n" else operands
        parents = tuple(_with_place(operand.node, equation, place) for operand in chosen)
    return [
        _Value(result, _Node(nan, infinity, parents, _origin(equation, operands, place, is_nan=nan) if nan or infinity else None))
        for result, (nan, infinity) in zip(results, faults, strict=True)
    ]


def _selected_cases(operands: list[_Value], result: Any) -> list[_Value]:
    """Returns the cases of a selection from which values that are not finite were taken."""
    which, is_bad = np.asarray(operands[0].array), ~np.isfinite(np.asarray(result))
    return [case for index, case in enumerate(operands[1:]) if ((which == index) & is_bad).any()]


def _bind(equation: Any, arrays: list[Any]) -> list[Any]:
    results = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def _evaluate_scan(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    """Returns the results of a `scan`, evaluated iteration by iteration."""
    params, length = equation.params, equation.params["length"]
    inner = params["jaxpr"].jaxpr
    # Stacked values have one axis more. Shapes are used because JAX's parameter names have changed.
    num_carry = sum(whole.aval.shape == one.aval.shape for whole, one in zip(equation.outvars, inner.outvars, strict=True))
    num_rows = sum(whole.aval.shape != one.aval.shape for whole, one in zip(equation.invars, inner.invars, strict=True))
    num_consts = len(operands) - num_carry - num_rows
    consts, carry, rows = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    stacks: list[list[_Value]] = [[] for _ in range(len(equation.outvars) - num_carry)]
    for index in reversed(range(length)) if params["reverse"] else range(length):
        slices = [_Value(row.array[index], row.node) for row in rows]
        results = _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, [*consts, *carry, *slices], _inner_place(equation, place))
        carry = results[:num_carry]
        for stack, result in zip(stacks, results[num_carry:], strict=True):
            stack.append(result)
    whole = []
    for stack in stacks:
        ordered = stack[::-1] if params["reverse"] else stack
        array = jnp.stack([value.array for value in ordered])
        whole.append(_Value(array, _Node(*_nonfinite_kinds(array), tuple(value.node for value in stack))))
    return [*carry, *whole]


def _evaluate_while(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    """Returns the results of a `while`, evaluated iteration by iteration."""
    params = equation.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body, carry = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
    inside = _inner_place(equation, place)
    while bool(_evaluate(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, [*of_test, *carry], inside)[0].array):
        carry = _evaluate(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, [*of_body, *carry], inside)
    return list(carry)


def _inner_place(equation: Any, place: _Place) -> _Place:
    """Returns the place of the operations inside a call or a loop."""
    # A cached function has the source lines of the call that traced it.
    return _place_of(equation, place)._replace(source=(_source(equation, place) or None) if equation.primitive.name in _CACHED else place.source)


def _place_of(equation: Any, place: _Place) -> _Place:
    """Returns the layer and direction of an operation."""
    scopes = str(equation.source_info.name_stack)
    layer = scopes
    while (simpler := _WRAPPED.sub(r"\1", layer)) != layer:
        layer = simpler
    names = [name for name in layer.split("/") if name not in _JAX_SCOPES]
    # Rematerialized operations repeat their scopes: "transpose(jvp(Net))/jvp(Net)".
    if _BACKWARD in scopes and "/jvp(" in scopes and len(names) > 1 and names[0] == names[1]:
        del names[0]
    before = place.layer.split("/") if place.layer and names[:1] != place.layer.split("/")[:1] else []
    return _Place("/".join([*before, *names] or place.layer.split("/")), place.is_backward or _BACKWARD in scopes, place.source)


def _with_place(node: _Node, equation: Any, place: _Place) -> _Node:
    """Returns the node of an operand; for a constant, with the place where it is used."""
    if node.origin is None or node.origin.operation != _CONSTANT or not (node.has_nan or node.has_infinity):
        return node
    where = _place_of(equation, place)
    origin = node.origin._replace(layer=where.layer, is_backward=where.is_backward, source=_source(equation, place))
    return _Node(node.has_nan, node.has_infinity, (), origin)


def _source(equation: Any, place: _Place) -> str:
    if place.source is not None:
        return place.source
    frames = getattr(equation.source_info.traceback, "frames", ())
    return next((f"{os.path.basename(frame.file_name)}:{frame.line_num} in {frame.function_name}" for frame in frames if _is_user_code(frame)), "")


def _is_user_code(frame: Any) -> bool:
    path = os.path.realpath(frame.file_name)
    return not path.startswith(_PACKAGES) and not frame.file_name.startswith("<frozen")


def _origin(equation: Any, operands: list[_Value], place: _Place, *, is_nan: bool) -> Origin | None:
    """Returns the origin if NaN, or an infinity, first came up at an operation; `None` if an operand had it already."""
    if any(operand.node.has_nan if is_nan else operand.node.has_infinity for operand in operands):
        return None
    where = _place_of(equation, place)
    described = tuple(_describe(operand.array) for operand in operands if hasattr(operand.array, "dtype"))
    return Origin("NaN" if is_nan else "infinity", equation.primitive.name, where.layer, where.is_backward, _source(equation, place), described)


def _describe(array: Any) -> str:
    shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if not array.size or not jnp.issubdtype(array.dtype, jnp.number):
        return shape
    numbers = np.asarray(array).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return f"{shape} with no finite values"
    low, high = finite.min(), finite.max()
    values = f"equal to {low:.4g}" if low == high else f"from {low:.4g} to {high:.4g}"
    infinite = " and infinities" if np.isinf(numbers).any() else ""
    return f"{shape} {values}{infinite}"
