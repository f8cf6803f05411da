"""Metrics that collect the rows of all examples for NumPy, metrics that are arrays, and gradients that a callback requests."""

import contextlib
import io
import json
import threading
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import linen as nn
from flax import struct

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, ProgressBar, SummaryLogger
from fitflax.errors import MetricError, MonitorError, NotReadyError, RestoreError
from fitflax.metrics import AUC, Metric, SampleCollector
from fitflax.parallel import DataParallel
from fitflax.steps.outputs import Collected
from tests.run_script import at, differences, directory_of, leaves_of, state_of

RNG = np.random.default_rng(3)
ROWS = 11  # In batches of 4: 4, 4, 3.
X = RNG.normal(size=(ROWS, 1)).astype(np.float32)
Y = (X[:, 0] + RNG.normal(size=ROWS) > 0).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 2.0, size=ROWS).astype(np.float32)
WEIGHTS[3] = 0
VALID = (X[::-1][:7] * 0.5, Y[:7])


class Scale(nn.Module):
    """Returns its inputs times a parameter, so that its ranking is known in advance."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("scale", nn.initializers.ones, ())


@struct.dataclass
class WeightedMedian(Metric):
    """The median of the outputs, each repeated as often as its weight says; it cannot be computed from sums."""

    values: Any = struct.field(default_factory=lambda: np.zeros(0, np.float32))
    weights: Any = struct.field(default_factory=lambda: np.zeros(0, np.float32))
    name: str = struct.field(pytree_node=False, default="median")
    direction: str | None = struct.field(pytree_node=False, default="max")
    collect: ClassVar[bool] = True

    def empty(self):
        return self.replace(values=np.zeros(0, np.float32), weights=np.zeros(0, np.float32))

    def update(self, outputs, targets, weights):
        return self.replace(values=outputs[:, 0], weights=weights)

    def merge(self, other):
        return self.replace(values=np.concatenate([self.values, other.values]), weights=np.concatenate([self.weights, other.weights]))

    def compute(self):
        assert isinstance(self.values, np.ndarray)
        return median(self.values, self.weights)


def median(values, weights):
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return values[order][np.searchsorted(total, total[-1] / 2)] if len(values) else np.float32(0)


@struct.dataclass
class Bins(Metric):
    """How many outputs are positive and how many are not, `[2]`."""

    counts: Any = struct.field(default_factory=lambda: np.zeros(2, np.float32))
    name: str = struct.field(pytree_node=False, default="bins")
    direction: str | None = struct.field(pytree_node=False, default="max")
    additive: ClassVar[bool] = True

    def empty(self):
        return self.replace(counts=np.zeros(2, np.float32))

    def update(self, outputs, targets, weights):
        yes = (outputs[:, 0] > 0) * weights
        return self.replace(counts=self.counts + jnp.stack([yes.sum(), weights.sum() - yes.sum()]))

    def merge(self, other):
        return self.replace(counts=self.counts + other.counts)

    def compute(self):
        return self.counts


def make(metrics=None, *, devices=1, rate=0.0, weighted=None, model=None, loss="binary_crossentropy"):
    trainer = fitflax.Trainer(Scale() if model is None else model, parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile(optax.sgd(rate), loss, metrics, weighted_metrics=weighted)
    return trainer


def collecting(**options):
    return make([AUC(), WeightedMedian()], weighted=[AUC(), WeightedMedian()], **options)


def expected_metrics(x, y, weights):
    scores = x[:, 0]
    return {
        "auc": sklearn.metrics.roc_auc_score(y, scores),
        "median": median(scores, np.ones(len(x))),
        "weighted_auc": sklearn.metrics.roc_auc_score(y, scores, sample_weight=weights),
        "weighted_median": median(scores, weights),
    }


def without_loss(logs):
    return {key: value for key, value in logs.items() if key != "loss"}


# --- Numbers ---


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.mostly_slow
def test_rows_of_ragged_batches_give_the_numbers_of_numpy_and_scikit_learn(devices):
    trainer = collecting(devices=devices)
    expected = expected_metrics(X, Y, WEIGHTS)
    history = trainer.fit(X, Y[:, None], WEIGHTS, batch_size=4, epochs=2, validation_data=(X[:7], Y[:7, None], WEIGHTS[:7]), verbose=0).history
    assert {key: values for key, values in history.items() if key in expected} == {key: pytest.approx([value] * 2) for key, value in expected.items()}
    assert {key: history[f"val_{key}"][-1] for key in expected} == pytest.approx(expected_metrics(X[:7], Y[:7], WEIGHTS[:7]))
    logs = trainer.evaluate(X, Y[:, None], WEIGHTS, batch_size=4, verbose=0)
    assert without_loss(logs) == pytest.approx(expected) and all(type(value) is float for value in logs.values())
    for batch in (slice(0, 4), slice(4, 7)):
        rows = X[batch], Y[batch, None], WEIGHTS[batch]
        for logs in (trainer.test_on_batch(rows), trainer.train_on_batch(rows)):
            assert without_loss(logs) == pytest.approx(expected_metrics(X[batch], Y[batch], WEIGHTS[batch]), nan_ok=True)


def test_rows_are_in_the_order_of_the_data():
    @struct.dataclass
    class Rows(WeightedMedian):
        name: str = struct.field(pytree_node=False, default="rows")

        def compute(self):
            return self.values[self.weights > 0]

    trainer = make([Rows()], devices=4)
    history = trainer.fit(X, Y[:, None], batch_size=8, shuffle=False, verbose=0).history
    np.testing.assert_array_equal(history["rows"][0], X[:, 0])


def test_no_row_is_lost_in_many_more_steps_than_may_wait_on_the_device():
    trainer = make([AUC(), WeightedMedian()])
    logs = trainer.fit(X, Y[:, None], batch_size=1, epochs=5, steps_per_epoch=44, verbose=0).history
    assert logs["auc"] == pytest.approx([sklearn.metrics.roc_auc_score(Y, X[:, 0])] * 5)
    assert logs["median"] == pytest.approx([np.sort(X[:, 0])[5]] * 5)


def test_metrics_are_logged_in_the_order_in_which_they_were_passed():
    trainer = make(["mae", WeightedMedian(), Bins(), AUC()])
    trainer.build((X, Y[:, None]))
    assert list(trainer.evaluate(X, Y[:, None], verbose=0)) == ["loss", "mae", "median", "bins", "auc"]


# --- Where they are logged, and where not ---


@pytest.mark.slow
def test_all_logs_except_those_of_batches_include_collected_metrics(tmp_path):
    seen = {}

    class Recorder(Callback):
        def on_train_batch_end(self, batch, logs):
            seen.setdefault("batch", set()).update(dict(logs))

        def on_test_batch_end(self, batch, logs):
            seen.setdefault("test batch", set()).update(dict(logs))

        def on_test_end(self, logs):
            seen["test"] = set(logs)

        def on_epoch_end(self, epoch, logs):
            seen["epoch"] = set(logs)

        def on_checkpoint(self, checkpoint):
            seen[checkpoint.step] = checkpoint.metrics

    trainer = make([AUC(), "mae"])
    store = ModelCheckpoint(tmp_path, every=fitflax.every(steps=1), keep=None)
    trainer.fit(X, Y[:, None], batch_size=4, shuffle=False, validation_data=(VALID[0], VALID[1][:, None]), callbacks=[Recorder(), store], verbose=0)
    batch, epoch = {"loss", "mae"}, {"loss", "mae", "auc"}
    assert (seen["batch"], seen["test batch"], seen["test"]) == (batch, batch, epoch)
    assert seen["epoch"] == {*epoch, *(f"val_{key}" for key in epoch)}
    # Over the epoch so far, even in the middle of it.
    assert seen[2]["train"]["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(Y[:8], X[:8, 0]))
    assert set(seen[3]["val"]) == epoch
    saved = json.loads((tmp_path / "step_00000003/metadata.json").read_text())
    assert saved["metrics"] == seen[3]


def test_values_read_late_are_those_of_their_step():
    """A checkpoint knows how many rows there were, regardless of the rows appended since."""
    trainer = make([WeightedMedian()])
    kept = list(trainer.train_loop(X, Y[:, None], steps=3, batch_size=4, shuffle=False))
    medians = [checkpoint.logs["median"] for checkpoint in kept]
    assert medians == [pytest.approx(median(X[:rows, 0], np.ones(rows))) for rows in (4, 8, 11)]


@pytest.mark.parametrize("monitor", ["auc", "val_auc"])
@pytest.mark.mostly_slow
def test_collected_metrics_can_be_monitored(monitor, tmp_path):
    # The targets are inverted, so that the parameter changes its sign during training, which inverts the ranking.
    best, early = BestCheckpoint(tmp_path, monitor=monitor), EarlyStopping(monitor, patience=50)
    trainer = make([AUC()], rate=0.3)
    flipped = 1 - Y[:, None]
    history = trainer.fit(X, flipped, batch_size=4, epochs=6, validation_data=(X, flipped), callbacks=[best, early], verbose=0).history
    assert best.best == early.best == max(history[monitor]) and len(set(history[monitor])) > 1
    assert fitflax.checkpoints.CheckpointStore(tmp_path).metric(best.best_step, monitor) == best.best


# --- Resuming ---


def run(root, *more, trainer=None, metrics=None, **options):
    trainer = trainer or make(metrics or [AUC(), WeightedMedian(), Bins()], rate=0.3)
    store = ModelCheckpoint(root, every=fitflax.every(steps=1), keep=None)
    options = {"validation_data": (VALID[0], VALID[1][:, None]), "steps": 8, "resume": "auto", **options}
    trainer.fit(X, Y[:, None], batch_size=4, callbacks=[store, *more], verbose=0, **options)
    return trainer


def everything(trainer, root):
    checkpoints = directory_of(root)
    for checkpoint in checkpoints.values():
        checkpoint.pop("closing")
    return {"state": state_of(trainer), "history": leaves_of(trainer.history.rows), "checkpoints": checkpoints}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("never")
    return everything(run(root), root)


@pytest.mark.parametrize("k", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.slow
def test_resuming_inside_an_epoch_is_bit_for_bit_identical_to_an_uninterrupted_run(k, uninterrupted, tmp_path):
    run(tmp_path, steps=k)
    resumed = everything(run(tmp_path), tmp_path)
    assert not differences(resumed, uninterrupted)


@pytest.mark.slow
def test_resuming_after_an_error_is_bit_for_bit_identical_to_an_uninterrupted_run(uninterrupted, tmp_path):
    trainer = make([AUC(), WeightedMedian(), Bins()], rate=0.3)

    def fail(step):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(tmp_path, at(trainer, "on_train_batch_begin", 2, fail), trainer=trainer)
    assert not differences(everything(run(tmp_path, LambdaCallback()), tmp_path), uninterrupted)


def test_the_history_row_of_an_epoch_closed_in_its_middle_is_restored_with_its_arrays(tmp_path):
    first = run(tmp_path, steps=4)
    resumed = run(tmp_path, steps=4)
    assert leaves_of(resumed.history.rows) == leaves_of(first.history.rows)
    assert resumed.history.history["bins"][1].dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [([], [AUC()]), ([AUC()], [WeightedMedian()]), ([AUC()], [])])
def test_resuming_inside_an_epoch_with_different_metrics_is_an_error(before, after, tmp_path):
    run(tmp_path, steps=2, metrics=["mae", *before])
    with pytest.raises(RestoreError, match="collected rows"):
        run(tmp_path, metrics=["mae", *after])


@pytest.mark.slow
def test_metrics_may_change_between_epochs(tmp_path):
    run(tmp_path, steps=3, metrics=["mae"])
    history = run(tmp_path, metrics=["mae", AUC()], steps=6).history.history
    assert (len(history["loss"]), len(history["auc"])) == (2, 1)


# --- Collecting rows ---


def numbers(*values):
    return {"median": WeightedMedian(np.array(values, np.float32), np.ones(len(values), np.float32))}


def test_a_read_misses_no_rows_while_another_thread_copies_rows_to_the_host():
    joining, proceed = threading.Event(), threading.Event()

    def slow(rows, steps):
        joining.set()
        assert proceed.wait(60)
        return rows

    rows = Collected({"median": WeightedMedian()}, slow)
    for value in (1.0, 2.0, 3.0):
        rows.add(numbers(value))
    results = []
    early = rows.now()
    thread = threading.Thread(target=lambda: results.append(early()))
    thread.start()
    assert joining.wait(60)
    late = rows.now()  # Does not wait.
    proceed.set()
    thread.join()
    rows.add(numbers(9.0))
    assert results == [{"median": 2.0}] == [late()] and len(rows.state_dict()["median"][0]) == 4


def test_no_row_is_copied_to_the_host_while_its_step_may_still_run():
    joined = []
    rows = Collected({"median": WeightedMedian()}, lambda tree, steps: (joined.append(float(tree["median"].values[0])), tree)[1])
    for step in range(20):
        rows.add(numbers(step))
    assert joined == [0.0, 1.0, 2.0, 3.0]


def test_saved_rows_are_restored_and_without_rows_there_is_nothing_to_save():
    rows, other = (Collected({"median": WeightedMedian()}, lambda tree, steps: tree) for _ in range(2))
    assert rows.state_dict() == {} and rows.now()() == {"median": 0.0}
    rows.add(numbers(1.0, 5.0))
    rows.add(numbers(7.0))
    other.load_state_dict(rows.state_dict())
    before = other.now()
    other.add(numbers(9.0, 9.0))
    assert (before(), other.now()()) == ({"median": 5.0}, {"median": 7.0})
    assert other.state_dict()["median"][0].tolist() == [1.0, 5.0, 7.0, 9.0, 9.0]


# --- Mistakes ---


def test_rows_of_different_shapes_are_an_error_that_names_the_metric():
    rows = Collected({"samples": SampleCollector()}, lambda tree, steps: tree)
    for length in (3, 5):
        rows.add({"samples": SampleCollector(rows=np.ones((2, length)), weights=np.ones((2, 1)))})
    with pytest.raises(MetricError, match=r"The metric 'samples' collects rows, .* Received rows of shapes \[\(3,\), \(5,\)\]\. Pad them to one shape\."):
        rows.now()()


def test_leaves_that_are_not_rows_are_an_error_before_the_first_step():
    @struct.dataclass
    class Wrong(WeightedMedian):
        def update(self, outputs, targets, weights):
            return self.replace(values=outputs.mean(), weights=weights)

    trainer = make([Wrong()], devices=2)
    with pytest.raises(MetricError, match=r"The metric 'median' has collect = True, so its leaves must be rows \[examples, ...\]\. Received: float32\[\]"):
        trainer.fit(X, Y[:, None], batch_size=4, verbose=0)
    assert trainer.step == 0


def test_a_metric_that_does_not_compute_a_number_is_an_error():
    @struct.dataclass
    class Words(WeightedMedian):
        def compute(self):
            return "many"

    with pytest.raises(MetricError, match=r"The metric 'median' must compute a number or an array of numbers. Received: .*many"):
        make([Words()]).fit(X, Y[:, None], batch_size=4, verbose=0)


# --- Arrays ---


@pytest.mark.mostly_slow
@pytest.mark.parametrize("devices", [1, 4])
def test_a_metric_may_be_an_array(devices, tmp_path):
    trainer = make([Bins()], devices=devices, weighted=[Bins()])
    history = trainer.fit(X, Y[:, None], WEIGHTS, batch_size=4, epochs=2, validation_data=(X[:7], Y[:7, None]), verbose=0).history
    evaluated = trainer.evaluate(X, Y[:, None], WEIGHTS, batch_size=4, verbose=0)
    yes = X[:, 0] > 0
    for value in (*history["bins"], evaluated["bins"]):
        assert isinstance(value, np.ndarray) and value.dtype == np.float32
        np.testing.assert_array_equal(value, [yes.sum(), (~yes).sum()])
    np.testing.assert_array_equal(history["val_bins"][1], [yes[:7].sum(), (~yes[:7]).sum()])
    for value in (*history["weighted_bins"], evaluated["weighted_bins"]):
        np.testing.assert_allclose(value, [WEIGHTS[yes].sum(), WEIGHTS[~yes].sum()], rtol=1e-6)
    # Each value is a separate array, not a view of one that changes.
    history["bins"][0][:] = 0
    assert history["bins"][1].sum() == ROWS


@pytest.mark.slow
def test_an_array_with_nan_is_saved_and_restored(tmp_path):
    @struct.dataclass
    class Partly(Bins):
        def compute(self):
            return jnp.where(jnp.arange(2) == 0, jnp.nan, self.counts)

    first = run(tmp_path, steps=4, metrics=[Partly()])
    again = run(tmp_path, steps=4, metrics=[Partly()])
    more = run(tmp_path, steps=6, metrics=[Partly()])
    for trainer in (first, again, more):
        values = trainer.history.history["bins"]
        assert np.isnan(values[0][0]) and values[0][1] == 11 - (X > 0).sum()
    saved = json.loads((tmp_path / "step_00000004/metadata.json").read_text())
    assert saved["metrics"]["train"]["bins"][0] == "NaN" and isinstance(saved["metrics"]["train"]["bins"][1], float)


def test_the_progress_bar_omits_arrays(capsys):
    make([Bins(), "mae"]).fit(X, Y[:, None], batch_size=4, callbacks=[ProgressBar()])
    out = capsys.readouterr().out
    assert "mae" in out and "bins" not in out


@pytest.mark.parametrize("monitor", ["bins", "val_bins"])
@pytest.mark.slow
def test_an_array_cannot_be_monitored(monitor, tmp_path):
    for callback in (EarlyStopping(monitor), BestCheckpoint(tmp_path, monitor=monitor)):
        with pytest.raises(MonitorError, match=rf"monitors '{monitor}', which is an array of shape \[2\]\. Monitor a number\."):
            make([Bins()]).fit(X, Y[:, None], validation_data=(X, Y[:, None]), batch_size=4, callbacks=[callback], verbose=0)


# --- Gradients ---


INPUTS = RNG.normal(size=(8, 3)).astype(np.float32)
TARGETS = RNG.normal(size=(8, 2)).astype(np.float32)


class GradientRecorder(Callback):
    needs_grads = True

    def __init__(self):
        self.grads, self.norms = [], []

    def on_checkpoint(self, checkpoint):
        self.grads.append(checkpoint.grads)
        self.norms.append(checkpoint.gradients_norm)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.slow
def test_a_callback_gets_the_gradient_of_the_global_batch(devices):
    trainer = make(model=nn.Dense(2), loss="mse", devices=devices, rate=0.1)
    trainer.build((INPUTS, TARGETS))
    params = jax.tree.map(np.array, trainer.state.params)

    def loss(params, x, y, weights):
        values = ((x @ params["kernel"] + params["bias"] - y) ** 2).mean(-1)
        return (weights * values).sum() / weights.sum()

    recorder = GradientRecorder()
    # The second batch is padded: 3 rows on up to 4 devices.
    trainer.fit(
        INPUTS[:7],
        TARGETS[:7],
        WEIGHTS[:7],
        batch_size=4,
        shuffle=False,
        callbacks=[recorder, LambdaCallback(lambda c: None, every=fitflax.every(steps=1))],
        verbose=0,
    )
    assert len(recorder.grads) == 2
    for grads, norm, rows in zip(recorder.grads, recorder.norms, (slice(0, 4), slice(4, 7)), strict=True):
        expected = jax.grad(loss)(params, INPUTS[rows], TARGETS[rows], WEIGHTS[rows])
        jax.tree.map(lambda have, want: np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6), grads, expected)
        assert norm == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)
        params = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, expected)


@pytest.mark.slow
def test_the_gradient_needs_no_copy_and_stays_valid():
    recorder = GradientRecorder()
    trainer = make(model=nn.Dense(2), loss="mse", rate=0.1)
    trainer.fit(INPUTS, TARGETS, batch_size=2, callbacks=[recorder], epochs=2, verbose=0)
    norms = [float(optax.tree.norm(grads)) for grads in recorder.grads]
    assert norms == pytest.approx(recorder.norms, rel=1e-6) and len(set(norms)) == 2


def test_reading_a_gradient_that_was_not_requested_is_an_error():
    reader = LambdaCallback(on_checkpoint=lambda checkpoint: checkpoint.grads)
    with pytest.raises(
        NotReadyError, match=r"The gradients of step 4 were not kept\. Pass train_loop\(grads=True\), or use a callback with needs_grads = True"
    ):
        make(model=nn.Dense(2), loss="mse").fit(INPUTS, TARGETS, batch_size=2, callbacks=[reader], verbose=0)


def test_keeping_gradients_does_not_change_the_state():
    states = []
    for callbacks in ([], [GradientRecorder()]):
        trainer = make(model=nn.Dense(2), loss="mse", rate=0.1, devices=2)
        trainer.fit(INPUTS, TARGETS, batch_size=4, callbacks=callbacks, epochs=2, verbose=0)
        states.append(state_of(trainer))
    assert states[0] == states[1]


def test_a_custom_update_has_no_gradient():
    class Custom(fitflax.Trainer):
        def train_step(self, state, batch):
            return super().train_step(state, batch)

    recorder = GradientRecorder()
    trainer = Custom(nn.Dense(2), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.1), "mse")
    trainer.fit(INPUTS, TARGETS, batch_size=4, callbacks=[recorder], verbose=0)
    assert recorder.grads == [()]
    assert np.isnan(recorder.norms).all()
    lines = io.StringIO()
    trainer.fit(INPUTS, TARGETS, batch_size=4, callbacks=[SummaryLogger(file=lines)], verbose=0)
    assert "weights_l2norm" in lines.getvalue()
    assert "gradients_l2norm" not in lines.getvalue()


# --- Compilations ---


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_rows_arrays_and_gradients_need_one_program_to_train_and_one_to_evaluate(devices, compilations):
    trainer = make([AUC(), WeightedMedian(), Bins()], devices=devices, rate=0.1)
    trainer.build((X, Y[:, None]))
    options = {"batch_size": 4, "validation_data": (X[:7], Y[:7, None]), "callbacks": [GradientRecorder()], "verbose": 0}
    with compilations.counted() as first:
        trainer.fit(X, Y[:, None], epochs=2, **options)
    programs = [name for name in first.names if name in ("jit(_fun)", "jit(train_step)", "jit(eval_step)", "jit(eval_group)")]
    assert len(programs) == 2, first.names
    with compilations.counted() as again:
        trainer.fit(X, Y[:, None], epochs=2, **options)
        trainer.evaluate(X, Y[:, None], batch_size=4, verbose=0)
    assert again.count == 0, again.names


def test_rows_stay_on_the_device_until_they_are_read(monkeypatch):
    """Rows wait on the device; while steps run, only rows of steps that finished long ago are copied to the host."""
    trainer = make([WeightedMedian()])
    trainer.fit(X, Y[:, None], batch_size=4, verbose=0)
    joined = []
    join = DataParallel.join
    monkeypatch.setattr(DataParallel, "join", lambda self, tree, steps=None: (joined.append(trainer.step), join(self, tree, steps))[1])
    with contextlib.closing(trainer.train_loop(X, Y[:, None], steps=40, batch_size=4, steps_per_epoch=40, every=fitflax.every(steps=40))) as loop:
        checkpoint = loop.next_checkpoint()
        assert checkpoint.step_in_epoch == 37 and len(joined) == 37 - 16
        assert checkpoint.logs["median"] and len(joined) == 37
