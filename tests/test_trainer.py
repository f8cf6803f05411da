"""`Trainer`: modules, batches, state, optimizers, custom steps, and the loops that yield checkpoints."""

import dataclasses
import gc
import weakref

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.errors import ConfigError, FitflaxWarning, LossError, ModelError, NotReadyError, OptimizerError, RestoreError
from fitflax.parallel import DataParallel, Sharded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
Y = RNG.normal(size=(12, 3)).astype(np.float32)


def make(model=None, optimizer=None, loss="mse", metrics=None, *, trainer=fitflax.Trainer, devices=1, compile_kwargs=None, **kwargs):
    made = trainer(model or nn.Dense(3), parallel=DataParallel(jax.devices()[:devices]), **kwargs)
    made.compile(optimizer or optax.sgd(0.1), loss=loss, metrics=metrics, **(compile_kwargs or {}))
    return made


def as_data(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def device_copy(leaf):
    """Returns the values, copied on the device first: a view of an array's memory would keep the next step from reusing it, which is what is tested."""
    return np.array(as_data(jnp.copy(leaf)))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(as_data(one), as_data(other)), a, b)


def differ(a, b):
    return any(not np.array_equal(as_data(one), as_data(other)) for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# --- The mode of the module ---


def constant(value):
    return jnp.full((1,), value, jnp.float32)


class Train(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(1)(x) * 0 + constant(train)


class Training(nn.Module):
    @nn.compact
    def __call__(self, x, *, training=False):
        return nn.Dense(1)(x) * 0 + constant(training)


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        return nn.Dense(1)(x) * 0 + constant(not deterministic)


class TrainField(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x) * 0 + constant(self.train)


class DeterministicField(nn.Module):
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x) * 0 + constant(not self.deterministic)


class KeywordBeforeField(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x, *, deterministic):
        assert not self.train
        return nn.Dense(1)(x) * 0 + constant(not deterministic)


class AnyKeywords(nn.Module):
    @nn.compact
    def __call__(self, x, **kwargs):
        assert not kwargs
        return nn.Dense(1)(x) * 0 + constant(True)


def modes(model, **kwargs):
    """Returns the means of the outputs in training, evaluation and prediction."""
    trainer = make(model, metrics={"mode": lambda outputs, targets: outputs}, **kwargs)
    y = np.zeros((12, 1))
    fitted = trainer.fit(X, y, verbose=0).history["mode"][0]
    return fitted, trainer.evaluate(X, y, verbose=0)["mode"], trainer.predict(X)[0, 0]


@pytest.mark.parametrize(
    "model", [Train(), Training(), Deterministic(), TrainField(), DeterministicField(), KeywordBeforeField()], ids=lambda m: type(m).__name__
)
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_a_mode_keyword_or_field_is_found_and_set(model):
    assert modes(model) == (1.0, 0.0, 0.0)


@pytest.mark.slow
def test_a_module_that_takes_any_keywords_gets_no_mode_keyword():
    assert modes(AnyKeywords()) == (1.0, 1.0, 1.0)


def test_a_mode_field_of_the_users_module_is_not_changed():
    model = TrainField()
    trainer = make(model)
    trainer.fit(X, np.zeros((12, 1)), verbose=0)
    assert trainer.model is model and model.train is False


@pytest.mark.slow
def test_train_kwargs_and_eval_kwargs_override_the_mode():
    assert modes(Train(), train_kwargs={"train": 0.25}, eval_kwargs={"train": 0.5}) == (0.25, 0.5, 0.5)

    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x, train, *, scale):
            return nn.Dense(1)(x) * 0 + constant(train) * scale + scale

    assert modes(Scaled(), train_kwargs={"scale": 2.0}, eval_kwargs={"scale": 3.0}) == (4.0, 3.0, 3.0)


# --- Batches ---


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, a, b):
        return nn.Dense(3, name="a")(a) + 2 * nn.Dense(3, name="b")(b)


A, B = X, RNG.normal(size=(12, 2)).astype(np.float32)


def outputs_of_two_inputs(params, a, b):
    return a @ params["a"]["kernel"] + params["a"]["bias"] + 2 * (b @ params["b"]["kernel"] + params["b"]["bias"])


@pytest.mark.parametrize(
    ("inputs", "data"),
    [
        (None, ((A, B), Y)),
        (("image", "extra"), {"image": A, "extra": B, "label": Y, "other": Y}),
        ({"b": "extra", "a": "image"}, {"image": A, "extra": B, "label": Y}),
    ],
    ids=["tuple", "keys", "keywords"],
)
@pytest.mark.slow
def test_several_inputs_reach_the_arguments_that_they_are_meant_for(inputs, data):
    trainer = make(TwoInputs(), inputs=inputs, targets=None if inputs is None else "label")
    trainer.build(data)
    expected = outputs_of_two_inputs(trainer.state.params, A, B)
    inputs_alone = data[0] if inputs is None else data
    np.testing.assert_allclose(trainer.predict(inputs_alone, batch_size=5), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.evaluate(data, batch_size=5, verbose=0)["loss"], np.mean((expected - Y) ** 2), rtol=1e-5)
    np.testing.assert_allclose(trainer.predict_on_batch(inputs_alone), expected, rtol=1e-4, atol=1e-5)
    one, many = trainer.train_on_batch(data)["loss"], trainer.evaluate(lambda: iter([data]), verbose=0)["loss"]
    assert many < one


def test_one_key_is_one_positional_argument():
    trainer = make(inputs="image", targets="label")
    history = trainer.fit({"image": X, "label": Y}, verbose=0)
    plain = make()
    assert plain.fit(X, Y, verbose=0).history == history.history


def test_inputs_without_targets_pass_only_outputs_to_the_loss():
    trainer = make(inputs="image", loss=lambda outputs: jnp.mean(outputs**2, axis=-1))
    trainer.build({"image": X, "label": Y})
    expected = np.mean(trainer.predict({"image": X}) ** 2)
    np.testing.assert_allclose(trainer.evaluate({"image": X, "label": Y}, verbose=0)["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("targets", [("one", "two"), {"first": "one", "second": "two"}], ids=["tuple", "dict"])
def test_several_targets_have_the_structure_of_their_keys(targets):
    def loss(outputs, given):
        one, two = (given["first"], given["second"]) if isinstance(targets, dict) else given
        return jnp.mean((outputs - one - 2 * two) ** 2, axis=-1)

    trainer = make(loss=loss, inputs="x", targets=targets)
    data = {"x": X, "one": Y, "two": 2 * Y}
    trainer.build(data)
    np.testing.assert_allclose(trainer.evaluate(data, verbose=0)["loss"], np.mean((trainer.predict(data) - 5 * Y) ** 2), rtol=1e-5)


def test_a_dict_of_inputs_without_keys_is_one_argument():
    class OfDict(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x["a"] + x["b"])

    trainer = make(OfDict())
    x = {"a": X, "b": 2 * X}
    trainer.fit(x, Y, batch_size=5, verbose=0)
    assert trainer.predict(x).shape == (12, 3)
    assert trainer.train_on_batch((x, Y)).keys() == {"loss"}


def test_inputs_may_be_a_pandas_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    by_frame, by_array = make(), make()
    assert by_frame.fit(frame, Y, verbose=0).history == by_array.fit(X, Y, verbose=0).history


# --- Collections ---


def counting(step_of):
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            count = self.variable("counts", "count", lambda: jnp.int32(0))
            flag = self.variable("counts", "flag", lambda: jnp.bool_(False))
            key = self.variable("keys", "key", lambda: jax.random.key(7))
            if train and not self.is_initializing():
                count.value += 1
                flag.value = ~flag.value
                key.value = step_of(key.value)
            return nn.Dense(3)(x)

    return Counting()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.mostly_slow
def test_integers_booleans_and_keys_keep_their_dtype(devices):
    def step_of(key):
        return jax.random.split(key)[0]

    trainer = make(counting(step_of), devices=devices)
    trainer.fit(X, Y, batch_size=4, steps=3, validation_data=(X, Y), verbose=0)
    counts, key = trainer.state.model_state["counts"], trainer.state.model_state["keys"]["key"]
    assert (counts["count"].dtype, counts["flag"].dtype) == (jnp.int32, jnp.bool_)
    assert (int(counts["count"]), bool(counts["flag"])) == (3, True)
    expected = jax.random.key(7)
    for _ in range(3):
        expected = step_of(expected)
    assert key.dtype == expected.dtype and jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.relu(x))


@pytest.mark.slow
def test_batch_statistics_equal_those_of_a_hand_written_loop():
    optimizer = optax.adam(0.01)
    trainer = make(Normalized(), optimizer)
    trainer.build((X, Y))
    params, stats = jax.tree.map(np.array, (trainer.state.params, trainer.state.model_state["batch_stats"]))
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, stats, opt_state, x, y):
        def loss(params):
            outputs, changed = Normalized().apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
            return jnp.mean((outputs - y) ** 2), changed["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, value

    losses = []
    for _ in range(3):
        for begin in (0, 4, 8):
            params, stats, opt_state, loss = step(params, stats, opt_state, X[begin : begin + 4], Y[begin : begin + 4])
            losses.append(float(loss))
    history = trainer.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], np.mean(np.reshape(losses, (3, 3)), axis=1), rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), trainer.state.params, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), trainer.state.model_state["batch_stats"], stats)


@pytest.mark.slow
def test_evaluation_uses_batch_statistics_and_does_not_change_them():
    trainer = make(Normalized())
    trainer.fit(X, Y, verbose=0)
    before = trainer.state
    outputs = Normalized().apply({"params": before.params, **before.model_state}, X, train=False)
    np.testing.assert_allclose(trainer.evaluate(X, Y, batch_size=5, verbose=0)["loss"], np.mean((outputs - Y) ** 2), rtol=1e-5)
    assert_same(before, trainer.state)


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        self.sow("losses", "one", jnp.float32(0.5))
        self.sow("summaries", "mean", jnp.mean(x))
        x = nn.Dense(3)(x)
        self.sow("losses", "two", 2 * jnp.mean(x**2))
        return x


def test_sown_losses_are_added_to_the_loss_in_training_and_evaluation():
    trainer = make(Sowing(), optax.sgd(0.0))
    history = trainer.fit(X, Y, verbose=0).history
    outputs = trainer.predict(X)
    expected = 0.5 + 2 * np.mean(outputs**2) + np.mean((outputs - Y) ** 2)
    np.testing.assert_allclose([history["loss"][0], trainer.evaluate(X, Y, batch_size=12, verbose=0)["loss"]], expected, rtol=1e-5)


def test_sown_losses_alone_are_enough_to_train_on():
    trainer = make(Sowing(), loss=None)
    trainer.build(X)
    outputs = trainer.predict(X)
    before = trainer.state.params
    np.testing.assert_allclose(trainer.train_on_batch(X)["loss"], 0.5 + 2 * np.mean(outputs**2), rtol=1e-5)
    gradient = jax.grad(lambda params: 2 * jnp.mean(nn.Dense(3).apply({"params": params}, X) ** 2))(before["Dense_0"])
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, before["Dense_0"], gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), trainer.state.params["Dense_0"], expected)


def test_sown_values_are_never_in_the_state_and_do_not_pile_up(compilations):
    trainer = make(Sowing(), optax.sgd(0.0))
    trainer.build((X, Y))
    structure = jax.tree.structure(trainer.state)
    assert trainer.state.model_state == {}
    first = trainer.fit(X, Y, verbose=0).history["loss"]
    with compilations.counted() as later:
        losses = trainer.fit(X, Y, epochs=4, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, first * 4, rtol=1e-6)
    assert later.names == [] and jax.tree.structure(trainer.state) == structure


def test_other_collections_can_be_transient():
    class Remembering(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("scratch", "last", lambda: jnp.zeros(())).value = jnp.mean(x)
            self.variable("kept", "last", lambda: jnp.zeros(())).value = jnp.mean(x)
            return nn.Dense(3)(x)

    trainer = make(Remembering(), transient=("scratch",))
    trainer.fit(X, Y, verbose=0)
    assert list(trainer.state.model_state) == ["kept"]
    np.testing.assert_allclose(trainer.state.model_state["kept"]["last"], X.mean(), rtol=1e-5)


def test_a_collection_that_is_not_mutable_keeps_its_value():
    class Reading(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            scale = self.variable("constants", "scale", lambda: jnp.float32(2.0))
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x)) * scale.value

    trainer = make(Reading(), mutable=["batch_stats"])
    trainer.fit(X, Y, verbose=0)
    assert float(trainer.state.model_state["constants"]["scale"]) == 2.0


# --- Randomness ---


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x)))


@pytest.mark.slow
def test_dropout_depends_only_on_the_seed():
    states = []
    for seed in (0, 0, 1):
        trainer = make(Dropping(), seed=seed)
        trainer.fit(X, Y, shuffle=False, epochs=2, verbose=0)
        states.append(trainer.state)
    assert_same(states[0], states[1])
    assert differ(states[0].params, states[2].params)


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation():
    trainer = make(Dropping(), optax.sgd(0.0))
    losses = trainer.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert len(set(losses)) == 3
    assert trainer.evaluate(X, Y, verbose=0) == trainer.evaluate(X, Y, verbose=0)


class Noisy(nn.Module):
    """Outputs noise from a custom random stream, in evaluation too."""

    @nn.compact
    def __call__(self, x):
        return jax.random.normal(self.make_rng("noise"), (x.shape[0], 1)) + 0 * nn.Dense(1)(x)


def noisy(seed=0):
    return make(Noisy(), optax.adam(0.1), seed=seed, rngs={"init": ["noise"], "train": ["noise"], "eval": ["noise"]})


@pytest.mark.slow
def test_noise_in_evaluation_depends_only_on_the_seed_and_the_batch():
    trainer = noisy()
    trainer.build((X, Y[:, :1]))
    first = trainer.predict(X, batch_size=4)
    assert len(np.unique(first)) == 12
    trainer.fit(X, Y[:, :1], epochs=2, verbose=0)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=4), first)
    np.testing.assert_allclose(trainer.evaluate(X, Y[:, :1], batch_size=4, verbose=0)["loss"], np.mean((first - Y[:, :1]) ** 2), rtol=1e-5)
    other = noisy(seed=1)
    other.build((X, Y[:, :1]))
    assert not np.array_equal(other.predict(X, batch_size=4), first)


def test_a_random_stream_that_is_not_named_is_an_error_that_mentions_rngs():
    with pytest.raises(ModelError, match=r"Name every random stream that the module uses: Trainer\(rngs="):
        make(Noisy()).fit(X, Y[:, :1], verbose=0)


# --- Optimizers and learning rates ---


@pytest.mark.slow
def test_an_optimizer_that_needs_params_gets_them():
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    trainer = make(optimizer=optimizer)
    trainer.build((X, Y))
    params = jax.tree.map(np.array, trainer.state.params)
    grads = jax.grad(lambda p: jnp.mean((X @ p["kernel"] + p["bias"] - Y) ** 2))(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    trainer.fit(X, Y, batch_size=12, verbose=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), trainer.state.params, optax.apply_updates(params, updates))


@pytest.mark.parametrize(("name", "default"), [("sgd", 0.01), ("adam", 0.001), ("adamw", 0.001)])
@pytest.mark.mostly_slow
def test_an_optimizer_by_name_is_the_one_in_optax_with_the_learning_rate_of_keras(name, default):
    by_name, explicit = make(optimizer=name), make(optimizer=getattr(optax, name)(default))
    for trainer in (by_name, explicit):
        trainer.fit(X, Y, epochs=2, verbose=0)
    assert by_name.learning_rate == np.float32(default)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), by_name.state.params, explicit.state.params)


def test_the_learning_rate_can_be_set_and_takes_effect_without_compiling(compilations):
    trainer = make(optimizer="sgd", compile_kwargs={"learning_rate": 0.5})
    trainer.build((X, Y))
    assert trainer.learning_rate == trainer.learning_rate == 0.5
    params = jax.tree.map(np.array, trainer.state.params)  # A state that was read is copied before the next step. This compiles the copy.
    trainer.fit(X, Y, batch_size=12, verbose=0)
    params = jax.tree.map(np.array, trainer.state.params)
    with compilations.counted() as setting:
        trainer.learning_rate = 0.25
        trainer.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    assert setting.names == [] and trainer.learning_rate == 0.25
    grads = jax.grad(lambda p: jnp.mean((X @ p["kernel"] + p["bias"] - Y) ** 2))(params)
    expected = jax.tree.map(lambda p, g: p - 0.25 * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), trainer.state.params, expected)


def test_the_learning_rate_of_injected_hyperparameters_can_be_read_and_set():
    trainer = make(optimizer=optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.5)))
    trainer.build((X, Y))
    trainer.learning_rate = 0.125
    assert trainer.learning_rate == 0.125
    trainer.learning_rate /= 2
    assert trainer.learning_rate == 0.0625


def test_a_callback_can_set_the_learning_rate_during_a_run():
    trainer = make(optimizer="sgd", compile_kwargs={"learning_rate": 0.0})
    trainer.build((X, Y))
    before = trainer.state.params

    def set_rate(epoch, logs):
        trainer.learning_rate = 0.5 if epoch == 1 else 0.0

    states = []
    callback = LambdaCallback(on_epoch_begin=set_rate, on_epoch_end=lambda epoch, logs: states.append(trainer.state.params))
    trainer.fit(X, Y, batch_size=12, epochs=3, callbacks=[callback], verbose=0)
    assert_same(before, states[0])
    assert differ(before, states[1])
    assert_same(states[1], states[2])


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [(optax.adam(0.1), {}), ("adam", {"learning_rate": optax.linear_schedule(0.1, 0.0, 10)})],
    ids=["plain", "schedule"],
)
def test_a_learning_rate_that_cannot_be_set_is_an_error_that_names_inject_hyperparams(optimizer, kwargs):
    trainer = make(optimizer=optimizer, compile_kwargs=kwargs)
    trainer.build((X, Y))
    with pytest.raises(OptimizerError, match=r"optax\.inject_hyperparams"):
        trainer.learning_rate = 0.5
    if not kwargs:
        with pytest.raises(OptimizerError, match=r"optax\.inject_hyperparams"):
            _ = trainer.learning_rate


def test_the_learning_rate_of_a_schedule_is_the_rate_of_the_last_update():
    trainer = make(optimizer="sgd", compile_kwargs={"learning_rate": optax.linear_schedule(1.0, 0.0, 10)})
    trainer.fit(X, Y, batch_size=12, epochs=3, verbose=0)
    np.testing.assert_allclose(trainer.learning_rate, 0.8, rtol=1e-6)


def moments(trainer):
    return trainer.state.opt_state[0].mu


def test_compiling_with_the_same_optimizer_keeps_its_state_and_another_one_resets_it():
    optimizer = optax.adam(0.1)
    trainer = make(optimizer=optimizer)
    trainer.fit(X, Y, epochs=3, verbose=0)
    before = trainer.state
    assert differ(moments(trainer), jax.tree.map(jnp.zeros_like, moments(trainer)))
    trainer.compile(optimizer, loss="mae")
    assert_same(before, trainer.state)
    trainer.compile(optax.adam(0.1), loss="mae")
    assert_same(before.params, trainer.state.params)
    assert_same(moments(trainer), jax.tree.map(jnp.zeros_like, moments(trainer)))
    assert int(trainer.state.opt_state[0].count) == 0 and trainer.step == 3
    trainer.fit(X, Y, verbose=0)
    assert trainer.step == 4


def test_compiling_again_keeps_collections():
    trainer = make(Normalized())
    trainer.fit(X, Y, verbose=0)
    before = trainer.state
    trainer.compile("adam", loss="mse")
    assert_same((before.params, before.model_state), (trainer.state.params, trainer.state.model_state))


def test_compiling_again_before_there_is_a_state_only_replaces_the_arguments():
    trainer = make()
    trainer.compile(optax.sgd(0.1), loss="mae")
    trainer.build((X, Y))
    np.testing.assert_allclose(trainer.evaluate(X, Y, verbose=0)["loss"], np.mean(np.abs(trainer.predict(X) - Y)), rtol=1e-5)


# --- Single batches ---


def test_values_on_a_batch_are_those_of_that_batch_before_the_update():
    trainer = make(metrics=["mae"])
    trainer.build((X, Y))
    for begin in (0, 6):
        x, y = X[begin : begin + 6], Y[begin : begin + 6]
        outputs = trainer.predict_on_batch(x)
        expected = {"loss": np.mean((outputs - y) ** 2), "mae": np.mean(np.abs(outputs - y))}
        assert trainer.test_on_batch((x, y)) == pytest.approx(expected, rel=1e-5)
        assert trainer.train_on_batch((x, y)) == pytest.approx(expected, rel=1e-5)
    assert trainer.step == 2


@pytest.mark.slow
def test_training_on_single_batches_is_bit_for_bit_identical_to_fit():
    by_batch, by_fit = make(Normalized(), optax.adam(0.1)), make(Normalized(), optax.adam(0.1))
    for begin in (0, 4, 8):
        by_batch.train_on_batch((X[begin : begin + 4], Y[begin : begin + 4]))
    by_fit.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert_same(by_batch.state, by_fit.state)


def test_a_smaller_batch_is_padded_instead_of_compiled_again(compilations):
    trainer = make()
    trainer.train_on_batch((X, Y))
    trainer.test_on_batch((X, Y))
    trainer.predict_on_batch(X)
    with compilations.counted() as smaller:
        expected = np.mean((trainer.predict_on_batch(X[:5]) - Y[:5]) ** 2)
        assert trainer.predict_on_batch(X[:5]).shape == (5, 3)
        assert trainer.test_on_batch((X[:5], Y[:5]))["loss"] == pytest.approx(expected, rel=1e-5)
        assert trainer.train_on_batch((X[:5], Y[:5]))["loss"] == pytest.approx(expected, rel=1e-5)
    assert smaller.names == []


def test_values_on_a_batch_are_python_floats():
    trainer = make()
    assert {type(value) for value in trainer.train_on_batch((X, Y)).values()} == {float}


# --- Order of calls ---


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.fit(X, Y),
        lambda t: t.evaluate(X, Y),
        lambda t: t.build((X, Y)),
        lambda t: t.train_on_batch((X, Y)),
        lambda t: t.test_on_batch((X, Y)),
        lambda t: t.train_loop((X, Y), steps=1),
        lambda t: t.eval_loop((X, Y)),
    ],
    ids=["fit", "evaluate", "build", "train_on_batch", "test_on_batch", "train_loop", "eval_loop"],
)
def test_using_a_trainer_before_compile_is_an_error_that_says_so(use):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    with pytest.raises(NotReadyError, match=r"Call compile\(optimizer, loss, metrics\) first"):
        use(trainer)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.evaluate(X, Y),
        lambda t: t.predict(X),
        lambda t: t.test_on_batch((X, Y)),
        lambda t: t.predict_on_batch(X),
        lambda t: t.state,
        lambda t: t.learning_rate,
        lambda t: setattr(t, "learning_rate", 0.1),
        lambda t: t.replace_state(None),
        lambda t: t.save("nowhere"),
    ],
    ids=["evaluate", "predict", "test_on_batch", "predict_on_batch", "state", "get rate", "set rate", "replace_state", "save"],
)
def test_using_a_trainer_before_there_is_a_state_is_an_error_that_says_so(use):
    with pytest.raises(NotReadyError, match=r"there is no state yet. Call build\(batch\), fit\(...\) or restore\(path\) first"):
        use(make())


def test_the_step_before_there_is_a_state_is_0():
    assert fitflax.Trainer(nn.Dense(1)).step == 0


def test_a_compile_that_fails_changes_nothing(monkeypatch):
    class Own(fitflax.Trainer):
        pass

    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    trainer, other, adam = Own(nn.Dense(1)), fitflax.Trainer(nn.Dense(1)), optax.adam(0.1)
    for each in (trainer, other):
        each.compile(optax.sgd(0.1, momentum=0.9), "mse")
        each.train_on_batch((x, y))
    with monkeypatch.context() as patch:
        patch.setattr(Own, "compute_loss", lambda self: 0.0)
        with pytest.raises(ConfigError, match="compute_loss"):
            trainer.compile(adam, "mae")
    assert trainer.train_on_batch((x, y)) == other.train_on_batch((x, y))
    for each in (trainer, other):
        each.compile(adam, "mae")  # The state of the optimizer is new, although this is the second time that the trainer receives the optimizer.
    assert trainer.train_on_batch((x, y)) == other.train_on_batch((x, y))


def test_predict_needs_no_compile_after_a_restore(tmp_path):
    trained = make()
    trained.fit(X, Y, verbose=0)
    trained.save(tmp_path / "saved")
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.restore(tmp_path / "saved")
    np.testing.assert_array_equal(trainer.predict(X), trained.predict(X))


# --- build ---


def test_building_from_shapes_equals_building_from_a_batch():
    one, two, three = make(Normalized()), make(Normalized()), make(Normalized())
    one.build((X, Y))
    two.build((jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(Y.shape, Y.dtype)))
    three.build((7 * X[:4], Y[:4]))
    assert_same(one.state, two.state)
    assert_same(one.state, three.state)
    one.fit(X, Y, verbose=0)
    fresh = make(Normalized())
    fresh.fit(X, Y, verbose=0)
    assert_same(one.state, fresh.state)


def test_building_needs_no_targets():
    trainer = make()
    trainer.build(X)
    assert trainer.state.params["kernel"].shape == (4, 3)


def test_the_state_is_a_pytree_of_arrays_with_an_int32_step_and_a_typed_key():
    trainer = make(Normalized(), seed=3)
    trainer.build((X, Y))
    state = trainer.state
    assert isinstance(state, fitflax.TrainState)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert (state.step.dtype, state.step.shape, state.ema_params) == (jnp.int32, (), None)
    assert state.key == jax.random.key(3)
    assert list(state.model_state) == ["batch_stats"]


# --- Stopping ---


@pytest.mark.parametrize("ask", [lambda t: t.stop("because"), lambda t: setattr(t, "stop_training", True)], ids=["stop", "stop_training"])
def test_a_run_stops_after_the_step_in_which_it_was_asked_to(ask):
    trainer = make()
    steps = []

    def on_train_batch_end(batch, logs):
        steps.append(trainer.step)
        if batch == 1:
            ask(trainer)
            assert trainer.stop_training
            trainer.stop("too late")

    trainer.fit(X, Y, batch_size=2, epochs=5, callbacks=[LambdaCallback(on_train_batch_end=on_train_batch_end)], verbose=0)
    assert steps == [1, 2] and trainer.step == 2
    assert trainer.stop_reason in ("because", "stop_training was set")


def test_stop_training_can_be_reset():
    trainer = make()

    def on_train_batch_end(batch, logs):
        trainer.stop_training = True
        trainer.stop_training = False

    trainer.fit(X, Y, batch_size=4, callbacks=[LambdaCallback(on_train_batch_end=on_train_batch_end)], verbose=0)
    assert (trainer.step, trainer.stop_reason) == (3, None)


# --- The state ---


@pytest.mark.slow
def test_a_state_that_was_read_does_not_change():
    trainer = make(Normalized(), optax.adam(0.1))
    trainer.build((X, Y))
    held, copied = trainer.state, jax.tree.map(device_copy, trainer.state)
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    trainer.train_on_batch((X, Y))
    jax.tree.map(lambda leaf, copy: np.testing.assert_array_equal(as_data(leaf), copy), held, copied)


def test_a_state_that_was_read_during_a_run_does_not_change():
    trainer, held = make(optimizer=optax.adam(0.1)), []

    def take(batch, logs):
        held.append((trainer.state, jax.tree.map(device_copy, trainer.state)))

    trainer.fit(X, Y, batch_size=4, epochs=2, callbacks=[LambdaCallback(on_train_batch_end=take)], verbose=0)
    assert [int(state.step) for state, _ in held] == [1, 2, 3, 4, 5, 6]
    for state, copied in held:
        jax.tree.map(lambda leaf, copy: np.testing.assert_array_equal(as_data(leaf), copy), state, copied)


def test_the_step_is_a_python_int_and_1_after_the_first_batch():
    trainer, steps = make(), []
    trainer.fit(X, Y, batch_size=6, callbacks=[LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(trainer.step))], verbose=0)
    assert steps == [1, 2] and type(steps[0]) is int and type(trainer.step) is int


def test_the_state_can_be_replaced_by_an_earlier_one():
    trainer = make(optimizer=optax.adam(0.1))
    trainer.fit(X, Y, verbose=0)
    held = trainer.state
    trainer.fit(X, Y, epochs=2, verbose=0)
    trainer.replace_state(held)
    assert trainer.step == 1
    assert_same(trainer.state, held)
    trainer.fit(X, Y, verbose=0)
    # The given state is copied: its buffers are not donated.
    assert int(held.step) == 1


def test_the_state_can_be_replaced_by_one_of_numpy_arrays():
    trainer = make()
    trainer.build((X, Y))
    params = {"kernel": np.ones((4, 3), np.float32), "bias": np.zeros(3, np.float32)}
    trainer.replace_state(dataclasses.replace(trainer.state, params=params))
    np.testing.assert_allclose(trainer.predict(X), np.repeat(X.sum(1, keepdims=True), 3, 1), rtol=1e-5, atol=1e-6)


def test_the_next_step_uses_a_state_that_was_replaced_in_a_hook():
    trainer = make(optimizer=optax.sgd(0.0))
    trainer.build((X, Y))
    zeros = jax.tree.map(jnp.zeros_like, trainer.state.params)

    def put(batch, logs):
        if batch == 0:
            trainer.replace_state(dataclasses.replace(trainer.state, params=zeros))

    trainer.fit(X, Y, batch_size=6, callbacks=[LambdaCallback(on_train_batch_end=put)], verbose=0)
    assert_same(trainer.state.params, zeros)
    assert trainer.step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: dataclasses.replace(s, params={"kernel": s.params["kernel"]}), r"params\['bias'\] is missing"),
        (lambda s: dataclasses.replace(s, params={**s.params, "bias": jnp.zeros(5)}), r"params\['bias'\] is float32\[5\] instead of float32\[3\]"),
        (lambda s: dataclasses.replace(s, params={**s.params, "bias": jnp.zeros(3, jnp.int32)}), r"params\['bias'\] is int32\[3\] instead of float32\[3\]"),
        (lambda s: s.replace(step=0), r"\.step is int instead of int32\[\]\. Change the step with state\.replace_step\(step\)\."),
    ],
)
def test_a_state_that_does_not_fit_is_rejected(change, message):
    trainer = make()
    trainer.build((X, Y))
    with pytest.raises(RestoreError, match=message):
        trainer.replace_state(change(trainer.state))


# --- Replacing the parameters ---


def new_params():
    rng = np.random.default_rng(7)
    return {"bias": rng.normal(size=3).astype(np.float32), "kernel": rng.normal(size=(4, 3)).astype(np.float32)}


def make_nnx():
    return nnx.Linear(4, 3, rngs=nnx.Rngs(0))


PARAMS_PLACES = {
    "linen": dict,
    "nnx": lambda: {"model": make_nnx()},
    "split": lambda: {"parallel": Sharded(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), fsdp=True)},
    "float16": lambda: {"precision": "float16"},
}


@pytest.mark.parametrize("place", PARAMS_PLACES)
@pytest.mark.mostly_slow
def test_after_replace_params_training_equals_a_hand_written_loop_from_these_parameters(place):
    options = PARAMS_PLACES[place]()
    model, precision = options.pop("model", None) or nn.Dense(3), options.pop("precision", "float32")
    trainer = fitflax.Trainer(model, **({"parallel": DataParallel(jax.devices()[:1])} | options))
    trainer.compile("adam", "mse", learning_rate=0.1, ema_decay=0.5, precision=precision)
    trainer.fit(X, Y, epochs=3, verbose=0)
    trainer.learning_rate = 0.05
    trainer.replace_params(new_params())
    assert trainer.step == 3 and trainer.learning_rate == np.float32(0.05)
    assert_same(jax.tree.map(np.asarray, trainer.state.params), new_params())
    assert_same(jax.tree.map(np.asarray, trainer.state.ema_params), new_params())
    trainer.fit(X, Y, epochs=2, verbose=0, shuffle=False)

    def loss(params):
        return jnp.mean((X @ params["kernel"] + params["bias"] - Y) ** 2)

    tx, params = optax.adam(0.05), jax.tree.map(jnp.asarray, new_params())
    opt_state, averages = tx.init(params), params
    for _ in range(2):
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
        averages = jax.tree.map(lambda one, other: 0.5 * one + 0.5 * other, averages, params)
    tolerance = 1e-5 if precision == "float32" else 1e-2
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=tolerance), trainer.state.params, params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=tolerance), trainer.state.ema_params, averages)


def test_replace_params_keeps_the_step_the_key_and_the_collections():
    trainer = make(Normalized(), optimizer=optax.contrib.schedule_free_sgd(0.1))
    trainer.fit(X, Y, verbose=0)
    before, params = trainer.state, jax.tree.map(lambda leaf: leaf + 1, trainer.state.params)
    trainer.replace_params(params)
    assert_same((trainer.state.step, trainer.state.key, trainer.state.model_state), (before.step, before.key, before.model_state))
    assert_same(trainer.state.opt_state.z, params)


def test_replace_params_takes_a_frozen_dict_and_rejects_other_structures_shapes_and_dtypes():
    trainer = make(optimizer=optax.adam(0.1))
    trainer.fit(X, Y, verbose=0)
    before = trainer.state
    for params, message in [
        ({"kernel": np.ones((4, 3), np.float32)}, "replace_params: the structure must not change"),
        (new_params() | {"bias": np.ones(5, np.float32)}, r"\['bias'\] must be float32\[3\]. Received: float32\[5\]"),
        (new_params() | {"bias": np.ones(3)}, r"\['bias'\] must be float32\[3\]. Received: float64\[3\]"),
    ]:
        with pytest.raises(ConfigError, match=message):
            trainer.replace_params(params)
        assert_same(trainer.state, before)
    trainer.replace_params(flax.core.freeze(new_params()))
    assert type(trainer.state.params) is dict
    trainer.fit(X, Y, verbose=0)
    with pytest.raises(NotReadyError, match="replace_params: there is no state yet"):
        make().replace_params(new_params())


@pytest.mark.slow
def test_replace_params_of_an_ensemble_and_of_a_trainer_without_optimizer():
    ensemble = make(ensemble=2, optimizer="adam", compile_kwargs={"learning_rate": 0.1})
    ensemble.fit(X, Y, verbose=0)
    params = jax.tree.map(np.zeros_like, ensemble.state.params)
    ensemble.replace_params(params)
    assert ensemble.state.opt_state.count.shape == (2,) and not np.any(ensemble.predict(X))
    ensemble.fit(X, Y, verbose=0)
    server = make()
    server.build((X, Y))
    server.replace_state(server.inference_state())
    server.replace_params(new_params())
    np.testing.assert_allclose(server.predict(X), X @ new_params()["kernel"] + new_params()["bias"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_variables_of_an_nnx_module_that_the_user_changes_restart_their_averages():
    model = make_nnx()
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", learning_rate=0.1, ema_decay=0.5)
    trainer.fit(X, Y, epochs=2, verbose=0)
    before = trainer.state.ema_params
    model.bias[...] = jnp.ones(3)
    np.testing.assert_array_equal(trainer.state.ema_params["bias"], np.ones(3))
    np.testing.assert_array_equal(trainer.state.ema_params["kernel"], before["kernel"])


def test_a_new_optimizer_of_an_ensemble_gets_a_state_for_each_member(tmp_path):
    ensemble = make(ensemble=2, optimizer="adam", compile_kwargs={"learning_rate": 0.1})
    ensemble.build((X, Y))
    ensemble.compile("adam", "mse", learning_rate=0.2)
    assert ensemble.learning_rates == {"member 0": np.float32(0.2), "member 1": np.float32(0.2)}
    ensemble.fit(X, Y, verbose=0)
    other = make(ensemble=2, optimizer="adam", compile_kwargs={"learning_rate": 0.2})
    other.restore(ensemble.save(tmp_path / "saved"))
    assert_same(other.state.opt_state, ensemble.state.opt_state)


# --- Custom losses and steps ---


class WithPenalty(fitflax.Trainer):
    def compute_loss(self, params, model_state, batch, *, rngs, train):
        values, new_state, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
        size = jnp.sum(params["kernel"] ** 2)
        return {"loss": values, "penalty": jnp.broadcast_to(0.1 * size, batch.mask.shape)}, new_state, {**aux, "size": size, "row": batch.x[:, 0]}


@pytest.mark.slow
def test_aux_of_a_custom_loss_reaches_the_logs_as_means_over_real_examples():
    trainer = make(optimizer=optax.sgd(0.0), metrics=["mae"], trainer=WithPenalty)
    logs = {key: values[0] for key, values in trainer.fit(X, Y, batch_size=5, verbose=0).history.items()}
    outputs, size = trainer.predict(X), np.sum(np.square(trainer.state.params["kernel"]))
    expected = {"loss": np.mean((outputs - Y) ** 2) + 0.1 * size, "size": size, "row": X[:, 0].mean(), "mae": np.mean(np.abs(outputs - Y))}
    assert logs == pytest.approx(expected, rel=1e-4)
    assert trainer.evaluate(X, Y, verbose=0) == pytest.approx(expected, rel=1e-4)


def test_the_gradient_is_computed_from_the_custom_loss():
    trainer = make(trainer=WithPenalty)
    trainer.build((X, Y))
    params = jax.tree.map(np.array, trainer.state.params)
    trainer.fit(X, Y, batch_size=12, verbose=0)
    grads = jax.grad(lambda p: jnp.mean((X @ p["kernel"] + p["bias"] - Y) ** 2) + 0.1 * jnp.sum(p["kernel"] ** 2))(params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), trainer.state.params, expected)


def test_a_custom_loss_written_from_scratch_needs_no_compiled_loss():
    class Custom(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            outputs = self.model.apply({"params": params, **model_state}, batch.x)
            return jnp.mean((outputs - batch.y) ** 2, axis=-1), {}, {}

    custom, plain = make(trainer=Custom, loss=None), make()
    assert custom.fit(X, Y, verbose=0).history["loss"] == pytest.approx(plain.fit(X, Y, verbose=0).history["loss"])
    assert_same(custom.state.params, plain.state.params)


def test_compiled_metrics_with_a_custom_loss_that_returns_no_outputs_are_an_error():
    class Custom(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            return jnp.mean(batch.x @ params["kernel"], axis=-1), {}, {}

    with pytest.raises(ValueError, match=r"compute_loss must return aux\['outputs'\]"):
        make(trainer=Custom, metrics=["mae"]).fit(X, Y, verbose=0)


def test_a_custom_loss_with_an_invalid_return_value_is_an_error():
    class Custom(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            return jnp.mean(batch.x @ params["kernel"], axis=-1)

    with pytest.raises(LossError, match=r"compute_loss must return \(values, new_model_state, aux\)"):
        make(trainer=Custom).fit(X, Y, verbose=0)


def test_a_custom_step_replaces_the_update_and_its_logs():
    class Shrinking(fitflax.Trainer):
        def train_step(self, state, batch):
            params = jax.tree.map(lambda leaf: leaf / 2, state.params)
            weight = jnp.sum(batch.mask)
            return dataclasses.replace(state, params=params), {"first": (jnp.sum(batch.x[:, 0] * batch.mask), weight), "rows": (weight * weight, weight)}

    trainer = make(trainer=Shrinking)
    trainer.build((X, Y))
    before = jax.tree.map(np.array, trainer.state.params)
    history = trainer.fit(X, Y, batch_size=8, shuffle=False, validation_data=(X, Y), verbose=0).history
    assert list(history) == ["first", "rows", "val_loss"]
    np.testing.assert_allclose(history["first"], [X[:, 0].mean()], rtol=1e-5)
    np.testing.assert_allclose(history["rows"], [(8 * 8 + 4 * 4) / 12], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b / 4), trainer.state.params, before)
    assert (trainer.step, int(trainer.state.step)) == (2, 2)


def test_a_custom_step_may_call_the_default_one():
    class Counting(fitflax.Trainer):
        def train_step(self, state, batch):
            state, logs = super().train_step(state, batch)
            return state, {**logs, "two": (jnp.float32(2), jnp.float32(1))}

    one, other = make(trainer=Counting, optimizer=optax.adam(0.1)), make(optimizer=optax.adam(0.1))
    history = one.fit(X, Y, batch_size=4, verbose=0).history
    other.fit(X, Y, batch_size=4, verbose=0)
    assert_same(one.state, other.state)
    assert list(history) == ["loss", "two"] and history["two"] == [2.0]


def test_a_custom_step_that_calls_the_default_one_logs_the_loss_over_real_examples():
    class Same(fitflax.Trainer):
        def train_step(self, state, batch):
            return super().train_step(state, batch)

    data = (X[:9], Y[:9])
    one = make(trainer=Same, optimizer=optax.sgd(0.0)).fit(*data, batch_size=8, verbose=0).history
    other = make(optimizer=optax.sgd(0.0)).fit(*data, batch_size=8, verbose=0).history
    assert one["loss"] == pytest.approx(other["loss"])


# --- Loops that yield checkpoints ---


def loop_of(trainer=None, rows=12, batch_size=4, **kwargs):
    return (trainer or make()).train_loop((X[:rows], Y[:rows]), batch_size=batch_size, **kwargs)


def test_case_30_a_loop_yields_at_its_trigger_and_after_its_last_step():
    loop = loop_of(steps=8, every=fitflax.every(steps=3, offset=1))
    assert [(c.step, c.n_completed_steps) for c in loop] == [(1, 1), (4, 3), (7, 3), (8, 1)]


# flax_extra: 7 steps and 10 steps, and a run that continues from step 1.
@pytest.mark.parametrize(("steps", "n", "expected"), [(7, 3, [1, 4, 7]), (10, 5, [1, 6, 10])])
def test_a_loop_that_ends_where_its_trigger_fires_yields_that_step_once(steps, n, expected):
    every = fitflax.first(1) | fitflax.every(steps=n, offset=1)
    assert [c.step for c in loop_of(steps=steps, every=every)] == expected


def test_a_loop_continues_from_the_current_step():
    trainer = make()
    assert [c.step for c in loop_of(trainer, steps=1)] == [1]
    every = fitflax.first(1) | fitflax.every(steps=3, offset=1)
    assert [(c.step, c.n_completed_steps) for c in loop_of(trainer, steps=4, every=every)] == [(4, 3), (5, 1)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (fitflax.every(steps=2), [2, 4, 6, 8, 10]),
        (fitflax.every(steps=4), [4, 8, 10]),
        (fitflax.every(steps=5), [5, 10]),
        (fitflax.every(epochs=1), [3, 6, 9, 10]),
        (fitflax.every(epochs=2), [6, 10]),
    ],
    ids=str,
)
def test_triggers_that_do_not_coincide_with_epochs_yield_the_right_steps(every, steps):
    """An epoch has three steps. If the trigger fires at the step after the end of an epoch, that step is a separate checkpoint."""
    seen = [(c.step, c.epoch, c.step_in_epoch, int(c.state.step)) for c in loop_of(steps=10, every=every)]
    assert seen == [(step, (step - 1) // 3, (step - 1) % 3 + 1, step) for step in steps]


def test_next_step_next_checkpoint_and_run_do_not_change_the_total():
    loop = loop_of(steps=8, every=fitflax.every(steps=3))
    assert loop.next_step().step == 1
    assert loop.next_checkpoint().step == 3
    assert loop.run(2).step == 5
    assert loop.next_step().step == 6
    assert (loop.next_checkpoint().step, loop.step, loop.steps) == (8, 8, 8)
    assert loop.next_step() is None and loop.next_checkpoint() is None and loop.run(3) is None
    assert list(loop) == []


@pytest.mark.parametrize("steps", [4, 5, 7, 8])
@pytest.mark.mostly_slow
def test_run_returns_the_checkpoint_of_its_last_step_even_in_a_later_epoch(steps):
    loop = loop_of(steps=20, every=fitflax.every(steps=100))
    checkpoint = loop.run(steps)
    assert (checkpoint.step, checkpoint.n_completed_steps, int(checkpoint.state.step)) == (steps, steps, steps)


def test_run_is_limited_to_the_remaining_steps():
    loop = loop_of(steps=4)
    assert loop.run(100).step == 4
    for steps in (0, 1.5, "2"):
        with pytest.raises(ConfigError, match=rf"run\(steps\) must be a positive integer. Received: {steps!r}"):
            loop.run(steps)


def test_a_loop_trains_as_fit_does():
    by_loop, by_fit = make(optimizer=optax.adam(0.1)), make(optimizer=optax.adam(0.1))
    for _ in loop_of(by_loop, steps=7, every=fitflax.every(steps=3)):
        pass
    by_fit.fit(X, Y, batch_size=4, steps=7, verbose=0)
    assert_same(by_loop.state, by_fit.state)


def test_a_loop_that_is_exited_early_can_be_followed_by_another():
    trainer = make()
    with loop_of(trainer, steps=100) as loop:
        for checkpoint in loop:
            if checkpoint.step == 2:
                break
    assert trainer.step == 2
    assert [c.step for c in loop_of(trainer, steps=2)] == [3, 4]


def test_a_loop_stops_when_the_trainer_is_asked_to():
    trainer, steps = make(), []
    for checkpoint in loop_of(trainer, steps=100, every=fitflax.every(steps=2)):
        steps.append(checkpoint.step)
        if checkpoint.step == 4:
            trainer.stop("enough")
    assert steps == [2, 4] and trainer.step == 4


def test_a_loop_over_data_that_ends_early_warns_and_yields_the_last_step():
    trainer = make()
    with pytest.warns(FitflaxWarning, match="ended before"):
        steps = [c.step for c in trainer.train_loop(iter([(X, Y)] * 3), steps=10, every=fitflax.every(steps=2))]
    assert steps == [2, 3] and trainer.stop_reason == "data_exhausted"


def test_a_checkpoints_values_are_those_of_its_step():
    trainer = make(optimizer=optax.sgd(0.05), metrics=["mae"])
    trainer.build((X, Y))
    params = jax.tree.map(np.array, trainer.state.params)

    def mse(params, rows):
        return jnp.mean((X[rows] @ params["kernel"] + params["bias"] - Y[rows]) ** 2)

    losses = []
    for number, checkpoint in enumerate(loop_of(trainer, steps=3, shuffle=False)):
        rows = slice(4 * number, 4 * number + 4)
        loss, grads = jax.value_and_grad(mse)(params, rows)
        losses.append(float(loss))
        np.testing.assert_allclose(checkpoint.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(checkpoint.gradients_norm, optax.tree.norm(grads), rtol=1e-4)
        np.testing.assert_allclose(checkpoint.metrics["train"]["loss"], np.mean(losses), rtol=1e-5)
        assert list(checkpoint.metrics) == ["train"] and list(checkpoint.metrics["train"]) == ["loss", "mae"]
        assert type(checkpoint.loss) is type(checkpoint.gradients_norm) is float
        params = jax.tree.map(lambda p, g: np.asarray(p - 0.05 * g), params, grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), checkpoint.model_params, params)


def test_a_checkpoint_has_its_position_in_the_data():
    seen = [(c.step, c.epoch, c.step_in_epoch, (c.data_position.passes, c.data_position.examples)) for c in loop_of(rows=10, steps=5)]
    assert seen == [(1, 0, 1, (0, 4)), (2, 0, 2, (0, 8)), (3, 0, 3, (1, 0)), (4, 1, 1, (1, 4)), (5, 1, 2, (1, 8))]


def test_parts_of_a_checkpoint_are_copied_when_they_are_first_read_and_stay_valid():
    loop = loop_of(make(Normalized(), optax.adam(0.1)), steps=3)
    first = next(loop)
    params, copied = first.model_params, jax.tree.map(np.array, first.model_params)
    later = [next(loop), next(loop)]
    assert_same(params, copied)
    assert first.model_params is params
    with pytest.raises(NotReadyError, match="The state of step 1 is gone: the loop is at step 3"):
        _ = first.optimizer_state
    with pytest.raises(NotReadyError, match="The state of step 1 is gone"):
        _ = first.state
    with pytest.raises(NotReadyError, match="The state of step 2 is gone"):
        _ = later[0].model_state
    assert int(later[1].state.step) == 3
    # Values are separate outputs: they can be read at any time.
    assert first.loss > 0 and first.metrics["train"]["loss"] == first.loss


def test_a_whole_state_that_was_read_stays_valid_in_later_steps():
    trainer = make(optimizer=optax.adam(0.1))
    states = [(c.state, jax.tree.map(device_copy, c.state)) for c in loop_of(trainer, steps=4)]
    assert [int(state.step) for state, _ in states] == [1, 2, 3, 4]
    for state, copied in states:
        jax.tree.map(lambda leaf, copy: np.testing.assert_array_equal(as_data(leaf), copy), state, copied)


def test_elapsed_time_is_a_nonnegative_number_of_seconds():
    assert all(0 <= c.elapsed_time < 60 for c in loop_of(steps=3))


# --- Evaluation loops ---


@pytest.mark.slow
def test_evaluation_loops_add_groups_of_metrics_and_can_be_chained():
    trainer = make(metrics=["mae"])
    first = trainer.eval_loop((X[:7], Y[:7]), batch_size=3)
    second = trainer.eval_loop(lambda: iter([(X[7:], Y[7:])]), name="other")
    for checkpoint in loop_of(trainer, steps=2):
        summary = second(first(checkpoint))
        assert isinstance(summary, fitflax.Summary) and isinstance(summary, fitflax.Checkpoint)
        assert (summary.step, summary.loss) == (checkpoint.step, checkpoint.loss)
        assert {group: list(values) for group, values in summary.metrics.items()} == {
            "train": ["loss", "mae"],
            "eval": ["loss", "mae"],
            "other": ["loss", "mae"],
        }
        outputs = X @ np.asarray(summary.model_params["kernel"]) + np.asarray(summary.model_params["bias"])
        np.testing.assert_allclose(summary.metrics["eval"]["loss"], np.mean((outputs - Y)[:7] ** 2), rtol=1e-5)
        np.testing.assert_allclose(summary.metrics["other"]["loss"], np.mean((outputs - Y)[7:] ** 2), rtol=1e-5)


def test_evaluating_an_earlier_checkpoint_is_an_error_that_names_its_step():
    trainer = make()
    evaluate = trainer.eval_loop((X, Y))
    loop = loop_of(trainer, steps=3)
    early = next(loop)
    next(loop)
    with pytest.raises(NotReadyError, match="The state of step 1 is gone: the loop is at step 2"):
        evaluate(early)


def test_serial_passes_a_checkpoint_from_each_function_to_the_next():
    trainer, seen = make(), []
    watch = LambdaCallback(lambda checkpoint: seen.append((checkpoint.step, list(checkpoint.metrics))), every=fitflax.every(steps=2))
    closed = []
    watch.close = lambda: closed.append(True)
    with fitflax.serial(trainer.eval_loop((X, Y), name="dev"), watch, lambda c: c.metrics["dev"]["loss"]) as process:
        values = [process(checkpoint) for checkpoint in loop_of(trainer, steps=4)]
    assert [type(value) for value in values] == [float] * 4 and values[3] < values[0]
    assert seen == [(2, ["train", "dev"]), (4, ["train", "dev"])]
    assert closed == [True]


def test_serial_takes_only_functions():
    with pytest.raises(ConfigError, match=r"serial\(\) takes functions from a checkpoint to a checkpoint. Received: 3"):
        fitflax.serial(3)


def test_a_callback_is_a_function_that_obeys_its_own_trigger_and_returns_the_checkpoint():
    seen = []
    watch = LambdaCallback(lambda checkpoint: seen.append(checkpoint.step), every=fitflax.first(1) | fitflax.every(steps=3))
    returned = [(checkpoint, watch(checkpoint)) for checkpoint in loop_of(steps=5)]
    assert seen == [1, 3] and all(given is got for given, got in returned)


def test_predicting_again_does_not_trace_the_module_again():
    calls = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls.append(x.shape)
            return nn.Dense(1)(x)

    trainer = fitflax.Trainer(Counted(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.build(np.ones((4, 2), np.float32))
    trainer.predict_on_batch(np.ones((4, 2), np.float32))
    seen = len(calls)
    trainer.predict_on_batch(np.zeros((4, 2), np.float32))
    assert len(calls) == seen


def test_with_seed_equals_a_new_trainer_with_that_seed_and_compiles_nothing(compilations):
    x, y = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 3
    first = fitflax.Trainer(nn.Dense(3), seed=1)
    first.compile("adam", "sparse_categorical_crossentropy")
    first.fit(x, y, verbose=0)
    made = fitflax.Trainer(nn.Dense(3), seed=7)
    made.compile("adam", "sparse_categorical_crossentropy")
    with compilations.counted() as counted:
        other = first.with_seed(7)
        assert other.step == 0 and first.step == 1
        other.fit(x, y, verbose=0)
    assert counted.names == []
    made.fit(x, y, verbose=0)
    assert np.array_equal(other.predict(x), made.predict(x)) and not np.array_equal(other.predict(x), first.predict(x))


@pytest.mark.parametrize("make_other", [lambda trainer: trainer.with_seed(1), lambda trainer: trainer.with_hyperparams()], ids=["seed", "hyperparams"])
def test_a_copy_without_a_state_does_not_keep_the_first_trainer(make_other):
    first = make()
    first.build((X, Y))
    other, reference = make_other(first), weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    other.compile(optax.sgd(0.2), "mse")
    other.build((X, Y))


@pytest.mark.slow
def test_after_with_seed_the_loss_of_a_subclass_uses_attributes_of_the_new_instance():
    class Scaled(fitflax.Trainer):
        scale = 1.0

        def compute_loss(self, params, model_state, batch, *, rngs, train):
            values, changed, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
            return self.scale * values, changed, aux

    x = np.ones((8, 2), np.float32)
    first = Scaled(nn.Dense(1))
    first.compile("sgd", "mse")
    first.fit(x, x[:, :1], verbose=0)
    other = first.with_seed(0)
    other.scale = 10.0
    other.compile("sgd", lambda outputs, targets: 0 * outputs[:, 0] + 123.0)
    assert other.fit(x, x[:, :1], verbose=0).history["loss"] == [1230.0]
    plain = first.with_seed(0)
    plain.scale = 100.0
    assert plain.fit(x, x[:, :1], verbose=0).history["loss"] == pytest.approx([100 * loss for loss in first.history.history["loss"]])


def test_an_attribute_error_in_a_property_of_a_subclass_is_raised_unchanged():
    class Custom(fitflax.Trainer):
        @property
        def norm(self):
            return None.missing

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
        Custom(nn.Dense(1)).norm  # noqa: B018 (reading it is what fails)
