"""Hand-written loops, as a careful author would write them.

State and running sums are donated, NumPy batches go directly into the compiled call, values are read only every 50 steps, and JAX limits how far the loop runs
ahead of the device.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from tqdm import tqdm
from typing_extensions import override

from benchmarks.peers import LOG_EVERY, STEPS_PER_CALL, Contender, Setup, Stretch, Watch
from benchmarks.peers.models import make_module, make_optimizer, shared_parameters
from benchmarks.peers.nnx_models import make_nnx_module
from benchmarks.workloads import SEED, Workload, batches, make_data, order

AXIS = "replica"


def measure(logits: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss, and what a batch adds to the sums of losses, of correct predictions and of weights."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, jnp.stack([loss * y.size, (logits.argmax(-1) == y).sum(dtype=jnp.float32), jnp.float32(y.size)])


def make_step(module: nn.Module, optimizer: optax.GradientTransformation, axis: str | None = None) -> Callable[..., Any]:
    """Returns the step `(state, sums, x, y) -> (state, sums)`, not yet compiled; with `axis`, for one replica's shard of a batch."""

    def step(state, sums, x, y):
        params, opt_state = state
        (_, added), grads = jax.value_and_grad(lambda params: measure(module.apply({"params": params}, x), y), has_aux=True)(params)
        if axis is not None:
            grads, added = jax.lax.pmean(grads, axis), jax.lax.psum(added, axis)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), sums + added

    return step


def compile_step(module: nn.Module, optimizer: optax.GradientTransformation, way: str) -> Callable[..., Any]:
    if way == "pmap":
        step = make_step(module, optimizer, AXIS)
        axes: dict[str, Any] = {"in_axes": (None, None, 0, 0), "out_axes": None}
        return jax.pmap(step, axis_name=AXIS, donate_argnums=(0, 1), devices=jax.devices()[:1], **axes)
    step = make_step(module, optimizer)
    if way == "jit":
        return jax.jit(step, donate_argnums=(0, 1))

    def steps(state, sums, xs, ys):
        return jax.lax.scan(lambda carry, batch: (step(*carry, *batch), None), (state, sums), (xs, ys))[0]

    return jax.jit(steps, donate_argnums=(0, 1))


def means(sums: jax.Array) -> dict[str, float]:
    total, hits, weight = sums.tolist()
    return {"loss": total / weight, "accuracy": hits / weight}


def text(sums: jax.Array) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in means(sums).items())


class Loop(NamedTuple):
    """The differences between the loops.

    Args:
        state: What a step takes and returns.
        step: `(state, sums, x, y) -> (state, sums)`.
        apply: `(state, x) -> outputs`.
        add: `(state, sums, x, y) -> sums`.
        lead: Axes of a batch before the axis of examples.
    """

    state: Any
    step: Callable[..., Any]
    apply: Callable[..., Any]
    add: Callable[..., Any]
    lead: tuple[int, ...] = ()


def linen_loop(workload: Workload, way: str, *, own_parameters: bool) -> Loop:
    module, optimizer = make_module(workload), make_optimizer(workload)
    x = make_data(workload)[0][: workload.batch_size]
    params = jax.jit(module.init)(jax.random.key(SEED), x)["params"]
    if not own_parameters:
        params = shared_parameters(params)
    lead = {"jit": (), "pmap": (1,), "scan": (STEPS_PER_CALL,)}[way]
    apply = jax.jit(lambda params, x: module.apply({"params": params}, x))
    add = jax.jit(lambda params, sums, x, y: sums + measure(module.apply({"params": params}, x), y)[1], donate_argnums=1)
    state = (params, jax.jit(optimizer.init)(params))
    return Loop(state, compile_step(module, optimizer, way), lambda state, x: apply(state[0], x), lambda state, *rest: add(state[0], *rest), lead)


def nnx_loop(workload: Workload, *, own_parameters: bool) -> Loop:
    """Returns the loop from Flax's documentation, with `nnx.jit` and `nnx.Optimizer`, which hold the state."""
    module = make_nnx_module(workload, own_parameters=own_parameters)
    optimizer = nnx.Optimizer(module, make_optimizer(workload), wrt=nnx.Param)

    @nnx.jit(donate_argnums=2)
    def train(module, optimizer, sums, x, y):
        (_, added), grads = nnx.value_and_grad(lambda module: measure(module(x), y), has_aux=True)(module)
        optimizer.update(module, grads)
        return sums + added

    apply = nnx.jit(lambda module, x: module(x))
    add = nnx.jit(lambda module, sums, x, y: sums + measure(module(x), y)[1], donate_argnums=1)
    # The state of the loop is an array that can be waited for.
    return Loop(
        (),
        lambda state, sums, x, y: (module.head.bias[...], train(module, optimizer, sums, x, y)),
        lambda state, x: apply(module, x),
        lambda state, *rest: add(module, *rest),
    )


def split_loop(workload: Workload, *, own_parameters: bool) -> Loop:
    """Returns a loop that splits an NNX module once and merges it in a step of `jax.jit`, which is the fastest way."""
    module, optimizer = make_nnx_module(workload, own_parameters=own_parameters), make_optimizer(workload)
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def outputs(params, rest, x):
        return nnx.merge(graph, params, rest)(x)

    def step(state, sums, x, y):
        params, rest, opt_state = state
        (_, added), grads = jax.value_and_grad(lambda params: measure(outputs(params, rest, x), y), has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), sums + added

    apply = jax.jit(outputs)
    add = jax.jit(lambda params, rest, sums, x, y: sums + measure(outputs(params, rest, x), y)[1], donate_argnums=2)
    state = (params, rest, jax.jit(optimizer.init)(params))
    donating = jax.jit(step, donate_argnums=(0, 1))
    return Loop(state, donating, lambda state, x: apply(*state[:2], x), lambda state, *more: add(*state[:2], *more))


LOOPS = {"nnx": nnx_loop, "split": split_loop}


class Hand(Contender):
    def __init__(self, workload: Workload, setup: Setup, loop: Loop) -> None:
        self._workload, self._screen, self._loop = workload, setup.screen, loop
        self._x, self._y = make_data(workload)
        self._passes = 0
        self._state = loop.state
        self._per_call = loop.lead[0] if loop.lead else 1

    def _batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Returns an iterator over the inputs and labels of each call in the next pass."""
        self._passes += 1
        whole = batches(self._x, self._y, self._workload.batch_size * self._per_call, order(self._passes - 1, len(self._x)))
        if not (lead := self._loop.lead):
            return whole
        return ((x.reshape(*lead, -1, *x.shape[1:]), y.reshape(*lead, -1, *y.shape[1:])) for x, y in whole)

    @override
    def train(self, passes: int, on_first_step: Callable[[], None] | None = None) -> Stretch:
        step, state, steps, per_call = self._loop.step, self._state, self._workload.steps, self._per_call
        watch = Watch()
        watch.begin()
        for _ in range(passes):
            sums, shown = jnp.zeros(3), 0
            bar = tqdm(total=steps, file=self._screen, dynamic_ncols=True)
            for done, batch in zip(range(per_call, steps + 1, per_call), self._batches(), strict=True):
                state, sums = step(state, sums, *batch)
                if on_first_step is not None:
                    jax.block_until_ready(sums)
                    on_first_step()
                    on_first_step = None
                if done - shown >= LOG_EVERY:
                    bar.set_postfix_str(text(sums), refresh=False)
                    bar.update(done - shown)
                    shown = done
            bar.set_postfix_str(text(sums), refresh=False)
            bar.update(steps - shown)
            bar.close()
        self._state = jax.block_until_ready(state)
        return watch.stretch(means(sums))

    @override
    def evaluate(self) -> Stretch:
        add, state = self._loop.add, self._state
        watch = Watch()
        watch.begin()
        sums = jnp.zeros(3)
        bar = tqdm(total=self._workload.steps, file=self._screen, dynamic_ncols=True)
        for done, batch in enumerate(batches(self._x, self._y, self._workload.batch_size), 1):
            sums = add(state, sums, *batch)
            if done % LOG_EVERY == 0:
                bar.update(LOG_EVERY)
        found = means(sums)
        bar.close()
        return watch.stretch(found)

    @override
    def predict(self) -> Stretch:
        apply, state, size = self._loop.apply, self._state, self._workload.batch_size
        watch = Watch()
        watch.begin()
        results, pending = [], None
        for begin in range(0, len(self._x), size):
            outputs = apply(state, self._x[begin : begin + size])
            if pending is not None:  # Fetched while the next batch is computed.
                results.append(np.asarray(pending))
            pending = outputs
        results.append(np.asarray(pending))
        outputs = np.concatenate(results)
        stretch = watch.stretch({})
        return stretch._replace(values={"outputs": float(np.abs(outputs).mean())})


def make(workload: Workload, setup: Setup, *, way: str) -> Contender:
    """Returns a loop with `jax.jit`, with `jax.pmap`, with `jax.lax.scan` over 16 stacked batches per call, or with NNX in one of two ways.

    Raises:
        Unavailable: There is no NNX module for this workload.
    """
    make_loop = LOOPS[way] if way in LOOPS else functools.partial(linen_loop, way=way)
    return Hand(workload, setup, make_loop(workload, own_parameters=setup.own_parameters))
