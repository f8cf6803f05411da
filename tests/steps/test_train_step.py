import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct

import fitflax
from fitflax import metrics
from fitflax.errors import FitflaxError, LossError, MetricError, ModelError
from fitflax.parallel import DataParallel, Sharded
from fitflax.state import Batch, TrainState
from fitflax.steps.gradients import split_key
from tests.order_metric import Digits

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(5)
X = RNG.normal(size=(13, 4)).astype(np.float32)
Y = RNG.normal(size=(13, 2)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 2.0, size=13).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(jnp.tanh(nn.Dense(5)(x)))


def trainer_of(model: nn.Module, devices: list[jax.Device], loss: Any = "mse", metrics: Any = None, *, kind: type = fitflax.Trainer, **options: Any) -> Any:
    reduce = options.pop("reduce", None)
    trainer = kind(model, parallel=DataParallel(devices, reduce=reduce), **options)
    trainer.compile(optax.sgd(0.1), loss, metrics)
    return trainer


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), actual, expected)


def assert_replicas_equal(tree: Any) -> None:
    """Asserts that the copies on all devices are bit-for-bit identical, regardless of the sharding that the array reports."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first, err_msg=jax.tree_util.keystr(path))


# -- known answers --


@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_logged_loss_is_the_one_before_the_update(num_devices: int, devices: Devices):
    class Shift(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.param("p", nn.initializers.ones, (5,)) - x

    batch = RNG.normal(size=(3, 5)).astype(np.float32)
    trainer = trainer_of(Shift(), devices(num_devices), lambda outputs: (outputs**2).mean(-1))
    assert trainer.train_on_batch(batch)["loss"] == pytest.approx(np.mean((batch - 1) ** 2), rel=1e-5)
    np.testing.assert_allclose(trainer.state.params["p"], 1 - 0.1 * 2 * (1 - batch).mean(0) / 5, rtol=1e-5)


def test_a_short_batch_passes_through_batch_norm_as_if_it_were_not_padded(devices: Devices):
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            return nn.BatchNorm(use_running_average=not train, use_bias=False, use_scale=False, name="norm")(x) + self.param("zero", nn.initializers.zeros, ())

    # The second batch's two rows are padded to four.
    rows = np.array([[0.0], [1.0], [2.0], [5.0], [3.516], [3.832]], np.float32)
    number = np.array([0, 0, 0, 0, 1, 2])
    outputs = {f"row_{which}": lambda o, t, which=which: o[:, 0] * (t == which) for which in (1, 2)}
    trainer = trainer_of(Norm(), devices(1), lambda o, t: 0 * o[:, 0], outputs)
    trainer.train_on_batch((rows[:4], number[:4]))
    logs = trainer.train_on_batch((rows[4:], number[4:]))
    # Means over two real rows, only one of which is not zero.
    assert 2 * logs["row_1"] == pytest.approx(-0.9998, abs=1e-4)
    assert 2 * logs["row_2"] == pytest.approx(0.9998, abs=1e-4)
    stats = trainer.state.model_state["batch_stats"]["norm"]
    means = [rows[:4].mean(), rows[4:].mean()]
    assert float(stats["mean"][0]) == pytest.approx(0.99 * 0.01 * means[0] + 0.01 * means[1], rel=1e-5)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.mostly_slow
def test_gradients_stay_finite_in_a_model_that_normalizes_a_short_batch(num_devices: int, devices: Devices):
    class Normalize(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(3, use_bias=False)(x)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    trainer = trainer_of(Normalize(), devices(num_devices))
    history = trainer.fit(X[:5], np.zeros((5, 3)), batch_size=4, epochs=2, verbose=0).history
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state.params))
    np.testing.assert_allclose(history["loss"], 1 / 3, rtol=1e-5)


# -- initialization --


@pytest.mark.slow
def test_the_initial_state_depends_only_on_seed_and_shapes(devices: Devices):
    states = []
    for number, batch in ((1, X), (4, X), (4, X * 0 + np.nan), (8, X[:2])):
        trainer = trainer_of(Net(), devices(number))
        trainer.build(batch)
        states.append(trainer.state.params)
    for state in states[1:]:
        assert_equal(state, states[0])
    other = trainer_of(Net(), devices(1), seed=1)
    other.build(X)
    assert not np.array_equal(other.state.params["Dense_0"]["kernel"], states[0]["Dense_0"]["kernel"])


def test_initialization_gives_the_same_shapes_and_dtypes_as_without_a_trainer(devices: Devices):
    trainer = trainer_of(Net(), devices(2))
    trainer.build(X)
    shapes = jax.eval_shape(Net().init, jax.random.key(0), X)["params"]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), trainer.state.params) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    assert trainer.state.model_state == {} and trainer.state.ema_params is None
    assert int(trainer.state.step) == 0 and trainer.state.step.dtype == jnp.int32


class Masked(nn.Module):
    """Keeps the dropout masks of all replicas, each in its own row of a collection that is summed over replicas."""

    replicas: int

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        drop = nn.Dropout(0.5, deterministic=not train, name="drop")
        mine = drop(jnp.ones(32))
        masks = self.variable("masks", "all", lambda: jnp.zeros((self.replicas, 32)))
        masks.value = jnp.zeros((self.replicas, 32)).at[jax.lax.axis_index("replica")].set(mine)
        return nn.Dense(2)(x)


def masks_of(devices: list[jax.Device], steps: int, seed: int = 0, **fit: Any) -> np.ndarray:
    trainer = trainer_of(Masked(len(devices)), devices, seed=seed, reduce={"masks": "sum"})
    trainer.build(X)
    found = []
    for _ in range(steps):
        trainer.train_on_batch((X[: fit.get("rows", 8)], Y[: fit.get("rows", 8)]))
        found.append(np.asarray(trainer.state.model_state["masks"]["all"]))
    return np.stack(found)


@pytest.mark.slow
def test_keys_differ_by_replica_and_step_and_depend_only_on_seed_step_and_replica(devices: Devices):
    masks = masks_of(devices(4), steps=2)
    assert len({mask.tobytes() for mask in masks.reshape(-1, 32)}) == 8
    np.testing.assert_array_equal(masks_of(devices(4), steps=1, rows=5), masks[:1])
    assert (masks_of(devices(1), steps=1, seed=1) != masks[:1, :1]).any()
    # The same replica has the same key regardless of the other replicas.
    np.testing.assert_array_equal(masks_of(devices(1), steps=2), masks[:, :1])


@pytest.mark.slow
def test_a_steps_key_is_the_states_key_folded_with_the_step_and_then_the_replica(devices: Devices):
    masks = masks_of(devices(2), steps=2)

    class Alone(nn.Module):
        @nn.compact
        def __call__(self) -> Any:
            return nn.Dropout(0.5, deterministic=False, name="drop")(jnp.ones(32))

    for step in range(2):
        for replica in range(2):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), replica)
            np.testing.assert_array_equal(Alone().apply({}, rngs=split_key(key, ("dropout",))), masks[step, replica])


def test_a_streams_key_does_not_depend_on_the_other_streams():
    key = jax.random.key(3)
    alone, both = split_key(key, ("dropout",)), split_key(key, ("noise", "dropout"))
    assert alone["dropout"] == both["dropout"] != both["noise"]


@pytest.mark.slow
def test_randomness_in_evaluation_depends_only_on_seed_and_batch(devices: Devices):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            nn.Dense(1)(x)
            return jax.random.normal(self.make_rng("noise"), x.shape)

    trainer = trainer_of(Noisy(), devices(2), rngs={"init": ("noise",), "train": ("noise",), "eval": ("noise",)})
    trainer.build(X)
    first, logs = trainer.predict(X, batch_size=4), trainer.evaluate(X, X, batch_size=4, verbose=0)
    trainer.fit(X, X, epochs=2, verbose=0)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=4), first)
    assert trainer.evaluate(X, X, batch_size=4, verbose=0) == logs
    # It differs between rows, replicas and batches.
    assert len(np.unique(first)) == first.size


# -- collections --


class Collections(nn.Module):
    """Sows values and keeps state of several kinds."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        count = self.variable("counts", "n", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        self.sow("intermediates", "x", x)
        self.sow("summaries", "mean", x.mean())
        self.sow("losses", "penalty", 0.5)
        return nn.Dense(2)(x)


@pytest.mark.slow
def test_sown_values_never_become_part_of_the_state(devices: Devices):
    trainer = trainer_of(Collections(), devices(2))
    trainer.build(X)
    assert list(trainer.state.model_state) == ["counts"]
    initial = int(trainer.state.model_state["counts"]["n"])
    trainer.fit(X, Y, epochs=3, batch_size=4, verbose=0)
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X)
    assert list(trainer.state.model_state) == ["counts"]
    assert int(trainer.state.model_state["counts"]["n"]) == initial + 12
    assert trainer.state.model_state["counts"]["n"].dtype == jnp.int32


class Perturbed(nn.Module):
    """`Net` with a perturbation."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(self.perturb("hidden", jnp.tanh(nn.Dense(5)(x))))


def test_perturbations_are_not_part_of_the_state_so_batches_may_have_any_size(devices: Devices):
    trainer, expected = trainer_of(Perturbed(), devices(1)), trainer_of(Net(), devices(1))
    for each in (trainer, expected):
        each.fit(X[:8], Y[:8], batch_size=8, epochs=2, verbose=0)
    assert trainer.state.model_state == {}
    assert_equal(trainer.state.params, expected.state.params)
    assert trainer.evaluate(X, Y, batch_size=13, verbose=0) == expected.evaluate(X, Y, batch_size=13, verbose=0)
    assert_equal(trainer.predict(X[:3], batch_size=3), expected.predict(X[:3], batch_size=3))


@pytest.mark.slow
def test_a_run_whose_checkpoints_have_perturbations_resumes_without_them(devices: Devices, tmp_path: Any):
    """As in 0.1, where perturbations were part of the state."""
    old, expected = trainer_of(Perturbed(), devices(1), transient=("losses", "summaries", "intermediates")), trainer_of(Perturbed(), devices(1))
    old.fit(X, Y, batch_size=13, verbose=0, callbacks=[fitflax.callbacks.ModelCheckpoint(tmp_path)])
    assert list(old.state.model_state) == ["perturbations"]
    expected.fit(X, Y, batch_size=13, epochs=2, verbose=0)
    resumed = trainer_of(Perturbed(), devices(1))
    resumed.fit(X, Y, batch_size=13, epochs=2, verbose=0, resume=tmp_path)
    assert resumed.state.model_state == {}
    assert_equal(resumed.state.params, expected.state.params)
    served = trainer_of(Perturbed(), devices(1))
    served.build((X, Y))
    served.replace_state(old.inference_state())
    assert_equal(served.predict(X), old.predict(X, batch_size=13))


def test_the_error_for_values_that_are_sown_into_the_state_names_transient(devices: Devices):
    class Sown(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.sow("activity", "x", x, reduce_fn=lambda old, new: new, init_fn=lambda: None)
            self.sow("means", "x", x.mean())
            return nn.Dense(2)(x)

    message = r"If the module sows into .*'means', keep it out of the state: Trainer\(transient=\('losses', .*'means'\)\)"
    with pytest.raises(ModelError, match=message):
        trainer_of(Sown(), devices(1)).fit(X, Y, verbose=0)
    names = ("losses", "summaries", "intermediates", "perturbations", "activity", "means")
    trainer = trainer_of(Sown(), devices(1), transient=names)
    trainer.fit(X, Y, batch_size=8, verbose=0)
    assert trainer.state.model_state == {}


def test_a_collection_that_is_not_transient_is_kept(devices: Devices):
    class Last(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.sow("kept", "largest", x.max(), reduce_fn=lambda old, new: new, init_fn=lambda: jnp.zeros(()))
            return nn.Dense(2)(x)

    trainer = trainer_of(Last(), devices(1))
    trainer.train_on_batch((X, Y))
    assert float(trainer.state.model_state["kept"]["largest"]) == X.max()


def test_a_state_that_grows_from_step_to_step_is_an_error_that_names_what_is_new(devices: Devices):
    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.sow("kept", "x", x.mean())
            return nn.Dense(2)(x)

    with pytest.raises(ModelError, match=r"must return a state with the same structure.*model_state\['kept'\]\['x'\]\[1\] is new"):
        trainer_of(Growing(), devices(2)).fit(X, Y, verbose=0)


def test_a_state_whose_dtype_changes_is_an_error_that_names_it(devices: Devices):
    class Changing(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            count = self.variable("counts", "n", lambda: jnp.zeros((), jnp.int32))
            count.value = count.value.astype(jnp.float32) + (0.5 if not self.is_initializing() else 0)
            if self.is_initializing():
                count.value = count.value.astype(jnp.int32)
            return nn.Dense(2)(x)

    with pytest.raises(ModelError, match=r"\['counts'\]\['n'\] is float32\[\] instead of int32\[\]"):
        trainer_of(Changing(), devices(1)).fit(X, Y, verbose=0)


@pytest.mark.slow
def test_evaluation_and_prediction_do_not_change_the_state(devices: Devices):
    trainer = trainer_of(Collections(), devices(2))
    trainer.build(X)
    before = jax.tree.map(np.array, dataclasses.replace(trainer.state, key=0))
    trainer.evaluate(X, Y, verbose=0)
    trainer.test_on_batch((X, Y))
    trainer.predict(X)
    trainer.predict_on_batch(X)
    assert_equal(dataclasses.replace(trainer.state, key=0), before)


@pytest.mark.slow
def test_adamw_which_needs_the_parameters_works(devices: Devices):
    trainer = fitflax.Trainer(Net(), parallel=DataParallel(devices(2)))
    optimizer = optax.adamw(0.01, weight_decay=0.1)
    trainer.compile(optimizer, "mse")
    trainer.build(X)
    params = jax.tree.map(np.array, trainer.state.params)
    gradient = jax.grad(lambda p: jnp.mean((Net().apply({"params": p}, X) - Y) ** 2))(params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    trainer.train_on_batch((X, Y))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trainer.state.params, optax.apply_updates(params, updates))


@pytest.mark.slow
def test_gradients_norm_is_the_norm_of_the_global_gradient(devices: Devices):
    for number in (1, 4):
        trainer = trainer_of(Net(), devices(number))
        trainer.build(X)
        gradient = jax.grad(lambda p: jnp.mean((Net().apply({"params": p}, X) - Y) ** 2))(jax.tree.map(np.array, trainer.state.params))
        (checkpoint,) = trainer.train_loop(X, Y, steps=1, shuffle=False)
        assert checkpoint.gradients_norm == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)


def test_norms_of_float16_arrays_do_not_overflow(devices: Devices):
    model = nn.Dense(1, use_bias=False, param_dtype=jnp.float16, kernel_init=nn.initializers.constant(300))
    trainer = trainer_of(model, devices(1), lambda outputs, targets: 300 * outputs[:, 0])
    (checkpoint,) = trainer.train_loop(np.ones((8, 4), np.float32), np.zeros((8, 1), np.float32), steps=1)
    assert checkpoint.gradients_norm == 600 and checkpoint.params_norm == pytest.approx(540, rel=1e-2)


# -- compute_loss --


class Doubled(fitflax.Trainer):
    """Trains on twice the loss and logs more values."""

    def compute_loss(self, params: Any, model_state: Any, batch: Batch, *, rngs: Any, train: bool) -> Any:
        outputs, changed = self.model.apply({"params": params, **model_state}, batch.x, mutable=list(model_state), rngs=rngs)
        values = ((outputs - batch.y) ** 2).mean(-1)
        return 2 * values, changed, {"outputs": outputs, "largest": values, "trains": float(train)}


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.slow
def test_a_custom_loss_is_weighted_and_combined_like_any_other(num_devices: int, devices: Devices):
    custom = trainer_of(Net(), devices(num_devices), None, ["mae"], kind=Doubled)
    plain = trainer_of(Net(), devices(num_devices), lambda o, t: 2 * ((o - t) ** 2).mean(-1), ["mae"])
    one, two = (trainer.fit(X, Y, WEIGHTS, batch_size=4, epochs=2, verbose=0).history for trainer in (custom, plain))
    assert list(one) == ["loss", "largest", "trains", "mae"]
    assert one["loss"] == two["loss"] and one["mae"] == two["mae"]
    assert one["largest"] == pytest.approx([value / 2 for value in two["loss"]], rel=1e-6)
    assert one["trains"] == [1.0, 1.0]
    assert_equal(custom.state.params, plain.state.params)
    assert custom.evaluate(X, Y, verbose=0)["trains"] == 0.0


@pytest.mark.slow
def test_calling_the_inherited_loss_changes_nothing(devices: Devices):
    class Same(fitflax.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    results = []
    for kind in (fitflax.Trainer, Same):
        trainer = trainer_of(Net(), devices(2), "mse", ["mae"], kind=kind)
        results.append((trainer.fit(X, Y, batch_size=4, verbose=0).history, trainer.state.params))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@pytest.mark.slow
def test_several_custom_losses_are_added(devices: Devices):
    class Parts(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Batch, *, rngs: Any, train: bool) -> Any:
            outputs = self.model.apply({"params": params}, batch.x)
            return {"near": outputs[:, 0] * 0 + 1, "far": outputs * 0 + 2}, {}, {"other": jnp.float32(5)}

    trainer = trainer_of(Net(), devices(2), None, kind=Parts)
    assert trainer.fit(X, Y, batch_size=4, verbose=0).history == {"loss": [3.0], "other": [5.0]}


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        (lambda values: values, LossError, r"compute_loss must return \(values, new_model_state, aux\)"),
        (lambda values: (values, {}), LossError, r"compute_loss must return \(values, new_model_state, aux\)"),
        (lambda values: (values, {}, values), LossError, r"compute_loss must return \(values, new_model_state, aux\)"),
        (lambda values: (values, {}, {}), MetricError, r"must return aux\['outputs'\], from which the compiled metrics are computed"),
        (lambda values: (values, {}, {"outputs": values, "bad": values[:1]}), LossError, r"aux\['bad'\] must be a scalar or \[4, ...\]"),
        (lambda values: (values[:1], {}, {"outputs": values}), LossError, "one value per example"),
    ],
    ids=["values", "pair", "aux", "no outputs", "bad aux", "bad values"],
)
def test_a_custom_loss_that_returns_something_else_is_an_error(result: Any, error: type, match: str, devices: Devices):
    class Wrong(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Batch, *, rngs: Any, train: bool) -> Any:
            return result(self.model.apply({"params": params}, batch.x).mean(-1))

    with pytest.raises(error, match=match):
        trainer_of(Net(), devices(2), None, {"m": lambda o, t: o}, kind=Wrong).fit(X[:8], Y[:8], batch_size=8, verbose=0)


# -- train_step --


class Careless(fitflax.Trainer):
    """A custom update that ignores the other replicas."""

    def train_step(self, state: TrainState, batch: Batch) -> Any:
        def loss(params: Any) -> Any:
            values = ((self.model.apply({"params": params}, batch.x) - batch.y) ** 2).mean(-1)
            return jnp.sum(values * batch.mask) / jnp.maximum(batch.mask.sum(), 1), values

        (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient)
        logs = {"second": (jnp.sum(batch.mask), jnp.sum(batch.mask)), "loss": (jnp.sum(values * batch.mask), jnp.sum(batch.mask))}
        return dataclasses.replace(state, params=params), logs


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_nan_of_one_replica_after_a_custom_update_is_in_the_parameters_of_all(spoiled: int, devices: Devices):
    class Trainer(fitflax.Trainer):
        def train_step(self, state: TrainState, batch: Batch) -> Any:
            factor = jnp.where(jax.lax.axis_index("replica") == spoiled, jnp.nan, 1.0)
            return dataclasses.replace(state, params=jax.tree.map(lambda leaf: factor * leaf, state.params)), {}

    trainer = trainer_of(Net(), devices(2), None, kind=Trainer)
    trainer.train_on_batch((X[:12], Y[:12]))
    assert_replicas_equal(trainer.state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(trainer.state.params))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.slow
def test_a_custom_update_leaves_all_replicas_equal(num_devices: int, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices), None, kind=Careless)
    trainer.build(X)
    params = jax.tree.map(np.array, trainer.state.params)
    trainer.train_on_batch((X[:12], Y[:12]))
    assert_replicas_equal(trainer.state)
    # With equal shards, the mean of the replicas' updates is the update of the whole batch.
    gradient = jax.grad(lambda p: jnp.mean((Net().apply({"params": p}, X[:12]) - Y[:12]) ** 2))(params)
    jax.tree.map(lambda new, old, g: np.testing.assert_allclose(new, old - 0.1 * g, atol=1e-6), trainer.state.params, params, gradient)
    trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    assert_replicas_equal(trainer.state)
    assert trainer.step == int(trainer.state.step) == 7


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.slow
def test_the_logs_of_a_custom_update_are_ratios_of_sums_in_its_order(num_devices: int, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices), None, kind=Careless)
    trainer.build(X)
    outputs = np.asarray(Net().apply({"params": trainer.state.params}, X[:5]))
    logs = trainer.train_on_batch((X[:5], Y[:5]))
    assert list(logs) == ["second", "loss"]
    assert logs == {"second": 1.0, "loss": pytest.approx(np.mean((outputs - Y[:5]) ** 2), rel=1e-6)}


class HandWritten(fitflax.Trainer):
    """The default update, written with the methods that the trainer provides for it."""

    def train_step(self, state: TrainState, batch: Batch) -> Any:
        num_examples = self.sum_replicas(batch.mask.sum())

        def loss(params: Any) -> Any:
            outputs = self.model.apply({"params": params}, batch.x, True, rngs=self.step_rngs(state))
            values = ((outputs - batch.y) ** 2).mean(axis=-1) * batch.mask
            return values.sum() / num_examples, values

        grads, values = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradient(self.sum_replicas(grads), self.optimizer), {"loss": (values.sum(), batch.mask.sum())}


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(Y.shape[1])(nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x)))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("strategy", [lambda four: DataParallel(four[:1]), DataParallel, lambda four: Sharded({"data": -1}, fsdp=False, devices=four)])
def test_a_hand_written_update_equals_the_default_one_on_all_strategies(strategy: Any, devices: Devices):
    states = []
    for kind in (HandWritten, fitflax.Trainer):
        trainer = kind(Dropping(), parallel=strategy(devices(4)))
        trainer.compile("adam", None if kind is HandWritten else "mse", learning_rate=0.1)
        history = trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
        states.append((trainer.state.params, history["loss"]))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), *states)


class Inheriting(fitflax.Trainer):
    def train_step(self, state: TrainState, batch: Batch) -> Any:
        return super().train_step(state, batch)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.mostly_slow
def test_calling_the_inherited_update_gives_the_same_state(num_devices: int, devices: Devices):
    states = []
    for kind in (fitflax.Trainer, Inheriting):
        trainer = trainer_of(Net(), devices(num_devices), "mse", kind=kind)
        trainer.fit(X, Y, WEIGHTS, batch_size=5, epochs=2, verbose=0)
        states.append(trainer.state)
    assert_equal(states[1].params, states[0].params)
    assert int(states[1].step) == 6


@pytest.mark.slow
def test_calling_the_inherited_update_logs_the_same_values_in_the_same_order(devices: Devices):
    histories = []
    for kind in (fitflax.Trainer, Inheriting):
        trainer = trainer_of(Net(), devices(2), "mse", ["mae", "accuracy"], kind=kind)
        histories.append(trainer.fit(X, Y, WEIGHTS, batch_size=5, verbose=0).history)
    assert list(histories[1]) == list(histories[0])
    # Over an epoch of 5, 5 and 3 examples: not a mean of means.
    assert {key: row[0] for key, row in histories[1].items()} == pytest.approx({key: row[0] for key, row in histories[0].items()}, rel=1e-6)


def test_a_custom_update_reduces_collections_as_the_strategy_specifies(devices: Devices):
    class Index(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.variable("largest", "n", lambda: jnp.zeros(())).value = jax.lax.axis_index("replica").astype(jnp.float32)
            return nn.Dense(2)(x)

    class Custom(fitflax.Trainer):
        def train_step(self, state: TrainState, batch: Batch) -> Any:
            _, changed = self.model.apply({"params": state.params, **state.model_state}, batch.x, mutable=["largest"])
            return dataclasses.replace(state, model_state=changed), {"loss": (jnp.float32(0), jnp.float32(1))}

    trainer = trainer_of(Index(), devices(4), None, kind=Custom, reduce={"largest": "max"})
    trainer.train_on_batch((X, Y))
    assert float(trainer.state.model_state["largest"]["n"]) == 3
    assert_replicas_equal(trainer.state)


def test_a_custom_update_cannot_change_the_key_or_the_step(devices: Devices):
    class Meddling(fitflax.Trainer):
        def train_step(self, state: TrainState, batch: Batch) -> Any:
            return dataclasses.replace(state, step=state.step + 10, key=jax.random.key(9)), {"loss": (jnp.float32(0), jnp.float32(1))}

    trainer = trainer_of(Net(), devices(2), None, kind=Meddling)
    trainer.build(X)
    key = jax.random.key_data(trainer.state.key)
    trainer.fit(X, Y, batch_size=5, verbose=0)
    assert int(trainer.state.step) == trainer.step == 3
    np.testing.assert_array_equal(jax.random.key_data(trainer.state.key), key)


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda state: state, r"train_step must return \(TrainState, dict\)"),
        (lambda state: (state.params, {}), r"train_step must return \(TrainState, dict\). Received: \(dict, dict\)"),
        (lambda state: (state, []), r"Received: \(TrainState, list\)"),
        (lambda state: (state, {"loss": jnp.float32(1)}), r"pairs \(sum, weight\). Received: 'loss' is float32\[\]"),
        (lambda state: (dataclasses.replace(state, params={}), {}), r"\['kernel'\] is missing"),
    ],
    ids=["state", "params", "list", "no pair", "other structure"],
)
def test_a_custom_update_that_returns_something_else_is_an_error(result: Any, match: str, devices: Devices):
    class Wrong(fitflax.Trainer):
        def train_step(self, state: TrainState, batch: Batch) -> Any:
            return result(state)

    with pytest.raises(FitflaxError, match=match):
        trainer_of(Net(), devices(2), None, kind=Wrong).fit(X, Y, verbose=0)


# -- metrics in steps --


def test_metrics_that_cannot_be_added_are_merged_over_replicas_in_order(devices: Devices):
    trainer = trainer_of(Net(), devices(4), lambda o, t: o[:, 0], [Digits()])
    trainer.build(X)
    # Two batches of four rows, one row per replica.
    assert trainer.evaluate(X[:8], np.arange(1, 9), batch_size=4, verbose=0)["digits"] == 1234 * 10 + 5678


@pytest.mark.slow
def test_a_metric_may_hold_constants_in_addition_to_its_sums(devices: Devices):
    @struct.dataclass
    class Above(metrics.Metric):
        """The mean fraction of thresholds that outputs exceed; `empty` keeps the thresholds."""

        thresholds: Any
        total: Any = np.float32(0)
        weight: Any = np.float32(0)
        name: str = struct.field(pytree_node=False, default="above")
        direction: Any = struct.field(pytree_node=False, default=None)

        def empty(self) -> Any:
            return dataclasses.replace(self, total=np.float32(0), weight=np.float32(0))

        def update(self, outputs: Any, targets: Any, weights: Any) -> Any:
            share = (outputs[:, :1] > self.thresholds).mean(-1)
            return dataclasses.replace(self, total=self.total + (share * weights).sum(), weight=self.weight + weights.sum())

        def merge(self, other: Any) -> Any:
            return dataclasses.replace(self, total=self.total + other.total, weight=self.weight + other.weight)

        def compute(self) -> Any:
            return self.total / self.weight

    class Pass(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + self.param("zero", nn.initializers.zeros, ())

    thresholds = np.linspace(-1, 1, 5, dtype=np.float32)
    trainer = trainer_of(Pass(), devices(2), "mse", [Above(thresholds)])
    trainer.build(X)
    assert trainer.evaluate(X, X, batch_size=4, verbose=0)["above"] == pytest.approx((X[:, :1] > thresholds).mean(), rel=1e-6)


def test_a_metric_that_fails_to_compute_is_an_error(devices: Devices):
    @struct.dataclass
    class Pair(metrics.Metric):
        value: Any = np.float32(0)
        name: str = struct.field(pytree_node=False, default="pair")
        direction: Any = struct.field(pytree_node=False, default=None)

        def empty(self) -> Any:
            return Pair()

        update = merge = lambda self, *_: self

        def compute(self) -> Any:
            raise ValueError("no number")

    with pytest.raises(MetricError, match="'pair' cannot be computed: ValueError: no number"):
        trainer_of(Net(), devices(1), "mse", [Pair()]).fit(X, Y, verbose=0)


# -- batches of dicts, several inputs --


def test_inputs_and_targets_are_mapped_as_the_trainer_specifies(devices: Devices):
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, a: Any, *, b: Any) -> Any:
            return a + 10 * b + self.param("zero", nn.initializers.zeros, ())

    data = {"left": X, "right": 2 * X, "label": 21 * X, "id": np.arange(13)}
    trainer = trainer_of(Sum(), devices(2), inputs={"a": "left", "b": "right"}, targets="label")
    assert trainer.fit(data, batch_size=4, verbose=0).history["loss"] == [pytest.approx(0, abs=1e-9)]
    np.testing.assert_allclose(trainer.predict({"left": X, "right": X}), 11 * X, rtol=1e-6)
    assert trainer.evaluate(lambda: iter([data]), verbose=0)["loss"] == pytest.approx(0, abs=1e-9)


# -- weights --


@pytest.mark.slow
def test_one_weight_for_all_values_of_an_example_may_have_an_extra_axis(devices: Devices):
    x, y = X[:12].reshape(2, 6, -1), Y[:12].reshape(2, 6, -1)
    weights = np.array([[1.0], [3.0]], np.float32)
    values = []
    for given in (weights, np.repeat(weights, 6, axis=1)):
        trainer = trainer_of(Net(), devices(1), "mse")
        values.append(trainer.fit(x, y, given, batch_size=2, verbose=0).history["loss"])
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.slow
def test_calling_the_inherited_update_logs_metrics_that_are_not_means_correctly(devices: Devices):
    trainer = trainer_of(Net(), devices(1), "mse", ["rmse"], kind=Inheriting)
    history = trainer.fit(X[:8], Y[:8], batch_size=8, verbose=0).history
    assert history["rmse"][0] == pytest.approx(history["loss"][0] ** 0.5, rel=1e-6)


def test_calling_the_inherited_update_leaves_out_metrics_whose_value_is_an_array(devices: Devices):
    trainer = trainer_of(nn.Dense(3), devices(1), "sparse_categorical_crossentropy", ["accuracy", "confusion_matrix"], kind=Inheriting)
    labels = np.arange(len(X)) % 3
    history = trainer.fit(X, labels, batch_size=8, validation_data=(X, labels), verbose=0).history
    assert list(history) == ["loss", "accuracy", "val_loss", "val_accuracy", "val_confusion_matrix"]
    assert history["val_confusion_matrix"][0].shape == (3, 3)


class WithStats(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


def test_a_train_step_that_does_not_pass_mutable_is_an_error_that_says_what_to_pass():
    class Frozen(fitflax.Trainer):
        def train_step(self, state, batch):
            self.model.apply({"params": state.params, **state.model_state}, batch.x, train=True)
            return state, {"loss": (0.0, 1.0)}

    trainer = Frozen(WithStats())
    trainer.compile("sgd")
    with pytest.raises(ModelError, match=r"^train_step: .*Pass mutable= with the collections that the module updates, .*mutable=\['batch_stats'\]"):
        trainer.fit(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32), verbose=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_collections_with_a_different_structure_are_an_error_in_every_precision(precision):
    class Renaming(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            outputs = self.model.apply({"params": params, **model_state}, batch.x)
            return (outputs**2).mean(-1), {"batch_stats": {"other": model_state["batch_stats"]}}, {}

    trainer = Renaming(WithStats())
    trainer.compile("sgd", precision=precision)
    with pytest.raises(ModelError, match=r"must return a state with the same structure, .*\['BatchNorm_0'\]\['mean'\] is missing"):
        trainer.fit(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32), verbose=0)
