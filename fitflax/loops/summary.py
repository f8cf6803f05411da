"""The summary of a model: linen's table of layers, and the sizes of its arrays, each counted once even if several devices hold it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fitflax.data.batch import Triple
from fitflax.errors import ConfigError, NotReadyError
from fitflax.leaves import is_key, named_leaves
from fitflax.loops.session import Session, unpadded_batch
from fitflax.models import Model
from fitflax.optimizers import get_learning_rates
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree, TrainState, shapes_of
from fitflax.steps.gradients import split_key
from fitflax.steps.optimizer import parameter_groups
from fitflax.steps.program import PASSES


def describe(session: Session, sample: Triple | None, *, memory: bool, sharding: bool) -> str:
    """Returns a table of a session's model, and its costs for the shapes of a batch; by default, of the first batch of the last call.

    `memory` also compiles the training step and reports its memory; `sharding` reports how each array is laid out.
    """
    shapes, strategy = session.state.sample if sample is None else shapes_of(unpadded_batch(sample)), session.strategy
    if shapes is None:
        raise NotReadyError("summary() needs the shapes of a batch, but there has been none yet. Pass summary(sample=x).")
    program = session.need_trainable("summary(memory=True)") if memory else session.task.any_program()
    task = program.task
    # Each replica gets as many rows as the batch has, because fewer rows than devices would leave some devices without rows.
    replicas = strategy.num_replicas
    whole: Batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * replicas, *leaf.shape[1:]), leaf.dtype), shapes)
    state = session.state.state_or_shapes(whole)
    table = describe_model(task.model, strategy, task.streams.init, state, whole, None if task.custom_step else task.optimizer)
    taken = program.preparation.memory() if sample is None else None
    if memory and taken is None:
        if sample is None:
            raise NotReadyError("summary(memory=True) needs the shapes of a batch to compile a training step. Pass summary(sample=(x, y), memory=True).")
        if program.is_eager:
            raise ConfigError("summary(memory=True) needs a compiled step. Remove what disables jit: jax.disable_jit(), JAX_DISABLE_JIT or run_eagerly=True.")
        batch = session.data_adapter.sample(sample, accumulate_steps=task.numerics.accumulate_steps)
        steps = program.limit_steps_per_call(session.task.steps_per_call or 1, batch)
        program.preparation.train(state, batch, steps_per_call=steps)
        taken = program.preparation.memory()
    lines = [table, *describe_costs(program.preparation.forward_flops(state, whole), taken)]
    return "\n".join(lines + (["", *describe_sharding(strategy, strategy.abstract_state(state))] if sharding else []))


def describe_size(tree: PyTree) -> str:
    """Returns the number of elements of a tree and their memory: exact below 1 KB, else rounded down to one decimal.

    >>> describe_size({"w": jnp.zeros((5, 5))}), describe_size(jnp.zeros(328960))
    ('25 = 100 B', '328960 ~ 1.2 MB')
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)]
    count, size = sum(leaf.size for leaf in arrays), sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    return f"{count} = {size} B" if size < 1024 else f"{count} ~ {_describe_bytes(size)}"


def _describe_bytes(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    units, scale = ("KB", "MB", "GB", "TB"), 1024
    unit = next((index for index in range(len(units)) if size < scale ** (index + 2)), len(units) - 1)
    return f"{size * 10 // scale ** (unit + 1) / 10} {units[unit]}"


def describe_costs(flops: float | None, memory: Any) -> list[str]:
    """Returns lines about the floating-point operations of a forward pass over an example, and about JAX's memory analysis of a training step."""
    lines = []
    if flops:
        lines.append(f"Model FLOPs per example: {_describe_count(flops)} forward, {_describe_count(PASSES * flops)} in training")
    if memory is not None:
        parts = {"arguments": "argument", "results": "output", "in common": "alias", "temporaries": "temp"}
        sizes = {what: int(getattr(memory, f"{name}_size_in_bytes", 0)) for what, name in parts.items()}
        # On CPUs, XLA's peak does not include temporaries.
        peak = max(int(getattr(memory, "peak_memory_in_bytes", 0)), sizes["arguments"] + sizes["results"] - sizes["in common"] + sizes["temporaries"])
        taken = ", ".join(f"{what} {_describe_bytes(size)}" for what, size in sizes.items() if what in ("arguments", "temporaries"))
        lines.append(f"Memory of a training step per device: {taken}, peak {_describe_bytes(peak)}")
    return lines


def _describe_count(number: float) -> str:
    unit = next((index for index in range(5) if number < 1000 ** (index + 1)), 5)
    return f"{number / 1000**unit:.3g} {['', 'K', 'M', 'G', 'T', 'P'][unit]}".rstrip()


def describe_model(
    model: Model, strategy: Strategy, streams: tuple[str, ...], state: TrainState, batch: Batch, optimizer: optax.GradientTransformation | None = None
) -> str:
    """Returns the table of layers, and the sizes of parameters, collections and optimizer state. Only shapes are evaluated.

    In linen's table 1 KB is 1000 bytes; in the lines below it, 1024.
    """
    table: str | None = None

    def tabulate(batch: Batch) -> jax.Array:
        nonlocal table
        table = model.tabulate(split_key(jax.random.key(0), ("params", *streams)), batch.x)
        return jnp.zeros(())

    jax.eval_shape(strategy.trace(tabulate, inputs=("split",)), strategy.abstract_feed(batch))
    lines = _describe_params(optimizer, state)
    lines += [f"Collection {name}: {describe_size(tree)}" for name, tree in state.model_state.items()]
    if state.ema_params is not None:
        lines.append(f"Averaged parameters: {describe_size(state.ema_params)}")
    if jax.tree.leaves(state.opt_state):
        lines.append(f"Optimizer state: {describe_size(state.opt_state)}")
    return "\n".join([*([] if table is None else [table, ""]), *lines])


def describe_sharding(strategy: Strategy, state: TrainState) -> list[str]:
    """Returns lines about how the arrays of a state are sharded, given their shapes, and how many bytes of them a device holds.

    Parameters and collections have a line each; averages and moments only if they are sharded differently from their parameter.
    """
    params = {f"params/{path}": leaf for path, leaf in named_leaves(state.params)}
    others = dict(named_leaves(state.model_state))
    followers = {f"ema_params/{path}": leaf for path, leaf in named_leaves(state.ema_params)}
    followers |= {f"opt_state/{path}": leaf for path, leaf in named_leaves(state.opt_state)}
    followers = {path: leaf for path, leaf in followers.items() if leaf.ndim}
    by_end = {path.removeprefix("params"): _split_axes(leaf) for path, leaf in params.items()}
    apart = {path: leaf for path, leaf in followers.items() if not any(path.endswith(end) and at == _split_axes(leaf) for end, at in by_end.items())}
    rows = [("array", "shape", "split over", "per device")]
    for path, leaf in (params | others | apart).items():
        rows.append((path, f"{leaf.dtype}{list(leaf.shape)}", _split_axes(leaf), _describe_bytes(_bytes_on_device(leaf))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{strategy!r}:", *("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows)]
    if len(apart) < len(followers):
        lines.append(f"The other {len(followers) - len(apart)} arrays of the optimizer state and averages are placed like their parameters.")
    lines += [f"Axis {axis!r} is unused: no array of the state and no batch is split over it." for axis in strategy.idle_axes(state)]
    parts = {"parameters": params, "collections": others, "averages": state.ema_params, "optimizer": state.opt_state}
    held = {name: (sum(map(_bytes_on_device, jax.tree.leaves(tree))), sum(map(_num_bytes, jax.tree.leaves(tree)))) for name, tree in parts.items()}
    sums = [f"{name} {_describe_bytes(on_device)} of {_describe_bytes(whole)}" for name, (on_device, whole) in held.items() if whole]
    on_device, whole = (sum(pair[index] for pair in held.values()) for index in (0, 1))
    return [*lines, f"Each device holds {', '.join(sums)}; in total {_describe_bytes(on_device)} of {_describe_bytes(whole)}."]


def _split_axes(leaf: Any) -> str:
    """Returns the mesh axes that each array axis is split over, such as `-, model` for a matrix whose columns are split."""
    spec = leaf.sharding.spec
    axes = [*spec, *[None] * (leaf.ndim - len(spec))]
    words = ["-" if each is None else each if isinstance(each, str) else "*".join(each) for each in axes]
    return ", ".join(words) if any(word != "-" for word in words) else "whole"


def _num_bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)


def _bytes_on_device(leaf: Any) -> int:
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * int(leaf.dtype.itemsize)


def _describe_params(optimizer: optax.GradientTransformation | None, state: TrainState) -> list[str]:
    """Returns a line for the trainable parameters, and one for each parameter group if there are several or some are frozen."""
    groups = [] if optimizer is None else parameter_groups(optimizer, state.params)
    leaves = dict(named_leaves(state.params))
    frozen = {path for group in groups if group.is_frozen for path in group.paths}
    lines = [f"Total number of trainable weights: {describe_size([leaf for path, leaf in leaves.items() if path not in frozen])}"]
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.opt_state))
    rates = {} if is_abstract else get_learning_rates(state.opt_state)
    for group in groups:
        how = ", frozen" if group.is_frozen else f", learning rate {float(rates[group.name]):g}" if group.name in rates else ""
        lines.append(f"  {group.name}: {describe_size([leaves[path] for path in group.paths])} in {len(group.paths)} arrays{how}")
    return lines
