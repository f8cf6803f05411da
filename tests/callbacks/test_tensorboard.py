"""`TensorBoard`, read with TensorBoard's own reader; and the contents of the files themselves, however the run ended."""

import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct
from tensorboard.backend.event_processing import event_multiplexer
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, LambdaCallback, ModelCheckpoint, TensorBoard
from fitflax.callbacks.event_files import EventFiles, events_of
from fitflax.commands.plot import read_curves
from fitflax.errors import CallbackError, FitflaxWarning
from fitflax.metrics import AUC, Metric
from fitflax.parallel import DataParallel
from tests.run_script import at, differences, directory_of, rows_of, state_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(18, 4)).astype(np.float32)  # In batches of 4: 4, 4, 4, 4, 2.
Y = (X.sum(axis=1) > 0).astype(np.int32)
VALID = (X[:7] + 1, Y[:7])
TIMES = ("time/steps_per_second", "time/examples_per_second", "time/model_flops_per_second", "time/validation_seconds")


def make(optimizer="adam", metrics=("accuracy",), devices=1, **options):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile(optimizer, "sparse_categorical_crossentropy", list(metrics), **options)
    return trainer


def fit(*callbacks, trainer=None, data=X, y=Y, **options):
    trainer = trainer or make()
    trainer.fit(data, y, callbacks=callbacks, verbose=0, **{"batch_size": 4, **options})
    return trainer


def opened(directory):
    runs = event_multiplexer.EventMultiplexer(size_guidance=dict.fromkeys(("scalars", "histograms", "tensors"), 0), purge_orphaned_data=True)
    return runs.AddRunsFromDirectory(str(directory)).Reload()


def shown(directory):
    """Returns the scalars that TensorBoard shows: `{run: {tag: {step: value}}}`."""
    runs = opened(directory)
    return {name: {tag: {event.step: event.value for event in runs.Scalars(name, tag)} for tag in tags["scalars"]} for name, tags in runs.Runs().items()}


def written(directory):
    """Returns the contents of the files, `{(run, tag, step): value}`, without times and environments, and checks that each value is there once."""
    found = []
    for path in sorted(pathlib.Path(directory).rglob("*.tfevents.*")):
        for record in events_of(path):
            for value in record.event.summary.value:
                kind = value.WhichOneof("value")
                content = value.histo.SerializeToString() if kind == "histo" else getattr(value, kind) if kind == "simple_value" else None
                found.append(((str(path.parent.relative_to(directory)), value.tag, record.event.step), content))
    twice = [key for key, count in Counter(key for key, _ in found).items() if count > 1]
    assert not twice, twice
    return {key: value for key, value in found if not key[1].startswith("time/") and key[1] != "environment/text_summary"}


def as_float32(value):
    return float(np.float32(value))


# --- What is written ---


def test_every_kind_of_value_is_found_by_tensorboards_own_reader(tmp_path):
    batch_logs, steps = {}, []

    class Recorder(Callback):
        def on_train_batch_end(self, batch, logs):
            batch_logs[trainer.step] = dict(logs)

        def on_checkpoint(self, checkpoint):
            steps.append((checkpoint.step, checkpoint.loss, checkpoint.gradients_norm))

    trainer = make(learning_rate=0.01)
    board = TensorBoard(tmp_path, every=fitflax.every(steps=2), histograms=fitflax.every(epochs=1))
    history = trainer.fit(X, Y, batch_size=4, epochs=2, validation_data=VALID, callbacks=[board, Recorder()], verbose=0).history
    runs = shown(tmp_path)
    assert set(runs) == {".", "train", "val"}
    train = runs["train"]
    assert set(train) == {"loss", "accuracy", "step/loss", "step/gradients_norm", "learning_rate", "epoch", *TIMES}
    # Steps 2, 4, the end of an epoch at 5, and so on.
    for key in ("loss", "accuracy"):
        assert train[key] == {step: as_float32(batch_logs[step][key]) for step in (2, 4, 5, 6, 8, 10)}
        assert [train[key][5], train[key][10]] == [as_float32(value) for value in history[key]]
        assert runs["val"][key] == {5: as_float32(history[f"val_{key}"][0]), 10: as_float32(history[f"val_{key}"][1])}
    assert train["step/loss"] == {step: as_float32(loss) for step, loss, _ in steps}
    assert train["step/gradients_norm"] == {step: as_float32(norm) for step, _, norm in steps}
    assert train["learning_rate"] == dict.fromkeys((2, 4, 5, 6, 8, 10), as_float32(0.01))
    assert train["epoch"] == {5: 1.0, 10: 2.0}
    assert set(train["time/validation_seconds"]) == {5, 10} and set(train["time/steps_per_second"]) == {4, 5, 6, 8, 10} == set(
        train["time/examples_per_second"]
    )
    assert all(value > 0 for tag in TIMES for value in train[tag].values())
    events = opened(tmp_path)
    assert set(events.Runs()["train"]["histograms"]) == {"params/bias", "params/kernel", "grads/bias", "grads/kernel"}
    assert [event.step for event in events.Histograms("train", "grads/kernel")] == [5, 10]
    kernel = events.Histograms("train", "params/kernel")[-1].histogram_value
    expected = np.asarray(trainer.state.params["kernel"], np.float64)
    assert (kernel.num, kernel.min, kernel.max) == (12, expected.min(), expected.max()) and kernel.sum == pytest.approx(expected.sum())
    assert sum(kernel.bucket) == 12


@pytest.mark.slow
def test_gradients_are_computed_from_the_global_batch(tmp_path):
    trainer = make(optax.sgd(0.1), devices=2)
    trainer.build((X, Y))
    params = jax.tree.map(np.asarray, trainer.state.params)

    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(X[:10] @ params["kernel"] + params["bias"], Y[:10]).mean()

    reference = jax.grad(loss)(params)
    fit(TensorBoard(tmp_path, histograms=fitflax.at(1)), trainer=trainer, data=X[:10], y=Y[:10], batch_size=10, shuffle=False)
    events = opened(tmp_path)
    for name in ("kernel", "bias"):
        (event,) = events.Histograms("train", f"grads/{name}")
        want, have = np.asarray(reference[name], np.float64), event.histogram_value
        assert (event.step, have.num) == (1, want.size)
        assert (have.sum, have.min, have.max, have.sum_squares) == pytest.approx((want.sum(), want.min(), want.max(), (want**2).sum()), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        ("sgd", {"learning_rate": 0.1}, 0.1),
        (optax.inject_hyperparams(optax.sgd)(learning_rate=0.2), {}, 0.2),
        ("sgd", {"learning_rate": optax.constant_schedule(0.3)}, 0.3),
        (optax.sgd(0.1), {}, None),
    ],
)
@pytest.mark.mostly_slow
def test_the_learning_rate_is_written_if_it_can_be_read(optimizer, options, expected, tmp_path):
    fit(TensorBoard(tmp_path), trainer=make(optimizer, **options))
    assert shown(tmp_path)["train"].get("learning_rate") == (None if expected is None else {5: as_float32(expected)})


def test_a_changed_learning_rate_is_written_from_then_on(tmp_path):
    trainer = make(learning_rate=0.5)
    fit(
        TensorBoard(tmp_path, every=fitflax.every(steps=1)),
        at(trainer, "on_train_batch_end", 3, lambda step: setattr(trainer, "learning_rate", 0.25)),
        trainer=trainer,
    )
    assert shown(tmp_path)["train"]["learning_rate"] == {1: 0.5, 2: 0.5, 3: 0.25, 4: 0.25, 5: 0.25}


def test_each_validation_set_has_its_own_directory(tmp_path):
    trainer = fit(TensorBoard(tmp_path), validation_data={"dev": VALID, "test": (X[:3], Y[:3])}, epochs=2)
    runs = shown(tmp_path)
    assert set(runs) == {".", "train", "dev", "test"}
    for name in ("dev", "test"):
        assert runs[name] == {key: dict(zip((5, 10), map(as_float32, trainer.history.history[f"{name}_{key}"]), strict=True)) for key in ("loss", "accuracy")}
    assert not [key for key in runs["train"] if key.startswith(("dev", "test"))]


def test_no_name_of_a_validation_set_leads_out_of_the_directory(tmp_path):
    names = ["/data/night", "../other", "..", "a/b"]
    trainer = fit(TensorBoard(tmp_path / "board"), validation_data=dict.fromkeys(names, VALID))
    assert [path.name for path in tmp_path.iterdir()] == ["board"] and all(path.parent.parent == tmp_path / "board" for path in tmp_path.rglob("board/*/*"))
    curves = read_curves(tmp_path / "board")
    for name in names:
        assert [point.value for point in curves[f"{name}_loss"]] == pytest.approx(trainer.history.history[f"{name}_loss"])
    _, metrics = hyperparameters(tmp_path / "board")
    assert {group for group, _ in metrics} == {path.name for path in (tmp_path / "board").iterdir() if path.is_dir()}


def test_a_validation_set_named_like_a_file_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "log.csv").touch()
    trainer = make()
    with pytest.raises(CallbackError, match=r"needs a subdirectory for 'log.csv', but .*log.csv is a file. Rename the validation set"):
        fit(TensorBoard(tmp_path), trainer=trainer, validation_data={"log.csv": VALID})
    assert trainer.step == 0


def test_validation_inside_an_epoch_is_written_at_its_step(tmp_path):
    seen = {}
    note = LambdaCallback(on_checkpoint=lambda checkpoint: seen.update({checkpoint.step: checkpoint.logs["val_loss"]} if checkpoint.evaluations else {}))
    fit(TensorBoard(tmp_path), note, epochs=2, validation_data=VALID, validation_freq=fitflax.every(steps=3))
    runs = shown(tmp_path)
    assert list(seen) == [3, 6, 9] and runs["val"]["loss"] == {step: as_float32(value) for step, value in seen.items()}
    assert set(runs["train"]["loss"]) == {5, 10} and "val_loss" not in runs["train"]
    assert runs["val"]["loss"][3] != runs["val"]["loss"][6]


def test_by_default_it_writes_every_fifty_steps_and_at_the_end_of_each_epoch(tmp_path):
    fit(TensorBoard(tmp_path), epochs=2, steps_per_epoch=70)
    assert list(shown(tmp_path)["train"]["loss"]) == [50, 70, 100, 140]


@struct.dataclass
class Columns(Metric):
    """The mean of each output, or with `is_matrix` a matrix of the means and of twice the means."""

    total: jax.Array = struct.field(default_factory=lambda: np.zeros(3, np.float32))
    count: jax.Array = struct.field(default_factory=lambda: np.zeros((), np.float32))
    name: str = struct.field(pytree_node=False, default="columns")
    direction: str | None = struct.field(pytree_node=False, default=None)
    is_matrix: bool = struct.field(pytree_node=False, default=False)

    def empty(self):
        return self.replace(total=np.zeros(3, np.float32), count=np.zeros((), np.float32))

    def update(self, outputs, targets, weights):
        return self.replace(total=self.total + (outputs * weights[:, None]).sum(0), count=self.count + weights.sum())

    def merge(self, other):
        return self.replace(total=self.total + other.total, count=self.count + other.count)

    def compute(self):
        mean = self.total / jnp.maximum(self.count, 1)
        return jnp.stack([mean, mean * 2]) if self.is_matrix else mean


def test_vectors_are_written_as_numbered_scalars_and_matrices_as_tables(tmp_path):
    trainer = fit(TensorBoard(tmp_path), trainer=make(metrics=[Columns(), Columns(name="matrix", is_matrix=True)]), validation_data=VALID)
    runs, history = shown(tmp_path), trainer.history.history
    for group, prefix in (("train", ""), ("val", "val_")):
        (columns,), (matrix,) = history[f"{prefix}columns"], history[f"{prefix}matrix"]
        assert [runs[group][f"columns/{index}"] for index in range(3)] == [{5: float(value)} for value in columns]
        (event,) = opened(tmp_path).Tensors(group, "matrix/text_summary")
        rows = event.tensor_proto.string_val[0].decode().splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        assert event.step == 5 and cells[:2] == [["", "0", "1", "2"], ["---"] * 4]
        assert cells[2:] == [[f"**{number}**", *(f"{value:g}" for value in row)] for number, row in enumerate(matrix)]


@pytest.mark.slow
def test_metrics_of_collected_rows_are_written_only_at_the_end_of_an_epoch(tmp_path):
    history = fit(TensorBoard(tmp_path, every=fitflax.every(steps=1)), trainer=make(metrics=[AUC()]), steps=7, validation_data=VALID).history.history
    runs = shown(tmp_path)
    # The last epoch ended in the middle, at a step that had been written without the metric.
    assert runs["train"]["auc"] == dict(zip((5, 7), map(as_float32, history["auc"]), strict=True)) and len(runs["train"]["loss"]) == 7
    assert runs["val"]["auc"] == dict(zip((5, 7), map(as_float32, history["val_auc"]), strict=True))
    assert written(tmp_path)


def test_real_numbers_that_callbacks_add_at_the_end_of_an_epoch_are_written(tmp_path, caplog):
    added = {
        "f1": 0.5,
        "flag": True,
        "count": np.int64(3),
        "half": jnp.bfloat16(0.25),
        "list": np.array([1.0, np.nan]),
        "nan": float("nan"),
        "inf": -np.inf,
        "text": "no number",
        "nothing": None,
        "complex": 1j,
        "empty": np.zeros((0, 3)),
        "ragged": [[1], [1, 2]],
        "hit@5 (top)": 0.75,
    }
    fit(TensorBoard(tmp_path), LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added)))
    train = shown(tmp_path)["train"]
    assert set(train) == {"loss", "accuracy", "step/loss", "step/gradients_norm", "learning_rate", "epoch"} | {
        "f1", "flag", "count", "half", "list/0", "list/1", "nan", "inf", "hit_5__top_"
    }  # fmt: skip
    assert [train[key][5] for key in ("f1", "flag", "count", "half", "list/0", "inf", "hit_5__top_")] == [0.5, 1, 3, 0.25, 1, -np.inf, 0.75]
    assert np.isnan(train["nan"][5]) and np.isnan(train["list/1"][5])
    assert not caplog.records


def test_a_run_with_values_that_are_not_finite_is_written_to_its_end(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    trainer = make(optax.sgd(np.inf))
    fit(TensorBoard(tmp_path, every=fitflax.every(steps=1), histograms=fitflax.every(steps=1)), trainer=trainer, validation_data=VALID)
    runs = shown(tmp_path)
    assert np.isfinite(runs["train"]["step/loss"][1]) and np.isnan(runs["train"]["step/loss"][5]) and np.isnan(runs["val"]["loss"][5])
    # Values that are not finite have no histogram.
    assert [event.step for event in opened(tmp_path).Histograms("train", "grads/kernel")] == [1]
    assert not caplog.records


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_parameters_of_any_dtype_have_histograms(dtype, tmp_path):
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.constant(-2.0), (3,), dtype)
            return (x[:, :3] * jnp.real(scale)).astype(jnp.float32)

    trainer = fitflax.Trainer(Odd(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.0), "sparse_categorical_crossentropy")
    fit(TensorBoard(tmp_path, histograms=fitflax.at(1)), trainer=trainer)
    value = opened(tmp_path).Histograms("train", "params/scale")[0].histogram_value
    assert (value.num, value.sum) == (3, 6.0 if dtype == jnp.complex64 else -6.0)


# --- What is written at the start ---


def test_the_environment_is_written_once_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--rate=0.1"])
    trainer = make(devices=2)
    fit(TensorBoard(tmp_path), trainer=trainer, epochs=2)
    (event,) = opened(tmp_path).Tensors(".", "environment/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 0
    assert "| command | train.py --rate=0.1 |" in text
    assert f"| jax | {jax.__version__} |" in text and "| python | 3." in text
    device = jax.devices()[0]
    assert f"| devices | {min(2, jax.device_count())} {device.device_kind} ({device.platform}), 1 processes |" in text
    assert "| parameters | 15 in 2 arrays, 60 bytes |" in text
    assert "| kernel | [4, 3] | float32 | 12 |" in text and "| bias | [3] | float32 | 3 |" in text


def hyperparameters(directory):
    contents = opened(directory).PluginRunToTagToContent("hparams")["."]
    experiment, start = (HParamsPluginData.FromString(contents[f"_hparams_/{name}"]) for name in ("experiment", "session_start_info"))
    metrics = {(info.name.group, info.name.tag) for info in experiment.experiment.metric_infos}
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in start.session_start_info.hparams.items()}, metrics


@pytest.mark.slow
def test_hyperparameters_are_written_with_the_metrics_of_all_sets(tmp_path):
    fit(TensorBoard(tmp_path), trainer=make("sgd", metrics=[Columns(name="a@b"), "accuracy"], learning_rate=0.125), validation_data=VALID)
    values, metrics = hyperparameters(tmp_path)
    want = {"seed": 0, "batch_size": 4, "num_examples": 18, "optimizer": "sgd", "learning_rate": 0.125, "model": "Dense", "model/features": 3}
    assert {key: values[key] for key in want} == want and values["loss"] == "sparse_categorical_crossentropy"
    assert metrics == {(group, tag) for group in ("train", "val") for tag in ("loss", "a_b", "accuracy")}


@pytest.mark.slow
def test_tensorboard_is_not_imported_before_it_is_used(tmp_path, process_env):
    code = (
        "import sys, fitflax; from fitflax.callbacks import TensorBoard; TensorBoard('here', histograms=fitflax.every(epochs=1));"
        "print([name for name in sys.modules if name.startswith(('tensorboard', 'tensorflow', 'google.protobuf'))])"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=process_env)
    assert (result.stdout.strip(), list(tmp_path.iterdir())) == ("[]", []), result.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [({"every": 5}, r"TensorBoard\(every=...\) takes a trigger"), ({"histograms": 1}, r"TensorBoard\(histograms=...\) takes a trigger.*Received: 1")],
)
def test_an_argument_that_is_not_a_trigger_is_an_error(arguments, fault, tmp_path):
    with pytest.raises(CallbackError, match=fault):
        TensorBoard(tmp_path, **arguments)


def test_a_directory_that_cannot_be_used_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    trainer = make()
    with pytest.raises(CallbackError, match=r"TensorBoard cannot use .*file/board.*Pass a writable directory"):
        fit(TensorBoard(tmp_path / "file/board"), trainer=trainer)
    assert trainer.step == 0


# --- When it is written ---


def test_values_and_histograms_can_be_written_by_the_clock(tmp_path):
    # A nanosecond has passed at every step, so one of the two triggers fires then, and the other only at the end.
    always, never = fitflax.every(seconds=1e-9), fitflax.every(seconds=1e9)
    fit(TensorBoard(tmp_path / "histograms", every=never, histograms=always), steps_per_epoch=8, steps=8)
    assert list(shown(tmp_path / "histograms")["train"]["loss"]) == [8]
    assert [event.step for event in opened(tmp_path / "histograms").Histograms("train", "params/bias")] == [*range(1, 9)]
    fit(TensorBoard(tmp_path / "values", every=always, histograms=never), steps_per_epoch=8, steps=8)
    assert list(shown(tmp_path / "values")["train"]["loss"]) == [*range(1, 9)]
    assert not opened(tmp_path / "values").Runs()["train"]["histograms"]


# --- As a plain function ---


@pytest.mark.slow
def test_it_works_in_a_loop_without_fit_and_everything_is_on_disk_when_the_loop_ends(tmp_path):
    trainer = make()
    board = TensorBoard(tmp_path, every=fitflax.every(steps=3), histograms=fitflax.at(7))
    process = fitflax.serial(trainer.eval_loop(*VALID, name="valid"), board)
    losses = {checkpoint.step: process(checkpoint).logs["valid_loss"] for checkpoint in trainer.train_loop(X, Y, steps=7, batch_size=4)}
    values = written(tmp_path)  # The callback was not closed.
    assert {step: values["valid", "loss", step] for step in range(1, 8)} == {step: as_float32(loss) for step, loss in losses.items()}
    assert sorted(step for run, tag, step in values if (run, tag) == ("train", "loss")) == [3, 5, 6, 7]
    # The loop does not know that gradients are wanted.
    assert {tag for run, tag, step in values if tag.startswith(("params/", "grads/"))} == {"params/bias", "params/kernel"}
    board.close()
    for checkpoint in trainer.train_loop(X, Y, steps=3, batch_size=4):
        board(checkpoint)
    board.close()
    assert sorted(step for run, tag, step in written(tmp_path) if (run, tag) == ("train", "loss")) == [3, 5, 6, 7, 9, 10]


@pytest.mark.parametrize("evaluates", [True, False])
def test_the_last_step_of_a_loop_without_fit_is_on_disk_although_the_trigger_does_not_fire(evaluates, tmp_path):
    trainer, board = make(), TensorBoard(tmp_path)
    process = fitflax.serial(trainer.eval_loop(*VALID), board) if evaluates else board
    for checkpoint in trainer.train_loop(X, Y, steps=3, batch_size=4, steps_per_epoch=100):
        process(checkpoint)
    values = written(tmp_path)  # The callback was not closed.
    board.close()
    assert [step for run, tag, step in values if (run, tag) == ("train", "loss")] == [3]


@pytest.mark.parametrize(("order", "seconds"), [("evaluate first", [200.0, 200.0]), ("evaluate last", [100.0, 200.0]), ("board twice", [300.0, 300.0])])
def test_the_speed_of_a_loop_without_fit_excludes_evaluations(order, seconds, tmp_path, monkeypatch):
    now = [1000.0]

    def batches():
        now[0] += 100
        yield VALID

    monkeypatch.setattr("fitflax.callbacks.step_logger.time.monotonic", lambda: now[0])
    trainer = make()
    evaluate, evaluate_again = (trainer.eval_loop(batches, name=name) for name in "ab")
    with TensorBoard(tmp_path, every=fitflax.every(steps=2)) as board:
        for checkpoint in trainer.train_loop(X, Y, steps=4, batch_size=4, steps_per_epoch=100):
            now[0] += 10
            if order == "evaluate last":
                evaluate(board(checkpoint))
            else:
                board(evaluate(checkpoint))
            if order == "board twice":
                board(evaluate_again(checkpoint))
    train = shown(tmp_path)["train"]
    assert train["time/steps_per_second"] == {4: as_float32(0.1)} and list(train["time/validation_seconds"].values()) == seconds


def test_a_loop_that_continues_after_the_callback_was_closed_loses_nothing(tmp_path):
    trainer, board = make(), TensorBoard(tmp_path, every=fitflax.every(steps=1))
    loop = trainer.train_loop(X, Y, steps=4, batch_size=4)
    for checkpoint in loop:
        with board:
            board(checkpoint)
    assert sorted(step for run, tag, step in written(tmp_path) if tag == "loss") == [1, 2, 3, 4]


# --- More than one ---


def test_a_second_fit_continues_in_the_same_directory(tmp_path):
    trainer, board = make(), TensorBoard(tmp_path)
    for _ in range(2):
        fit(board, trainer=trainer, validation_data=VALID, steps=7)
    values = written(tmp_path)
    assert sorted(step for run, tag, step in values if (run, tag) == ("train", "loss")) == [5, 7, 12, 14]
    assert sorted(step for run, tag, step in values if (run, tag) == ("val", "loss")) == [5, 7, 12, 14]
    assert list(shown(tmp_path)["train"]["loss"]) == [5, 7, 12, 14]


def test_a_new_run_in_the_same_directory_keeps_the_old_files_and_only_it_is_shown(tmp_path):
    fit(TensorBoard(tmp_path), epochs=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.tfevents.*")}
    fit(TensorBoard(tmp_path), epochs=2)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert len(list(tmp_path.rglob("*.tfevents.*"))) == 2 * len(before)
    assert list(shown(tmp_path)["train"]["loss"]) == [5, 10]


def test_two_callbacks_write_to_two_directories(tmp_path):
    fit(TensorBoard(tmp_path / "a", every=fitflax.every(steps=1)), TensorBoard(tmp_path / "b"), validation_data=VALID)
    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    assert {key for key in a if key[2] == 5} == {key for key in b if key[2] == 5} and set(b) < set(a)
    assert {key[2] for key in a} == {0, 1, 2, 3, 4, 5} and {key[2] for key in b} == {0, 5}


# --- Off the training thread ---


def test_training_continues_while_the_writer_is_blocked(tmp_path, monkeypatch):
    release, write = threading.Event(), EventFiles._write

    def blocked(self, *arguments):
        assert release.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(EventFiles, "_write", blocked)
    trainer = make()
    # There are fewer writes than the queue holds.
    fit(TensorBoard(tmp_path, every=fitflax.every(steps=4)), at(trainer, "on_train_batch_end", 15, lambda step: release.set()), trainer=trainer, epochs=3)
    assert sorted(step for run, tag, step in written(tmp_path) if tag == "loss") == [4, 5, 8, 10, 12, 15]


@pytest.mark.slow
def test_the_training_thread_reads_no_values_for_it(tmp_path, monkeypatch):
    """Values, parameters, gradients and the rate come to the host in the writing thread."""
    trainer, threads = make(metrics=["accuracy", Columns()]), []
    trainer.fit(X, Y, batch_size=4, verbose=0)

    def watch(module, name):
        function = getattr(module, name)

        def watched(value, *args, **kwargs):
            arrays = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
            threads.extend(threading.current_thread().name for _ in arrays)
            return function(value, *args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(np, "asarray")
    watch(jax, "device_get")
    fit(TensorBoard(tmp_path, every=fitflax.every(steps=2), histograms=fitflax.every(steps=3)), trainer=trainer, steps=60, steps_per_epoch=60)
    assert len([name for name in threads if name == "fitflax-tensorboard"]) >= 30 + 20 * 4
    # Only for the history, once.
    assert len([name for name in threads if name != "fitflax-tensorboard"]) <= 2
    assert len(opened(tmp_path).Scalars("train", "learning_rate")) == 31


class Disk:
    """A writer that fails at the given steps."""

    def __init__(self, monkeypatch, *, steps):
        self.failed, write = threading.Event(), EventFiles._write

        def fail(files, group, step, *arguments):
            if step in steps:
                self.failed.set()
                raise OSError(28, "No space left on device")
            write(files, group, step, *arguments)

        monkeypatch.setattr(EventFiles, "_write", fail)


@pytest.mark.parametrize(("failing", "at_once"), [(range(4, 999), True), ([12], False)])
@pytest.mark.mostly_slow
def test_an_error_in_the_thread_is_raised_and_the_run_can_be_resumed(failing, at_once, tmp_path, monkeypatch):
    ended, trainer = [], make()
    with monkeypatch.context() as patch:
        disk = Disk(patch, steps=failing)
        callbacks = [
            TensorBoard(tmp_path / "board", every=fitflax.every(steps=2)),
            ModelCheckpoint(tmp_path / "checkpoints", every=fitflax.every(steps=3), keep=None),
            at(trainer, "on_train_batch_end", 5, lambda step: disk.failed.wait(60) if at_once else None),
            LambdaCallback(on_train_end=lambda logs: ended.append(trainer.step)),
        ]
        with pytest.raises(CallbackError, match=r"TensorBoard cannot write event files in .*board: OSError: \[Errno 28\] No space left") as caught:
            fit(*callbacks, trainer=trainer, steps=12)
    assert isinstance(caught.value.__cause__, OSError)
    # The error is raised by the next event at the latest; the other callbacks ended normally, and the thread is gone.
    assert trainer.step == (5 if at_once else 12) and ended == [trainer.step]
    assert not [thread for thread in threading.enumerate() if thread.name == "fitflax-tensorboard"]
    steps = fitflax.checkpoints.CheckpointStore(tmp_path / "checkpoints").steps()
    assert steps[0] == 3 and steps[-1] >= (3 if at_once else 9)
    fit(
        TensorBoard(tmp_path / "board", every=fitflax.every(steps=2)),
        ModelCheckpoint(tmp_path / "checkpoints", every=fitflax.every(steps=3), keep=None),
        LambdaCallback(on_train_end=lambda logs: None),
        steps=12,
        resume=True,
    )
    # Events whose write failed before the run was saved are lost, but the run itself never is.
    assert {step for run, tag, step in written(tmp_path / "board") if tag == "loss"} >= ({8, 10, 12} if at_once else {2, 4, 6, 8, 10})


def test_the_run_is_saved_even_if_the_disk_of_the_events_is_full(tmp_path, monkeypatch):
    """An error of a writer is like that of any other callback: the checkpoint of the step at which it is raised is complete."""
    trainer = make()

    def full(files):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventFiles, "_flush", full)
    with pytest.raises(CallbackError, match="No space left"):
        fit(TensorBoard(tmp_path / "board", every=fitflax.every(steps=1)), ModelCheckpoint(tmp_path / "checkpoints"), trainer=trainer, epochs=3)
    assert fitflax.checkpoints.CheckpointStore(tmp_path / "checkpoints").steps() == [trainer.step]


@pytest.mark.slow
def test_a_directory_that_becomes_a_file_is_an_error(tmp_path):
    trainer = make()

    def replace(step):
        (tmp_path / "board/val").parent.mkdir(exist_ok=True)
        (tmp_path / "board/val").touch()

    with pytest.raises(CallbackError, match="FileExistsError"):
        fit(TensorBoard(tmp_path / "board"), at(trainer, "on_train_batch_end", 2, replace), trainer=trainer, validation_data=VALID, epochs=3)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("how", ["deleted", "replaced", "truncated"])
def test_events_after_a_file_was_deleted_replaced_or_truncated_are_in_a_new_file_with_one_warning(how, tmp_path):
    def change(epoch, logs):
        if epoch == 2:
            for path in (tmp_path / "board").rglob("*.tfevents.*"):
                if how == "replaced":
                    path.with_name("copy").write_bytes(path.read_bytes())
                    path.with_name("copy").replace(path)
                elif how == "truncated":
                    os.truncate(path, 8)
                else:
                    path.unlink()

    options = {"epochs": 4, "validation_data": VALID}
    trainer = make()
    saving = ModelCheckpoint(tmp_path / "checkpoints")  # Everything is on disk at the end of an epoch.
    with pytest.warns(FitflaxWarning, match="was replaced, truncated or deleted by another program during the run. Its events may be lost") as caught:
        fit(TensorBoard(tmp_path / "board"), saving, LambdaCallback(on_epoch_begin=change), trainer=trainer, **options)
    losses = dict(zip((5, 10, 15, 20), map(as_float32, trainer.history.history["val_loss"]), strict=True))
    assert shown(tmp_path / "board")["val"]["loss"] == {step: loss for step, loss in losses.items() if how == "replaced" or step > 10}
    assert len(caught) == 1


@pytest.mark.slow
def test_a_resume_without_the_event_files_of_the_run_warns(tmp_path):
    def start(epochs):
        fit(TensorBoard(tmp_path / "board"), ModelCheckpoint(tmp_path / "checkpoints"), epochs=epochs, resume="auto")

    start(2)
    shutil.rmtree(tmp_path / "board")
    with pytest.warns(FitflaxWarning, match=r"board no longer has the event files of this run"):
        start(3)
    assert list(shown(tmp_path / "board")["train"]["loss"]) == [15]


def test_no_thread_is_left(tmp_path):
    before = threading.active_count()
    fit(TensorBoard(tmp_path))
    with pytest.raises(ZeroDivisionError):
        fit(TensorBoard(tmp_path), LambdaCallback(on_epoch_end=lambda epoch, logs: 1 / 0))
    assert threading.active_count() == before


def test_everything_up_to_a_checkpoint_is_on_disk_before_it_is_complete(tmp_path):
    seen = []

    class Peek(Callback):
        phase = fitflax.callbacks.Phase.SAVE

        def run_was_saved(self):
            seen.append(sorted({step for run, tag, step in written(tmp_path / "board") if tag == "loss"}))

    fit(
        TensorBoard(tmp_path / "board", every=fitflax.every(steps=1)),
        ModelCheckpoint(tmp_path / "c", every=fitflax.every(steps=3)),
        Peek(),
        steps=7,
        validation_data=VALID,
    )
    assert seen == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.slow
def test_it_compiles_nothing_in_a_second_run(tmp_path, compilations):
    trainer = make()
    options = {"trainer": trainer, "validation_data": VALID, "steps": 5}
    fit(TensorBoard(tmp_path, every=fitflax.every(steps=2), histograms=fitflax.every(steps=2)), **options)
    with compilations.counted() as again:
        fit(TensorBoard(tmp_path, every=fitflax.every(steps=2), histograms=fitflax.every(steps=2)), **options)
    assert again.count == 0, again.names


# --- Resuming ---


class Adding(Callback):
    """Adds a value at the end of each epoch, including an epoch that ends in the middle."""

    def on_epoch_end(self, epoch, logs):
        logs["added"] = epoch + logs["loss"]


def run(root, *more, trainer=None, every=None, saves=None, **options):
    """Trains with new objects, as a new process would."""
    trainer = trainer or make()
    callbacks = [
        ModelCheckpoint(root / "checkpoints", keep=None, every=fitflax.every(steps=saves or 1)),
        BestCheckpoint(root / "best"),
        Adding(),
        TensorBoard(root / "board", every=every or fitflax.every(steps=2), histograms=fitflax.every(steps=3)),
        *more,
    ]
    options = {"validation_data": VALID, "steps": 12, "resume": "auto", **options}
    fit(*callbacks, trainer=trainer, **options)
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The root and the trainer of an uninterrupted run."""
    root = tmp_path_factory.mktemp("never")
    trainer = run(root)
    return root, trainer


def assert_equal(root, trainer, uninterrupted):
    uninterrupted_root, uninterrupted_trainer = uninterrupted
    have, want = written(root / "board"), written(uninterrupted_root / "board")
    assert set(have) == set(want)
    assert have == want
    unequal = differences(state_of(trainer), state_of(uninterrupted_trainer)) + differences(
        directory_of(root / "checkpoints"), directory_of(uninterrupted_root / "checkpoints")
    )
    # A closing row stays next to the checkpoint that it was made for; the seconds since a trigger last fired depend on the clock.
    unequal = [line for line in unequal if ": closing: " not in line and not re.search(r"/TensorBoard\(.*\)/(values|histograms)/", line)]
    assert not unequal, "\n".join(unequal)
    assert rows_of(trainer.history) == rows_of(uninterrupted_trainer.history)
    assert shown(root / "board")["train"]["loss"] == shown(uninterrupted_root / "board")["train"]["loss"]


@pytest.mark.parametrize("k", [1, pytest.param(5, marks=pytest.mark.slow), 7])
@pytest.mark.slow
def test_a_run_that_was_stopped_and_resumed_has_the_events_of_an_uninterrupted_run(k, uninterrupted, tmp_path):
    run(tmp_path, steps=k)
    # An epoch that ended in the middle was closed, with its validation and the values that callbacks added.
    closed = {key for key in written(tmp_path / "board") if key[2] == k}
    assert {("val", "loss", k), ("train", "added", k), ("train", "loss", k), ("train", "epoch", k)} <= closed
    assert_equal(tmp_path, run(tmp_path), uninterrupted)


def raising(step):
    raise ArithmeticError


@pytest.mark.parametrize(("hook", "k"), [pytest.param("on_train_batch_end", 4, marks=pytest.mark.slow), ("on_train_batch_end", 7), ("on_checkpoint", 4)])
@pytest.mark.mostly_slow
def test_a_run_that_failed_and_was_resumed_has_the_events_of_an_uninterrupted_run(hook, k, uninterrupted, tmp_path):
    trainer = make()
    with pytest.raises(ArithmeticError):
        run(tmp_path, at(trainer, hook, k, raising), trainer=trainer)
    assert_equal(tmp_path, run(tmp_path, LambdaCallback()), uninterrupted)


@pytest.mark.parametrize("hook", [pytest.param("on_test_batch_end", marks=pytest.mark.slow), "on_epoch_end"])
def test_a_run_that_was_interrupted_at_the_end_of_an_epoch_closes_it_again(hook, uninterrupted, tmp_path):
    trainer = make()
    with pytest.raises(ArithmeticError):
        run(tmp_path, at(trainer, hook, 5, raising), trainer=trainer)
    assert_equal(tmp_path, run(tmp_path), uninterrupted)


@pytest.mark.slow
def test_events_after_the_checkpoint_are_dropped(uninterrupted, tmp_path):
    """The run has checkpoints every five steps and more frequent events. It dies as if killed, without another checkpoint."""
    run(tmp_path, saves=5, steps=9)
    shutil.rmtree(tmp_path / "checkpoints/step_00000009")
    assert 9 in {step for run, tag, step in written(tmp_path / "board")}
    trainer = run(tmp_path, saves=5)
    have, want = written(tmp_path / "board"), written(uninterrupted[0] / "board")
    assert have == want and trainer.step == 12


@pytest.mark.parametrize("k", [7, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_resume_with_nothing_left_to_do_keeps_the_existing_events(k, tmp_path):
    run(tmp_path, steps=k)
    before, events = {path: path.read_bytes() for path in (tmp_path / "board").rglob("*.tfevents.*")}, written(tmp_path / "board")
    run(tmp_path, steps=k)
    assert written(tmp_path / "board") == events
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.slow
def test_a_run_killed_before_its_closing_row_was_written_closes_the_epoch_again(tmp_path):
    k = 6  # This step was already written, because the trigger fired.
    run(tmp_path, steps=k)
    events = written(tmp_path / "board")
    (closing,) = (tmp_path / "checkpoints").rglob("closing.json")
    closing.unlink()
    run(tmp_path, steps=k)
    assert written(tmp_path / "board") == events


@pytest.mark.slow
def test_a_process_that_dies_before_it_saves_anything_leaves_no_events(tmp_path):
    run(tmp_path, steps=4)
    for k in (5, 5):
        trainer = make()
        with pytest.raises(ArithmeticError):
            run(tmp_path, at(trainer, "on_train_batch_end", k, raising), trainer=trainer, saves=100)
        shutil.rmtree(tmp_path / f"checkpoints/step_{k:08d}")
    run(tmp_path)
    # `written` checks that each event is there once. Only the environments of the processes that did not die are there.
    written(tmp_path / "board")
    assert [event.step for event in opened(tmp_path / "board").Tensors(".", "environment/text_summary")] == [0, 5]
    assert hyperparameters(tmp_path / "board")[0]["seed"] == 0


@pytest.mark.slow
def test_a_run_that_died_before_its_first_checkpoint_starts_again_under_the_same_id(uninterrupted, tmp_path):
    trainer = make()
    with pytest.raises(ArithmeticError):
        run(tmp_path, at(trainer, "on_train_batch_end", 3, raising), trainer=trainer, saves=100)
    shutil.rmtree(tmp_path / "checkpoints/step_00000003")
    run(tmp_path, saves=100)
    assert written(tmp_path / "board") == written(uninterrupted[0] / "board")


@pytest.mark.slow
def test_a_callback_added_to_a_resumed_run_starts_there(tmp_path):
    fit(ModelCheckpoint(tmp_path / "checkpoints"), epochs=1)
    with pytest.warns(fitflax.errors.FitflaxWarning, match=r"TensorBoard\(directory='board'\) is new"):
        fit(ModelCheckpoint(tmp_path / "checkpoints"), TensorBoard(tmp_path / "board"), epochs=2, resume=True)
    assert {step for run, tag, step in written(tmp_path / "board") if tag == "loss"} == {10}
    assert hyperparameters(tmp_path / "board")[0]["batch_size"] == 4


# --- Processes ---

SCRIPT = """
import json, os, pathlib, signal, sys, warnings
warnings.simplefilter("error")
from tests.callbacks import test_tensorboard as test
root, steps, kill = pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
trainer = test.make()
more = [test.at(trainer, kill[0], kill[1], lambda step: os.kill(os.getpid(), signal.SIGKILL))] if kill else []
test.run(root, *more, trainer=trainer, steps=steps, saves=2)
"""


def process(root, env, *, steps=12, kill=None, status=0):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(root), str(steps), json.dumps(kill)], env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr


@pytest.mark.slow
def test_a_killed_run_resumes_in_a_new_process_and_each_step_is_written_once(uninterrupted, tmp_path, process_env):
    for hook, k in (("on_train_batch_end", 1), ("on_train_batch_end", 7), ("on_epoch_end", 10), ("on_checkpoint", 12)):
        process(tmp_path, process_env, kill=[hook, k], status=-signal.SIGKILL)
        if k > 1:
            assert {step for run, tag, step in written(tmp_path / "board")} >= {0, 2, 4}
    process(tmp_path, process_env)
    assert written(tmp_path / "board") == written(uninterrupted[0] / "board")


@pytest.mark.slow
def test_utilization_is_written_if_the_peak_is_given(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(3, use_bias=False), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    x = np.ones((40, 4), np.float32)
    trainer.train_on_batch((x[:2], x[:2, :3]))  # Other shapes have a different cost.
    trainer.fit(x, x[:, :3], batch_size=8, epochs=2, callbacks=[TensorBoard(tmp_path, every=fitflax.every(steps=1), peak_flops=1e9)], verbose=0)
    train = shown(tmp_path)["train"]
    flops = 3 * 2 * 8 * 4 * 3
    for step, rate in train["time/steps_per_second"].items():
        assert train["time/model_flops_per_second"][step] == pytest.approx(rate * flops, rel=1e-5)
        assert train["time/model_flops_utilization"][step] == pytest.approx(rate * flops / 1e9, rel=1e-5)


@pytest.mark.parametrize("peak", [0, -1.0, "312e12", True, float("inf")])
def test_an_invalid_peak_is_an_error(peak):
    with pytest.raises(CallbackError, match=r"TensorBoard\(peak_flops=...\) must be a number of floating-point operations per second"):
        TensorBoard("runs", peak_flops=peak)


def test_a_collection_must_be_given_by_its_name(tmp_path):
    with pytest.raises(CallbackError, match=r"TensorBoard\(sown=\.\.\.\) takes the name of a collection, or None\. Received: 3\."):
        TensorBoard(tmp_path, sown=3)
