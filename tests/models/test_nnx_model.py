"""NNX modules: what the trainer reads from them, what it writes back, and how it handles everything that they can hold."""

import dataclasses
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import load_inference_state
from fitflax.errors import ConfigError, LossError, MetricError, ModelError, OptimizerError, RestoreError
from fitflax.metrics import foreign
from fitflax.models.nnx_model import _rngs, adapt_nnx
from fitflax.parallel import DataParallel, Sharded
from tests.nnx_hand_written import assert_same, hand_written_loop, values

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 22)
LABELS = "sparse_categorical_crossentropy"
PLACES = {
    "one": lambda: DataParallel(jax.devices()[:1]),
    "four": lambda: DataParallel(jax.devices()[:4]),
    "mesh": lambda: Sharded({"data": 4}, devices=jax.devices()[:4]),
}


class Net(nnx.Module):
    """Has batch statistics, random streams, a list of layers, and an attribute with their number."""

    def __init__(self, rngs: nnx.Rngs, *, rate: float = 0.2):
        self.depth = 2
        self.l1 = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(self.depth)])
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.drop(self.norm(self.l1(x))))
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(x)


def make(model: Any = None, place: str = "one", kind: type[fitflax.Trainer] = fitflax.Trainer, **options: Any) -> Any:
    compiled = {key: options.pop(key) for key in ("accumulate_steps", "precision", "ema_decay", "run_eagerly", "steps_per_call") if key in options}
    optimizer, loss, metrics = options.pop("optimizer", "adam"), options.pop("loss", LABELS), options.pop("metrics", ["accuracy"])
    trainer = kind(Net(nnx.Rngs(0)) if model is None else model, parallel=PLACES[place](), **options)
    trainer.compile(optimizer, loss, metrics, **compiled)
    return trainer


def fit(trainer: Any, **options: Any) -> Any:
    return trainer.fit(X, Y, **{"batch_size": 8, "epochs": 2, "verbose": 0, **options})


def batch_loss(model: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


BATCHES = [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[:8], Y[8:16]), (X[8:16], Y[:8])]


# -- what is read and what is written back --


def test_a_run_is_bit_for_bit_identical_to_a_hand_written_loop():
    model, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    trainer = make(model, optimizer=optax.adam(1e-2))
    losses = [trainer.train_on_batch(batch)["loss"] for batch in BATCHES]
    assert losses == hand_written_loop(twin, optax.adam(1e-2), BATCHES, batch_loss)
    assert_same(values(model), values(twin))


def test_the_modules_variables_are_the_initial_state_for_any_seed():
    model = Net(nnx.Rngs(3))
    trainer = make(model, seed=7)
    assert trainer.step == 0
    np.testing.assert_array_equal(trainer.state.params["l1"]["kernel"], model.l1.kernel[...])
    assert sorted(trainer.state.model_state) == ["batch_stats", "rngs"]
    trainer.build((X, Y))
    np.testing.assert_array_equal(trainer.state.params["layers"][1]["kernel"], model.layers[1].kernel[...])


@pytest.mark.slow
def test_a_module_can_be_evaluated_before_training():
    model = Net(nnx.Rngs(0))
    expected = nnx.view(model, deterministic=True, use_running_average=True)(X)
    np.testing.assert_allclose(fitflax.Trainer(model).predict(X), expected, rtol=1e-5, atol=1e-6)
    assert make(model).evaluate(X, Y, verbose=0)["loss"] == pytest.approx(float(optax.softmax_cross_entropy_with_integer_labels(expected, Y).mean()), rel=1e-5)


def test_parameters_set_after_the_trainer_was_created_are_the_initial_ones():
    model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(9))
    trainer = make(model)
    nnx.update(model, nnx.state(other))
    np.testing.assert_array_equal(trainer.state.params["l1"]["kernel"], other.l1.kernel[...])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_module_holds_the_newest_variables_and_training_keeps_earlier_arrays_valid(place: str):
    model = Net(nnx.Rngs(0))
    trainer = make(model, place)
    fit(trainer)
    first = values(model)
    np.testing.assert_array_equal(model.l1.kernel[...], trainer.state.params["l1"]["kernel"])
    kernel = model.l1.kernel[...]
    trainer.train_on_batch((X[:8], Y[:8]))
    assert not np.array_equal(kernel, model.l1.kernel[...])
    assert np.array_equal(kernel, first["l1/kernel"])
    assert model(X).shape == (22, 3)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_initial_arrays_are_freed_once_the_module_has_new_ones(place: str):
    model = Net(nnx.Rngs(0))
    trainer, initial = make(model, place), weakref.ref(model.l1.kernel.get_value())
    fit(trainer, validation_data=(X, Y))
    trainer.predict(X)
    gc.collect()
    assert initial() is None


def test_the_module_is_up_to_date_when_fit_raises():
    model = Net(nnx.Rngs(0))
    trainer, before = make(model), values(model)

    def fail(step: int, logs: Any) -> None:
        if step == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(trainer, callbacks=[LambdaCallback(on_train_batch_end=fail)])
    np.testing.assert_array_equal(model.l1.kernel[...], trainer.state.params["l1"]["kernel"])
    assert not np.array_equal(before["l1/kernel"], model.l1.kernel[...])


@pytest.mark.slow
def test_callbacks_can_read_the_state_and_merge_it_into_a_module():
    model, seen = Net(nnx.Rngs(0)), []

    def look(step: int, logs: Any) -> None:
        state = trainer.state
        seen.append(trainer.merge(state.params, state.model_state)(X[:2]))
        trainer.evaluate(X, Y, verbose=0)

    trainer = make(model)
    fit(trainer, callbacks=[LambdaCallback(on_train_batch_end=look)])
    assert len(seen) == 6
    np.testing.assert_allclose(seen[-1], trainer.predict(X[:2]), rtol=1e-5, atol=1e-6)


def test_changes_to_the_module_between_two_calls_take_effect():
    model = Net(nnx.Rngs(0))
    trainer = make(model)
    fit(trainer)
    model.out.kernel[...] = jnp.zeros((8, 3))
    model.out.bias[...] = jnp.zeros(3)
    np.testing.assert_array_equal(trainer.predict(X), np.zeros((22, 3)))
    assert trainer.step == 6
    trainer.train_on_batch((X[:8], Y[:8]))
    assert trainer.step == 7


def test_an_optimizer_that_keeps_the_parameters_gets_the_changed_ones_in_compile():
    model = Net(nnx.Rngs(0))
    trainer = make(model)
    trainer.predict(X)
    nnx.update(model, nnx.state(Net(nnx.Rngs(1)), nnx.Param))
    trainer.compile(optax.contrib.schedule_free_sgd(0.1), LABELS)
    state = trainer.state
    jax.tree.map(np.testing.assert_array_equal, optax.tree_utils.tree_get(state.opt_state, "z"), state.params)


def test_restore_replace_state_and_train_loop_update_the_module(tmp_path):
    model = Net(nnx.Rngs(0))
    trainer = make(model)
    start, state = values(model), trainer.state
    path = trainer.save(tmp_path / "start")
    with trainer.train_loop(X, Y, steps=3, batch_size=8) as loop:
        for _ in loop:
            pass
    assert not np.array_equal(start["l1/kernel"], model.l1.kernel[...])
    trainer.restore(path)
    assert_same(values(model), start)
    fit(trainer)
    trainer.replace_state(state)
    assert_same(values(model), start)


def test_a_trainer_from_with_seed_starts_with_a_copy_of_the_module():
    model = Net(nnx.Rngs(0))
    trainer = make(model)
    fit(trainer)
    other = trainer.with_seed(1)
    assert other.model is not model
    np.testing.assert_array_equal(other.state.params["l1"]["kernel"], model.l1.kernel[...])
    kept = values(model)
    fit(other)
    assert_same(values(model), kept)


def test_the_flags_of_the_module_are_not_changed():
    model = Net(nnx.Rngs(0))
    model.eval()
    trainer = make(model)
    fit(trainer, epochs=1)
    model.train()
    fit(trainer, epochs=1)
    assert (model.drop.deterministic, model.norm.use_running_average) == (False, False)
    model.eval()
    assert (model.drop.deterministic, trainer.step) == (True, 6)
    np.testing.assert_allclose(trainer.predict(X), model(X), rtol=1e-5, atol=1e-6)


# -- random streams --


def test_dropout_differs_by_step_and_replica_and_evaluation_leaves_the_streams_alone():
    class Masks(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.drop(x) * self.scale

    kept = []

    class LogsRows(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            outputs = model(batch.x)
            return outputs.mean(axis=1), {"row": (outputs * 2.0 ** jnp.arange(16)).sum(axis=1)}

    trainer = make(Masks(), "four", LogsRows, metrics=None)
    model = trainer.model
    rows = np.ones((4, 16), np.float32)
    for _ in range(3):
        kept.append(trainer.train_on_batch((rows,))["row"])
    assert len(set(kept)) == 3
    assert int(model.drop.rngs.count[...]) == 3
    trainer.evaluate((rows,), verbose=0)
    trainer.predict(rows)
    assert int(model.drop.rngs.count[...]) == 3
    # Each replica has one row. With the same mask in all of them, the four rows would be equal, and their mean would be an even integer.
    assert any(row % 2 for row in kept)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"steps_per_call": 2}, {"precision": "bfloat16"}, {"ema_decay": 0.9}], ids=str)
@pytest.mark.mostly_slow
def test_a_run_stopped_inside_an_epoch_resumes_bit_for_bit(place: str, options: Any, tmp_path):
    whole = make(place=place, **options)
    history = fit(whole).history
    interrupted = make(place=place, **options)
    stop = LambdaCallback(on_train_batch_end=lambda step, logs: interrupted.stop() if interrupted.step >= 4 else None)
    fit(interrupted, callbacks=[ModelCheckpoint(tmp_path), stop])
    assert interrupted.step == 4
    resumed = make(place=place, **options)
    assert fit(resumed, callbacks=[ModelCheckpoint(tmp_path)], resume="auto").history == history
    assert_same(values(resumed.model), values(whole.model))
    np.testing.assert_array_equal(resumed.predict(X), whole.predict(X))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "options"), [("four", {}), ("mesh", {"backend": "orbax"}), ("one", {"asynchronous": False})], ids=str)
def test_a_run_resumes_bit_for_bit_from_checkpoints_inside_an_epoch_that_were_written_during_later_steps(place: str, options: Any, tmp_path):
    whole = make(place=place)
    history = fit(whole, validation_data=(X, Y), callbacks=[ModelCheckpoint(tmp_path, every=fitflax.every(steps=1), keep=None, **options)]).history
    for step in (2, 5):
        resumed = make(place=place)
        assert fit(resumed, validation_data=(X, Y), resume=tmp_path / f"step_{step:08d}").history == history
        assert_same(values(resumed.model), values(whole.model))


@pytest.mark.slow
def test_evaluation_may_draw_from_the_streams_and_draws_the_same_numbers_each_time():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs, self.out = rngs, nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(x + self.rngs.noise.normal(x.shape))

    trainer = make(Noisy(nnx.Rngs(0, noise=1)))
    one, two = trainer.predict(X[:16], batch_size=8), trainer.predict(X[:16], batch_size=8)
    np.testing.assert_array_equal(one, two)
    same = trainer.predict(np.concatenate([X[:8], X[:8]]), batch_size=8)
    assert not np.array_equal(same[:8], same[8:])  # Different batches draw different numbers.


@pytest.mark.slow
def test_streams_passed_to_a_call_are_the_trainers():
    class TakesStreams(nnx.Module):
        def __init__(self, rngs):
            self.drop, self.out = nnx.Dropout(0.5), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x, rngs=None):
            return self.out(self.drop(x, rngs=rngs))

    model = TakesStreams(nnx.Rngs(0))
    first, second = (make(model, seed=seed).train_on_batch((X[:8], Y[:8]))["loss"] for seed in (0, 1))
    assert first != second
    np.testing.assert_allclose(make(model).predict(X), nnx.view(model, deterministic=True)(X), rtol=1e-5, atol=1e-6)


def test_a_stream_that_is_not_named_is_independent_of_the_named_ones():
    rngs = _rngs({"dropout": jax.random.key(0), "noise": jax.random.key(1)})
    drawn = [rngs.dropout(), rngs.noise(), rngs(), rngs.other()]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in drawn}) == 4
    assert _rngs({"default": jax.random.key(0)})() == nnx.Rngs(jax.random.key(0))()


# -- what modules may hold --


@pytest.mark.slow
def test_a_shared_parameter_is_stored_once():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(3, 5, rngs=rngs)
            self.head = nnx.Linear(5, 3, use_bias=False, rngs=rngs)
            self.again = self.embed

        def __call__(self, x):
            return self.again.attend(self.embed(x)) + self.head(self.embed(x))

    tokens = RNG.integers(0, 3, (16,))
    model, twin = Tied(nnx.Rngs(0)), Tied(nnx.Rngs(0))
    trainer = make(model, optimizer=optax.adam(1e-2))
    batches = [(tokens[:8], tokens[8:]), (tokens[8:], tokens[:8])]
    losses = [trainer.train_on_batch(batch)["loss"] for batch in batches]
    assert losses == hand_written_loop(twin, optax.adam(1e-2), batches, batch_loss)
    assert sorted(trainer.state.params) == ["again", "head"]
    assert model.again is model.embed
    assert sum(leaf.size for leaf in jax.tree.leaves(trainer.state.opt_state)) == 2 * (15 + 15) + 1


class Everything(nnx.Module):
    """Holds everything else that a module can hold."""

    def __init__(self, rngs: nnx.Rngs):
        self.count = nnx.Variable(jnp.int32(0))
        self.number = nnx.Variable(2)
        self.pair = nnx.Variable({"a": jnp.zeros(2), "b": (jnp.ones(1), None)})
        self.raw = jnp.ones(3)
        self.parts = nnx.data({"scale": nnx.Param(jnp.ones(4))})
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        self.raw = self.raw + 1
        self.pair.set_value({**self.pair.get_value(), "a": self.pair.get_value()["a"] + 1})
        return self.out(x * self.parts["scale"]) * (self.number[...] / 2)


def test_everything_that_a_module_holds_besides_parameters_is_kept(tmp_path):
    model = Everything(nnx.Rngs(0))
    trainer = make(model)
    fit(trainer, epochs=1)
    assert (int(model.count[...]), model.raw.tolist(), model.pair.get_value()["a"].tolist()) == (3, [4.0] * 3, [3.0] * 2)
    assert sorted(trainer.state.model_state) == ["arrays", "variable"]
    assert sorted(trainer.state.params) == ["out", "parts"]
    other = make(Everything(nnx.Rngs(1)))
    other.restore(trainer.save(tmp_path / "all"))
    assert other.model.count[...] == 3
    assert other.model.pair.get_value()["a"].tolist() == [3.0, 3.0]


def test_collections_that_are_not_mutable_keep_their_values():
    trainer = make(Everything(nnx.Rngs(0)), mutable=("arrays",))
    fit(trainer, epochs=1)
    assert (int(trainer.model.count[...]), trainer.model.raw.tolist()) == (0, [4.0] * 3)


class Stacked(nnx.Module):
    """A scan over stacked layers."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def block(rngs: nnx.Rngs) -> Any:
            return nnx.Linear(4, 4, rngs=rngs)

        self.blocks, self.out = block(rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Any, x: Any) -> Any:
            return nnx.tanh(block(x))

        return self.out(run(self.blocks, x))


class Rematerialized(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.out = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.remat(lambda inner, x: nnx.tanh(inner(x)))(self.inner, x))


class Normed(nnx.Module):
    """Its layers overwrite their kernels."""

    def __init__(self, rngs: nnx.Rngs):
        self.spectral = nnx.SpectralNorm(nnx.Linear(4, 8, rngs=rngs), rngs=rngs)
        self.weight, self.out = nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any, train: bool = True) -> Any:
        return self.out(nnx.relu(self.weight(self.spectral(x, update_stats=train))))


def sequential(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Dropout(0.1, rngs=rngs), nnx.Linear(8, 3, rngs=rngs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stacked, Rematerialized, Normed, sequential], ids=lambda kind: kind.__name__)
def test_lifted_layers_and_sequences_train_like_a_hand_written_loop(kind: Any):
    model, twin = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    trainer = make(model, optimizer=optax.adam(1e-2))
    losses = [trainer.train_on_batch(batch)["loss"] for batch in BATCHES]
    np.testing.assert_allclose(losses, hand_written_loop(twin, optax.adam(1e-2), BATCHES, batch_loss), rtol=1e-6)
    assert_same(values(model), values(twin), rtol=1e-5, atol=1e-6)
    assert trainer.predict(X).shape == (22, 3)


@pytest.mark.slow
def test_kernels_that_layers_overwrite_are_equal_on_all_replicas():
    model, twin = Normed(nnx.Rngs(0)), Normed(nnx.Rngs(0))
    trainer = make(model, "four", optimizer=optax.adam(1e-2))
    losses = [trainer.train_on_batch(batch)["loss"] for batch in BATCHES]
    np.testing.assert_allclose(losses, hand_written_loop(twin, optax.adam(1e-2), BATCHES, batch_loss), rtol=1e-5)
    fitflax.parallel.check_replicas(trainer.state)


class Bridged(nn.Module):
    """A linen module with everything that a bridge must carry over."""

    rate: float = 0.3

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        self.sow("losses", "penalty", 0.5 * (x**2).mean())
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(x))


@pytest.mark.slow
def test_a_linen_module_in_a_bridge_trains_as_it_does_in_linen():
    linen = make(Bridged(rate=0.0))
    linen.build((X, Y))
    bridge = nnx.bridge.ToNNX(Bridged(rate=0.0), rngs=nnx.Rngs(0)).lazy_init(X)
    twin = make(bridge)
    linen.replace_state(dataclasses.replace(linen.state, params=twin.state.params))
    assert [linen.train_on_batch(batch)["loss"] for batch in BATCHES] == pytest.approx([twin.train_on_batch(batch)["loss"] for batch in BATCHES], rel=1e-6)
    np.testing.assert_allclose(linen.predict(X), twin.predict(X), rtol=1e-5, atol=1e-6)

    bridge = nnx.bridge.ToNNX(Bridged(), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)
    trainer = make(bridge)
    assert sorted(trainer.state.params) == ["BatchNorm_0", "Dense_0", "Dense_1"]
    assert sorted(trainer.state.model_state) == ["batch_stats", "rngs"]
    logs = trainer.train_on_batch((X[:8], Y[:8]))
    assert logs["loss"] > 0
    assert np.any(np.asarray(bridge.BatchNorm_0["mean"][...]) != 0)
    before = np.asarray(bridge.BatchNorm_0["mean"][...])
    trainer.evaluate(X, Y, verbose=0)
    np.testing.assert_array_equal(bridge.BatchNorm_0["mean"][...], before)


@pytest.mark.slow
def test_sown_losses_are_added_and_other_sown_values_are_in_checkpoints():
    class Losses(nnx.Intermediate):
        pass

    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            y = self.out(x)
            self.sow(Losses, "penalty", 100.0)
            self.sow(nnx.Intermediate, "mean", y.mean())
            return y

    class Popping(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            outputs = model(batch.x)
            sown = nnx.pop(model, Losses)
            return sum(jax.tree.leaves(sown)) + optax.softmax_cross_entropy_with_integer_labels(outputs, batch.y), {"outputs": outputs}

    model = Sowing(nnx.Rngs(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flax recommends nnx.capture instead.
        model(X)  # What the user's call has sown is not one of the module's variables.
    for kind in (fitflax.Trainer, Popping):
        assert make(Sowing(nnx.Rngs(0)), kind=kind).evaluate(X, Y, verbose=0)["loss"] > 100
    trainer = make(model)
    with trainer.train_loop(X, Y, steps=2, sown="intermediates") as loop:
        for checkpoint in loop:
            assert checkpoint.sown["intermediates"]["mean"][0].shape == ()
    assert trainer.state.model_state == {}


@pytest.mark.slow
def test_lora_trains_only_its_own_parameters(tmp_path):
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(4, 8, rngs=rngs)
            self.lora, self.out = nnx.LoRA(4, 2, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.base(x) + self.lora(x)))

    model, twin = Adapted(nnx.Rngs(0)), Adapted(nnx.Rngs(0))
    trainer = make(model, optimizer=optax.adam(1e-2), trainable=nnx.LoRAParam)
    assert (sorted(trainer.state.params), sorted(trainer.state.model_state)) == (["lora"], ["frozen"])
    losses = [trainer.train_on_batch(batch)["loss"] for batch in BATCHES]

    assert losses == hand_written_loop(twin, optax.adam(1e-2), BATCHES, batch_loss, wrt=nnx.LoRAParam)
    assert_same(values(model), values(twin))
    # The base comes from a checkpoint of a model without adapters.
    base = make(sequential(nnx.Rngs(5)))
    mapping = {"frozen/base": "params/layers/0", "frozen/out": "params/layers/3"}
    report = trainer.restore(base.save(tmp_path / "base"), partial=True, mapping=mapping)
    assert sorted(report.initialized) == ["params/lora/lora_a", "params/lora/lora_b"]
    np.testing.assert_array_equal(model.base.kernel[...], base.model.layers[0].kernel[...])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"precision": "bfloat16"}], ids=["plain", "accumulated", "bfloat16"])
def test_frozen_parameters_stay_bit_for_bit_identical_on_several_devices(options):
    model = nnx.LoRALinear(4, 64, lora_rank=2, rngs=nnx.Rngs(0))
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:3]), trainable=nnx.LoRAParam)
    trainer.compile("sgd", "mse", **options)
    before = jax.tree.map(np.array, trainer.state.model_state["frozen"])
    trainer.train_on_batch((X[:6], np.zeros((6, 64), np.float32)))
    jax.tree.map(np.testing.assert_array_equal, trainer.state.model_state["frozen"], before)


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=["plain", "accumulated"])
def test_frozen_parameters_compute_in_half_precision_and_are_stored_unchanged(options):
    dtypes = []

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base, self.lora = nnx.Linear(4, 3, rngs=rngs), nnx.LoRA(4, 2, 3, rngs=rngs)

        def __call__(self, x):
            outputs = self.base(x) + self.lora(x)
            dtypes.append(str(outputs.dtype))
            return outputs

    trainer = make(Adapted(nnx.Rngs(0)), trainable=nnx.LoRAParam, precision="bfloat16", **options)
    before = jax.tree.map(np.array, trainer.state.model_state["frozen"])
    trainer.train_on_batch((X[:8], Y[:8]))
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X)
    assert set(dtypes) == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, trainer.state.model_state["frozen"], before)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_frozen_parameters_that_compute_loss_changes_are_stored_and_others_are_bitwise_unchanged(precision):
    class Average(nnx.Variable): ...

    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.student, self.teacher, self.fixed = (nnx.Linear(4, 3, rngs=rngs) for _ in range(3))
            self.average = Average(jnp.zeros((4, 3)))

        def __call__(self, x):
            fixed = nnx.remat(lambda layer, x: layer(x))(self.fixed, x)
            return self.student(x) + self.teacher(x) + fixed

    class MeanTeacher(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            kernel = model.student.kernel[...]
            model.teacher.kernel[...] = jnp.where(jnp.arange(3) > 0, kernel, model.teacher.kernel[...])
            model.average[...] = 0.999 * model.average[...] + 0.001 * kernel
            return super().compute_loss(model, batch, train=train)

    trainer = make(Pair(nnx.Rngs(0)), kind=MeanTeacher, trainable=lambda path, leaf: isinstance(leaf, nnx.Param) and "student" in path, precision=precision)
    given, expected = jax.tree.map(np.array, (trainer.state.params["student"]["kernel"].astype(precision), trainer.state.model_state["frozen"]))
    expected["teacher"]["kernel"][:, 1:] = given[:, 1:]
    trainer.train_on_batch((X[:8], Y[:8]))
    jax.tree.map(np.testing.assert_array_equal, trainer.state.model_state["frozen"], expected)
    average = trainer.state.model_state["average"]["average"]
    np.testing.assert_allclose(average, 0.001 * given.astype(np.float32), rtol=1e-2 if precision == "bfloat16" else 1e-6)
    assert np.any(average != average.astype(jnp.bfloat16))


def test_averages_that_would_change_the_dtype_of_the_module_are_rejected(tmp_path):
    model = nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    trainer = make(model, ema_decay=0.5)
    fit(trainer)
    path, state = trainer.save(tmp_path / "final"), trainer.inference_state()
    for server in (trainer, make(model)):
        with pytest.raises(RestoreError, match="kernel is float32, expected bfloat16"):
            server.replace_state(state)
    assert model.kernel[...].dtype == jnp.bfloat16
    trainer.restore(path)


def test_a_variable_with_a_named_sharding_has_its_axis_names():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(np.ones((4, 3), np.float32), out_sharding=jax.NamedSharding(mesh, jax.P("data", None)))
    trainer = fitflax.Trainer(model, parallel=Sharded(mesh))
    trainer.compile("adam", LABELS)
    assert trainer.state.logical_axes(strict=False).params["kernel"] == jax.P("data", None)
    assert trainer.state.params["kernel"].sharding.spec == jax.P("data")


@pytest.mark.slow
def test_axis_names_in_metadata_split_the_state():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = nnx.Linear(4, 3, kernel_init=nnx.with_partitioning(nnx.initializers.ones, ("data", None)), rngs=nnx.Rngs(0))
    trainer = fitflax.Trainer(model, parallel=Sharded(mesh))
    trainer.compile("adam", LABELS)
    assert trainer.state.logical_axes(strict=False).params["kernel"] == jax.P("data", None)
    fit(trainer)
    assert trainer.state.params["kernel"].sharding.spec == jax.P("data")
    assert optax.tree.get(trainer.state.opt_state, "mu")["kernel"].sharding.spec == jax.P("data")
    assert model.kernel[...].sharding.spec == jax.P("data")


# -- names, files and tables --


@pytest.mark.slow
def test_masks_groups_and_mappings_use_names_as_paths_as_in_linen(tmp_path):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(8, name="l1")(x))
            return nn.Dense(3, name="out")(x)

    class Same(nnx.Module):
        def __init__(self, rngs):
            self.first, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.first(x)))

    linen, module = make(Linen()), make(Same(nnx.Rngs(0)))
    fit(linen)
    module.restore(linen.save(tmp_path / "linen"), mapping={"params/first": "params/l1"})
    np.testing.assert_array_equal(module.model.first.kernel[...], linen.state.params["l1"]["kernel"])
    assert module.step == 6
    np.testing.assert_allclose(module.predict(X), linen.predict(X), rtol=1e-6)
    fit(module, epochs=1)
    linen.restore(module.save(tmp_path / "module"), mapping={"params/l1": "params/first"})
    np.testing.assert_array_equal(module.model.first.kernel[...], linen.state.params["l1"]["kernel"])

    decayed = optax.adamw(1e-2, mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key == "kernel", params))
    labels = {"first": "freeze", "out": "train"}
    frozen = optax.multi_transform({"train": decayed, "freeze": optax.set_to_zero()}, labels)
    trainer = make(Same(nnx.Rngs(0)), optimizer=frozen)
    before = values(trainer.model)
    fit(trainer)
    after = values(trainer.model)
    assert np.array_equal(before["first/kernel"], after["first/kernel"])
    assert not np.array_equal(before["out/kernel"], after["out/kernel"])
    out = io.StringIO()
    trainer.summary(file=out)
    assert "freeze: 40 = 160 B in 2 arrays, frozen" in out.getvalue()
    assert "first" in out.getvalue()
    assert "Linear" in out.getvalue()


@pytest.mark.parametrize("backend", ["msgpack", "orbax"])
def test_a_checkpoint_is_readable_by_nnx(backend: str, tmp_path):
    trainer = make()
    fit(trainer, callbacks=[ModelCheckpoint(tmp_path, backend=backend)])
    state = load_inference_state(tmp_path)
    model = Net(nnx.Rngs(5))
    for tree in state.variables.values():
        nnx.update(model, tree)
    assert_same(values(model), values(trainer.model))
    server = fitflax.Trainer(Net(nnx.Rngs(6)), parallel=PLACES["one"]())
    server.replace_state(state)
    np.testing.assert_array_equal(server.predict(X), trainer.predict(X))


def test_plain_orbax_reads_a_checkpoint_for_nnx_update(tmp_path):
    trainer = make()
    fit(trainer, callbacks=[ModelCheckpoint(tmp_path, backend="orbax")])
    with ocp.PyTreeCheckpointer() as checkpointer:
        train = checkpointer.restore(tmp_path / "step_00000006/train")
    streams = train["model_state"].pop("rngs")
    streams["drop"]["rngs"]["key"] = jax.random.wrap_key_data(streams["drop"]["rngs"]["key"])  # Files have no typed keys.
    model = Net(nnx.Rngs(5))
    for tree in (train["params"], *train["model_state"].values(), streams):
        nnx.update(model, nnx.restore_int_paths(tree))
    assert_same(values(model), values(trainer.model))


def test_an_exported_module_computes_what_predict_does(tmp_path):
    pytest.importorskip("flatbuffers")
    trainer = make()
    fit(trainer)
    run = jax.export.deserialize(bytearray(trainer.export(tmp_path / "model.jaxexport").read_bytes())).call
    np.testing.assert_allclose(run(X), trainer.predict(X), rtol=1e-5, atol=1e-6)


def test_a_second_fit_compiles_nothing(compilations):
    trainer = make()
    fit(trainer, validation_data=(X, Y))
    with compilations.counted() as counted:
        fit(trainer, validation_data=(X, Y))
    assert counted.count == 0


# -- custom losses, metrics and steps --


def test_a_custom_loss_gets_the_module():
    class Custom(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            outputs = model(batch.x)
            assert isinstance(model, Net)
            assert model.drop.deterministic is not train
            values = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.y)
            return values, {"outputs": outputs, "double": 2 * values}

    class CallsSuper(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            return super().compute_loss(model, batch, train=train)

    class Bare(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch.x), batch.y)

    plain = make()
    history = fit(plain).history
    for kind, metrics in ((Custom, ["accuracy"]), (CallsSuper, ["accuracy"]), (Bare, None)):
        trainer = make(kind=kind, metrics=metrics)
        found = fit(trainer).history
        assert found["loss"] == history["loss"]
        assert_same(values(trainer.model), values(plain.model))


@pytest.mark.slow
def test_a_custom_step_can_merge_and_split():
    class Custom(fitflax.Trainer):
        def train_step(self, state, batch):
            count = self.sum_replicas(batch.mask.sum())

            def loss(params):
                model = self.merge(params, state.model_state, train=True)
                values = optax.softmax_cross_entropy_with_integer_labels(model(batch.x), batch.y) * batch.mask
                return values.sum() / count, (values, self.split(model)[1])

            grads, (values, model_state) = jax.grad(loss, has_aux=True)(state.params)
            return state.apply_gradient(self.sum_replicas(grads), self.optimizer, model_state), {"loss": (values.sum(), batch.mask.sum())}

    for place in ("one", "four"):
        plain, custom = make(place=place, metrics=None), make(place=place, kind=Custom, metrics=None)
        found = [[trainer.train_on_batch(batch)["loss"] for batch in BATCHES] for trainer in (plain, custom)]
        np.testing.assert_allclose(*found, rtol=1e-5)
        assert_same(values(custom.model), values(plain.model), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["one", "four"])
def test_nnx_metrics_have_the_values_that_nnx_computes(place: str):
    trainer = make(place=place, metrics=[nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")), nnx.metrics.Welford("loss")])
    found = trainer.evaluate(X, Y, batch_size=8, verbose=0)
    outputs = nnx.view(trainer.model, deterministic=True, use_running_average=True)(X)
    accuracy, welford = nnx.metrics.Accuracy(), nnx.metrics.Welford()
    accuracy.update(logits=outputs, labels=jnp.asarray(Y))
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, Y)
    welford.update(values=losses)
    wanted = {"loss": losses.mean(), "accuracy": accuracy.compute()} | {
        f"welford_{name}": value for name, value in dataclasses.asdict(welford.compute()).items()
    }
    assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-5)
    assert list(fit(trainer).history) == list(found)


def test_nnx_metrics_see_logged_values_and_ignore_padding():
    class Custom(fitflax.Trainer):
        def compute_loss(self, model, batch, *, train):
            outputs = model(batch.x)
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.y)
            return losses, {"outputs": outputs, "size": batch.x.sum(axis=1), "penalty": jnp.abs(batch.x).max()}

    trainer = make(kind=Custom, metrics=[nnx.metrics.Average("size"), nnx.metrics.Average("penalty"), nnx.metrics.Welford("penalty")])
    logged = trainer.evaluate(X, Y, batch_size=16, verbose=0)
    assert logged["mean_size"] == pytest.approx(X.sum(axis=1).mean(), rel=1e-5)
    assert logged["mean_penalty"] == pytest.approx(logged["penalty"]) == logged["welford_mean"]
    assert logged["welford_standard_deviation"] > 0


@pytest.mark.parametrize("place", ["one", "four"])
def test_nnx_metrics_with_a_custom_update_exclude_padding(place: str):
    class MAE(nnx.metrics.Average):
        def update(self, *, logits, labels, mask=None, **_):
            super().update(values=jnp.abs(logits - labels).mean(axis=-1), mask=mask)

    class Elements(nnx.metrics.Average):
        def update(self, *, logits, labels, **_):
            super().update(values=jnp.abs(logits - labels))

    class Positive(nnx.metrics.Average):
        def update(self, *, logits, labels, **_):
            super().update(values=jnp.abs(logits - labels)[:, 0], mask=labels[:, 0] > 0)

    class Everything(nnx.metrics.Average):
        def update(self, *, logits, labels, **_):
            super().update(values=jnp.abs(logits - labels)[:, 0] + 1, mask=jnp.ones(len(labels), bool))

    class Scalar(nnx.metrics.Average):
        def update(self, *, loss, mask, **_):
            assert mask.dtype == bool and mask.shape == (*loss.shape, 1)
            super().update(values=2.0)

    model, targets = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), X[:11, :1] ** 3
    trainer = make(model, place, loss="mse", metrics=[MAE(), Elements(), Positive(), Everything(), Scalar()])
    found = trainer.evaluate(X[:11], targets, batch_size=4, verbose=0)
    errors = np.abs(np.asarray(model(X[:11])) - targets)
    wanted = {"loss": (errors**2).mean(), "mae": errors.mean(), "elements": errors.mean(), "positive": errors[targets > 0].mean()}
    wanted |= {"everything": errors.mean() + 1, "scalar": 2.0}
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("length", [4, 5])
def test_masks_of_nnx_metrics_can_be_multiplied_by_masks_of_tokens(length: int):
    class Tokens(nnx.metrics.Average):
        def update(self, *, logits, labels, mask, **_):
            super().update(values=logits, mask=mask * (labels != 0))

    logits, labels, is_real = jnp.arange(4.0 * length).reshape(4, length), jnp.arange(4 * length).reshape(4, length) % 3, np.array([True, True, True, False])
    found = foreign.adapt_nnx(Tokens())["tokens"].update(logits, labels, is_real).compute()
    assert found == pytest.approx(float(logits[:3][labels[:3] != 0].mean()))


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda self, add, e, mask: nnx.metrics.Average.update(self, values=e, mask=mask), r"Odd\.update must call super\(\)\.update, which excludes padding"),
        (
            lambda self, add, e, mask: add(values=e.reshape(-1)),
            r"values must have one value per example, \[4, \.\.\.\]\. Received: \[20\]",
        ),
        (
            lambda self, add, e, mask: add(values=e, mask=jnp.ones(5)),
            r"mask must have the leading axes of values, \[4, 5\]\. Received: \[5\]",
        ),
        (lambda self, add, e, mask: add(values=e, mask=jnp.ones((1, 5))), r"of values, \[4, 5\]\. Received: \[1, 5\]"),
        (lambda self, add, e, mask: add(values=e[:, 0], mask=mask * e[:, 0]), r"of values, \[4\]\. Received: \[4, 4\]\. It need not"),
    ],
)
def test_nnx_metrics_that_could_include_padding_raise_an_error(update: Any, message: str):
    class Odd(nnx.metrics.Average):
        def update(self, *, logits, labels, mask, **_):
            update(self, super().update, logits - labels, mask)

    with pytest.raises(MetricError, match=message):
        foreign.adapt_nnx(Odd())["odd"].update(jnp.ones((4, 5)), jnp.zeros((4, 5)), np.ones(4))


# -- a module for evaluation --


@pytest.mark.slow
def test_an_eval_model_uses_the_variables_of_the_model():
    class Modal(nnx.Module):
        def __init__(self, rngs, *, deterministic_config):
            self.config, self.out = deterministic_config, nnx.Linear(4, 3, rngs=rngs)
            if deterministic_config:
                self.scale = nnx.Cache(jnp.float32(2))

        def __call__(self, x):
            return self.out(x) * (self.scale[...] if self.config else 1)

    model = Modal(nnx.Rngs(0), deterministic_config=False)
    trainer = make(model, eval_model=Modal(nnx.Rngs(1), deterministic_config=True))
    fit(trainer)
    np.testing.assert_allclose(trainer.predict(X), 2 * model(X), rtol=1e-5, atol=1e-6)
    sizes = [nnx.Sequential(nnx.Linear(4, width, rngs=nnx.Rngs(0))) for width in (3, 4)]
    with pytest.raises(ModelError, match=r"wrong shape: params/layers/0/bias \(4,\), not \(3,\), params/layers/0/kernel"):
        make(sizes[0], eval_model=sizes[1])


# -- mistakes --


class Growing(nnx.Module):
    def __init__(self):
        self.out = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        self.seen = nnx.Cache(x.mean())
        return self.out(x)


class Careless(nnx.Module):
    def __init__(self):
        self.out, self.drop = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.out(x))


MISTAKES: dict[str, Any] = {
    "a class": (lambda: fitflax.Trainer(Net), ConfigError, r"Received: the class Net\. Call it: Trainer\(Net\(\.\.\., rngs=nnx.Rngs\(0\)\)\)"),
    "a bridge of a bridge": (
        lambda: fitflax.Trainer(nnx.bridge.ToNNX(nnx.bridge.ToNNX(nn.Dense(1), rngs=nnx.Rngs(0)))),
        ConfigError,
        "must wrap an instance of a linen module. Received: a ToNNX",
    ),
    "a bridge there and back": (
        lambda: fitflax.Trainer(nnx.bridge.ToNNX(nnx.bridge.ToLinen(nnx.Linear, args=(4, 3)), rngs=nnx.Rngs(0))),
        ConfigError,
        "Received: a ToLinen. Pass such an instance, or an NNX module",
    ),
    "another kind of eval_model": (lambda: fitflax.Trainer(Net(nnx.Rngs(0)), eval_model=nn.Dense(3)), ConfigError, "must be of the same kind as the model"),
    "trainable of linen": (lambda: fitflax.Trainer(nn.Dense(3), trainable=nnx.Param), ConfigError, "a filter for the variables of an NNX module"),
    "no filter": (lambda: fitflax.Trainer(Net(nnx.Rngs(0)), trainable=3), ConfigError, "takes an NNX filter, such as nnx.Param or nnx.LoRAParam"),
    "nothing to train": (lambda: make(trainable=nnx.LoRAParam), ConfigError, "selects no variable of Net, which has"),
    "an optimizer of NNX": (
        lambda: make().compile(nnx.Optimizer(Net(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)),
        OptimizerError,
        r"Received: an nnx.Optimizer\. Pass its transformation: compile\(optimizer.tx, \.\.\.\)",
    ),
    "a variable that is added": (
        lambda: fit(make(Growing())),
        ModelError,
        r"Growing adds variables while it runs: seen \(Cache\)\. Create all variables in __init__",
    ),
    "a bridge without variables": (
        lambda: fit(make(nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)))),
        ModelError,
        r"lazy_init\(x\)",
    ),
    "shapes": (lambda: fit(make(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))), ModelError, "holds shapes instead of arrays"),
    "no random stream": (
        lambda: fit(make(Careless())),
        ModelError,
        r"nnx.Dropout\(rate, rngs=rngs\)",
    ),
    "inputs of another width": (lambda: make().fit(X[:, :2], Y, verbose=0), ModelError, r"Net cannot be run in training mode on inputs float32\[\d+,2\]"),
    "a triple as loss": (
        lambda: fit(make(kind=type("Own", (fitflax.Trainer,), {"compute_loss": lambda self, model, batch, *, train: (1, 2, 3)}))),
        LossError,
        r"must return values, or \(values, aux\)",
    ),
    "linen's signature": (
        lambda: make(kind=type("Own", (fitflax.Trainer,), {"compute_loss": lambda self, params, model_state, batch, *, rngs, train: 0})),
        ConfigError,
        r"is called as compute_loss\(model, batch, train=train\)",
    ),
    "a metric that cannot be merged": (
        lambda: make(metrics=[type("Largest", (nnx.metrics.Metric,), {"__init__": lambda self: None})()]),
        MetricError,
        "Largest is not an nnx.metrics.Average",
    ),
    "merging linen": (lambda: make(nn.Dense(3)).merge({}, {}), ConfigError, "Only NNX modules hold their variables"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_one_clear_error(name: str):
    act, kind, match = MISTAKES[name]
    with pytest.raises(kind, match=match) as caught:
        act()
    assert caught.value.__cause__ is not caught.value


def test_changing_the_module_between_runs_is_an_error_that_names_the_change():
    model = Net(nnx.Rngs(0))
    trainer = make(model)
    fit(trainer, epochs=1)
    out = model.out
    model.out = nnx.Linear(8, 3, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"after the trainer was created: out/bias was removed\. Create a new Trainer"):
        fit(trainer, epochs=1)
    model.out = out
    model.depth = 5
    with pytest.raises(ModelError, match="its configuration"):
        trainer.evaluate(X, Y, verbose=0)
    model.depth = 2
    trainer.evaluate(X, Y, verbose=0)


def test_arrays_that_were_donated_elsewhere_are_named_in_the_error():
    model = Net(nnx.Rngs(0))
    trainer = make(model)
    jax.tree.map(lambda leaf: leaf.delete(), nnx.state(model, nnx.Param))
    with pytest.raises(ModelError, match="was donated"):
        trainer.predict(X)


def test_a_trainer_cannot_be_pickled():
    with pytest.raises(TypeError):
        pickle.dumps(make())


def test_functions_can_be_the_model_of_a_trainer():
    module = nn.Dense(3)
    trainer = make((module.init, module.apply))
    linen = make(nn.Dense(3))
    assert fit(trainer).history == fit(linen).history
    np.testing.assert_array_equal(trainer.predict(X), linen.predict(X))
    assert adapt_nnx(Net(nnx.Rngs(0)), transient=())[0].name == "Net"
