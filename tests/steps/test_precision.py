"""`compile(precision=...)`: what is computed in half precision, what stays float32, and how the loss is scaled for float16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import fitflax
from fitflax.callbacks import ModelCheckpoint, TerminateOnNaN
from fitflax.errors import ConfigError, FitflaxWarning, RestoreError
from fitflax.parallel import DataParallel
from fitflax.state import Batch
from fitflax.steps.optimizer import FIRST_SCALE, MAX_SCALE, PATIENCE, LossScaled, unscaled, with_loss_scale
from tests.run_script import differences, rows_of, state_of

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(17)
X = RNG.normal(size=(13, 4)).astype(np.float32)
Y = RNG.normal(size=(13, 2)).astype(np.float32)
HALVES = ["bfloat16", "float16"]
SLOW = pytest.mark.slow


class Net(nn.Module):
    """Records the dtypes that it sees while it is traced."""

    note: Any = None

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        hidden = nn.Dense(5, name="first")(x)
        own = nn.Dense(5, name="own", dtype=jnp.float32)(x)
        normed = nn.BatchNorm(use_running_average=not train, name="norm")(hidden)
        outputs = nn.Dense(2, name="last")(normed)
        if self.note is not None and not self.is_initializing():
            kernel = self.get_variable("params", "first")["kernel"]
            statistics = self.get_variable("batch_stats", "norm")["mean"]
            parts = {"x": x, "kernel": kernel, "hidden": hidden, "own": own, "normed": normed, "outputs": outputs}
            self.note({name: str(value.dtype) for name, value in parts.items()} | {"statistics": str(statistics.dtype)})
        return outputs


class Line(nn.Module):
    """The sum of inputs times one parameter; counts its calls in a collection."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        count = self.variable("count", "n", lambda: jnp.zeros(()))
        if train and not self.is_initializing():
            count.value += 1
        return x * self.param("w", nn.initializers.ones, (1,))


def trainer_of(model: nn.Module, devices: list[jax.Device], precision: str, loss: Any = "mse", *, optimizer: Any = None, **options: Any) -> Any:
    kind = options.pop("kind", fitflax.Trainer)
    trainer = kind(model, parallel=DataParallel(devices))
    trainer.compile(optimizer or optax.adam(0.01), loss, precision=precision, **options)
    return trainer


def dtypes_of(tree: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def scale_of(trainer: Any) -> float:
    return float(trainer.state.opt_state.scale)


# -- what is computed in which dtype --


@pytest.mark.parametrize(
    ("precision", "num_devices"), [("bfloat16", 2), ("float16", 1), pytest.param("bfloat16", 1, marks=SLOW), pytest.param("float16", 2, marks=SLOW)]
)
@pytest.mark.slow
def test_the_module_computes_in_half_precision_and_the_state_stays_float32(precision: str, num_devices: int, devices: Devices):
    seen: list[dict[str, str]] = []
    trainer = trainer_of(Net(seen.append), devices(num_devices), precision, metrics=["mae"])
    trainer.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), verbose=0)
    trainer.predict(X)
    half = dict.fromkeys(("x", "kernel", "hidden", "normed", "outputs"), precision)
    assert seen and all(dtypes == {**half, "own": "float32", "statistics": "float32"} for dtypes in seen)
    assert dtypes_of(trainer.state) == {"float32"}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.slow
def test_losses_metrics_and_predictions_are_float32(precision: str, devices: Devices):
    seen: list[str] = []

    def loss(outputs: Any, targets: Any) -> Any:
        seen.append(str(outputs["b"].dtype) + "".join(outputs))
        return ((outputs["b"] - targets["b"]) ** 2).mean(-1)

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return {"b": nn.Dense(2)(x), "a": jnp.argmax(x, -1)}

    def spread(outputs: Any, targets: Any) -> Any:
        seen.append(str(outputs["b"].dtype) + "".join(outputs))
        return outputs["b"][:, 0]

    trainer = trainer_of(Two(), devices(2), precision, loss, metrics={"spread": spread})
    trainer.fit(X, {"a": X[:, 0], "b": Y}, verbose=0)
    assert set(seen) == {"float32ba"}  # In the order of the module.
    outputs = trainer.predict(X)
    assert outputs["b"].dtype == np.float32 and outputs["a"].dtype == np.int32
    assert trainer.predict_on_batch(X)["b"].dtype == np.float32


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.slow
def test_gradients_equal_those_of_the_module_in_bfloat16(num_devices: int, devices: Devices):
    trainer = trainer_of(nn.Dense(2), devices(num_devices), "bfloat16", optimizer=optax.sgd(1.0))
    trainer.build((X[:12], Y[:12]))
    params = jax.tree.map(np.asarray, trainer.state.params)

    def whole(params: Any) -> Any:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        outputs = nn.Dense(2).apply({"params": half}, X[:12].astype(jnp.bfloat16)).astype(jnp.float32)
        return ((outputs - Y[:12]) ** 2).mean()

    grads = jax.grad(whole)(params)
    trainer.train_on_batch((X[:12], Y[:12]))
    for name in params:
        # Sums over rows are computed in bfloat16, and in a different order on several devices.
        np.testing.assert_allclose(params[name] - trainer.state.params[name], grads[name], rtol=2e-2 if num_devices > 1 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=SLOW), "float16"])
@pytest.mark.slow
def test_training_is_close_to_training_in_float32(precision: str, devices: Devices):
    losses = []
    for each in ("float32", precision):
        trainer = trainer_of(Net(), devices(1), each)
        losses.append(trainer.fit(X, Y, batch_size=13, epochs=30, verbose=0).history["loss"])
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.1) and losses[1][-1] < losses[1][0] * 0.9


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.slow
def test_collections_that_a_module_computes_from_its_inputs_keep_their_dtype(precision: str, devices: Devices):
    class Last(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mean = self.variable("last", "mean", lambda: x.mean(0))
            mean.value = x.mean(0)
            return nn.Dense(2)(x)

    trainer = trainer_of(Last(), devices(2), precision)
    trainer.train_on_batch((X[:12], Y[:12]))
    assert dtypes_of(trainer.state.model_state) == {"float32"}
    np.testing.assert_allclose(trainer.state.model_state["last"]["mean"], X[:12].mean(0), atol=1e-2)


@pytest.mark.slow
def test_a_custom_loss_gets_parameters_and_inputs_in_half_precision(devices: Devices):
    seen: set[str] = set()

    class Custom(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Batch, *, rngs: Any, train: bool) -> Any:
            outputs = self.model.apply({"params": params}, batch.x)
            seen.update({f"x {batch.x.dtype}", f"params {params['kernel'].dtype}", f"y {batch.y.dtype}", f"outputs {outputs.dtype}"})
            return ((outputs - batch.y) ** 2).mean(-1), {}, {"outputs": outputs}

    def mae(outputs: Any, targets: Any) -> Any:
        seen.add(f"metric {outputs.dtype}")
        return abs(outputs - targets).mean(-1)

    trainer_of(nn.Dense(2), devices(1), "bfloat16", None, kind=Custom, metrics=[mae]).train_on_batch((X, Y))
    assert seen == {"x bfloat16", "params bfloat16", "y float32", "outputs bfloat16", "metric float32"}


@pytest.mark.slow
def test_integer_inputs_are_not_affected_by_the_precision(devices: Devices):
    class Words(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            assert ids.dtype == jnp.int32
            embedded = nn.Embed(5, 3)(ids)
            assert self.is_initializing() or embedded.dtype == jnp.bfloat16
            return nn.Dense(2)(embedded)

    trainer_of(Words(), devices(1), "bfloat16").train_on_batch((np.arange(4) % 5, Y[:4]))


# -- the loss scale --


def square_sum(outputs: Any, targets: Any) -> Any:
    return (outputs[:, 0] - targets) ** 2


LARGE = (np.full((4, 1), 3000, np.float32), np.zeros(4, np.float32))
SMALL = (np.full((4, 1), 0.25, np.float32), np.zeros(4, np.float32))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_whose_gradient_overflows_is_skipped_and_halves_the_scale(num_devices: int, devices: Devices):
    trainer = trainer_of(Line(), devices(num_devices), "float16", square_sum, ema_decay=0.5)
    trainer.train_on_batch(SMALL)
    before = trainer.state
    assert scale_of(trainer) == FIRST_SCALE and int(before.opt_state.good_steps) == 1
    # On only one replica.
    rows = np.concatenate([SMALL[0][:3], LARGE[0][:1]])
    logs = trainer.train_on_batch((rows, SMALL[1]))
    after = trainer.state
    assert np.isfinite(logs["loss"])
    assert int(after.step) == trainer.step == 2
    assert scale_of(trainer) == FIRST_SCALE / 2 and int(after.opt_state.good_steps) == 0
    for name in ("params", "model_state", "ema_params"):
        for old, new in zip(jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name)), strict=True):
            assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    for old, new in zip(jax.tree.leaves(before.opt_state.inner_state), jax.tree.leaves(after.opt_state.inner_state), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_the_scale_preserves_gradients_that_are_too_small_for_float16(devices: Devices):
    x, y = np.full((4, 1), 1e-3, np.float32), np.full(4, 1e-3, np.float32) * (1 - 1e-3)
    updates = {}
    for precision in ("float32", "float16"):
        trainer = trainer_of(Line(), devices(1), precision, lambda o, t: o[:, 0] * 1e-6, optimizer=optax.sgd(1e6))
        trainer.train_on_batch((x, y))
        updates[precision] = 1 - float(trainer.state.params["w"][0])
    # The gradient of each row is 2.5e-10: less than a hundredth of the smallest float16 number.
    assert updates["float16"] == pytest.approx(updates["float32"], rel=1e-2) and updates["float32"] == pytest.approx(1e-3, rel=1e-3)


def test_the_scale_falls_until_gradients_fit(devices: Devices):
    trainer = trainer_of(Line(), devices(1), "float16", square_sum, optimizer=optax.sgd(1e-9))
    rows = (np.full((4, 1), 30, np.float32), LARGE[1])
    scales = []
    for _ in range(12):
        trainer.train_on_batch(rows)
        scales.append(scale_of(trainer))
    # 2 * 30 * scale / 4 per row, then times 30 and summed: 1800 * scale must stay below 65504.
    assert scales[-1] == 32 and scales[0] == FIRST_SCALE / 2 and int(trainer.state.opt_state.good_steps) > 0


def test_consecutive_good_steps_double_the_scale_up_to_a_limit():
    optimizer = with_loss_scale(optax.with_extra_args_support(optax.sgd(0.1)))
    good, bad = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}
    state = optimizer.init(good)
    nearly = state._replace(good_steps=jnp.int32(PATIENCE - 1))

    def after(state: Any, grads: Any) -> tuple[float, int]:
        state = optimizer.update(grads, state, good)[1]
        return float(state.scale), int(state.good_steps)

    assert after(state, good) == (FIRST_SCALE, 1)
    assert after(nearly, good) == (2 * FIRST_SCALE, 0)
    assert after(nearly, bad) == (FIRST_SCALE / 2, 0)
    assert after(nearly._replace(scale=jnp.float32(MAX_SCALE)), good) == (MAX_SCALE, 0)
    assert after(state._replace(scale=jnp.float32(1)), bad) == (1.0, 0)


def test_gradients_in_float16_are_divided_by_scales_that_are_too_large_for_float16():
    grads = unscaled({"w": jnp.ones(1, jnp.float16)}, jnp.float32(2**16))
    assert grads["w"].dtype == jnp.float16 and float(grads["w"][0]) == 2**-16


def test_a_skipped_step_does_not_end_a_run_but_a_loss_that_is_not_finite_does(devices: Devices):
    def run(rows: Any, **options: Any) -> Any:
        trainer = trainer_of(Line(), devices(2), "float16", square_sum, optimizer=optax.sgd(1e-9))
        trainer.fit(rows, np.zeros(len(rows), np.float32), batch_size=4, shuffle=False, callbacks=[TerminateOnNaN()], log_every=1, verbose=0, **options)
        return trainer

    rows = np.concatenate([SMALL[0], LARGE[0], SMALL[0]])
    trainer = run(rows, epochs=1)
    assert trainer.step == 3 and trainer.stop_reason is None and scale_of(trainer) == FIRST_SCALE / 2
    with pytest.warns(FitflaxWarning, match="x has NaN or infinity in 4 of 12 examples"):
        assert "step 2" in run(np.where(rows > 1, np.nan, rows), epochs=1).stop_reason
    # Gradients that no scale can make finite: 3000 * 6000 is too large for float16.
    trainer = run(LARGE[0], epochs=30)
    assert trainer.step == 16 and scale_of(trainer) == 1 and "not finite at step 16" in trainer.stop_reason


@pytest.mark.slow
def test_micro_batches_are_scaled_in_the_same_way(devices: Devices):
    trainers = [trainer_of(Line(), devices(2), "float16", square_sum, optimizer=optax.sgd(0.1), accumulate_steps=steps) for steps in (1, 2)]
    for trainer in trainers:
        trainer.train_on_batch(SMALL)
    np.testing.assert_allclose(trainers[1].state.params["w"], trainers[0].state.params["w"], rtol=1e-6)
    assert float(trainers[0].state.params["w"][0]) == pytest.approx(1 - 0.1 * 2 * 0.25**2, rel=1e-3)
    trainers[1].train_on_batch((np.concatenate([SMALL[0][:3], LARGE[0][:1]]), SMALL[1]))
    assert scale_of(trainers[1]) == FIRST_SCALE / 2


def test_the_learning_rate_can_be_read_and_set_if_there_is_a_scale(devices: Devices):
    trainer = trainer_of(Line(), devices(1), "float16", square_sum, optimizer="sgd", learning_rate=0.5)
    trainer.build(SMALL)
    assert trainer.learning_rate == 0.5
    trainer.learning_rate = 0.25
    trainer.train_on_batch(SMALL)
    assert trainer.learning_rate == 0.25 and isinstance(trainer.state.opt_state, LossScaled)
    assert float(trainer.state.params["w"][0]) == pytest.approx(1 - 0.25 * 2 * 0.25**2, rel=1e-3)


# -- compiling again, errors, resuming --


@pytest.mark.slow
def test_compiling_again_with_the_same_optimizer_keeps_its_state_with_or_without_a_scale(devices: Devices):
    adam = optax.adam(0.1)
    trainer = trainer_of(Line(), devices(2), "float32", square_sum, optimizer=adam)
    trainer.train_on_batch(SMALL)
    moments = jax.tree.map(np.asarray, trainer.state.opt_state)
    for precision in ("float16", "float16", "bfloat16"):
        trainer.compile(adam, square_sum, precision=precision)
        state = trainer.state.opt_state
        assert isinstance(state, LossScaled) == (precision == "float16")
        inner = state.inner_state if precision == "float16" else state
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, inner), moments)
        if precision == "float16":
            assert scale_of(trainer) == FIRST_SCALE
    trainer.train_on_batch(SMALL)
    assert int(trainer.state.opt_state[0].count) == 2


@pytest.mark.parametrize("precision", ["half", "float64", None, jnp.bfloat16, ["float16"]])
def test_the_precision_must_be_one_of_three_names(precision: Any, devices: Devices):
    with pytest.raises(ConfigError, match=r"compile\(precision=...\) must be one of 'float32', 'bfloat16', 'float16'. Received: "):
        trainer_of(Net(), devices(1), precision)


def test_a_custom_update_cannot_be_combined_with_a_precision(devices: Devices):
    class Custom(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            return super().train_step(state, batch)

    with pytest.raises(ConfigError, match=r"compile\(accumulate_steps=4, precision='bfloat16'\) cannot be combined with an overridden train_step"):
        trainer_of(Net(), devices(1), "bfloat16", kind=Custom, accumulate_steps=4)


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=SLOW), "float16"])
@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_identical_to_an_uninterrupted_run(precision: str, tmp_path: Any, devices: Devices):
    x = np.concatenate([X, 1e4 * X[:4]])  # Some steps overflow.

    def run(directory: Any, stops: list[int]) -> Any:
        for steps in stops:
            trainer = trainer_of(Net(), devices(2), precision, optimizer="adam", metrics=["mae"])
            checkpoints = ModelCheckpoint(tmp_path / directory, every=fitflax.every(steps=5))
            trainer.fit(x, np.concatenate([Y, Y[:4]]), batch_size=4, steps=steps, callbacks=[checkpoints], resume="auto", verbose=0)
        return trainer

    whole, resumed = run("whole", [10]), run("parts", [5, 10])
    assert resumed.step == 10 and not differences(state_of(resumed), state_of(whole))
    assert rows_of(resumed.history) == rows_of(whole.history)
    trainer = trainer_of(Net(), devices(2), "float32", optimizer="adam", metrics=["mae"])
    with pytest.raises(RestoreError, match=f"precision was '{precision}' and is"):
        trainer.fit(x, x[:, :2], steps=12, batch_size=4, callbacks=[ModelCheckpoint(tmp_path / "parts")], resume="auto", verbose=0)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("before", "after"), [("float32", "float16"), ("float16", "float32")])
def test_a_checkpoint_with_a_missing_or_extra_scale_is_an_error_that_says_what_to_do(before: str, after: str, tmp_path: Any, devices: Devices):
    trainer = trainer_of(Line(), devices(1), before, square_sum)
    trainer.train_on_batch(SMALL)
    path = trainer.save(tmp_path / "saved")
    saved, compiled = ("without", "with") if before == "float32" else ("with", "without")
    match = f"was saved {saved} precision='float16', but the trainer is compiled {compiled} it. Compile with .* precision, or restore with weights_only=True"
    other = trainer_of(Line(), devices(1), after, square_sum)
    with pytest.raises(RestoreError, match=match):
        other.restore(path)
    other.restore(path, weights_only=True)
    other.train_on_batch(SMALL)
    assert other.step == 1
    bare = fitflax.Trainer(Line(), parallel=DataParallel(devices(1)))
    bare.restore(path)
    adam = optax.adam(0.01)
    with pytest.raises(RestoreError, match=match):
        bare.compile(adam, square_sum, precision=after)
    bare.compile(adam, square_sum, precision=before)
    bare.train_on_batch(SMALL)
    assert bare.step == 2


def test_the_scale_is_saved_and_restored(tmp_path: Any, devices: Devices):
    trainer = trainer_of(Line(), devices(1), "float16", square_sum)
    trainer.train_on_batch(LARGE)
    trainer.train_on_batch(SMALL)
    path = trainer.save(tmp_path / "saved")
    for is_compiled_first in (True, False):
        other = fitflax.Trainer(Line(), parallel=DataParallel(devices(1)))
        calls = [lambda other=other: other.compile(optax.adam(0.01), square_sum, precision="float16"), lambda other=other: other.restore(path)]
        for call in calls if is_compiled_first else reversed(calls):
            call()
        assert scale_of(other) == FIRST_SCALE / 2 and int(other.state.opt_state.good_steps) == 1
        other.train_on_batch(SMALL)
        assert int(other.state.opt_state.good_steps) == 2


# -- fp8 --

FP8_X = (30 * RNG.normal(size=(32, 16))).astype(np.float32)
FP8_Y = (FP8_X @ RNG.normal(size=(16, 8)) / 30).astype(np.float32)


class Fp8Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp, name="first")(x))
        return nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp, name="last")(x)


def fp8_trainer(devices: list[jax.Device], **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Fp8Net(), parallel=DataParallel(devices))
    trainer.compile(optax.sgd(1e-3), "mse", **options)
    trainer.build((FP8_X, FP8_Y))
    return trainer


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (1, {}),
        (4, {"accumulate_steps": 2}),
        pytest.param(4, {}, marks=SLOW),
        pytest.param(1, {"accumulate_steps": 4}, marks=SLOW),
        pytest.param(1, {"steps_per_call": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_scales_of_fp8_are_replaced_by_their_gradients_as_in_the_train_state_of_flax(num_devices: int, options: Any, devices: Devices):
    trainer = fp8_trainer(devices(num_devices), **options)
    variables = {"params": trainer.state.params, **trainer.state.model_state}
    state = TrainState.create(apply_fn=Fp8Net().apply, params=variables, tx=optax.sgd(1e-3))

    @jax.jit
    def step(state: TrainState, x: Any, y: Any) -> TrainState:
        return state.apply_gradients(grads=jax.grad(lambda variables: jnp.mean((state.apply_fn(variables, x) - y) ** 2))(state.params))

    for _ in range(2):
        for rows in (slice(0, 16), slice(16, 32)):
            state = step(state, FP8_X[rows], FP8_Y[rows])
    trainer.fit(FP8_X, FP8_Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    scales = state.params["_overwrite_with_gradient"]
    assert not np.array_equal(scales["first"]["Fp8DirectDotGeneralOp_0"]["input_scale"], [1.0])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
    jax.tree.map(close, trainer.state.model_state["_overwrite_with_gradient"], scales)
    jax.tree.map(close, trainer.state.params, state.params["params"])


@pytest.mark.slow
def test_a_resumed_run_with_fp8_is_bit_for_bit_identical_to_an_uninterrupted_run(tmp_path: Any, devices: Devices):
    def run(directory: str, ends: list[int]) -> fitflax.Trainer:
        for steps in ends:
            trainer = fp8_trainer(devices(2), accumulate_steps=2)
            trainer.fit(FP8_X, FP8_Y, batch_size=8, steps=steps, callbacks=[ModelCheckpoint(tmp_path / directory)], resume="auto", verbose=0)
        return trainer

    whole, resumed = run("whole", [10]), run("parts", [5, 10])
    assert resumed.step == 10 and not differences(state_of(resumed), state_of(whole))


@pytest.mark.slow
def test_a_custom_step_that_calls_the_default_one_updates_the_scales_of_fp8(devices: Devices):
    class Custom(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            return super().train_step(state, batch)

    states = []
    for kind in (fitflax.Trainer, Custom):
        trainer = kind(Fp8Net(), parallel=DataParallel(devices(2)))
        trainer.compile(optax.sgd(1e-3), "mse")
        trainer.fit(FP8_X, FP8_Y, batch_size=16, verbose=0)
        states.append(trainer.state)
    jax.tree.map(np.testing.assert_array_equal, states[0].model_state, states[1].model_state)
