"""`compile(accumulate_steps=k)`: the update of a whole batch, computed one micro-batch at a time."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct

import fitflax
from fitflax import metrics
from fitflax.callbacks import ModelCheckpoint
from fitflax.data import Batcher
from fitflax.data.adapt import Feeder
from fitflax.errors import ConfigError, DataError, FitflaxWarning, LossError, ModelError, RestoreError
from fitflax.metrics import Metric
from fitflax.parallel import DataParallel
from fitflax.state import Batch
from fitflax.steps.gradients import split
from tests.order_metric import Digits
from tests.run_script import differences, rows_of, state_of

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(11)
ROWS = 13  # Padded to 16, so that the last micro-batch of four has only one real row.
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
Y = RNG.normal(size=(ROWS, 2)).astype(np.float32)
LABELS = RNG.integers(3, size=ROWS)
WEIGHTS = RNG.uniform(0.1, 2.0, size=ROWS).astype(np.float32)
WEIGHTS[2] = 0
TOKEN_WEIGHTS = RNG.uniform(0.1, 2.0, size=(ROWS, 2)).astype(np.float32)


def keeping_gradients() -> optax.GradientTransformation:
    """Returns an optimizer that keeps the newest gradient as its state and changes no parameters."""
    zeros = optax.tree.zeros_like
    return optax.GradientTransformation(zeros, lambda grads, state, params=None: (zeros(grads), grads))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(jnp.tanh(nn.Dense(5)(x)))


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = jnp.tanh(nn.Dense(5)(x))
        return {"value": nn.Dense(2, name="value")(hidden), "label": nn.Dense(3, name="label")(hidden)}


class Sowing(nn.Module):
    """Sows a penalty on its parameters, and one on its activations, which is a mean over examples."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (4, 2))
        self.sow("losses", "parameters", 0.1 * (kernel**2).sum())
        self.sow("losses", "activations", 0.3 * ((x @ kernel) ** 2).mean())
        return x @ kernel


def trainer_of(model: nn.Module, devices: list[jax.Device], loss: Any = "mse", steps: int = 1, *, optimizer: Any = None, **options: Any) -> Any:
    kind = options.pop("kind", fitflax.Trainer)
    trainer = kind(model, parallel=DataParallel(devices))
    trainer.compile(optimizer or keeping_gradients(), loss, accumulate_steps=steps, **options)
    return trainer


def gradient(trainer: Any, batch: Any) -> Any:
    trainer.train_on_batch(batch)
    return jax.tree.map(np.asarray, trainer.state.opt_state)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Leaf by leaf, relative to the norm of the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), actual, expected)):
        assert leaf < tolerance, jax.tree_util.keystr(path)


# -- gradients --


def mean_of(values: Any, weights: Any) -> Any:
    weights = jnp.broadcast_to(jnp.asarray(weights).reshape(weights.shape + (1,) * (values.ndim - weights.ndim)), values.shape)
    return (values * weights).sum() / weights.sum()


def crossentropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


ONES = np.ones(ROWS, np.float32)
# Model, loss, options, batch, and the hand-written loss of all rows.
TASKS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "padding": (Net(), "mse", {}, (X, Y), lambda out: mean_of(((out - Y) ** 2).mean(-1), ONES)),
    "weights": (Net(), "mse", {}, (X, Y, WEIGHTS), lambda out: mean_of(((out - Y) ** 2).mean(-1), WEIGHTS)),
    "weights of tokens": (Net(), lambda o, t: (o - t) ** 2, {}, (X, Y, TOKEN_WEIGHTS), lambda out: mean_of((out - Y) ** 2, TOKEN_WEIGHTS)),
    "several outputs": (
        Heads(),
        {"value": "mse", "label": "sparse_categorical_crossentropy"},
        {"loss_weights": {"value": 0.3, "label": 2.0}},
        (X, {"value": Y, "label": LABELS}, WEIGHTS),
        lambda out: 0.3 * mean_of(((out["value"] - Y) ** 2).mean(-1), WEIGHTS) + 2.0 * mean_of(crossentropy(out["label"], LABELS), WEIGHTS),
    ),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("task", "steps", "num_devices"),
    [
        *(("padding", steps, 1) for steps in (1, 2, 4)),
        *((task, 2, 2) for task in TASKS),
        *(pytest.param(task, steps, 1, marks=SLOW) for task in TASKS for steps in (1, 2, 4) if task != "padding"),
        *(pytest.param(task, steps, 2, marks=SLOW) for task in TASKS for steps in (1, 4)),
    ],
)
@pytest.mark.slow
def test_the_gradient_equals_that_of_the_whole_batch(task: str, steps: int, num_devices: int, devices: Devices):
    model, loss, options, batch, whole = TASKS[task]
    trainer = trainer_of(model, devices(num_devices), loss, steps, **options)
    trainer.build(batch)
    params = jax.tree.map(np.asarray, trainer.state.params)
    value, expected = jax.value_and_grad(lambda params: whole(model.apply({"params": params}, X)))(params)
    logs = trainer.train_on_batch(batch)
    assert logs["loss"] == pytest.approx(float(value), rel=1e-6)
    assert_close(jax.tree.map(np.asarray, trainer.state.opt_state), expected)


@pytest.mark.parametrize(("steps", "num_devices"), [(2, 2), *(pytest.param(*pair, marks=SLOW) for pair in ((2, 1), (4, 1), (4, 2)))])
@pytest.mark.slow
def test_a_scalar_loss_and_sown_losses_are_averaged_over_micro_batches(steps: int, num_devices: int, devices: Devices):
    # Full batches, because a scalar loss does not allow padding, and a sown mean would include it.
    x, y = np.tile(X, (2, 1))[:16], np.tile(Y, (2, 1))[:16]
    model = Sowing()
    trainer = trainer_of(model, devices(num_devices), lambda outputs, targets: ((outputs - targets) ** 2).mean(), steps)
    trainer.build((x, y))

    def whole(params: Any) -> Any:
        out = x @ params["kernel"]
        return ((out - y) ** 2).mean() + 0.1 * (params["kernel"] ** 2).sum() + 0.3 * (out**2).mean()

    value, expected = jax.value_and_grad(whole)(jax.tree.map(np.asarray, trainer.state.params))
    assert trainer.train_on_batch((x, y))["loss"] == pytest.approx(float(value), rel=1e-6)
    assert_close(jax.tree.map(np.asarray, trainer.state.opt_state), expected)


@pytest.mark.slow
def test_training_with_class_weights_and_short_batches_gives_the_same_results(devices: Devices):
    outcomes = []
    for steps in (1, 4):
        trainer = trainer_of(nn.Dense(3), devices(2), "sparse_categorical_crossentropy", steps, optimizer=optax.sgd(0.5), metrics=["accuracy"])
        history = trainer.fit(X, LABELS, WEIGHTS, batch_size=8, epochs=3, class_weight={0: 0.2, 2: 3.0}, verbose=0).history
        outcomes.append((trainer.state.params, history))
    assert_close(jax.tree.map(np.asarray, outcomes[1][0]), jax.tree.map(np.asarray, outcomes[0][0]))
    for key, values in outcomes[0][1].items():
        assert outcomes[1][1][key] == pytest.approx(values, rel=1e-6)


@pytest.mark.slow
def test_a_micro_batch_with_only_padding_adds_nothing(devices: Devices):
    class Normalize(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(3, use_bias=False)(x)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    one, eight = (gradient(trainer_of(Normalize(), devices(1), lambda o: o[:, 0], steps), X[:3]) for steps in (1, 8))
    assert_close(eight, one)


def test_gradients_of_parameters_in_half_precision_are_added_in_float32(devices: Devices):
    class Line(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x * self.param("w", nn.initializers.ones, (1,), jnp.bfloat16)

    def update(grads: Any, state: Any, params: Any, *, grad_fn: Any) -> Any:
        return optax.tree.zeros_like(grads), (grads, grad_fn(params))

    # In bfloat16, a sum of parts of 1 / 512 stops growing at 0.5.
    ones = np.ones((512, 1), np.float32)
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (optax.tree.zeros_like(params),) * 2, update)
    for grads in gradient(trainer_of(Line(), devices(1), lambda outputs, targets: outputs[:, 0], 512, optimizer=optimizer), (ones, ones)):
        assert grads["w"].dtype == jnp.bfloat16 and grads["w"] == 1


def test_a_batch_with_weight_zero_has_a_gradient_of_zero(devices: Devices):
    with pytest.warns(FitflaxWarning, match="are 0, so weighted values such as 'loss' are NaN"):
        grads = gradient(trainer_of(Net(), devices(2), "mse", 2), (X, Y, 0 * WEIGHTS))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_a_custom_loss_is_accumulated(devices: Devices):
    class Custom(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Batch, *, rngs: Any, train: bool) -> Any:
            outputs = self.model.apply({"params": params}, batch.x)
            error = (outputs - batch.y) ** 2
            return {"first": error[:, 0], "second": 3 * error}, {}, {"outputs": outputs, "error": error[:, 0]}

    trainers = [trainer_of(Net(), devices(2), None, steps, kind=Custom, metrics=["mae"]) for steps in (1, 4)]
    logs = [trainer.train_on_batch((X, Y, WEIGHTS)) for trainer in trainers]
    assert_close(*(jax.tree.map(np.asarray, trainer.state.opt_state) for trainer in reversed(trainers)))
    assert list(logs[1]) == list(logs[0]) and logs[1] == pytest.approx(logs[0], rel=1e-6)


# -- other results of a step --


@struct.dataclass
class Rows(Metric):
    """Keeps outputs and weights of every example."""

    values: Any = struct.field(default_factory=lambda: np.zeros((0, 2), np.float32))
    weights: Any = struct.field(default_factory=lambda: np.zeros(0, np.float32))
    name: str = struct.field(pytree_node=False, default="rows")
    direction: str | None = struct.field(pytree_node=False, default=None)
    collect: ClassVar[bool] = True

    def empty(self) -> Any:
        return Rows()

    def update(self, outputs: Any, targets: Any, weights: Any) -> Any:
        return Rows(outputs, weights)

    def merge(self, other: Any) -> Any:
        return Rows(np.concatenate([self.values, other.values]), np.concatenate([self.weights, other.weights]))

    def compute(self) -> Any:
        return self.values[self.weights > 0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_rows_are_collected_in_the_order_of_the_batch(num_devices: int, devices: Devices):
    class Pass(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + self.param("zero", nn.initializers.zeros, ())

    trainer = trainer_of(Pass(), devices(num_devices), "mse", 4, metrics=[Rows()])
    np.testing.assert_array_equal(trainer.train_on_batch((Y, Y))["rows"], Y)


def test_metrics_are_merged_in_the_order_of_replicas_and_of_their_micro_batches(devices: Devices):
    targets = np.arange(1, 9, dtype=np.float32)[:, None]
    logs = trainer_of(nn.Dense(1), devices(2), "mse", 2, metrics=[Digits()]).train_on_batch((targets, targets))
    # Micro-batches start at rows 1, 3, 5 and 7. The empty metric at the start of an epoch is a leading zero; the other replica adds none.
    assert logs["digits"] == 13 * 10 + 57


@pytest.mark.slow
def test_metrics_equal_those_of_the_whole_batch(devices: Devices):
    given = ["mae", "r2", metrics.AUC(name="auc"), Rows()]
    logs = [
        trainer_of(nn.Dense(1), devices(2), "mse", steps, metrics=given).train_on_batch((X, (Y[:, :1] > 0).astype(np.float32), WEIGHTS)) for steps in (1, 4)
    ]
    assert list(logs[0]) == list(logs[1])
    for key, value in logs[0].items():
        np.testing.assert_allclose(logs[1][key], value, rtol=1e-5, atol=1e-6)


class Norm(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name, name="norm")(x)
        return nn.Dense(2)(x)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.slow
def test_batch_statistics_are_passed_from_micro_batch_to_micro_batch(num_devices: int, devices: Devices):
    x, y = X[:12], Y[:12]
    trainer = trainer_of(Norm(), devices(num_devices), "mse", 3)
    trainer.train_on_batch((x, y))
    expected = []
    for shard in np.split(x, num_devices):
        mean, var = np.zeros(4), np.ones(4)
        for rows in np.split(shard, 3):
            mean, var = 0.9 * mean + 0.1 * rows.mean(0), 0.9 * var + 0.1 * rows.var(0)
        expected.append((mean, var))
    stats = trainer.state.model_state["batch_stats"]["norm"]
    np.testing.assert_allclose(stats["mean"], np.mean([mean for mean, _ in expected], axis=0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(stats["var"], np.mean([var for _, var in expected], axis=0), rtol=1e-5)


@pytest.mark.slow
def test_a_module_may_communicate_with_other_replicas_inside_a_micro_batch(devices: Devices):
    x, y = X[:12], Y[:12]
    trainer = trainer_of(Norm(axis_name="replica"), devices(2), "mse", 3)
    trainer.train_on_batch((x, y))
    mean = np.zeros(4)
    for index in range(3):
        rows = np.concatenate([shard[2 * index : 2 * index + 2] for shard in np.split(x, 2)])
        mean = 0.9 * mean + 0.1 * rows.mean(0)
    np.testing.assert_allclose(trainer.state.model_state["batch_stats"]["norm"]["mean"], mean, rtol=1e-5, atol=1e-7)


def test_random_keys_differ_between_micro_batches_replicas_and_steps(devices: Devices):
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            noise = jax.random.uniform(self.make_rng("dropout"), x.shape) if train else x
            return noise + self.param("zero", nn.initializers.zeros, ())

    trainer = trainer_of(Noise(), devices(2), "mse", 4, metrics=[Rows()])
    first, second = (trainer.train_on_batch((Y[:8], Y[:8]))["rows"] for _ in range(2))
    assert len(np.unique(np.concatenate([first, second]))) == 32


# -- memory --


@pytest.mark.slow
def test_accumulation_needs_less_memory(devices: Devices):
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(8):
                x = jnp.tanh(nn.Dense(64)(x))
            return x

    x = np.ones((4096, 64), np.float32)
    sizes = []
    for steps in (1, 4, 16):
        trainer = trainer_of(Deep(), devices(1), "mse", steps, optimizer=optax.sgd(0.1))
        trainer.build((x, x))
        session = trainer._session
        program, strategy = session.task.need_compiled("test"), session.strategy
        batch = Batch(x, x, np.ones(len(x), bool))
        program.preparation.train(session.state.live.borrow(), batch)
        carry = session.state.live.take()
        compiled = program._steps.get("train", carry)
        analysis = compiled.lower(carry.leaves, carry.key, program.empty_sums(train=True), strategy.feed(batch)).compile().memory_analysis()
        sizes.append(analysis.temp_size_in_bytes)
    # Eight layers of 4096 x 64 float32 are 8 MiB.
    assert sizes[0] > 8 * 2**20 and sizes[1] < sizes[0] / 2 and sizes[2] < sizes[0] / 6, sizes


# -- shapes --


def test_batches_are_padded_to_a_multiple_and_the_step_is_compiled_once(devices: Devices, compilations: Any):
    sizes: list[int] = []

    class Seen(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            if train:
                sizes.append(len(x))
            return nn.Dense(2)(x)

    trainer = trainer_of(Seen(), devices(2), "mse", 2)
    trainer.build((X[:4], Y[:4]))
    sizes.clear()
    trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0)  # 5, 5 and 3 rows, padded to 8: 4 per replica.
    assert set(sizes) == {2}
    with compilations.counted() as again:
        trainer.fit(X, Y, batch_size=5, verbose=0)
        trainer.train_on_batch((X[:7], Y[:7]))
    assert again.count == 0


def test_only_training_pads_batches_to_multiples_of_the_micro_batches():
    feeder = Feeder(functools.partial(Batcher, num_shards=2), pad=True, accumulate_steps=3)
    source = fitflax.data.adapt(np.zeros(100), batch_size=8, shuffle=False)
    feeds = (feeder.train(source, None, fitflax.data.Position()), feeder.evaluations(source, "val", None)(), feeder.prediction(source))
    assert [len(feed.next().batch.mask) for feed in feeds] == [12, 8, 8]


def test_without_padding_a_batch_that_cannot_be_split_evenly_is_an_error(devices: Devices):
    trainer = trainer_of(Net(), devices(2), "mse", 3, pad=False)
    trainer.train_on_batch((X[:12], Y[:12]))
    with pytest.raises(DataError, match=r"must be a multiple of 6 \(devices: 2, accumulate_steps: 3\)\. Received: 8 examples"):
        trainer.train_on_batch((X[:8], Y[:8]))
    assert np.isfinite(trainer.test_on_batch((X[:8], Y[:8]))["loss"])


# -- errors --


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "2", None])
def test_the_number_of_micro_batches_must_be_a_positive_integer(steps: Any, devices: Devices):
    with pytest.raises(ConfigError, match=r"compile\(accumulate_steps=...\) must be a positive integer. Received: "):
        trainer_of(Net(), devices(1), steps=steps)


def test_a_custom_update_cannot_be_accumulated(devices: Devices):
    class Custom(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            return super().train_step(state, batch)

    with pytest.raises(ConfigError, match=r"compile\(accumulate_steps=2\) cannot be combined with an overridden train_step.*compute_loss"):
        trainer_of(Net(), devices(1), steps=2, kind=Custom)


def test_a_collection_that_changes_its_structure_is_an_error(devices: Devices):
    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            count = self.variable("count", "n", lambda: jnp.zeros(()))
            if train and not self.is_initializing():
                count.value = jnp.zeros(2)
            return nn.Dense(2)(x)

    with pytest.raises(ModelError, match=r"\['count'\]\['n'\] is float32\[2\] instead of float32\[\]"):
        trainer_of(Growing(), devices(1), steps=2).train_on_batch((X, Y))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("loss", "batch", "match"),
    [
        (lambda o, t: o[:1, 0], (X, Y), r"one value per example, \[4\]"),
        (lambda o, t: o[:, 0], (X, Y, TOKEN_WEIGHTS), r"sample_weight \[4, 2\] does not fit the loss values \[4\].* one value per weight, \[4, 2\]"),
        (lambda o, t: o.mean(), (X[:12], Y[:12], WEIGHTS[:12]), "The loss is a scalar, but the data is weighted"),
        (lambda o, t: o.mean(), (X, Y), "returns one number for a batch, but a batch of 13 examples must be padded to 16"),
    ],
)
def test_losses_that_do_not_fit_raise_the_same_errors(loss: Any, batch: Any, match: str, devices: Devices):
    with pytest.raises(LossError, match=match):
        trainer_of(Net(), devices(1), loss, 4).train_on_batch(batch)


# -- resuming --


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
        return nn.Dense(2)(nn.Dropout(0.3, deterministic=not train)(x))


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_identical_to_an_uninterrupted_run(tmp_path: Any, devices: Devices):
    def run(directory: Any, stops: list[int]) -> Any:
        for steps in stops:
            trainer = trainer_of(Noisy(), devices(2), "mse", 2, optimizer="adam", metrics=["mae"])
            checkpoints = ModelCheckpoint(tmp_path / directory, every=fitflax.every(steps=5))
            trainer.fit(X, Y, WEIGHTS, batch_size=4, steps=steps, callbacks=[checkpoints], resume="auto", verbose=0)
        return trainer

    whole, resumed = run("whole", [10]), run("parts", [5, 10])
    assert resumed.step == 10 and not differences(state_of(resumed), state_of(whole))
    assert rows_of(resumed.history) == rows_of(whole.history)


@pytest.mark.slow
def test_a_run_cannot_be_resumed_with_a_different_number_of_micro_batches(tmp_path: Any, devices: Devices):
    for before, after in itertools.permutations((1, 2), 2):
        directory = tmp_path / str(before)
        trainer_of(Net(), devices(1), steps=before).fit(X, Y, steps=2, callbacks=[ModelCheckpoint(directory)], verbose=0)
        trainer = trainer_of(Net(), devices(1), steps=after)
        with pytest.raises(RestoreError, match="accumulate_steps was"):
            trainer.fit(X, Y, steps=4, callbacks=[ModelCheckpoint(directory)], resume="auto", verbose=0)


def test_rows_that_cannot_be_split_into_equal_micro_batches_are_an_error():
    batch = Batch(x=jnp.arange(3), y=(), mask=jnp.ones(3, bool))
    with pytest.raises(DataError, match=r"compile\(accumulate_steps=2\) cannot split the 3 examples of a replica into 2 equal micro-batches\."):
        split(batch, 2, DataParallel())


# -- random keys of streams in a custom step --


class NoisyTrainer(fitflax.Trainer):
    def train_step(self, state, batch):
        noise = jax.random.normal(self.step_rngs(state)["noise"], batch.mask.shape)
        return state.replace_step(state.step + 1), {"loss": (noise.sum(), batch.mask.sum())}


def noisy_trainer(**options) -> fitflax.Trainer:
    trainer = NoisyTrainer(nn.Dense(1), **options)
    trainer.compile("adam")
    return trainer


def test_a_stream_that_is_not_named_is_an_error_that_says_where_to_name_it():
    x = np.ones((8, 2), np.float32)
    with pytest.raises(ConfigError, match=r"no random stream 'noise'\. It has: \['dropout'\]\. Name it: Trainer\(rngs=\('dropout', 'noise'\)\)\."):
        noisy_trainer().fit(x, x, verbose=0)
    assert noisy_trainer(rngs=("dropout", "noise")).fit(x, x, verbose=0).epoch == [0]


@pytest.mark.slow
def test_jax_and_flax_treat_the_keys_of_a_step_as_a_dict():
    trainer = noisy_trainer(rngs=("noise", "dropout"), parallel=fitflax.parallel.Sharded({"data": -1}, devices=jax.devices()[:1]))
    trainer.build((np.ones((8, 2), np.float32),))
    keys = trainer.step_rngs(trainer.state)
    assert [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(keys)] == ["dropout", "noise"]
    assert jax.jit(lambda keys: keys["noise"])(keys) == keys["noise"] == jax.tree.map(lambda key: key, keys)["noise"]
    assert nn.Dropout(0.5, deterministic=False).apply({}, np.ones(100), rngs=keys).min() == 0
    assert keys.get("params") is None and "params" not in keys
