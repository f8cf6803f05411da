"""GPT-2 and ViT-B/16 in Keras on JAX: Keras layers with its bfloat16 policy, trained by `Model.fit`."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np
from typing_extensions import override

from benchmarks.real.contenders import Contender, Stretch, batches_of
from benchmarks.real.workloads import SEED

EPSILON = 1e-6


class Positions(keras.layers.Layer):
    """Adds a learned vector to each position; if `has_class`, first prepends a learned token."""

    def __init__(self, positions: int, *, has_class: bool, **options: Any) -> None:
        super().__init__(**options)
        self._positions, self._has_class = positions, has_class

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(name="table", shape=(self._positions, shape[-1]), initializer=keras.initializers.RandomNormal(stddev=0.02))
        if self._has_class:
            self.token = self.add_weight(name="token", shape=(1, 1, shape[-1]), initializer="zeros")

    def call(self, x: Any) -> Any:
        if self._has_class:
            token = keras.ops.broadcast_to(self.token, (keras.ops.shape(x)[0], 1, x.shape[-1]))
            x = keras.ops.concatenate([keras.ops.cast(token, x.dtype), x], 1)
        return x + keras.ops.cast(self.table[: x.shape[1]], x.dtype)


def blocks(x: Any, *, heads: int, width: int, count: int, causal: bool) -> Any:
    """Returns the output of transformer blocks with the norms before attention and MLP."""
    for _ in range(count):
        before = keras.layers.LayerNormalization(epsilon=EPSILON)(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(before, before, use_causal_mask=causal)
        up = keras.layers.Dense(4 * width)(keras.layers.LayerNormalization(epsilon=EPSILON)(x))
        x = x + keras.layers.Dense(width)(keras.ops.gelu(up, approximate=True))
    return keras.layers.LayerNormalization(epsilon=EPSILON)(x)


def gpt2(length: int, sizes: Mapping[str, Any]) -> Any:
    width = sizes.get("width", 768)
    tokens = keras.Input((length,), dtype="int32")
    embed = keras.layers.ReversibleEmbedding(sizes.get("vocabulary", 50257), width, embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02))
    x = Positions(sizes.get("positions", 1024), has_class=False)(embed(tokens))
    x = blocks(x, heads=sizes.get("heads", 12), width=width, count=sizes.get("blocks", 12), causal=True)
    return keras.Model(tokens, keras.layers.Activation("linear", dtype="float32")(embed(x, reverse=True)))


def vit(side: int, sizes: Mapping[str, Any]) -> Any:
    width, patch = sizes.get("width", 768), sizes.get("patch", 16)
    images = keras.Input((side, side, 3))
    x = keras.layers.Reshape((-1, width))(keras.layers.Conv2D(width, patch, patch)(images))
    x = Positions((side // patch) ** 2 + 1, has_class=True)(x)
    x = blocks(x, heads=sizes.get("heads", 12), width=width, count=sizes.get("blocks", 12), causal=False)
    return keras.Model(images, keras.layers.Dense(sizes.get("classes", 1000), dtype="float32")(x[:, 0]))


class _Marks(keras.callbacks.Callback):
    """Records when the epoch begins."""

    def __init__(self, marks: list[tuple[float, float]]) -> None:
        super().__init__()
        self._marks = marks

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._marks.append((time.perf_counter(), time.thread_time()))


class Keras(Contender):
    """`keras.Model.fit` on JAX, with AdamW, warm-up and cosine decay, clipping, and a mask for weight decay."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        keras.utils.set_random_seed(SEED)
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
        sizes = self.workload.sizes[self.size]
        self._model = {"gpt2": gpt2, "vit_b16": vit}[self.workload.name](sizes.length, sizes.model)
        schedule = keras.optimizers.schedules.CosineDecay(0.0, 9900, warmup_target=self.workload.learning_rate, warmup_steps=100)
        optimizer = keras.optimizers.AdamW(schedule, beta_2=0.95, epsilon=1e-8, weight_decay=0.1, global_clipnorm=1.0)
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        self._model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self._batches = batches_of(self.x, self.y, self.batch)

    @override
    def train(self, steps: int, *, validates: bool = False) -> Stretch:
        marks: list[tuple[float, float]] = []
        history = self._model.fit(self._batches, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[_Marks(marks)])
        jax.block_until_ready([variable.value for variable in self._model.variables])
        seconds, host = time.perf_counter() - marks[0][0], time.thread_time() - marks[0][1]
        return Stretch(seconds, host, float(history.history["loss"][-1]))

    @property
    def parameters(self) -> int:
        """Returns the number of trained parameters."""
        return int(sum(np.prod(weight.shape) for weight in self._model.trainable_weights))

    @override
    def evaluate(self) -> float:
        raise NotImplementedError("Only training is compared with Keras.")

    predict = evaluate
