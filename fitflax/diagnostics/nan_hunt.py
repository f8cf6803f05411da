"""Finds the first step that is not finite, and the operations that caused it: runs steps one by one, and traces the first bad one operation by operation."""

import dataclasses
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fitflax.checkpoints.checkpoint_files import Saved, is_checkpoint
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.data import Feed
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from fitflax.leaves import listed, named_leaves, path_name, through_key_data
from fitflax.loops.session import Session
from fitflax.parallel.placement import whole
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.outputs import Keep
from fitflax.steps.program import Program
from fitflax.storage import locate

WATCHED = Keep(norm=True, culprit=True)
"""The values of a step that show whether it is finite."""

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
_CONSTANT = "a constant"


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


@dataclasses.dataclass(frozen=True)
class NanReport:
    """The first step of a run whose loss, gradient or new parameters are not finite, with the cause.

    Attributes:
        step: The step, counted from 1.
        culprit: The first value that was not finite: "the loss", "the gradient of Dense_0/kernel", "the parameter Dense_0/kernel".
        origins: The operations that caused it, in order: where an infinity first appeared, if it became NaN, then where NaN first appeared. Empty if only the
            compiled step, which computes in another order, is not finite.
        batch: The batch, as NumPy arrays `[batch, ...]`.
        state: The state before the step, on the host.

    >>> print(NanReport(7, "the loss", (Origin("NaN", "log", "Net/Dense_0", False, "net.py:12 in __call__", ("float32[8] from -1 to 3",)),), None, None))
    Step 7: the loss is not finite.
      NaN from log in Net/Dense_0 (net.py:12 in __call__); operands: float32[8] from -1 to 3
    """

    step: int
    culprit: str
    origins: tuple[Origin, ...]
    batch: Batch
    state: TrainState

    def __str__(self) -> str:
        unknown = ["The step is finite when it runs operation by operation. Only the compiled step, which computes in another order, is not finite."]
        return "\n  ".join([f"Step {self.step}: {self.culprit} is not finite.", *([str(origin) for origin in self.origins] or unknown)])


def hunt_nan(session: Session, feed: Feed, *, steps: int | None) -> NanReport | None:
    """Trains a session's state, which is used only here, until a step is not finite, and returns a report; `None` if all steps are finite.

    `steps` is the maximum number of steps; by default one pass over the data.
    """
    program, live = session.task.need_compiled("hunt_nan"), session.state.need("hunt_nan")
    bad = _nonfinite_paths(live.borrow().params)
    if bad:
        raise ConfigError(
            f"The parameters are not finite before the first step: {listed(bad)}. Pass restore_from=, an earlier checkpoint or a directory of checkpoints, or "
            "use a new trainer."
        )
    num_steps, sums = 0, program.empty_sums(train=True)
    while steps is None or num_steps < steps:
        fed = feed.next()
        if fed is None and steps is not None and feed.source.can_restart:
            fed = feed.next()
        if fed is None:
            return None
        before = session.strategy.copy(live.borrow())
        trained = program.train(live.take(), sums, fed, keep=WATCHED)
        live.advance(trained.state)
        sums, num_steps = trained.sums, num_steps + 1
        if trained.values.steps_since_bad is not None:
            return _report(program, before, fed.batch, live.step, trained.values.culprit)
    return None


def _report(program: Program, state: TrainState, batch: Batch, step: int, culprit: str | None) -> NanReport:
    names: list[str] = []

    def examine(state: TrainState, batch: Batch) -> list[jax.Array]:
        suspects = program.task.suspects(state, batch)
        names[:] = [name for name, _ in suspects]
        return [array for _, array in suspects]

    on_host = jax.tree.map(through_key_data(whole), (state, program.strategy.feed(batch)))
    jaxpr = jax.make_jaxpr(program.strategy.emulate(examine, inputs=("replicated", "split")))(*on_host)
    inputs = jax.tree_util.tree_leaves_with_path(on_host)
    chains = find_origins(jaxpr, [leaf for _, leaf in inputs], [_array_name(path) for path, _ in inputs])
    name, chain = next(((name, chain) for name, chain in zip(names, chains, strict=True) if chain), ("the loss or its gradient", []))
    return NanReport(step, culprit or name, tuple(chain), jax.device_get(batch), on_host[0])


def _array_name(path: tuple[Any, ...]) -> str:
    """Returns the name of an array of the state or the batch."""
    name = path_name(path[1:])
    return name if path[0].idx == 0 else f"the batch's {name}"


def _nonfinite_paths(params: PyTree) -> list[str]:
    """Returns the paths of arrays that hold NaN or infinities."""
    return [name for name, leaf in named_leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(whole(leaf)).all()]


def last_finite(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Saved:
    """Returns a checkpoint; for a directory of checkpoints, the newest intact one with finite parameters."""
    directory = locate(path, owner="restore_from", error=CheckpointError, options=storage_options)
    if is_checkpoint(directory):
        return load_checkpoint(directory)
    store = CheckpointStore(directory)
    if not store.steps():
        return load_checkpoint(directory)  # A checkpoint of another library, or an error that says what is there instead.
    saved, skipped = store.newest_good(accepts=lambda saved: not _nonfinite_paths(saved.train["params"]))
    if saved is None:
        damaged = f" Others cannot be read: {' '.join(map(str, skipped))}" if skipped else ""
        raise CheckpointNotFoundError(
            f"No checkpoint in {directory} has finite parameters. Start from the beginning instead: use a new trainer, without restore_from.{damaged}"
        )
    return saved


# -- where NaN and infinities come from --


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

    These are, from cause to effect: where an infinity first appeared, if it became NaN, and where NaN first appeared; empty for finite results.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.log(x - 2))(np.float32(1))
    >>> [[origin]] = find_origins(jaxpr, [np.float32(1)], ["x"])
    >>> print(origin.kind, origin.operation, *origin.operands)
    NaN log float32[] equal to -1
    """
    inputs = [_input_value(array, name) for array, name in zip(arguments, names, strict=True)]
    return [_trace_back(value.node) for value in _evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, _Place())]


def _trace_back(node: _Node | None) -> list[Origin]:
    """Returns the origins of a result, the cause first."""
    chain: list[Origin] = []
    while node is not None and (node.has_nan or node.has_infinity):
        is_nan = node.has_nan
        before = next((parent for parent in node.parents if (parent.has_nan if is_nan else parent.has_infinity)), None)
        if before is None and node.origin is not None:
            chain.insert(0, node.origin)
        if before is None and is_nan:
            before = next((parent for parent in node.parents if parent.has_infinity), None)
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
    values: dict[Any, _Value] = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*inputs, *map(_input_value, consts)], strict=True))

    def read(atom: Any) -> _Value:
        return _input_value(atom.val) if isinstance(atom, core.Literal) else values[atom]

    last_use = {atom: index for index, equation in enumerate(jaxpr.eqns) for atom in equation.invars if not isinstance(atom, core.Literal)}
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    for index, equation in enumerate(jaxpr.eqns):
        results = _evaluate_equation(equation, list(map(read, equation.invars)), place)
        values.update(zip(equation.outvars, results, strict=True))
        for atom in {atom for atom in equation.invars if not isinstance(atom, core.Literal)} - needed:
            if last_use[atom] == index:
                del values[atom]
    return list(map(read, jaxpr.outvars))


def _input_value(array: Any, name: str = _CONSTANT) -> _Value:
    """Returns an array that no operation computed: an argument or a constant."""
    nan, infinity = _nonfinite_kinds(array)
    return _Value(array, _Node(nan, infinity, (), Origin("NaN" if nan else "infinity", name)))


def _evaluate_equation(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    name, params = equation.primitive.name, equation.params
    if name == "sharding_constraint":
        return operands  # All arrays are on one device here.
    if name == "cond":
        return _evaluate_closed(params["branches"][int(operands[0].array)], operands[1:], equation, place)
    if name in _CALLS:
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            return _evaluate_closed(inner, operands, equation, place)
    results = equation.primitive.bind(*(operand.array for operand in operands), **equation.primitive.get_bind_params(params))
    results = list(results) if equation.primitive.multiple_results else [results]
    faults = [_nonfinite_kinds(result) for result in results]
    if not any(nan or infinity for nan, infinity in faults):
        return [_Value(result, _Node(False, False)) for result in results]  # Finite results need no parents.
    if name in ("scan", "while"):
        return _evaluate_scan(equation, operands, place) if name == "scan" else _evaluate_while(equation, operands, place)
    chosen = _selected_cases(operands, results[0]) if name == "select_n" else operands
    parents = tuple(_with_place(operand.node, equation, place) for operand in chosen)
    return [
        _Value(result, _Node(nan, infinity, parents, _origin(equation, operands, place, is_nan=nan) if nan or infinity else None))
        for result, (nan, infinity) in zip(results, faults, strict=True)
    ]


def _evaluate_closed(closed: Any, operands: Sequence[_Value], equation: Any, place: _Place) -> list[_Value]:
    """Evaluates the function that an equation calls."""
    # A cached function has the source lines of the call that traced it.
    source = (_source(equation, place) or None) if equation.primitive.name in _CACHED else place.source
    return _evaluate(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), operands, _place_of(equation, place)._replace(source=source))


def _selected_cases(operands: list[_Value], result: Any) -> list[_Value]:
    """Returns the cases of a selection from which values that are not finite were taken."""
    which, is_bad = np.asarray(operands[0].array), ~np.isfinite(np.asarray(result))
    return [case for index, case in enumerate(operands[1:]) if ((which == index) & is_bad).any()]


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
    for index in range(length)[:: -1 if params["reverse"] else 1]:
        slices = [_Value(row.array[index], row.node) for row in rows]
        results = _evaluate_closed(params["jaxpr"], [*consts, *carry, *slices], equation, place)
        carry = results[:num_carry]
        for stack, result in zip(stacks, results[num_carry:], strict=True):
            stack.append(result)
    for stack in stacks:
        array = jnp.stack([value.array for value in (reversed(stack) if params["reverse"] else stack)])
        carry.append(_Value(array, _Node(*_nonfinite_kinds(array), tuple(value.node for value in stack))))
    return carry


def _evaluate_while(equation: Any, operands: list[_Value], place: _Place) -> list[_Value]:
    """Returns the results of a `while`, evaluated iteration by iteration."""
    params = equation.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body, carry = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
    while bool(_evaluate_closed(params["cond_jaxpr"], [*of_test, *carry], equation, place)[0].array):
        carry = _evaluate_closed(params["body_jaxpr"], [*of_body, *carry], equation, place)
    return carry


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
    for frame in getattr(equation.source_info.traceback, "frames", ()):
        if not os.path.realpath(frame.file_name).startswith(_PACKAGES) and not frame.file_name.startswith("<frozen"):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} in {frame.function_name}"
    return ""


def _origin(equation: Any, operands: list[_Value], place: _Place, *, is_nan: bool) -> Origin | None:
    """Returns the origin if NaN, or an infinity, first appeared at an operation; `None` if an operand already had it."""
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
