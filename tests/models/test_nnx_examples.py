"""Modules like those of Flax's NNX examples, each compared with the training loop of its example; attributes have the names that they have there."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.parallel import DataParallel, Sharded
from tests.nnx_hand_written import assert_same, hand_written_loop, values

RNG = np.random.default_rng(0)
# Not Adam: the gradient of a bias before batch normalization is only rounding error, which Adam would turn into full-size steps.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
CROSSENTROPY = "sparse_categorical_crossentropy"
PLACES = {"one": lambda: DataParallel(jax.devices()[:1]), "four": lambda: Sharded({"data": 4}, devices=jax.devices()[:4])}


# -- MNIST: batch normalization, and dropout with streams that are passed to __call__ --


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.0)  # With a higher rate, the trainer's streams would be used, and the numbers would differ.
        self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
        x = self.pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        return self.linear1(x.reshape(x.shape[0], -1))


# -- the VAE: a separate noise stream, and a loss that each call stores in a new variable --


class Loss(nnx.Variable):
    pass


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.mean, self.std = (nnx.Linear(*sizes, rngs=rngs) for sizes in ((16, 8), (8, 2), (8, 2)))
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        hidden = nnx.relu(self.linear(x))
        mean, std = self.mean(hidden), jnp.exp(self.std(hidden))
        self.kl_loss = Loss(0.5 * (mean**2 + std**2 - 1 - 2 * jnp.log(std)).mean())
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)


class VAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encoder, self.decoder = Encoder(rngs), nnx.Linear(2, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def vae_values(model: VAE, x: Any) -> Any:
    logits = model(x)
    kl_loss = sum(jax.tree.leaves(nnx.pop(model, Loss)))
    return optax.sigmoid_binary_cross_entropy(logits, x).mean(axis=1) + 0.1 * kl_loss


class VAETrainer(fitflax.Trainer):
    def compute_loss(self, model, batch, *, train):
        return vae_values(model, batch.x)


# -- scan over layers --


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.bn = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.gelu(self.dropout(self.bn(self.linear(x))))


class ScanMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, depth: int = 3):
        self.depth = depth

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(axis_size=depth)
        def create(rngs: nnx.Rngs) -> Block:
            return Block(6, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan
        def over_layers(x: Any, block: Block) -> Any:
            return block(x), None

        return over_layers(x, self.layers)[0]


# -- LoRA --


class Adapted(nnx.Module):
    """A model with one layer replaced by an adapter that wraps it."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear1, self.linear2 = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.linear1 = nnx.LoRA(6, 2, 8, base_module=self.linear1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear2(nnx.relu(self.linear1(x)))


# -- Gemma: tied embeddings, rotary positions, grouped heads, gated feed-forward, a local and a global layer, a cache as an argument --


class RMSNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Any) -> Any:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + self.scale[...])


def rotate(x: Any, positions: Any) -> Any:
    """RoPE (Su et al. 2021) for `[batch, time, heads, features]`."""
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = positions[..., None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles)], axis=-1)


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, window: int | None, rngs: nnx.Rngs):
        self.window, size = window, width // heads
        self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", (heads, width, size), rngs=rngs)
        self.kv_einsum = nnx.Einsum("BSD,CDH->CBSH", (2, width, size), rngs=rngs)
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (heads, size, width), rngs=rngs)

    def __call__(self, x: Any, positions: Any, mask: Any) -> Any:
        key, value = self.kv_einsum(x)
        query, key = rotate(self.q_einsum(x), positions), rotate(key[:, :, None], positions)[:, :, 0]
        logits = jnp.einsum("BTNH,BSH->BTNS", query, key) * key.shape[-1] ** -0.5
        if self.window is not None:
            near = abs(positions[:, :, None] - positions[:, None, :]) < self.window
            mask = mask & near
        return self.attn_vec_einsum(jnp.einsum("BTNS,BSH->BTNH", jax.nn.softmax(jnp.where(mask[:, :, None], logits, -1e9)), value))


class FeedForward(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        make = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj, self.up_proj, self.down_proj = make(width, 2 * width), make(width, 2 * width), make(2 * width, width)

    def __call__(self, x: Any) -> Any:
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, width: int, window: int | None, rngs: nnx.Rngs):
        self.pre_attention_norm, self.pre_ffw_norm = RMSNorm(width), RMSNorm(width)
        self.attn, self.mlp = Attention(width, 2, window, rngs), FeedForward(width, rngs)

    def __call__(self, x: Any, positions: Any, mask: Any) -> Any:
        x += self.attn(self.pre_attention_norm(x), positions, mask)
        return x + self.mlp(self.pre_ffw_norm(x))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocabulary: int = 16, width: int = 8):
        self.embedder = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, window, rngs) for window in (3, None)])
        self.final_norm = RMSNorm(width)
        self.final_dropout = nnx.Dropout(0.0, deterministic=False)

    def __call__(self, last_tokens: Any, positions: Any, cache: Any, attention_mask: Any, rngs: nnx.Rngs | None = None) -> Any:
        x = self.embedder(last_tokens)
        for layer in self.layers:
            x = layer(x, positions, attention_mask)
        logits = self.embedder.attend(self.final_dropout(self.final_norm(x), rngs=rngs))
        return 30 * jnp.tanh(logits / 30), cache


# -- the examples and their losses --


def crossentropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Example(NamedTuple):
    make: Callable[[], Any]
    data: Any
    reference_loss: Callable[[Any, Any], Any]
    loss: Any = CROSSENTROPY
    options: dict[str, Any] = {}  # noqa: RUF012 (only read)
    kind: type[fitflax.Trainer] = fitflax.Trainer
    wrt: Any = nnx.Param


ROWS = 20
FEATURES, LABELS = RNG.normal(size=(ROWS, 6)).astype(np.float32), RNG.integers(0, 3, ROWS)
BINARY = (RNG.random((ROWS, 16)) < 0.5).astype(np.float32)
TOKENS = RNG.integers(0, 16, (ROWS, 8))
TEXT = {
    "last_tokens": TOKENS[:, :-1],
    "positions": np.broadcast_to(np.arange(7), (ROWS, 7)),
    "attention_mask": np.broadcast_to(np.tril(np.ones((7, 7), bool)), (ROWS, 7, 7)),
}
NO_CACHE = {"cache": None}
EXAMPLES = {
    "mnist": Example(
        lambda: CNN(nnx.Rngs(0)),
        (RNG.random((ROWS, 8, 8, 1), np.float32), LABELS),
        lambda model, batch: crossentropy(model(batch[0], nnx.Rngs(0)), batch[1]),
    ),
    "vae": Example(lambda: VAE(nnx.Rngs(0, noise=1)), (BINARY, ()), lambda model, batch: vae_values(model, batch[0]).mean(), None, kind=VAETrainer),
    "scan over layers": Example(lambda: ScanMLP(nnx.Rngs(0)), (FEATURES, LABELS), lambda model, batch: crossentropy(model(batch[0]), batch[1])),
    "lora": Example(
        lambda: Adapted(nnx.Rngs(0)),
        (FEATURES, LABELS),
        lambda model, batch: crossentropy(model(batch[0]), batch[1]),
        options={"trainable": nnx.LoRAParam},
        wrt=nnx.LoRAParam,
    ),
    "gemma": Example(
        lambda: Transformer(nnx.Rngs(0)),
        {**TEXT, "targets": TOKENS[:, 1:]},
        lambda model, batch: crossentropy(model(**{key: batch[key] for key in TEXT}, **NO_CACHE, rngs=nnx.Rngs(0))[0], batch["targets"]),
        lambda outputs, targets: optax.softmax_cross_entropy_with_integer_labels(outputs[0], targets),
        {"inputs": {key: key for key in TEXT}, "targets": "targets", "train_kwargs": NO_CACHE, "eval_kwargs": NO_CACHE},
    ),
}


def make(example: Example, place: str) -> Any:
    trainer = example.kind(example.make(), parallel=PLACES[place](), **example.options)
    trainer.compile(OPTIMIZER, example.loss)
    return trainer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.slow
def test_an_example_trains_like_its_own_loop_and_resumes_inside_an_epoch_bit_for_bit(name: str, place: str, tmp_path):
    example = EXAMPLES[name]
    trainer, twin = make(example, place), example.make()
    twin.train()
    batches = [jax.tree.map(lambda leaf, begin=begin: leaf[begin : begin + 4], example.data) for begin in (0, 4, 8, 12)]
    losses = [trainer.train_on_batch(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(losses, hand_written_loop(twin, OPTIMIZER, batches, example.reference_loss, wrt=example.wrt), rtol=1e-4)
    assert_same(values(trainer.model), values(twin), rtol=1e-4, atol=1e-5)

    def fit(trainer: Any, *callbacks: Any, **options: Any) -> Any:
        return trainer.fit(example.data, batch_size=4, epochs=2, verbose=0, callbacks=callbacks, validation_data=example.data, **options)

    whole, interrupted, resumed = (make(example, place) for _ in range(3))
    history = fit(whole).history
    fit(interrupted, ModelCheckpoint(tmp_path), LambdaCallback(on_train_batch_end=lambda step, logs: interrupted.stop() if interrupted.step == 3 else None))
    assert fit(resumed, ModelCheckpoint(tmp_path), resume="auto").history == history
    assert_same(values(resumed.model), values(whole.model))
