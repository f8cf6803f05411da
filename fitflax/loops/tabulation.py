"""A model as a table: linen's own tabulation of its layers, and the sizes of what is trained, each counted once however many devices hold it."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from fitflax.data.batch import Triple
from fitflax.errors import NotReadyError
from fitflax.leaves import is_key, named_leaves
from fitflax.loops.intake import as_given
from fitflax.loops.session import Session
from fitflax.optimizers import get_learning_rates
from fitflax.parallel import Strategy
from fitflax.state import Batch, PyTree, TrainState, shapes_of
from fitflax.steps.groups import parameter_groups
from fitflax.steps.model import LinenModel
from fitflax.steps.program import PASSES
from fitflax.steps.task import split_key

__all__ = ["describe"]


def describe(session: Session, sample: Triple | None, *, memory: bool, sharding: bool) -> str:
    """Returns a session's model as a table and what it costs, for the shapes of a batch, by default those of the last one.

    Args:
        session: The session.
        sample: A batch as the user gave it.
        memory: Whether the training step is compiled for a batch like it, for what is said of its memory.
        sharding: Whether it is said where each array lies.

    Raises:
        NotReadyError: There has been no batch yet; `memory` before `compile`.
        ModelError: The module does not run on it.
    """
    shapes, strategy = session.sample if sample is None else shapes_of(as_given(sample)), session.strategy
    if shapes is None:
        raise NotReadyError("summary() needs the shapes of a batch, and there has been none yet. Pass summary(sample=x).")
    program = session.need_trainable("summary(memory=True)") if memory else session.any_program()
    task = program.task
    # A share of a batch that has fewer rows than there are devices would have none.
    whole = for_each_replica(shapes, strategy)
    state = session.state_or_shapes(whole)
    assert isinstance(task.model, LinenModel)
    table = describe_model(task.model, strategy, task.streams.init, state, shapes, None if task.custom_step else task.optimizer)
    taken = program.memory() if sample is None else None
    if memory and taken is None:
        if sample is None:
            raise NotReadyError("summary(memory=True) compiles a training step for the shapes of a batch. Pass summary(sample=(x, y), memory=True).")
        batch = session.intake.sample(sample, accumulate_steps=task.numerics.accumulate_steps)
        program.prepare_train(state, batch, steps_per_call=session.steps_per_call or 1)
        taken = program.memory()
    lines = [table, *describe_costs(program.forward_flops(state, whole), taken)]
    return "\n".join(lines + (["", *describe_sharding(strategy, strategy.abstract_state(state))] if sharding else []))


def describe_size(tree: PyTree) -> str:
    """Returns how many numbers a tree holds and how much memory they take: exact below 1 KB, else rounded down to one decimal.

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
    """Returns lines about what a model costs.

    Args:
        flops: The floating-point operations of a pass forward over an example, if they are known.
        memory: JAX's analysis of the memory of a compiled training step, if there is one.

    >>> describe_costs(2.5e9, None)
    ['Model FLOPs of an example: 2.5 G forward, 7.5 G in training']
    """
    lines = []
    if flops:
        lines.append(f"Model FLOPs of an example: {_describe_count(flops)} forward, {_describe_count(PASSES * flops)} in training")
    if memory is not None:
        parts = {"arguments": "argument", "results": "output", "in common": "alias", "temporaries": "temp"}
        sizes = {what: int(getattr(memory, f"{name}_size_in_bytes", 0)) for what, name in parts.items()}
        # The peak that XLA gives for a CPU leaves temporaries out.
        peak = max(int(getattr(memory, "peak_memory_in_bytes", 0)), sizes["arguments"] + sizes["results"] - sizes["in common"] + sizes["temporaries"])
        taken = ", ".join(f"{what} {_describe_bytes(size)}" for what, size in sizes.items() if what in ("arguments", "temporaries"))
        lines.append(f"Memory of a training step on a device: {taken}, peak {_describe_bytes(peak)}")
    return lines


def _describe_count(number: float) -> str:
    unit = next((index for index in range(5) if number < 1000 ** (index + 1)), 5)
    return f"{number / 1000**unit:.3g} {['', 'K', 'M', 'G', 'T', 'P'][unit]}".rstrip()


def for_each_replica(batch: Batch, strategy: Strategy) -> Batch:
    """Returns the shapes of a batch of which every replica sees as much as `batch` has."""
    whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * strategy.num_replicas, *leaf.shape[1:]), leaf.dtype), batch)
    return cast(Batch, whole)


def describe_model(
    model: LinenModel, strategy: Strategy, streams: tuple[str, ...], state: TrainState, batch: Batch, optimizer: optax.GradientTransformation | None = None
) -> str:
    """Returns the model's layers as a table, and the sizes of parameters, collections and optimizer state. Nothing is computed but shapes.

    In linen's table 1 KB is 1000 bytes; in the lines below it, as everywhere here, 1024.

    Args:
        model: The module.
        strategy: Whose axis name the module may need.
        streams: Names of random streams at initialization.
        state: The state, or its shapes.
        batch: The shapes of a batch.
        optimizer: What the groups of parameters follow from, if there is one.

    Raises:
        ModelError: The module does not run on it.
    """
    table = ""

    def tabulate(batch: Batch) -> jax.Array:
        nonlocal table
        table = model.tabulate(split_key(jax.random.key(0), ("params", *streams)), batch.x)
        return jnp.zeros(())

    jax.eval_shape(strategy.trace(tabulate, inputs=("split",)), strategy.abstract_feed(for_each_replica(batch, strategy)))
    lines = _describe_params(optimizer, state)
    lines += [f"Collection {name}: {describe_size(tree)}" for name, tree in state.model_state.items()]
    if state.ema_params is not None:
        lines.append(f"Averaged parameters: {describe_size(state.ema_params)}")
    if jax.tree.leaves(state.opt_state):
        lines.append(f"Optimizer state: {describe_size(state.opt_state)}")
    # Linen's last line adds collections to the parameters, and would contradict ours.
    return "\n".join([table[: table.rindex("Total Parameters")].rstrip(), "", *lines])


def describe_sharding(strategy: Strategy, state: TrainState) -> list[str]:
    """Returns lines about where the arrays of a state lie, and how many bytes of them a device holds.

    Parameters and collections have a line each; averages and moments have one only where they lie otherwise than their parameter.

    Args:
        strategy: Where the state is.
        state: The state's shapes with their places.
    """
    params = {f"params/{path}": leaf for path, leaf in named_leaves(state.params)}
    others = dict(named_leaves(state.model_state))
    followers = {f"ema_params/{path}": leaf for path, leaf in named_leaves(state.ema_params)}
    followers |= {f"opt_state/{path}": leaf for path, leaf in named_leaves(state.opt_state)}
    followers = {path: leaf for path, leaf in followers.items() if leaf.ndim}
    by_end = {path.removeprefix("params"): _place(leaf) for path, leaf in params.items()}
    apart = {path: leaf for path, leaf in followers.items() if not any(path.endswith(end) and at == _place(leaf) for end, at in by_end.items())}
    rows = [("array", "shape", "split over", "a device holds")]
    for path, leaf in (params | others | apart).items():
        rows.append((path, f"{leaf.dtype}{list(leaf.shape)}", _place(leaf), _describe_bytes(_bytes_on_device(leaf))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{strategy!r}:", *("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows)]
    if len(apart) < len(followers):
        lines.append(f"The other {len(followers) - len(apart)} arrays of optimizer and averages lie as their parameters do.")
    lines += [f"No array of the state and no batch is split over {axis!r}." for axis in strategy.idle_axes(state)]
    parts = {"parameters": params, "collections": others, "averages": state.ema_params, "optimizer": state.opt_state}
    held = {name: (sum(map(_bytes_on_device, jax.tree.leaves(tree))), sum(map(_num_bytes, jax.tree.leaves(tree)))) for name, tree in parts.items()}
    sums = [f"{name} {_describe_bytes(own)} of {_describe_bytes(whole)}" for name, (own, whole) in held.items() if whole]
    own, whole = (sum(pair[index] for pair in held.values()) for index in (0, 1))
    return [*lines, f"A device holds {', '.join(sums)}; in all {_describe_bytes(own)} of {_describe_bytes(whole)}."]


def _place(leaf: Any) -> str:
    """Returns over which mesh axes each axis of an array is split: `-, model` for a matrix whose columns are."""
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
    """Returns a line for the parameters that are trained, and one for each group that is treated alike, if there are several or some are frozen."""
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
