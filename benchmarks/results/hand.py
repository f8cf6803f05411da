"""Hand-written training scripts in plain JAX and Optax, one per task, as written by someone without a trainer.

They do not use fitflax. With `Shared`, they take the same random keys and orders as fitflax, which documents them (docs/numbers.md, "Random keys"),
so results can be compared number by number. With `Own`, they draw random numbers as scripts usually do.
"""

import functools
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.results.data import Digits, Text, random_batches, windows
from benchmarks.results.settings import Autoencoder, CharLM, Curves, Images, Settings


class Randomness(Protocol):
    """The source of a script's random numbers."""

    seed: int

    def start(self, module: nn.Module, x: Any, streams: tuple[str, ...], **mode: bool) -> Any:
        """Returns the initial variables."""

    def train(self, step: jax.Array, stream: str) -> jax.Array:
        """Returns the key of a stream in a training step."""

    def evaluate(self, batch: jax.Array, stream: str) -> jax.Array:
        """Returns the key of a stream for a batch of an evaluation."""

    def order(self, epoch: int, examples: int) -> np.ndarray:
        """Returns the order of the examples in an epoch."""


class Shared:
    """The keys and orders of `fitflax.Trainer(seed=seed)` on one device.

    A stream's key is the key of the seed, folded with the step, the index of the replica, which is 0, and the CRC-32 of the stream's name.
    """

    def __init__(self, seed: int, variables: Any) -> None:
        self.seed, self._variables = seed, variables

    def start(self, module: nn.Module, x: Any, streams: tuple[str, ...], **mode: bool) -> Any:
        return jax.tree.map(jnp.array, self._variables)

    def train(self, step: jax.Array, stream: str) -> jax.Array:
        return self._of(jax.random.fold_in(jax.random.key(self.seed), step), stream)

    def evaluate(self, batch: jax.Array, stream: str) -> jax.Array:
        return self._of(jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), 0xE7A1), batch), stream)

    def _of(self, key: jax.Array, stream: str) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, 0), zlib.crc32(stream.encode()))

    def order(self, epoch: int, examples: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(examples)


class Own:
    """Keys and orders that are independent of fitflax's."""

    def __init__(self, seed: int) -> None:
        self.seed = 1000 + seed
        self._init, self._train, self._evaluate = jax.random.split(jax.random.key(self.seed, impl="rbg"), 3)
        self._rng = np.random.default_rng(self.seed)

    def start(self, module: nn.Module, x: Any, streams: tuple[str, ...], **mode: bool) -> Any:
        keys = jax.random.split(self._init, 1 + len(streams))
        return module.init({"params": keys[0], **dict(zip(streams, keys[1:], strict=True))}, x, **mode)

    def train(self, step: jax.Array, stream: str) -> jax.Array:
        return jax.random.fold_in(self._train, step)

    def evaluate(self, batch: jax.Array, stream: str) -> jax.Array:
        return jax.random.fold_in(self._evaluate, batch)

    def order(self, epoch: int, examples: int) -> np.ndarray:
        return self._rng.permutation(examples)


def batches_of(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yields the examples of each full batch of an epoch."""
    for begin in range(0, len(order) - size + 1, size):
        yield order[begin : begin + size]


def train_char_lm(settings: CharLM, text: Text, randomness: Randomness) -> tuple[Curves, Any]:
    """Trains a language model on random windows of a text, and returns its curves and variables."""
    module, optimizer = settings.model(len(text.vocabulary)), settings.optimizer()
    inputs, targets = windows(text.valid, settings.length)
    params = randomness.start(module, inputs[: settings.batch], (), train=False)["params"]
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, opt_state: Any, step: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = module.apply({"params": params}, x, train=True, rngs={"dropout": randomness.train(step, "dropout")})
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def evaluate(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(module.apply({"params": params}, x, train=False), y).sum()

    losses, curves = [], Curves([], [], {"val_loss": []})
    for step, (x, y) in zip(range(settings.steps), random_batches(text.train, settings.length, settings.batch, randomness.seed), strict=False):
        params, opt_state, loss = update(params, opt_state, step, x, y)
        losses.append(loss)
        if (step + 1) % settings.every == 0:
            parts = np.arange(128, len(inputs), 128)
            total = sum(float(evaluate(params, *part)) for part in zip(np.split(inputs, parts), np.split(targets, parts), strict=True))
            curves.steps.append(step + 1)
            curves.evaluations["val_loss"].append(total / targets.size)
    curves.loss = [float(loss) for loss in losses]
    return curves, {"params": params}


def train_resnet(settings: Images, digits: Digits, randomness: Randomness) -> tuple[Curves, Any]:
    """Trains an image classifier, and returns its curves and variables."""
    steps_per_epoch = len(digits.x) // settings.batch
    module, optimizer = settings.model(), settings.optimizer(steps_per_epoch * settings.epochs)
    variables = randomness.start(module, digits.x[: settings.batch], (), train=False)
    params, statistics = variables["params"], variables["batch_stats"]
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(params: Any, statistics: Any, opt_state: Any, step: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            variables, keys = {"params": params, "batch_stats": statistics}, {"augment": randomness.train(step, "augment")}
            logits, changed = module.apply(variables, x, train=True, rngs=keys, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed["batch_stats"]

        (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, loss

    @jax.jit
    def evaluate(params: Any, statistics: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = module.apply({"params": params, "batch_stats": statistics}, x, train=False)
        return jnp.stack([optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), (logits.argmax(-1) == y).mean()])

    losses, curves = [], Curves([], [], {"val_loss": [], "val_accuracy": []})
    for epoch in range(settings.epochs):
        for rows in batches_of(randomness.order(epoch, len(digits.x)), settings.batch):
            params, statistics, opt_state, loss = update(params, statistics, opt_state, len(losses), digits.x[rows], digits.y[rows])
            losses.append(loss)
        loss, accuracy = evaluate(params, statistics, digits.x_test, digits.y_test).tolist()
        curves.steps.append(len(losses))
        curves.evaluations["val_loss"].append(loss)
        curves.evaluations["val_accuracy"].append(accuracy)
    curves.loss = [float(loss) for loss in losses]
    return curves, {"params": params, "batch_stats": statistics}


def negative_bound(module: nn.Module, params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the negative evidence lower bound of each image, in nats, from a single latent sample."""
    logits, mean, log_variance = module.apply({"params": params}, x, rngs={"latent": key})
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
    return reconstruction + 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum(-1)


def train_vae(settings: Autoencoder, digits: Digits, randomness: Randomness) -> tuple[Curves, Any]:
    """Trains a variational autoencoder, and returns its curves and variables."""
    module, optimizer = settings.model(), settings.optimizer()
    params = randomness.start(module, digits.x[: settings.batch], ("latent",))["params"]
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, opt_state: Any, step: jax.Array, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda params: negative_bound(module, params, x, randomness.train(step, "latent")).mean())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def evaluate(params: Any, batch: jax.Array, x: jax.Array) -> jax.Array:
        return negative_bound(module, params, x, randomness.evaluate(batch, "latent")).mean()

    losses, curves = [], Curves([], [], {"val_loss": []})
    for epoch in range(settings.epochs):
        for rows in batches_of(randomness.order(epoch, len(digits.x)), settings.batch):
            params, opt_state, loss = update(params, opt_state, len(losses), digits.x[rows])
            losses.append(loss)
        if (epoch + 1) % settings.every == 0:
            # All batches are full.
            values = [evaluate(params, index, digits.x_test[rows]) for index, rows in enumerate(batches_of(np.arange(len(digits.x_test)), settings.batch))]
            curves.steps.append(len(losses))
            curves.evaluations["val_loss"].append(float(jnp.stack(values).mean()))
    curves.loss = [float(loss) for loss in losses]
    return curves, {"params": params}


def train(settings: Settings, data: Any, randomness: Randomness) -> tuple[Curves, Any]:
    """Trains with the script of a task, and returns its curves and variables."""
    if isinstance(settings, CharLM):
        return train_char_lm(settings, data, randomness)
    if isinstance(settings, Images):
        return train_resnet(settings, data, randomness)
    return train_vae(settings, data, randomness)
