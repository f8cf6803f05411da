"""`fit` and `evaluate`: numbers, log keys, and the rules of steps, epochs and validation."""

import gc
import itertools
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fitflax
from fitflax import metrics
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, TerminateOnNaN
from fitflax.callbacks.callback_list import CallbackList
from fitflax.data import Shard
from fitflax.errors import ConfigError, DataError, FitflaxWarning, LossError, MetricError
from fitflax.logs import StepValues
from fitflax.loops import fit, training_loop
from fitflax.loops.session import DataAdapter
from fitflax.loops.training_loop import Run
from fitflax.parallel import DataParallel
from fitflax.steps.loss import Objective

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
Y = RNG.normal(size=(12, 3)).astype(np.float32)
W = RNG.uniform(0.5, 2.0, size=12).astype(np.float32)


def F():
    return nn.Dense(3, use_bias=False, kernel_init=nn.initializers.ones)


def I():  # noqa: E743 (the name that the table of cases gives it)
    return nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)


def make(model, loss="mse", metrics=None, *, rate=0.01, optimizer=None, trainer=fitflax.Trainer, seed=0, compile_kwargs=None, **kwargs):
    made = trainer(model, seed=seed, parallel=DataParallel(jax.devices()[:1]), **kwargs)
    made.compile(optimizer or optax.sgd(rate), loss=loss, metrics=metrics, **(compile_kwargs or {}))
    return made


def ones(rows):
    return np.ones((rows, 4), np.float32), np.zeros((rows, 3), np.float32)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(as_data, a), jax.tree.map(as_data, b))
    return jax.tree.structure(a) == jax.tree.structure(b)


def as_data(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


class Seen(Callback):
    """Counts the batches of each epoch and of each evaluation, and keeps the running logs of every batch."""

    def on_train_begin(self, logs):
        self.epochs, self.tests, self.logs = [], [], []

    def on_epoch_begin(self, epoch, logs):
        self.epochs.append(0)

    def on_train_batch_end(self, batch, logs):
        self.epochs[-1] += 1
        self.logs.append(dict(logs))

    def on_test_begin(self, logs):
        self.tests.append(0)

    def on_test_batch_end(self, batch, logs):
        self.tests[-1] += 1


class ByMode(nn.Module):
    """Returns its inputs when training, and zeros otherwise; has one parameter that nothing depends on."""

    @nn.compact
    def __call__(self, x, train):
        unused = self.param("unused", nn.initializers.zeros, ())
        return (x if train else jnp.zeros_like(x)) + 0 * unused


class TwoOutputs(nn.Module):
    as_dict: bool = False

    @nn.compact
    def __call__(self, x):
        a, b = nn.Dense(1, name="a")(x), nn.Dense(2, name="b")(x)
        return {"a": a, "b": b} if self.as_dict else (a, b)


# --- Numbers with known answers (cases of Keras) ---


def test_case_1_losses_of_three_epochs_equal_those_of_keras():
    history = make(F()).fit(*ones(100), batch_size=20, epochs=3, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [14.4024, 10.9913, 8.3882], atol=1e-4)


def test_case_2_evaluate_and_predict_return_the_expected_numbers():
    trainer = make(F(), metrics=["mse"])
    trainer.build(ones(4))
    assert trainer.evaluate(*ones(100), batch_size=16, verbose=0) == {"loss": 16.0, "mse": 16.0}
    outputs = trainer.predict(ones(100)[0])
    assert type(outputs) is np.ndarray
    np.testing.assert_array_equal(outputs, np.full((100, 3), 4.0))


def test_case_3_the_module_knows_whether_it_is_training():
    trainer = make(ByMode(), rate=0.0)
    x, y = np.ones((8, 1), np.float32), np.zeros((8, 1), np.float32)
    assert trainer.fit(x, y, verbose=0).history == {"loss": [1.0]}
    assert trainer.evaluate(x, y, verbose=0) == {"loss": 0.0}
    np.testing.assert_array_equal(trainer.predict(x), np.zeros((8, 1)))


def test_case_4_loss_weights_scale_the_loss():
    trainer = make(F(), compile_kwargs={"loss_weights": 0.2})
    history = trainer.fit(*ones(40), batch_size=20, epochs=3, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [3.18298, 3.11562, 3.04968], atol=1e-5)


@pytest.mark.slow
def test_case_5_a_frozen_model_has_the_same_loss_for_any_batch_size():
    x, y = RNG.normal(size=(100, 4)).astype(np.float32), RNG.normal(size=(100, 3)).astype(np.float32)
    expected = np.mean((x.sum(1, keepdims=True) - y) ** 2)
    for batch_size in (80, 100):
        trainer = make(F(), rate=0.0)
        fitted = trainer.fit(x, y, batch_size=batch_size, verbose=0).history["loss"][0]
        evaluated = trainer.evaluate(x, y, batch_size=batch_size, verbose=0)["loss"]
        np.testing.assert_allclose([fitted, evaluated], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "labels",
    [np.array([0, 1, 0, 2]), np.array([[0], [1], [0], [2]]), np.eye(3, dtype=np.float32)[[0, 1, 0, 2]]],
    ids=["labels", "column", "one-hot"],
)
@pytest.mark.mostly_slow
def test_case_6_class_weights_are_equivalent_to_sample_weights(labels):
    loss = "categorical_crossentropy" if labels.shape == (4, 3) else "sparse_categorical_crossentropy"
    x = RNG.normal(size=(4, 4)).astype(np.float32)
    by_class = make(nn.Dense(3), loss, rate=0.1)
    by_class.fit(x, labels, class_weight={0: 1, 1: 2, 2: 3}, verbose=0)
    by_sample = make(nn.Dense(3), loss, rate=0.1)
    by_sample.fit(x, labels, sample_weight=np.array([1, 2, 1, 3]), verbose=0)
    assert same(by_class.state, by_sample.state)
    unweighted = make(nn.Dense(3), loss, rate=0.1)
    unweighted.fit(x, labels, verbose=0)
    assert not np.array_equal(by_class.state.params["kernel"], unweighted.state.params["kernel"])


def test_case_6_labels_of_class_weight_zero_may_be_outside_of_the_classes():
    x, labels = np.eye(4, dtype=np.float32), np.array([0, 255, 2, 1], np.int32)
    some, whole = make(nn.Dense(3), "sparse_categorical_crossentropy"), make(nn.Dense(3), "sparse_categorical_crossentropy")
    history = some.fit(x, labels, class_weight={255: 0}, batch_size=4, verbose=0).history
    is_counted = labels != 255
    assert history["loss"] == pytest.approx(whole.fit(x[is_counted], labels[is_counted], batch_size=3, verbose=0).history["loss"], rel=1e-5)
    with pytest.raises(DataError, match="y holds labels from 1 to 255"):
        some.fit(x, labels, class_weight={0: 0}, verbose=0)
    with pytest.raises(DataError, match="y holds labels from 0 to 255"):  # The check of `fit` was with class weights.
        some.evaluate(x, labels, verbose=0)


def test_case_6_class_weights_of_all_examples_are_not_computed_if_the_loss_has_no_labels_to_check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Objective, "check_labels", lambda *_: pytest.fail("The class weights were computed to check labels."))
    make(nn.Dense(1), "mse").fit(np.zeros((4, 4), np.float32), np.ones((4, 1), np.float32), class_weight={1: 2.0}, verbose=0)


def test_case_6_labels_without_a_class_weight_have_weight_one():
    x, y = RNG.normal(size=(4, 4)).astype(np.float32), np.array([0, 1, 0, 2])
    some = make(nn.Dense(3), "sparse_categorical_crossentropy").fit(x, y, class_weight={1: 2.0}, verbose=0)
    every = make(nn.Dense(3), "sparse_categorical_crossentropy").fit(x, y, class_weight={0: 1.0, 1: 2.0, 2: 1.0}, verbose=0)
    assert some.history == every.history


def test_case_6_class_and_sample_weights_multiply():
    x, y = RNG.normal(size=(4, 4)).astype(np.float32), np.array([0, 1, 0, 2])
    both = make(nn.Dense(3), "sparse_categorical_crossentropy").fit(x, y, sample_weight=np.array([1, 2, 3, 4]), class_weight={1: 2.0}, verbose=0)
    one = make(nn.Dense(3), "sparse_categorical_crossentropy").fit(x, y, sample_weight=np.array([1, 4, 3, 4]), verbose=0)
    assert both.history == one.history


def test_case_6_a_class_that_is_not_an_integer_is_an_error():
    with pytest.raises(ValueError, match=r"class_weight must map integer labels to weights of at least 0. Received: 'a': 1"):
        make(nn.Dense(3)).fit(X, Y, class_weight={"a": 1}, verbose=0)


@pytest.mark.slow
def test_case_7_outputs_in_a_tuple_are_numbered_from_1():
    y = (Y[:, :1], Y[:, :2])
    trainer = make(TwoOutputs(), "mse", [["mean_squared_error"], ["mean_squared_error"]])
    history = trainer.fit(X, y, verbose=0)
    assert list(history.history) == [
        "loss",
        "output_1_loss",
        "output_2_loss",
        "output_1_mean_squared_error",
        "output_2_mean_squared_error",
    ]
    logs = {key: values[0] for key, values in history.history.items()}
    np.testing.assert_allclose(logs["loss"], logs["output_1_loss"] + logs["output_2_loss"], rtol=1e-6)
    np.testing.assert_allclose(logs["output_1_loss"], logs["output_1_mean_squared_error"], rtol=1e-6)
    # One metric for several outputs measures each of them.
    assert set(make(TwoOutputs(), "mse", "mean_squared_error").fit(X, y, verbose=0).history) == set(history.history)


def test_case_7_an_output_with_loss_none_is_skipped():
    trainer = make(TwoOutputs(), ["mse", None], rate=0.1)
    trainer.build((X, (Y[:, :1], Y[:, :2])))
    before = trainer.state.params
    history = trainer.fit(X, (Y[:, :1], Y[:, :2]), verbose=0).history
    assert list(history) == ["loss", "output_1_loss"] and history["loss"] == history["output_1_loss"]
    assert same(before["b"], trainer.state.params["b"])
    assert not np.array_equal(before["a"]["kernel"], trainer.state.params["a"]["kernel"])


def test_case_8_compiling_again_changes_the_log_keys_and_keeps_the_state():
    optimizer = optax.sgd(0.01, momentum=0.9)
    trainer = make(F(), metrics=["mean_squared_error"], optimizer=optimizer)
    assert list(trainer.fit(*ones(8), verbose=0).history) == ["loss", "mean_squared_error"]
    before = trainer.state
    trainer.compile(optimizer, loss="mse", metrics=["mean_absolute_error"])
    assert same(before, trainer.state) and trainer.step == 1
    assert list(trainer.evaluate(*ones(8), verbose=0)) == ["loss", "mean_absolute_error"]
    assert list(trainer.fit(*ones(8), verbose=0).history) == ["loss", "mean_absolute_error"]
    assert trainer.step == 2


def test_case_10_logs_at_the_end_of_a_batch_are_running_means():
    seen = Seen()
    x = np.arange(4, dtype=np.float32)[:, None]
    make(I(), rate=0.0).fit(x, np.zeros((4, 1)), batch_size=1, shuffle=False, callbacks=[seen], verbose=0)
    np.testing.assert_allclose([logs["loss"] for logs in seen.logs], [0, 0.5, 5 / 3, 3.5], rtol=1e-6)


def test_case_11_a_stop_at_the_fifth_batch_of_endless_data_runs_exactly_five_steps():
    seen, trainer = Seen(), make(F())
    ends = []
    stop = LambdaCallback(
        on_train_batch_end=lambda batch, logs: trainer.stop("enough") if batch == 4 else None,
        on_epoch_end=lambda epoch, logs: ends.append(sorted(logs)),
        on_train_end=lambda logs: ends.append("train"),
    )
    with pytest.warns(FitflaxWarning, match="never ends"):
        history = trainer.fit(itertools.cycle([ones(4)]), steps=1000, validation_data=ones(4), callbacks=[seen, stop], verbose=0)
    assert (trainer.step, seen.epochs, seen.tests, trainer.stop_reason) == (5, [5], [1], "enough")
    assert ends == [["loss", "val_loss"], "train"] and list(history.history) == ["loss", "val_loss"]


def test_case_12_step_counts_limit_endless_data():
    seen = Seen()
    endless = itertools.cycle([ones(4)])
    validation = itertools.cycle([ones(4)])
    make(F()).fit(endless, epochs=2, steps_per_epoch=3, validation_data=validation, validation_steps=4, callbacks=[seen], verbose=0)
    assert (seen.epochs, seen.tests) == ([3, 3], [4, 4])


@pytest.mark.parametrize(("save_last", "steps"), [(False, [15, 30, 45]), (True, [15, 30, 45, 50])])
def test_case_16_checkpoints_every_fifteen_steps_are_at_the_ends_of_epochs_3_6_and_9(tmp_path, save_last, steps):
    checkpoint = ModelCheckpoint(tmp_path / "run", every=fitflax.every(steps=15), keep=None, save_last=save_last)
    make(F()).fit(*ones(20), batch_size=4, epochs=10, callbacks=[checkpoint], verbose=0)
    assert checkpoint.store.steps() == steps
    assert [checkpoint.store.restore(step).metadata["metrics"].keys() == {"train"} for step in steps] == [True] * len(steps)


@pytest.mark.parametrize(("rows", "batch_size", "expected"), [(34, 16, [16, 16, 2]), (100, 32, [32, 32, 32, 4]), (5, 32, [5])])
def test_case_18_the_last_batch_of_arrays_is_the_short_one(rows, batch_size, expected):
    loop = make(F()).train_loop(ones(rows), steps=len(expected), batch_size=batch_size)
    ends = [0, *(checkpoint.data_position.examples + rows * checkpoint.data_position.passes for checkpoint in loop)]
    assert np.diff(ends).tolist() == expected


def test_case_18_the_default_batch_size_is_32():
    seen = Seen()
    make(F()).fit(*ones(100), callbacks=[seen], verbose=0)
    assert seen.epochs == [4]


@pytest.mark.slow
def test_case_18_a_validation_split_is_the_last_part_before_shuffling():
    x = np.arange(100, dtype=np.float32)[:, None]
    trainer = make(I(), rate=0.0, metrics={"mean": lambda outputs, targets: outputs})
    history = trainer.fit(x, np.zeros((100, 1)), validation_split=0.2, verbose=0).history
    np.testing.assert_allclose(history["val_mean"], [x[80:].mean()], rtol=1e-6)
    np.testing.assert_allclose(history["mean"], [x[:80].mean()], rtol=1e-6)


def test_a_validation_split_also_splits_sample_weights():
    x, y, w = np.arange(10, dtype=np.float32)[:, None], np.zeros((10, 1)), np.arange(10, dtype=np.float32)
    history = make(I(), rate=0.0).fit(x, y, w, validation_split=0.3, verbose=0).history
    np.testing.assert_allclose(history["val_loss"], [np.average(x[7:, 0] ** 2, weights=w[7:])], rtol=1e-6)
    np.testing.assert_allclose(history["loss"], [np.average(x[:7, 0] ** 2, weights=w[:7])], rtol=1e-6)


def test_case_19_predict_keeps_the_order_across_batches_of_varying_sizes():
    sizes = [2, 3, 4, 2, 3, 4]
    ends = np.cumsum([0, *sizes])
    x = np.arange(18, dtype=np.float32)[:, None]
    batches = [x[a:b] for a, b in itertools.pairwise(ends)]
    trainer = make(I())
    trainer.build((x, x))
    with pytest.warns(FitflaxWarning, match="batch of"):
        outputs = trainer.predict(lambda: iter(batches))
    np.testing.assert_array_equal(outputs, x)


def test_case_20_validation_happens_at_the_listed_epochs():
    seen = Seen()
    history = make(F()).fit(*ones(4), epochs=4, validation_data=ones(4), validation_freq=[1, 4], callbacks=[seen], verbose=0).history
    assert (len(history["loss"]), len(history["val_loss"]), len(seen.tests)) == (4, 2, 2)


def test_case_35_a_last_step_that_is_a_multiple_of_everything_validates_and_saves_once(tmp_path):
    seen, saved = Seen(), []

    class Counting(ModelCheckpoint):
        def on_checkpoint(self, checkpoint):
            saved.append(checkpoint.step)
            super().on_checkpoint(checkpoint)

    every = fitflax.every(steps=2) | fitflax.every(epochs=1) | fitflax.every(steps=4)
    shown = []
    watch = LambdaCallback(lambda checkpoint: shown.append(checkpoint.step))
    callbacks = [seen, watch, Counting(tmp_path / "run", every=every)]
    make(F()).fit(*ones(8), batch_size=4, steps=4, epochs=2, validation_data=ones(4), validation_freq=fitflax.every(steps=4), callbacks=callbacks, verbose=0)
    assert (len(seen.tests), saved, shown) == (1, [2, 4], [2, 4])


def test_case_35_one_of_two_callbacks_is_enough_to_stop():
    trainer = make(F())
    callbacks = [LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.stop("first") if epoch == 1 else None), Seen()]
    history = trainer.fit(*ones(4), epochs=5, callbacks=callbacks, verbose=0)
    assert (history.epoch, trainer.stop_reason) == ([0, 1], "first")


# --- Losses and weights ---


@pytest.mark.slow
def test_weighted_losses_are_weighted_means_over_all_examples():
    trainer = make(F(), metrics=["mse"], rate=0.0, compile_kwargs={"weighted_metrics": ["mse", "mae"]})
    logs = trainer.fit(X, Y, W, batch_size=5, verbose=0).history
    errors = X.sum(1, keepdims=True) - Y
    np.testing.assert_allclose(logs["loss"], [np.average((errors**2).mean(1), weights=W)], rtol=1e-6)
    np.testing.assert_allclose(logs["mse"], [(errors**2).mean()], rtol=1e-6)
    np.testing.assert_allclose(logs["weighted_mse"], logs["loss"], rtol=1e-6)
    np.testing.assert_allclose(logs["mae"], [np.average(np.abs(errors).mean(1), weights=W)], rtol=1e-6)
    evaluated = trainer.evaluate(X, Y, W, batch_size=7, verbose=0)
    np.testing.assert_allclose(list(evaluated.values()), [values[0] for values in logs.values()], rtol=1e-6)
    assert list(evaluated) == list(logs)


def test_weights_per_token_are_broadcast_from_the_left():
    def squares(outputs, targets):
        return (outputs - targets) ** 2

    weights = RNG.uniform(size=(12, 3)).astype(np.float32)
    trainer = make(F(), squares, rate=0.0)
    loss = trainer.fit(X, Y, weights, batch_size=5, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, [np.average((X.sum(1, keepdims=True) - Y) ** 2, weights=weights)], rtol=1e-6)


@pytest.mark.slow
def test_an_update_uses_the_gradient_of_the_weighted_mean():
    trainer = make(F(), rate=0.1)
    trainer.fit(X, Y, W, batch_size=12, verbose=0)

    def loss(kernel):
        return jnp.sum(W * jnp.mean((X @ kernel - Y) ** 2, axis=1)) / jnp.sum(W)

    expected = np.ones((4, 3)) - 0.1 * np.asarray(jax.grad(loss)(jnp.ones((4, 3))))
    np.testing.assert_allclose(trainer.state.params["kernel"], expected, rtol=1e-5)


def test_rows_of_padding_do_not_change_updates():
    # 5 rows in batches of 4: the second batch is one row, repeated.
    trainer = make(F(), rate=0.1)
    trainer.fit(X[:5], Y[:5], batch_size=4, shuffle=False, verbose=0)
    kernel = jnp.ones((4, 3))
    for rows in (slice(0, 4), slice(4, 5)):
        kernel = kernel - 0.1 * jax.grad(lambda k, rows=rows: jnp.mean((X[rows] @ k - Y[rows]) ** 2))(kernel)
    np.testing.assert_allclose(trainer.state.params["kernel"], kernel, rtol=1e-5)


def test_an_epoch_with_only_zero_weights_changes_nothing_and_its_loss_is_nan():
    trainer = make(F(), rate=0.1)
    trainer.build((X, Y))
    before = trainer.state.params
    with pytest.warns(FitflaxWarning, match=r"all examples of 'train' are 0, so weighted values such as 'loss' are NaN") as caught:
        assert np.isnan(trainer.fit(X, Y, np.zeros(12), epochs=2, verbose=0).history["loss"]).tolist() == [True, True]
    assert len(caught) == 1
    assert same(before, trainer.state.params)


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"steps_per_call": 4}], ids=str)
@pytest.mark.mostly_slow
def test_a_batch_with_only_zero_weights_adds_nothing_to_its_epoch(options):
    weights = np.where(np.arange(12) < 4, 0.0, 1.0)
    with jax.debug_nans(True):  # A running mean without weight is no fault.
        trainer, other = (make(F(), rate=0.1, compile_kwargs=options) for _ in range(2))
        nan = TerminateOnNaN()
        loss = trainer.fit(X, Y, weights, batch_size=4, shuffle=False, callbacks=[nan], verbose=0).history["loss"]
        assert loss == other.fit(X[4:], Y[4:], batch_size=4, shuffle=False, verbose=0).history["loss"]
    assert nan.bad_step is None
    assert same(trainer.state.params, other.state.params)


def test_validation_with_only_zero_weights_is_never_an_improvement(tmp_path):
    trainer = make(F(), rate=0.1)
    stop, best = EarlyStopping(patience=2), BestCheckpoint(tmp_path, monitor="val_loss")
    with pytest.warns(FitflaxWarning, match="all examples of 'val' are 0") as caught:
        history = trainer.fit(X, Y, epochs=5, validation_data=(X, Y, np.zeros(12)), callbacks=[stop, best], verbose=0).history
    assert len(caught) == 1
    assert np.isnan(history["val_loss"]).tolist() == [True, True]
    assert (stop.best, best.best) == (None, None)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("module", [F(), TwoOutputs(as_dict=True)], ids=["one output", "two outputs"])
def test_a_custom_step_without_weight_adds_nothing_to_its_epoch(module):
    class Custom(fitflax.Trainer):
        def train_step(self, state, batch):
            return super().train_step(state, batch)

    y = {"a": Y[:, :1], "b": Y[:, :2]} if isinstance(module, TwoOutputs) else Y
    weights, nan = np.where(np.arange(12) < 4, 0.0, 1.0), TerminateOnNaN()
    found = []
    for kind in (fitflax.Trainer, Custom):
        trainer = make(module, rate=0.1, trainer=kind)
        found.append(trainer.fit(X, y, weights, batch_size=4, shuffle=False, callbacks=[nan], verbose=0).history["loss"])
        assert nan.bad_step is None
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.slow
def test_a_sown_loss_does_not_hide_that_the_others_have_no_weight():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "penalty", jnp.float32(2))
            return nn.Dense(3)(x)

    trainer = make(Sows())
    trainer.build((X, Y))
    assert trainer.evaluate(X, Y, verbose=0)["loss"] > 2
    with pytest.warns(FitflaxWarning, match="'eval' are 0"):
        assert np.isnan(trainer.evaluate(X, Y, sample_weight=np.zeros(12), verbose=0)["loss"])


def test_a_loss_of_only_the_outputs_gets_no_targets():
    def size(outputs):
        return jnp.mean(outputs**2, axis=-1)

    trainer = make(F(), size, rate=0.0)
    expected = np.mean(X.sum(1) ** 2)
    for data in (lambda: [(X, ())], lambda: [(X,)], lambda: [X], X, (X,), (X, ())):
        np.testing.assert_allclose(trainer.fit(data, verbose=0).history["loss"], [expected], rtol=1e-6)


def test_a_loss_function_gets_all_outputs_of_a_module_that_has_several():
    def both(outputs, targets):
        a, b = outputs
        return jnp.mean((a - targets) ** 2, axis=-1) + jnp.mean(b**2, axis=-1)

    history = make(TwoOutputs(), both, rate=0.0).fit(X, Y[:, :1], verbose=0).history
    assert list(history) == ["loss"]


class Nested(nn.Module):
    softmax: bool = False

    @nn.compact
    def __call__(self, x):
        c = nn.Dense(2, name="c")(x)
        return {"a": nn.Dense(1, name="a")(x), "b": {"d": (nn.Dense(3, name="d")(x), None), "c": nn.softmax(c) if self.softmax else c}}


NESTED_Y = {"a": Y[:, :1], "b": {"c": (X[:, 0] > 0).astype(np.int32), "d": (Y[:, :3], None)}}
NESTED_LOSS = {"a": "mse", "b": {"c": "sparse_categorical_crossentropy", "d": ["mae", None]}}


def test_losses_of_nested_outputs_are_named_by_nested_dicts():
    trainer = make(Nested(), NESTED_LOSS, rate=0.1, compile_kwargs={"loss_weights": {"a": 2.0, "b": {"c": 3.0, "d": 0.5}}})
    trainer.build((X, NESTED_Y))
    params = trainer.state.params

    def hand_written(params):
        outputs = Nested().apply({"params": params}, X)
        a = jnp.mean((outputs["a"] - NESTED_Y["a"]) ** 2)
        c = optax.losses.softmax_cross_entropy_with_integer_labels(outputs["b"]["c"], NESTED_Y["b"]["c"]).mean()
        d = jnp.abs(outputs["b"]["d"][0] - NESTED_Y["b"]["d"][0]).mean()
        return 2 * a + 3 * c + 0.5 * d, {"a_loss": a, "b/c_loss": c, "b/d/output_1_loss": d}

    (loss, logged), grads = jax.value_and_grad(hand_written, has_aux=True)(params)
    history = trainer.fit(X, NESTED_Y, batch_size=12, verbose=0).history
    expected = {key: float(value) for key, value in {"loss": loss, **logged}.items()}
    assert {key: values[0] for key, values in history.items()} == pytest.approx(expected, rel=1e-5)
    jax.tree.map(lambda new, old, grad: np.testing.assert_allclose(new, old - 0.1 * grad, rtol=1e-5, atol=1e-6), trainer.state.params, params, grads)


@pytest.mark.slow
def test_mistakes_in_losses_of_nested_outputs_name_the_output():
    for loss, weights, message in (
        ({"b": {"e": "mse"}}, None, r"names the outputs \['e'\], but the outputs in 'b' are \['d', 'c'\]"),
        ({"a": {"e": "mse"}}, None, r"several losses for the output 'a', which is one output: float32\[12,1\]"),
        ({"a": "mse"}, {"a": {"e": 1.0}}, r"several weights for the output 'a', which has one loss"),
    ):
        with pytest.raises((LossError, ConfigError), match=message):
            make(Nested(), loss, compile_kwargs={"loss_weights": weights}).fit(X, NESTED_Y, verbose=0)
    with pytest.raises(LossError, match=r"The output 'b/c' has no targets. Received: targets for \['e'\]"):
        make(Nested(), {"a": "mse", "b": {"c": "mse"}}).fit(X, {"a": Y[:, :1], "b": {"e": Y[:, :2]}}, verbose=0)
    with pytest.raises(DataError, match=r"y\['b/c'\] holds labels from 2 to 2, but the module has 2 outputs"):
        make(Nested(), NESTED_LOSS).fit(X, {**NESTED_Y, "b": {**NESTED_Y["b"], "c": np.full(12, 2)}}, verbose=0)
    with pytest.warns(FitflaxWarning, match="The module's output 'b/c' ends with a softmax"):
        make(Nested(softmax=True), NESTED_LOSS).fit(X, NESTED_Y, verbose=0)


@pytest.mark.slow
def test_a_run_with_losses_of_nested_outputs_resumes_inside_an_epoch(tmp_path):
    def run(directory, ends):
        for steps in ends:
            trainer = make(Nested(), NESTED_LOSS)
            trainer.fit(X, NESTED_Y, batch_size=4, steps=steps, callbacks=[ModelCheckpoint(tmp_path / directory)], resume="auto", verbose=0)
        return trainer

    whole, parts = run("whole", [6]), run("parts", [2, 6])
    assert whole.history.history == parts.history.history
    assert same(whole.state.params, parts.state.params)


@pytest.mark.slow
def test_losses_that_are_named_by_output_are_weighted_by_name():
    y = {"a": Y[:, :1], "b": Y[:, :2]}
    trainer = make(TwoOutputs(as_dict=True), {"a": "mse", "b": "mae"}, {"b": ["mse"]}, rate=0.0, compile_kwargs={"loss_weights": {"a": 2.0, "b": 0.5}})
    logs = {key: values[0] for key, values in trainer.fit(X, y, verbose=0).history.items()}
    assert list(logs) == ["loss", "a_loss", "b_loss", "b_mse"]
    outputs = trainer.predict(X)
    np.testing.assert_allclose(logs["a_loss"], np.mean((outputs["a"] - y["a"]) ** 2), rtol=1e-5)
    np.testing.assert_allclose(logs["b_loss"], np.mean(np.abs(outputs["b"] - y["b"])), rtol=1e-5)
    np.testing.assert_allclose(logs["loss"], 2 * logs["a_loss"] + 0.5 * logs["b_loss"], rtol=1e-6)


# --- Log keys ---


def keys_of(metrics=None, weighted=None, **kwargs):
    trainer = make(F(), metrics=metrics, compile_kwargs={"weighted_metrics": weighted}, **kwargs)
    trainer.build((X, Y))
    return list(trainer.evaluate(X, Y, verbose=0))


def error_rate(outputs, targets):
    return jnp.mean(jnp.abs(outputs - targets), axis=-1)


def loss(outputs, targets):
    return error_rate(outputs, targets)


@pytest.mark.parametrize(
    ("given", "weighted", "expected"),
    [
        ("mae", None, ["mae"]),
        (["mae", "mean_absolute_error"], None, ["mae", "mean_absolute_error"]),
        ([metrics.Mean(error_rate, name="mine")], None, ["mine"]),
        ([error_rate], None, ["error_rate"]),
        ({"e": error_rate, "m": "mae"}, None, ["e", "m"]),
        (["mae", "mae", "mae"], None, ["mae", "mae_1", "mae_2"]),
        (["mae"], ["mae", "mse"], ["mae", "weighted_mae", "mse"]),
        (["mae"], ["mae", "mae"], ["mae", "weighted_mae", "weighted_mae_1"]),
        ([loss], None, ["loss_1"]),
        (None, [loss], ["weighted_loss"]),
        (["rmse", "r2"], None, ["rmse", "r2"]),
    ],
)
@pytest.mark.mostly_slow
def test_log_keys_are_what_the_user_wrote(given, weighted, expected):
    assert keys_of(given, weighted) == ["loss", *expected]


def test_values_in_logs_history_and_evaluate_are_python_floats():
    seen = Seen()
    trainer = make(F(), metrics=["mae"])
    history = trainer.fit(X, Y, validation_data=(X, Y), callbacks=[seen], verbose=0)
    values = [*seen.logs[0].values(), *trainer.evaluate(X, Y, verbose=0).values(), *itertools.chain(*history.history.values())]
    assert {type(value) for value in values} == {float}


def test_the_metrics_group_of_validation_is_val_or_the_name_of_its_set():
    checkpoints = []
    watch = LambdaCallback(lambda checkpoint: checkpoints.append(checkpoint.metrics))
    one = make(F(), metrics=["mae"]).fit(X, Y, validation_data=(X, Y), callbacks=[watch], verbose=0)
    assert list(one.history) == ["loss", "mae", "val_loss", "val_mae"]
    sets = {"dev": (X[:5], Y[:5]), "test": (X[5:], Y[5:])}
    two = make(F(), metrics=["mae"]).fit(X, Y, validation_data=sets, callbacks=[watch], verbose=0)
    assert list(two.history) == ["loss", "mae", "dev_loss", "dev_mae", "test_loss", "test_mae"]
    assert {group: list(values) for group, values in checkpoints[0].items()} == {"train": ["loss", "mae"], "val": ["loss", "mae"]}
    assert list(checkpoints[1]) == ["train", "dev", "test"]
    assert checkpoints[1]["dev"]["mae"] == two.history["dev_mae"][0]


def test_no_value_in_the_history_is_read_from_a_clock():
    assert list(make(F()).fit(X, Y, verbose=0).history) == ["loss"]


# --- Steps and epochs ---


def test_without_steps_and_epochs_there_is_one_epoch():
    seen = Seen()
    make(F()).fit(X, Y, batch_size=4, callbacks=[seen], verbose=0)
    assert seen.epochs == [3]
    make(F()).fit(X, Y, batch_size=4, steps_per_epoch=2, callbacks=[seen], verbose=0)
    assert seen.epochs == [2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"steps": 7}, [3, 3, 1]),
        ({"steps": 6}, [3, 3]),
        ({"epochs": 2}, [3, 3]),
        ({"steps": 4, "epochs": 2}, [3, 1]),
        ({"steps": 100, "epochs": 2}, [3, 3]),
        ({"epochs": 3, "initial_epoch": 1}, [3, 3]),
        ({"initial_epoch": 4}, [3]),
        ({"steps": 4, "initial_epoch": 4}, [3, 1]),
        ({"epochs": 2, "initial_epoch": 2}, []),
        ({"epochs": 2, "steps_per_epoch": 5}, [5, 5]),
        ({"steps": 7, "steps_per_epoch": 2}, [2, 2, 2, 1]),
    ],
    ids=str,
)
@pytest.mark.mostly_slow
def test_a_run_ends_after_its_steps_or_its_epochs(arguments, expected):
    seen = Seen()
    trainer = make(F())
    history = trainer.fit(X, Y, batch_size=4, callbacks=[seen], verbose=0, **arguments)
    assert seen.epochs == expected
    begin = arguments.get("initial_epoch", 0)
    assert history.epoch == list(range(begin, begin + len(expected)))
    assert trainer.step == sum(expected) and trainer.stop_reason is None


@pytest.mark.slow
def test_with_steps_per_epoch_one_iterator_continues_across_epochs():
    opened, taken, seen = [], [], Seen()

    def batches():
        opened.append(len(taken))
        for number in range(10):
            taken.append(number)
            yield np.full((2, 4), number, np.float32), np.zeros((2, 3), np.float32)

    trainer = make(F(), rate=0.0)
    history = trainer.fit(batches, epochs=4, steps_per_epoch=9, callbacks=[seen], verbose=0)
    assert (seen.epochs, trainer.step) == ([9, 9, 9, 9], 36)
    assert opened == [0, 10, 20, 30]
    order = np.array([*range(10)] * 4)[:36].reshape(4, 9)
    np.testing.assert_allclose(history.history["loss"], ((4.0 * order) ** 2).mean(1), rtol=1e-6)


def test_with_steps_per_epoch_arrays_continue_across_epochs():
    seen = Seen()
    make(F()).fit(*ones(20), batch_size=2, steps_per_epoch=9, epochs=4, callbacks=[seen], verbose=0)
    assert seen.epochs == [9, 9, 9, 9]


@pytest.mark.parametrize("data", [itertools.cycle([ones(2)]), itertools.repeat(ones(2))], ids=["cycle", "repeat"])
def test_endless_data_without_a_number_of_steps_is_an_error(data):
    with pytest.raises(ConfigError, match=r"never ends\. Pass steps=, or both steps_per_epoch= and epochs="):
        make(F()).fit(data, verbose=0)
    with pytest.raises(ConfigError, match=r"epochs= alone is not enough"):
        make(F()).fit(data, epochs=3, verbose=0)


def test_endless_data_without_steps_per_epoch_is_one_epoch():
    seen, trainer = Seen(), make(F())
    trainer.fit(itertools.cycle([ones(2)]), steps=7, callbacks=[seen], verbose=0)
    assert seen.epochs == [7] and trainer.stop_reason is None


def test_endless_data_with_validation_but_no_steps_per_epoch_warns_and_names_both_fixes():
    with pytest.warns(FitflaxWarning, match=r"pass steps_per_epoch= or validation_freq=every\(steps=...\)"):
        history = make(F()).fit(itertools.cycle([ones(2)]), steps=3, validation_data=ones(2), verbose=0)
    assert len(history.history["val_loss"]) == 1


def test_endless_validation_data_needs_validation_steps():
    with pytest.raises(ConfigError, match="validation_steps"):
        make(F()).fit(*ones(4), validation_data=itertools.cycle([ones(2)]), verbose=0)


def batches_of(count, rows=2):
    return [(np.full((rows, 4), number + 1, np.float32), np.zeros((rows, 3), np.float32)) for number in range(count)]


def test_a_one_shot_iterator_that_ends_early_ends_the_run():
    seen, trainer = Seen(), make(F(), rate=0.0)
    with pytest.warns(FitflaxWarning, match="ended before"):
        history = trainer.fit(iter(batches_of(3)), steps=10, callbacks=[seen], verbose=0)
    assert (trainer.step, seen.epochs, trainer.stop_reason) == (3, [3], "data_exhausted")
    # The batch that was peeked at is not replayed: each batch counts once.
    np.testing.assert_allclose(history.history["loss"], [np.mean([16, 64, 144])], rtol=1e-6)


def test_a_one_shot_iterator_is_one_epoch_without_a_warning():
    trainer = make(F())
    history = trainer.fit(iter(batches_of(3)), verbose=0)
    assert (trainer.step, history.epoch, trainer.stop_reason) == (3, [0], None)


@pytest.mark.parametrize(("count", "expected"), [(5, [2, 2, 1]), (4, [2, 2])])
def test_an_epoch_that_gets_no_batch_does_not_begin(count, expected):
    seen, trainer = Seen(), make(F())
    with pytest.warns(FitflaxWarning, match="ended before"):
        history = trainer.fit(iter(batches_of(count)), epochs=4, steps_per_epoch=2, callbacks=[seen], verbose=0)
    assert (seen.epochs, history.epoch, trainer.stop_reason) == (expected, list(range(len(expected))), "data_exhausted")


def test_a_second_epoch_of_a_one_shot_iterator_does_not_begin():
    seen, trainer = Seen(), make(F())
    with pytest.warns(FitflaxWarning, match="ended before"):
        trainer.fit(iter(batches_of(3)), epochs=2, callbacks=[seen], verbose=0)
    assert (seen.epochs, trainer.stop_reason) == ([3], "data_exhausted")


@pytest.mark.parametrize("arguments", [{"steps": 3}, {"epochs": 1, "steps_per_epoch": 3}], ids=str)
def test_no_batch_is_taken_from_a_one_shot_iterator_that_will_not_be_used(arguments):
    iterator = iter(batches_of(5))
    make(F()).fit(iterator, verbose=0, **arguments)
    assert len(list(iterator)) == 2


def test_a_second_fit_continues_a_one_shot_iterator_where_the_first_stopped():
    iterator = iter(batches_of(6))
    trainer = make(F(), rate=0.0)
    first = trainer.fit(iterator, steps=2, verbose=0).history["loss"]
    second = trainer.fit(iterator, steps=4, verbose=0).history["loss"]
    np.testing.assert_allclose([*first, *second], [np.mean([16, 64]), np.mean([144, 256, 400, 576])], rtol=1e-6)


def test_a_generator_function_is_called_again_for_each_pass():
    opened = []

    def batches():
        opened.append(True)
        yield from batches_of(2)

    seen = Seen()
    make(F()).fit(batches, epochs=3, callbacks=[seen], verbose=0)
    assert (len(opened), seen.epochs) == (3, [2, 2, 2])


def test_a_dataset_with_only_a_length_and_items_yields_its_batches():
    class Dataset:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return batches_of(3)[index]

    seen = Seen()
    make(F()).fit(Dataset(), epochs=2, callbacks=[seen], verbose=0)
    assert seen.epochs == [3, 3]


def test_drop_remainder_omits_the_short_batch():
    seen, trainer = Seen(), make(F())
    trainer.fit(*ones(10), batch_size=4, drop_remainder=True, epochs=2, callbacks=[seen], verbose=0)
    assert seen.epochs == [2, 2]


def test_shuffling_takes_every_row_once_per_epoch_in_a_different_order_each_time():
    x = np.arange(8, dtype=np.float32)[:, None]
    seen = Seen()
    trainer = make(I(), rate=0.0, metrics={"mean": lambda outputs, targets: outputs})
    trainer.fit(x, np.zeros((8, 1)), batch_size=1, epochs=2, callbacks=[seen], verbose=0)
    running = np.array([logs["mean"] for logs in seen.logs]).reshape(2, 8) * np.arange(1, 9)
    rows = np.round(np.diff(running, axis=1, prepend=0)).astype(int)
    assert [sorted(order) for order in rows.tolist()] == [[*range(8)]] * 2
    assert rows[0].tolist() != rows[1].tolist() and rows[0].tolist() != [*range(8)]


def test_the_order_of_examples_depends_only_on_the_seed():
    def losses(seed):
        seen = Seen()
        make(I(), rate=0.0, seed=seed).fit(X[:, :1], Y[:, :1], batch_size=1, callbacks=[seen], verbose=0)
        return [logs["loss"] for logs in seen.logs]

    assert losses(0) == losses(0) != losses(1)


# --- A second fit ---


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.slow
def test_two_fits_of_one_epoch_are_bit_for_bit_identical_to_one_fit_of_two_epochs():
    trainer = make(Dropping(), optimizer=optax.adam(0.1))
    whole = trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    expected = trainer.state
    trainer.build((X, Y))  # Starts over, without another compilation.
    rows = [trainer.fit(X, Y, batch_size=5, epochs=1, verbose=0) for _ in range(2)]
    assert same(expected, trainer.state)
    assert [row.epoch for row in rows] == [[0], [0]]
    assert [row.history["loss"][0] for row in rows] == whole.history["loss"]


def test_steps_of_a_second_fit_are_counted_from_the_current_step():
    trainer = make(F())
    trainer.fit(*ones(8), batch_size=4, steps=3, verbose=0)
    trainer.fit(*ones(8), batch_size=4, steps=3, verbose=0)
    assert trainer.step == 6 and trainer.history.epoch == [0, 1]


@pytest.mark.slow
def test_a_second_fit_compiles_nothing(compilations):
    trainer = make(Dropping(), metrics=["mae"])
    trainer.fit(X, Y, batch_size=5, validation_data=(X, Y), verbose=0)
    with compilations.counted() as second:
        trainer.fit(X, Y, batch_size=5, epochs=2, validation_data=(X, Y), verbose=0)
    assert second.names == []


@pytest.mark.slow
def test_after_its_first_epoch_a_fit_with_ragged_data_and_validation_compiles_nothing(compilations):
    counts = []
    watch = LambdaCallback(on_epoch_end=lambda epoch, logs: counts.append((dict(logs), compilations.count)[1]))
    make(Dropping(), metrics=["mae"]).fit(X, Y, batch_size=5, epochs=3, validation_data=(X[:7], Y[:7]), callbacks=[watch], verbose=0)
    assert counts[0] == counts[1] == counts[2] > 0


# --- Validation ---


@pytest.mark.slow
def test_validation_never_disturbs_training():
    trainer = make(Dropping(), optimizer=optax.adam(0.1))

    def trained(**kwargs):
        trainer.build((X, Y))
        history = trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0, **kwargs).history["loss"]
        return trainer.state, history

    state, history = trained()
    for kwargs in (
        {"validation_data": (X, Y)},
        {"validation_data": {"a": (X, Y), "b": lambda: iter([(X, Y)])}},
        {"validation_data": (X, Y), "validation_freq": fitflax.every(steps=2)},
    ):
        other_state, other_history = trained(**kwargs)
        assert same(state, other_state) and history == other_history


@pytest.mark.parametrize("options", [{}, {"validation_freq": fitflax.every(steps=2)}])
def test_the_elapsed_time_of_a_checkpoint_excludes_validations_and_the_ends_of_epochs(options, monkeypatch):
    now, seen = [0.0], []

    def advance(*arguments):
        now[0] += 100

    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: now[0])
    callback = LambdaCallback(lambda checkpoint: seen.append(checkpoint.elapsed_time), on_test_end=advance, on_epoch_end=advance)
    make(F()).fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), callbacks=[callback], verbose=0, **options)
    assert len(seen) >= 2 and not any(seen) and now[0] >= 400


def test_the_elapsed_time_includes_steps_that_are_still_running_before_a_validation(monkeypatch):
    now, seen, waited = [0.0], [], []

    def finish(self):
        if not any(self is other for other in waited):
            waited.append(self)
            now[0] += 5

    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: now[0])
    monkeypatch.setattr(StepValues, "wait", finish)

    def validate(logs):
        seen.append(len(waited))
        now[0] += 100

    callback = LambdaCallback(lambda checkpoint: seen.append(checkpoint.elapsed_time), on_test_begin=validate)
    make(F()).fit(X, Y, batch_size=12, epochs=2, validation_data=(X, Y), callbacks=[callback], verbose=0)
    assert seen == [1, 5.0, 2, 5.0]


@pytest.mark.slow
def test_validation_metrics_equal_what_evaluate_returns():
    trainer = make(Dropping(), metrics=["mae"])
    history = trainer.fit(X, Y, batch_size=5, epochs=2, validation_data=(X, Y, W), verbose=0).history
    evaluated = trainer.evaluate(X, Y, W, batch_size=12, verbose=0)
    np.testing.assert_allclose([history["val_loss"][-1], history["val_mae"][-1]], [evaluated["loss"], evaluated["mae"]], rtol=1e-6)


@pytest.mark.parametrize(
    ("frequency", "epochs"),
    [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), ([1, 4], [0, 3]), ((2,), [1]), (fitflax.every(epochs=2), [1, 3]), (fitflax.at(2, 6), [0, 2])],
    ids=str,
)
@pytest.mark.mostly_slow
def test_validation_freq_determines_in_which_epochs_validation_happens(frequency, epochs):
    history = make(F()).fit(*ones(8), batch_size=4, epochs=4, validation_data=ones(4), validation_freq=frequency, verbose=0)
    assert [row["epoch"] for row in history.rows if "val_loss" in row["logs"]] == epochs


def test_validation_by_a_trigger_is_in_the_checkpoint_of_its_step():
    seen = []
    watch = LambdaCallback(lambda checkpoint: seen.append((checkpoint.step, sorted(checkpoint.metrics), sorted(checkpoint.evaluated))))
    make(F()).fit(*ones(16), batch_size=4, epochs=2, validation_data=ones(4), validation_freq=fitflax.every(steps=3), callbacks=[watch], verbose=0)
    assert seen == [(3, ["train", "val"], ["val_loss"]), (4, ["train"], []), (6, ["train", "val"], ["val_loss"]), (8, ["train"], [])]


def test_the_history_keeps_the_last_validation_by_a_trigger_in_each_epoch():
    values = []
    watch = LambdaCallback(on_test_end=lambda logs: values.append(logs["loss"]))
    trainer = make(F())
    history = trainer.fit(*ones(16), batch_size=4, epochs=2, validation_data=ones(4), validation_freq=fitflax.at(1, 3, 6), callbacks=[watch], verbose=0)
    assert len(values) == 3
    assert history.history["val_loss"] == [values[1], values[2]]


def test_validation_calls_a_data_function_again_each_time():
    opened, seen = [], Seen()

    def batches():
        opened.append(True)
        yield from batches_of(2)

    make(F()).fit(*ones(4), epochs=3, validation_data=batches, callbacks=[seen], verbose=0)
    assert (len(opened), seen.tests) == (3, [2, 2, 2])


def test_one_shot_validation_data_can_be_used_only_once():
    history = make(F()).fit(*ones(4), epochs=1, validation_data=iter(batches_of(2)), verbose=0)
    assert len(history.history["val_loss"]) == 1
    with pytest.raises(DataError, match=r"'val' is an iterator that has been used up.*validation_steps"):
        make(F()).fit(*ones(4), epochs=2, validation_data=iter(batches_of(2)), verbose=0)


def test_endless_validation_data_continues_from_one_validation_to_the_next():
    numbers = itertools.count(1)
    endless = ((np.full((2, 4), number, np.float32), np.zeros((2, 3), np.float32)) for number in numbers)
    history = make(F(), rate=0.0).fit(*ones(4), epochs=2, validation_data=endless, validation_steps=2, verbose=0).history
    np.testing.assert_allclose(history["val_loss"], [16 * np.mean([1, 4]), 16 * np.mean([9, 16])], rtol=1e-6)


def test_validation_steps_limits_the_batches_of_a_validation():
    seen = Seen()
    make(F()).fit(*ones(4), epochs=2, validation_data=ones(10), validation_batch_size=2, validation_steps=3, callbacks=[seen], verbose=0)
    assert seen.tests == [3, 3]


def test_a_dict_of_arrays_is_one_validation_set_if_the_trainer_knows_its_keys():
    trainer = make(F(), inputs="image", targets="label")
    data = {"image": X, "label": Y}
    history = trainer.fit(data, validation_data=data, verbose=0).history
    assert list(history) == ["loss", "val_loss"]
    named = trainer.fit(data, validation_data={"dev": data, "test": data}, verbose=0).history
    assert list(named) == ["loss", "dev_loss", "test_loss"]


def test_a_stop_that_is_requested_before_fit_is_called_is_ignored():
    trainer = make(F())
    trainer.stop("long ago")
    trainer.fit(*ones(4), verbose=0)
    assert (trainer.step, trainer.stop_reason) == (1, None)


# --- evaluate and predict ---


def test_evaluate_takes_steps():
    trainer = make(F())
    trainer.build(ones(2))
    assert trainer.evaluate(lambda: batches_of(4), steps=2, verbose=0) == {"loss": np.mean([16.0, 64.0])}
    with pytest.warns(FitflaxWarning, match="ended after 4 of 9 batches"):
        trainer.evaluate(lambda: batches_of(4), steps=9, verbose=0)


def test_evaluate_does_not_change_the_state():
    trainer = make(Dropping())
    trainer.build((X, Y))
    before = trainer.state
    trainer.evaluate(X, Y, verbose=0)
    assert same(before, trainer.state) and trainer.step == 0


def test_predict_ignores_the_targets_of_batches_and_takes_steps():
    trainer = make(F())
    trainer.build(ones(2))
    np.testing.assert_array_equal(trainer.predict(lambda: batches_of(3))[:, 0], [4, 4, 8, 8, 12, 12])
    np.testing.assert_array_equal(trainer.predict(lambda: batches_of(3), steps=1)[:, 0], [4, 4])


def test_predict_returns_the_tree_that_the_module_returns():
    trainer = make(TwoOutputs(as_dict=True), {"a": "mse"})
    trainer.build((X, {"a": Y[:, :1]}))
    outputs = trainer.predict(X, batch_size=5)
    assert {name: leaf.shape for name, leaf in outputs.items()} == {"a": (12, 1), "b": (12, 2)}
    np.testing.assert_allclose(outputs["a"], trainer.model.apply({"params": trainer.state.params}, X)["a"], rtol=1e-5)


@pytest.mark.slow
def test_results_of_evaluate_and_predict_do_not_depend_on_the_batch_size():
    trainer = make(Dropping(), metrics=["r2"])
    trainer.fit(X, Y, verbose=0)
    results = [list(trainer.evaluate(X, Y, batch_size=size, verbose=0).values()) for size in (1, 5, 12)]
    np.testing.assert_allclose(results, [results[0]] * 3, rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(X, batch_size=5), trainer.predict(X, batch_size=12), rtol=1e-5)


def test_outputs_without_an_axis_of_examples_cannot_be_predicted():
    class Total(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sum(nn.Dense(1)(x))

    trainer = make(Total(), lambda outputs: outputs)
    trainer.build(X)
    with pytest.raises(ValueError, match=r"predict concatenates outputs along their first axis, which must be the examples"):
        trainer.predict(X)


def test_metrics_that_do_not_fit_the_outputs_are_errors_before_any_step():
    seen = []
    look = LambdaCallback(on_train_batch_begin=lambda batch, logs: seen.append(batch))
    with pytest.raises(MetricError, match=r"'sparse_categorical_accuracy'"):
        make(F(), metrics=["sparse_categorical_accuracy"]).fit(X, Y, callbacks=[look], verbose=0)
    with pytest.raises(LossError, match=r"names the outputs \['c'\], but the module's outputs are \['a', 'b'\]"):
        make(TwoOutputs(as_dict=True), {"c": "mse"}).fit(X, {"a": Y, "b": Y}, callbacks=[look], verbose=0)
    assert not seen


def test_validation_batch_size_also_applies_to_a_validation_split():
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    sizes = []
    count = LambdaCallback(on_test_batch_end=lambda batch, logs: sizes.append(batch))
    trainer.fit(np.ones((20, 2)), np.ones((20, 1)), batch_size=8, validation_split=0.5, validation_batch_size=3, callbacks=[count], verbose=0)
    assert sizes == [0, 1, 2, 3]


def test_a_trainer_does_not_keep_the_data_of_its_last_fit():
    trainer = make(F())
    x, y = (np.ones((8, size), np.float32) for size in (4, 3))
    kept = [weakref.ref(x), weakref.ref(y)]
    trainer.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0)
    del x, y
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_a_compile_that_fails_leaves_the_trainer_as_it_was():
    def fails(params):
        raise RuntimeError("out of memory")

    trainer, optimizer = make(F(), optimizer=(adam := optax.adam(0.1))), optax.GradientTransformation(fails, lambda updates, state, params: (updates, state))
    trainer.fit(X, Y, batch_size=4, verbose=0)
    before, shown = trainer.state, repr(trainer)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.compile(optimizer, "mae", pad=False)
    assert repr(trainer) == shown and same(trainer.state, before)
    trainer.compile(adam, "mse")  # The same optimizer object as before, so its state is kept.
    assert same(trainer.state, before)
    trainer.fit(X[:5], Y[:5], batch_size=4, verbose=0)  # Padded.


@pytest.mark.parametrize("fault", ["the loss", "a callback's files"])
def test_a_fit_that_fails_before_its_first_step_closes_its_data(fault):
    closed = []

    def batches():
        try:
            while True:
                yield X[:4], Y[:4]
        finally:
            closed.append(True)

    class NoFiles(Callback):
        def open_run(self, run_id, step):
            raise OSError("no such disk")

    trainer = make(F(), loss="mse" if fault == "a callback's files" else lambda outputs, targets: outputs[:2, 0])
    with pytest.raises((LossError, OSError)):
        trainer.fit(batches, steps=3, callbacks=[NoFiles()] if fault == "a callback's files" else [], verbose=0)
    assert closed == [True]


def test_data_with_a_validation_split_is_adapted_only_once(monkeypatch):
    calls, adapt = [], DataAdapter.adapt
    monkeypatch.setattr(
        DataAdapter, "adapt", lambda adapter, data, *targets, call, **options: calls.append(call) or adapt(adapter, data, *targets, call=call, **options)
    )
    history = make(F()).fit(Shard((X, Y)), batch_size=4, validation_split=0.5, verbose=0)
    assert calls == ["fit"] and "val_loss" in history.history


def test_with_several_processes_process_0_opens_the_run_first(monkeypatch):
    strategy, calls, bind = DataParallel(jax.devices()[:1]), [], CallbackList.bind

    class Opening(Callback):
        def open_run(self, run_id, step):
            calls.append("open_run")

    def bind_for_two(*arguments, **options):  # As if there were two processes, but only until the run is open.
        strategy.num_processes = 2
        bind(*arguments, **options)

    def after_first(make):
        strategy.num_processes = 1
        calls.append("after_first")
        make()

    monkeypatch.setattr(CallbackList, "bind", bind_for_two)
    monkeypatch.setattr(fit, "after_first", after_first)
    trainer = fitflax.Trainer(F(), parallel=strategy)
    trainer.compile("sgd", "mse")
    trainer.fit(*ones(4), callbacks=[Opening()], verbose=0)
    assert calls == ["after_first", "open_run"]


def test_evaluate_and_predict_close_all_callbacks_even_if_closing_one_fails():
    class Closing(Callback):
        is_closed = False

        def close(self):
            self.is_closed = True
            raise OSError("no such disk")

    trainer = make(F())
    trainer.build(X[:4])
    for call in (lambda callbacks: trainer.evaluate(X, Y, callbacks=callbacks, verbose=0), lambda callbacks: trainer.predict(X, callbacks=callbacks)):
        first, second = Closing(), Closing()
        with pytest.raises(OSError, match="no such disk"):
            call([first, second])
        assert first.is_closed and second.is_closed


def test_a_metric_with_the_key_of_a_validation_metric_is_an_error_before_the_first_step():
    trainer = make(F(), metrics={"mae": "mae", "dev_mae": "rmse"})
    with pytest.raises(ConfigError, match=r"The training metrics \['dev_mae'\] have log keys of validation metrics\. Rename them"):
        trainer.fit(X, Y, validation_data={"dev": (X, Y)}, verbose=0)
    assert trainer.step == 0
    assert trainer.fit(X, Y, validation_data={"test": (X, Y)}, verbose=0).history.keys() >= {"dev_mae", "test_dev_mae", "test_mae"}


def test_two_validation_sets_with_the_same_log_key_are_an_error_before_the_first_step():
    trainer = make(F(), metrics={"mae": "mae", "top_mae": "rmse"})
    with pytest.raises(ConfigError, match=r"Several validation sets share the log keys \['val_top_mae'\]\. Rename one of the sets\."):
        trainer.fit(X, Y, validation_data={"val": (X, Y), "val_top": (X, Y)}, verbose=0)
    assert trainer.step == 0


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: lambda: iter([data])], ids=["arrays", "function"])
def test_keys_that_only_a_custom_step_logs_are_not_log_keys_of_validation_sets(wrap):
    class Custom(fitflax.Trainer):
        def train_step(self, state, batch):
            state, logs = super().train_step(state, batch)
            return state, {**logs, "top_loss": (jnp.float32(1), jnp.float32(1))}

    sets = {"val": wrap((X, Y)), "val_top": wrap((X, Y))}
    history = make(F(), trainer=Custom).fit(X, Y, validation_data=sets, verbose=0).history
    assert list(history) == ["loss", "top_loss", "val_loss", "val_top_loss"]


def test_keys_that_only_validation_sets_of_a_custom_step_log_must_be_different():
    class Custom(fitflax.Trainer):
        def train_step(self, state, batch):
            return state, {"first": (jnp.sum(batch.x[:, 0]), jnp.sum(batch.mask))}

    trainer = make(F(), metrics={"mae": "mae", "top_mae": "rmse"}, trainer=Custom)
    with pytest.raises(ConfigError, match=r"Several validation sets share the log keys \['val_top_mae'\]"):
        trainer.fit(X, Y, validation_data={"val": (X, Y), "val_top": (X, Y)}, verbose=0)
    assert trainer.step == 0


def test_a_value_that_is_deleted_from_the_logs_is_not_in_the_history():
    def forget(epoch, logs):
        assert repr(dict(logs)) == repr(logs)
        del logs["mae"]

    history = make(F(), metrics=["mae"]).fit(X, Y, callbacks=[LambdaCallback(on_epoch_end=forget)], verbose=0)
    assert list(history.history) == ["loss"]


@pytest.mark.slow
def test_a_loss_that_requires_the_given_shapes_may_return_a_matrix():
    def pairs(outputs, targets):
        return outputs @ targets[None] / outputs.shape[1]  # Fails for outputs without a second axis.

    def network():
        return nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)

    expected = (X.sum(axis=1)[:, None] * Y[:, 0][None]).mean()
    assert make(network(), pairs, rate=0.0).fit(X, Y[:, 0], verbose=0, batch_size=12).history["loss"] == [pytest.approx(expected, rel=1e-4)]


def test_callbacks_know_where_in_its_first_epoch_a_run_starts(tmp_path):
    class Begin(Callback):
        def on_train_begin(self, logs):
            self.begin = self.params["first_epoch"], self.params["first_step_in_epoch"]

    def begin(steps):
        callback = Begin()
        make(F()).fit(X, Y, batch_size=4, steps=steps, callbacks=[callback, ModelCheckpoint(tmp_path)], resume="auto", verbose=0)
        return callback.begin

    assert [begin(steps) for steps in (5, 6, 7)] == [(0, 0), (1, 2), (2, 0)]


def test_the_first_batch_is_not_kept_after_its_step():
    references, alive = [], []

    def batches():
        for _ in range(5):
            x, y = map(jnp.asarray, ones(4))
            references.append(weakref.ref(x))
            yield x, y

    def look(batch, logs):
        gc.collect()
        alive.append(references[0]() is not None)

    make(F()).fit(batches, steps=5, callbacks=[LambdaCallback(on_train_batch_end=look)], verbose=0)
    assert not alive[-1]


@pytest.mark.parametrize("call", ["fit", "train_loop"])
def test_a_run_that_cannot_begin_closes_its_data(call, monkeypatch):
    closed = []

    def batches():
        try:
            while True:
                yield ones(4)
        finally:
            closed.append(True)

    def fail(*arguments):
        raise RuntimeError("Another process has failed.")

    monkeypatch.setattr(training_loop, "make_agreement", fail)
    trainer = make(F())
    with pytest.raises(RuntimeError, match="Another process") as held:
        trainer.fit(batches, steps=3, verbose=0) if call == "fit" else trainer.train_loop(batches, steps=3)
    assert closed and held.value is not None  # The exception keeps the frames, so nothing was closed by garbage collection.
