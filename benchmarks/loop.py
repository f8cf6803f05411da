"""`fit` against the best hand-written loop for the same model, data and metrics, in one process.

Each round runs hand, fit, control, control, fit, hand, each for the same number of steps. The control is the hand-written loop once more, with a state of
its own: its ratio shows what 1 looks like on this machine. With --callback, `fit` with that callback is compared with `fit` without.

Compilation and warm-up come first. The clock of `fit` runs from its first `on_epoch_begin` until it has returned and the state is there, and so holds all
that grows with the steps, the ends of epochs and of the run included. What `fit` does once before its first step (checks, a dry run on shapes) would weigh
more or less by the number of steps alone; it stands in a column of its own.
"""

import argparse
import functools
import gc
import io
import json
import os
import pathlib
import platform
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from tqdm import tqdm

import fitflax
from fitflax.callbacks import Callback, LambdaCallback, ProgressBar
from fitflax.parallel import DataParallel

LOG_EVERY = 50
SEED = 0


def mlp(hidden: int = 64) -> nn.Module:
    return nn.Sequential([nn.Dense(hidden), nn.relu, nn.Dense(10)])


def cnn(features: int = 32) -> nn.Module:
    pool = functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2))
    convolutions = [nn.Conv(features, (3, 3)), nn.relu, pool, nn.Conv(2 * features, (3, 3)), nn.relu, pool]
    return nn.Sequential([*convolutions, lambda x: x.reshape(len(x), -1), nn.Dense(4 * features), nn.relu, nn.Dense(10)])


class Transformer(nn.Module):
    width: int = 128
    vocabulary: int = 256

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x += self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


class Workload(NamedTuple):
    """What is trained; `limit` is for the ratio, `steps` are timed at a stretch."""

    name: str
    module: nn.Module
    x: np.ndarray
    y: np.ndarray
    batch_size: int
    limit: float
    steps: int


class Run(NamedTuple):
    """One timed stretch: seconds of its steps, seconds before the first, and loss and accuracy over its last pass."""

    seconds: float
    start_seconds: float
    loss: float
    accuracy: float


Contender = Callable[[int], Run]  # Trains so many steps, from where it left off.


def images(rows: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns random images and the labels that a random linear map gives them, which can be learned."""
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((rows, *shape), np.float32)
    return x, (x.reshape(rows, -1) @ rng.standard_normal((x[0].size, 10), np.float32)).argmax(-1).astype(np.int32)


def text(rows: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random walks over the vocabulary, and the same one token ahead."""
    rng = np.random.default_rng(SEED)
    walk = rng.integers(0, vocabulary, (rows, 1)) + rng.integers(-2, 3, (rows, length + 1)).cumsum(axis=1)
    tokens = (walk % vocabulary).astype(np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def make_workload(name: str, *, tiny: bool = False) -> Workload:
    rows = 256 if tiny else 60_000
    if name == "mlp":
        return Workload(name, mlp(8 if tiny else 64), *images(rows, (784,)), batch_size=64, limit=1.15, steps=3000)
    if name == "cnn":
        return Workload(name, cnn(2 if tiny else 32), *images(rows, (28, 28, 1)), batch_size=64, limit=1.03, steps=100)
    if name == "transformer":
        module = Transformer(8, 16) if tiny else Transformer()
        return Workload(name, module, *text(rows // 8, 64, module.vocabulary), batch_size=16, limit=1.03, steps=150)
    example = runpy.run_path(str(pathlib.Path(__file__).resolve().parent.parent / "examples" / "digits.py"))  # Needs scikit-learn.
    return Workload(name, example["CNN"](2 if tiny else 32), *example["load"]()[0], batch_size=64, limit=1.03, steps=1000)


class Screen(io.StringIO):
    """A terminal as far as progress bars can tell, so that they draw."""

    def isatty(self) -> bool:
        return True


def make_trainer(workload: Workload) -> fitflax.Trainer:
    trainer = fitflax.Trainer(workload.module, seed=SEED, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    trainer.build((workload.x[: workload.batch_size], workload.y[: workload.batch_size]))
    return trainer


def fit_contender(workload: Workload, screen: Screen, make_callbacks: Callable[[], list[Callback]] = list) -> Contender:
    """Returns `fit` with metrics, a progress bar, and what else `make_callbacks` makes for each run."""
    trainer = make_trainer(workload)
    options = {"batch_size": workload.batch_size, "drop_remainder": True, "log_every": LOG_EVERY}

    def run(steps: int) -> Run:
        epochs: list[float] = []  # When each began; a hook that is called at every step would cost time itself.
        watch = LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(time.perf_counter()))
        callbacks = [watch, ProgressBar(file=screen), *make_callbacks()]
        called = time.perf_counter()
        history = trainer.fit(workload.x, workload.y, steps=steps, callbacks=callbacks, **options).history
        jax.block_until_ready(trainer.state)
        seconds = time.perf_counter() - epochs[0]
        return Run(seconds, epochs[0] - called, history["loss"][-1], history["accuracy"][-1])

    return run


def make_hand_step(module: nn.Module, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the compiled step `(state, sums, x, y) -> (state, sums)`; `sums` holds those of losses, of hits and of weights."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, sums, x, y):
        def loss_fn(params):
            logits = module.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        params, opt_state = state
        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        hits = (logits.argmax(-1) == y).sum(dtype=jnp.float32)
        return (optax.apply_updates(params, updates), opt_state), sums + jnp.stack([loss * y.size, hits, jnp.float32(y.size)])

    return step


def endless(workload: Workload, passes: int) -> Iterator[tuple[bool, np.ndarray, np.ndarray]]:
    """Yields batches in the order in which `fit` takes them, each with whether it begins a pass."""
    while True:
        order = np.random.default_rng([SEED, passes]).permutation(len(workload.x))
        for begin in range(0, len(order) - workload.batch_size + 1, workload.batch_size):
            rows = order[begin : begin + workload.batch_size]
            yield begin == 0, workload.x[rows], workload.y[rows]
        passes += 1


def hand_contender(workload: Workload, screen: Screen, step: Callable[..., Any], state: Any) -> Contender:
    """Returns the hand-written loop. It reads values at log points only, and JAX itself bounds how far it runs ahead of the device."""
    passes = 0

    def run(steps: int) -> Run:
        nonlocal state, passes
        feed = endless(workload, passes)
        batch = next(feed)  # `fit` too has its first batch when its clock starts.
        began = time.perf_counter()
        bar = tqdm(total=steps, file=screen, dynamic_ncols=True)
        for done in range(1, steps + 1):
            begins_pass, x, y = batch
            if begins_pass:
                passes, sums = passes + 1, jnp.zeros(3)
            state, sums = step(state, sums, x, y)
            if done % LOG_EVERY == 0:
                total, hits, weight = sums.tolist()
                bar.set_postfix_str(f"loss {total / weight:.4g}, accuracy {hits / weight:.4g}", refresh=False)
                bar.update(LOG_EVERY)
            if done < steps:
                batch = next(feed)
        bar.close()
        jax.block_until_ready((state, sums))
        seconds = time.perf_counter() - began
        total, hits, weight = sums.tolist()
        return Run(seconds, 0.0, total / weight, hits / weight)

    return run


def against_hand(workload: Workload, screen: Screen) -> dict[str, Contender]:
    optimizer = optax.adam(1e-3)
    step = make_hand_step(workload.module, optimizer)
    params = make_trainer(workload).state.params  # The same seed gives `fit` the same.

    def hand() -> Contender:
        own = jax.tree.map(jnp.copy, params)
        return hand_contender(workload, screen, step, (own, optimizer.init(own)))

    return {"base": hand(), "fit": fit_contender(workload, screen), "control": hand()}


# What `fit` with a callback may take of the time of `fit` without.
CALLBACK_LIMITS = {"tensorboard": 1.03, "saving": 1.05}


def against_none(workload: Workload, screen: Screen, callback: str, directory: str) -> dict[str, Contender]:
    def make() -> list[Callback]:
        own = tempfile.mkdtemp(dir=directory)
        if callback == "tensorboard":
            return [fitflax.callbacks.TensorBoard(own, every=fitflax.every(steps=LOG_EVERY))]
        return [fitflax.callbacks.ModelCheckpoint(own, every=fitflax.every(steps=10))]

    return {name: fit_contender(workload, screen, *([make] if name == "fit" else [])) for name in ("base", "fit", "control")}


def check_agreement(runs: dict[str, Run]) -> None:
    """Checks that all contenders did the same work."""
    for who, run in runs.items():
        np.testing.assert_allclose(run[2:], runs["base"][2:], rtol=1e-5, atol=1e-5, err_msg=f"loss and accuracy of {who} differ from the base's")


def measure(workload: Workload, contenders: dict[str, Contender], rounds: int, steps: int) -> dict[str, Any]:
    """Returns the table's row: medians in microseconds a step, and ratios of the sums of each round."""
    for _ in range(2):  # Twice, because a second run may take another path through the caches.
        check_agreement({who: contender(min(steps, LOG_EVERY)) for who, contender in contenders.items()})
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    starts: list[float] = []
    last: dict[str, Run] = {}
    for _ in range(rounds):
        for who in [*contenders, *reversed(contenders)]:  # There and back: a machine that grows slower does so for all alike.
            gc.collect()
            last[who] = contenders[who](steps)
            seconds[who].append(last[who].seconds)
            starts += [last[who].start_seconds] if who == "fit" else []
    check_agreement(last)

    def ratio(who: str) -> dict[str, float]:
        mine, base = (np.reshape(seconds[name], (rounds, 2)).sum(axis=1) for name in (who, "base"))
        return {"median": float(np.median(mine / base)), "min": float(np.min(mine / base)), "max": float(np.max(mine / base))}

    fit, control = ratio("fit"), ratio("control")
    per_step = {f"{who}_us": statistics.median(seconds[who]) / steps * 1e6 for who in contenders}
    verdict = "ok" if fit["median"] <= max(workload.limit, control["median"]) else "over"
    row = {"workload": workload.name, "rounds": rounds, "steps": steps, **per_step, "ratio": fit, "control": control, "limit": workload.limit}
    return row | {"verdict": verdict, "start_ms": statistics.median(starts) * 1e3, "losses": {who: run.loss for who, run in last.items()}}


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return {"cpus": os.cpu_count(), "platform": platform.platform(), "device": jax.devices()[0].device_kind} | versions | {"fitflax": fitflax.__version__}


def table(rows: list[dict[str, Any]], base: str, other: str) -> str:
    def spread(ratio: dict[str, float]) -> str:
        return f"{ratio['median']:.3f} ({ratio['min']:.3f}..{ratio['max']:.3f})"

    lines = [["workload", f"{base} us/step", f"{other} us/step", "ratio", "control", "limit", "verdict", "start ms"], ["---"] * 8]
    for row in rows:
        numbers = [f"{row['base_us']:.1f}", f"{row['fit_us']:.1f}", spread(row["ratio"]), spread(row["control"]), f"{row['limit']:.2f}"]
        lines.append([row["workload"], *numbers, row["verdict"], f"{row['start_ms']:.1f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    names = ["mlp", "cnn", "transformer"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="steps of each timed stretch; by default what suits the workload")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the numbers")
    parser.add_argument("--callback", choices=CALLBACK_LIMITS, help="fit with this against fit without, on the CNN of examples/digits.py")
    parser.add_argument("--tiny", action="store_true", help="small models and little data, to try the benchmark itself")
    options = parser.parse_args(argv)
    rows, screen = [], Screen()
    with tempfile.TemporaryDirectory() as directory:
        for name in ["digits"] if options.callback else options.workload:
            workload = make_workload(name, tiny=options.tiny)
            if options.callback:
                workload = workload._replace(limit=CALLBACK_LIMITS[options.callback])
                contenders = against_none(workload, screen, options.callback, directory)
            else:
                contenders = against_hand(workload, screen)
            rows.append(measure(workload, contenders, options.rounds, options.steps or workload.steps))
    here = machine()
    print(table(rows, *("without", "with") if options.callback else ("hand", "fit")), ", ".join(f"{k} {v}" for k, v in here.items()), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "results": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
