"""Keras 3 on JAX: the same models built from Keras layers, with the same parameters. It shuffles differently, so losses agree only roughly."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from benchmarks.peers import Contender, Once, Setup, Stretch, Unavailable, Watch
from benchmarks.workloads import Workload, initial, make_data

try:
    import keras
except ModuleNotFoundError as error:
    raise Unavailable("keras is not installed") from error

# Keras names -> linen names.
LINEN_NAMES = {"gamma": "scale", "beta": "bias", "embeddings": "embedding", "attention_output": "out"}


class Positions(keras.layers.Layer):
    def build(self, input_shape):
        self.table = self.add_weight(name="table", shape=input_shape[1:])

    def call(self, x):
        return x + self.table


class Leaves(keras.layers.Layer):
    def __init__(self, pairs: int, **options: Any) -> None:
        super().__init__(**options)
        self.pairs = pairs

    def build(self, input_shape):
        options = {"shape": input_shape[1:], "initializer": "ones"}
        self.all_weights = [self.add_weight(name=f"weight_{index}", **options) for index in range(self.pairs)]
        self.all_shifts = [self.add_weight(name=f"shift_{index}", **options) for index in range(self.pairs)]

    def call(self, x):
        weights, shifts = keras.ops.stack(self.all_weights), keras.ops.stack(self.all_shifts)
        return keras.ops.reshape(keras.ops.tanh(x[:, None, :] * weights + shifts), (-1, self.pairs * x.shape[-1]))


def dense(inputs: int, hidden: tuple[int, ...]) -> tuple[Any, Any]:
    x = given = keras.Input((inputs,))
    for index, width in enumerate(hidden):
        x = keras.layers.Dense(width, activation="relu", name=f"hidden_{index}")(x)
    return given, keras.layers.Dense(10, name="head")(x)


def cnn(side: int, features: int) -> tuple[Any, Any]:
    x = given = keras.Input((side, side, 1))
    for index in range(2):
        x = keras.layers.Conv2D(features * (index + 1), 3, padding="same", activation="relu", name=f"conv_{index}")(x)
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Dense(4 * features, activation="relu", name="hidden")(keras.layers.Flatten()(x))
    return given, keras.layers.Dense(10, name="head")(x)


def lm(vocabulary: int, length: int, width: int, heads: int, blocks: int) -> tuple[Any, Any]:
    def norm(name: str) -> Any:
        return keras.layers.LayerNormalization(epsilon=1e-6, name=name)

    given = keras.Input((length,), dtype="int32")
    x = Positions(name="positions")(keras.layers.Embedding(vocabulary, width, name="embed")(given))
    for index in range(blocks):
        before = norm(f"before_attention_{index}")(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads, name=f"attention_{index}")(before, before, use_causal_mask=True)
        up = keras.layers.Dense(4 * width, name=f"up_{index}")(norm(f"before_up_{index}")(x))
        x = x + keras.layers.Dense(width, name=f"down_{index}")(keras.ops.gelu(up, approximate=True))
    return given, keras.layers.Dense(vocabulary, name="head")(norm("before_head")(x))


def leaves(inputs: int, pairs: int) -> tuple[Any, Any]:
    given = keras.Input((inputs,))
    return given, keras.layers.Dense(10, name="head")(Leaves(pairs, name="leaves")(given))


MODELS: dict[str, Callable[..., tuple[Any, Any]]] = {"dense": dense, "cnn": cnn, "lm": lm, "leaves": leaves}


def share_parameters(model: Any) -> None:
    """Gives all variables the initial values that the peers share."""
    for variable in model.trainable_variables:
        path = "/".join(LINEN_NAMES.get(part, part) for part in variable.path.removeprefix(f"{model.name}/").split("/"))
        variable.assign(initial(path, tuple(variable.shape)))


class Events(keras.callbacks.Callback):
    """Tells a watch when the first epoch of a call begins."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.on_epoch_begin = self.on_test_begin = self.on_predict_begin = watch.begin


class FirstStep(keras.callbacks.Callback):
    async_safe = True  # Otherwise Keras waits for each step.

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._once = Once(function)

    def on_train_batch_end(self, batch, logs=None):
        self._once(logs)


class Keras(Contender):
    def __init__(self, workload: Workload, setup: Setup, compile_options: dict[str, Any]) -> None:
        self._workload = workload
        self._x, self._y = make_data(workload)
        self._model = keras.Model(*MODELS[workload.kind](**workload.sizes))
        if not setup.own_parameters:
            share_parameters(self._model)
        optimizer = {"adam": lambda rate: keras.optimizers.Adam(rate, epsilon=1e-8), "sgd": keras.optimizers.SGD}[workload.optimizer]
        self._model.compile(
            optimizer(workload.learning_rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            **compile_options,
        )

    @override
    def train(self, passes: int, on_first_step: Callable[[], None] | None = None) -> Stretch:
        watch = Watch()
        callbacks = [Events(watch), *([] if on_first_step is None else [FirstStep(on_first_step)])]
        history = self._model.fit(self._x, self._y, batch_size=self._workload.batch_size, epochs=passes, callbacks=callbacks, verbose=1).history
        jax.block_until_ready([variable.value for variable in self._model.variables])
        return watch.stretch({name: float(history[name][-1]) for name in ("loss", "accuracy")})

    @override
    def evaluate(self) -> Stretch:
        watch = Watch()
        options = {"batch_size": self._workload.batch_size, "callbacks": [Events(watch)], "verbose": 1}
        found = self._model.evaluate(self._x, self._y, return_dict=True, **options)
        return watch.stretch({name: float(found[name]) for name in ("loss", "accuracy")})

    @override
    def predict(self) -> Stretch:
        watch = Watch()
        outputs = self._model.predict(self._x, batch_size=self._workload.batch_size, callbacks=[Events(watch)], verbose=0)
        stretch = watch.stretch({})
        return stretch._replace(values={"outputs": float(np.abs(outputs).mean())})


def make(workload: Workload, setup: Setup, **compile_options: Any) -> Contender:
    """Returns Keras's `fit`. Its progress bar draws on standard output, which the worker has replaced.

    Raises:
        Unavailable: Keras does not run on JAX.
    """
    if keras.backend.backend() != "jax":
        raise Unavailable(f"Keras runs on {keras.backend.backend()}, not on JAX")
    return Keras(workload, setup, compile_options)
