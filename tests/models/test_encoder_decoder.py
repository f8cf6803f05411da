"""A translation model with the structure of Flax's wmt example: one configuration for training, evaluation, and decoding with a cache."""

import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.parallel import DataParallel, Sharded

VOCABULARY, LENGTH = 13, 4


@flax.struct.dataclass
class Config:
    """Both embeddings are one by default, and give the logits as well."""

    share_embeddings: bool = True
    logits_via_embedding: bool = True
    width: int = 8
    heads: int = 2
    dropout_rate: float = 0.2
    deterministic: bool = False
    decode: bool = False


def split(*axes: str) -> Any:
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), axes)


def embedding(config: Config) -> nn.Embed:
    return nn.Embed(VOCABULARY, config.width, embedding_init=nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed")))


class Part(nn.Module):
    config: Config

    def attend(self, x: Any, *keys: Any, mask: Any, decode: bool = False) -> Any:
        config = self.config
        options: dict[str, Any] = {"use_bias": False, "dropout_rate": config.dropout_rate, "deterministic": config.deterministic, "decode": decode}
        attention = nn.MultiHeadDotProductAttention(config.heads, kernel_init=split("embed", "heads", "kv"), **options)
        return x + self.drop(attention(nn.LayerNorm()(x), *keys, mask=mask))

    def transform(self, x: Any) -> Any:
        hidden = self.drop(nn.relu(nn.Dense(2 * self.config.width, kernel_init=split("embed", "mlp"))(nn.LayerNorm()(x))))
        return x + self.drop(nn.Dense(self.config.width, kernel_init=split("mlp", "embed"))(hidden))

    def drop(self, x: Any) -> Any:
        return nn.Dropout(self.config.dropout_rate)(x, deterministic=self.config.deterministic)


class Positions(nn.Module):
    """Adds sinusoids; with `decode`, that of the next position."""

    decode: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        angles = np.arange(LENGTH)[:, None] / 100 ** (np.arange(x.shape[-1]) / x.shape[-1])
        table = jnp.asarray(np.sin(angles), x.dtype)
        if not self.decode:
            return x + table
        is_initialized = self.has_variable("cache", "cache_index")
        index = self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
        if not is_initialized:
            return x + table
        index.value += 1
        return x + jax.lax.dynamic_slice_in_dim(table, index.value - 1, 1)


class Encoder(Part):
    shared: Any = None

    @nn.compact
    def __call__(self, source: Any) -> Any:
        x = self.drop(Positions()((self.shared or embedding(self.config))(source)))
        x = self.attend(x, mask=nn.make_attention_mask(source > 0, source > 0))
        return nn.LayerNorm()(self.transform(x))


class Decoder(Part):
    shared: Any = None

    @nn.compact
    def __call__(self, encoded: Any, source: Any, target: Any) -> Any:
        config, embed = self.config, self.shared or embedding(self.config)
        tokens = target if config.decode else jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        x = self.drop(Positions(config.decode)(embed(tokens)))
        x = self.attend(x, mask=None if config.decode else nn.make_causal_mask(target), decode=config.decode)
        x = self.attend(x, encoded, mask=nn.make_attention_mask(jnp.ones_like(target) > 0, source > 0))
        x = nn.LayerNorm()(self.transform(x))
        if config.logits_via_embedding:
            return embed.attend(x) / np.sqrt(config.width)
        return nn.Dense(VOCABULARY, kernel_init=split("embed", "vocab"))(x)


class Translation(nn.Module):
    """With `decode`, it computes the logits of one token after the other."""

    config: Config

    def setup(self) -> None:
        self.shared = embedding(self.config) if self.config.share_embeddings else None
        self.encoder, self.decoder = Encoder(self.config, self.shared), Decoder(self.config, self.shared)

    def __call__(self, source: Any, target: Any) -> Any:
        encoded = self.encoder(source)
        if not self.config.decode:
            return self.decoder(encoded, source, target)
        self.decoder(encoded, source, jnp.zeros_like(target))  # Creates the cache.
        previous = jnp.pad(target, ((0, 0), (1, 0)))
        return jnp.concatenate([self.decoder(encoded, source, previous[:, i : i + 1]) for i in range(target.shape[1])], axis=1)

    def encode(self, source: Any) -> Any:
        return self.encoder(source)

    def decode(self, encoded: Any, source: Any, target: Any) -> Any:
        return self.decoder(encoded, source, target)


def in_mode(config: Config, **changes: Any) -> Translation:
    return Translation(dataclasses.replace(config, **changes))


RNG = np.random.default_rng(0)
SOURCE, TARGET = (np.where(np.arange(LENGTH) < RNG.integers(2, LENGTH + 1, (24, 1)), RNG.integers(1, VOCABULARY, (24, LENGTH)), 0) for _ in range(2))
WEIGHTS = (TARGET > 0).astype(np.float32)


def mean_loss(logits: Any, target: Any, weights: Any) -> Any:
    return (optax.softmax_cross_entropy_with_integer_labels(logits, target) * weights).sum() / weights.sum()


def hand_written_decoding(config: Config) -> Any:
    """The loop of the example, as a function of the parameters: it creates a cache of the full length, and then decodes one token per call."""
    model = in_mode(config, deterministic=True, decode=True)

    @jax.jit
    def start(params: Any) -> Any:
        encoded = model.apply({"params": params}, SOURCE, method="encode")
        return encoded, model.apply({"params": params}, encoded, SOURCE, jnp.zeros_like(TARGET), method="decode", mutable=["cache"])[1]

    @jax.jit
    def step(params: Any, cache: Any, encoded: Any, token: Any) -> Any:
        return model.apply({"params": params, **cache}, encoded, SOURCE, token, method="decode", mutable=["cache"])

    def decode(params: Any) -> np.ndarray:
        encoded, cache = start(params)
        logits, token = [], np.zeros_like(TARGET[:, :1])
        for i in range(LENGTH):
            output, cache = step(params, cache, encoded, token)
            logits.append(output)
            token = TARGET[:, i : i + 1]
        return np.concatenate(logits, axis=1)

    return decode


SEPARATE = Config(share_embeddings=False, logits_via_embedding=False)
RULES = {"embed": None, "heads": "model", "kv": None, "mlp": "model", "vocab": None}
CASES: dict[str, Any] = {
    "one device": (Config(), ["cache"], lambda: DataParallel(jax.devices()[:1])),
    "a mesh": (Config(), ["cache"], lambda: Sharded({"data": 2, "model": 2}, rules=RULES, devices=jax.devices()[:4])),
    "separate embeddings": (SEPARATE, flax.core.DenyList("params"), lambda: DataParallel(jax.devices()[:1])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_translation_equals_a_hand_written_loop_step_by_step(name: str):
    config, mutable, place = CASES[name]
    # Not Adam: see test_eval_model.py.
    optimizer = optax.sgd(0.5, momentum=0.9)
    trainer = fitflax.Trainer(in_mode(config), eval_model=in_mode(config, deterministic=True, decode=True), mutable=mutable, parallel=place())
    trainer.compile(optimizer, "sparse_categorical_crossentropy")
    trainer.build(((SOURCE, TARGET), TARGET))
    state = trainer.state
    params = jax.device_get(state.params)
    opt_state = optimizer.init(params)
    assert ("shared" in params) is config.share_embeddings

    @jax.jit
    def step(params: Any, opt_state: Any, rngs: Any, source: Any, target: Any, weights: Any) -> Any:
        def loss(params: Any) -> Any:
            return mean_loss(in_mode(config).apply({"params": params}, source, target, rngs=rngs), target, weights)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    decode = hand_written_decoding(config)
    for number in range(3):
        rows = slice(8 * number, 8 * number + 8)
        batch = SOURCE[rows], TARGET[rows], WEIGHTS[rows]
        rngs = trainer.step_rngs(dataclasses.replace(state, step=jnp.int32(number)))
        loss, params, opt_state = step(params, opt_state, rngs, *batch)
        logs = trainer.train_on_batch(((batch[0], batch[1]), batch[1], batch[2]))
        assert logs["loss"] == pytest.approx(float(loss), rel=1e-5)
        jax.tree.map(lambda have, want: np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-5), jax.device_get(trainer.state.params), params)
        expected = decode(params)
        np.testing.assert_allclose(trainer.predict((SOURCE, TARGET)), expected, rtol=2e-4, atol=2e-5)
        want = pytest.approx(float(mean_loss(expected, TARGET, WEIGHTS)), rel=1e-4)
        assert trainer.evaluate((SOURCE, TARGET), TARGET, WEIGHTS, verbose=0)["loss"] == want
        assert trainer.state.model_state == {}  # The cache is not kept.
    # All tokens at a time have the same logits.
    whole = jax.jit(in_mode(config, deterministic=True).apply)({"params": params}, SOURCE, TARGET)
    np.testing.assert_allclose(whole, expected, rtol=2e-4, atol=2e-5)
