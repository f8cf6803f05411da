"""docs/from-keras.md: it has a row for every argument and callback of Keras, each row's code line runs, and the numbers match those of Keras."""

import csv
import importlib.util
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import Callback, CSVLogger, EarlyStopping, Phase, ReduceLROnPlateau
from fitflax.parallel import DataParallel
from tests.test_docs import ROW, run_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/from-keras.md").read_text(encoding="utf-8")
ROWS = [row for row in ROW.finditer(PAGE) if row["there"] != "Keras"]

# Of Keras 3.15, by heading.
ARGUMENTS = {
    "compile": "optimizer loss loss_weights metrics weighted_metrics run_eagerly steps_per_execution jit_compile auto_scale_loss",
    "fit": "x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight sample_weight initial_epoch steps_per_epoch "
    "validation_steps validation_batch_size validation_freq",
    "evaluate and predict": "x y batch_size sample_weight steps callbacks",
    "Callbacks": "BackupAndRestore CSVLogger Callback CallbackList EarlyStopping History LambdaCallback LearningRateScheduler ModelCheckpoint OrbaxCheckpoint "
    "ProgbarLogger ReduceLROnPlateau RemoteMonitor SwapEMAWeights TensorBoard TerminateOnNaN",
}


def section(heading):
    return next(part for part in PAGE.split("\n## ") if part.startswith(f"{heading}\n"))


@pytest.mark.parametrize("heading", ARGUMENTS)
def test_every_argument_and_callback_of_keras_has_a_row(heading):
    rows = [row["there"] for row in ROW.finditer(section(heading))]
    words = {word for row in rows for code in re.findall(r"`([^`]*)`", row) for word in re.findall(r"\w+", code)}
    assert not set(ARGUMENTS[heading].split()) - words
    lines = [line for line in section(heading).splitlines() if line.startswith("| ") and not line.startswith(("| Keras", "|---"))]
    assert len(lines) == len(rows)


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
@pytest.mark.slow
def test_the_listed_arguments_and_callbacks_are_those_of_the_installed_keras(process_env):
    code = """
import inspect, json, keras
names = {name: list(inspect.signature(getattr(keras.Model, name)).parameters)[1:] for name in ("compile", "fit", "evaluate", "predict")}
print(json.dumps({**names, "Callbacks": [name for name in dir(keras.callbacks) if name[0].isupper()]}))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=process_env | {"KERAS_BACKEND": "jax"}, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["compile"]) == set(ARGUMENTS["compile"].split()) and set(found["fit"]) == set(ARGUMENTS["fit"].split())
    assert set(found["evaluate"]) | set(found["predict"]) <= {*ARGUMENTS["evaluate and predict"].split(), "verbose", "return_dict", "kwargs"}
    assert set(found["Callbacks"]) == set(ARGUMENTS["Callbacks"].split())


@pytest.mark.slow
def test_the_code_line_of_every_row_runs(tmp_path, monkeypatch, capsys):
    assert len(ROWS) > 50
    run_rows(PAGE, ROWS, tmp_path, monkeypatch)


def test_all_optimizers_by_name_are_listed_with_their_rates():
    paragraph = next(part for part in PAGE.split("\n\n") if part.startswith("**Optimizers by name**"))
    with_rate, without = paragraph.split("Without a default learning rate:")
    known = set(fitflax.optimizers.names())
    listed = [set(re.findall(r"`(\w+)`", part)) & known for part in (with_rate, without)]
    assert listed[0] | listed[1] == known
    for name in known:
        if name in listed[1]:
            with pytest.raises(fitflax.errors.OptimizerError, match="has no default learning rate"):
                fitflax.optimizers.get(name)
        else:
            rate = float(fitflax.optimizers.get_learning_rate(fitflax.optimizers.get(name).init({"w": np.ones(2, np.float32)})))
            assert rate == pytest.approx(0.01 if name == "sgd" else 0.001)


# -- side by side --

RNG = np.random.default_rng(0)
SIZE = 43  # Batches of 16, and one of 11.


class Mlp(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(self.outputs)(x)


class Cnn(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), padding="VALID")(x))
        return nn.Dense(self.outputs)(x.reshape(len(x), -1))


MODULES = {"mlp": Mlp, "cnn": Cnn}
SHAPES = {"mlp": (8,), "cnn": (6, 6, 2)}
CLASSES = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], "outputs": 3}
VALUES = {"loss": "mse", "metrics": ["mae"], "outputs": 2}
NETWORKS = {f"{kind} {name}": {"kind": kind, **what} for kind in MODULES for name, what in (("classes", CLASSES), ("values", VALUES))}


def data_of(name):
    rng, job = np.random.default_rng(sorted(NETWORKS).index(name)), NETWORKS[name]
    x = rng.normal(size=(SIZE, *SHAPES[job["kind"]])).astype(np.float32)
    return x, rng.integers(0, 3, SIZE) if job["outputs"] == 3 else rng.normal(size=(SIZE, 2)).astype(np.float32)


def params_of(name):
    return MODULES[NETWORKS[name]["kind"]](NETWORKS[name]["outputs"]).init(jax.random.key(0), data_of(name)[0][:1])["params"]


def scripts():
    """Yields runs of callbacks with various options, on values that go up and down."""
    draw = random.Random(0)

    def values(count):
        level, found = 1.0, []
        for _ in range(count):
            level += draw.choice([-0.3, -0.1, -0.01, 0.0, 0.05, 0.2])
            found.append(round(level, 3))
        return found

    for _ in range(25):
        options = {"mode": draw.choice(["min", "max"]), "patience": draw.choice([0, 1, 2, 4]), "min_delta": draw.choice([0, 0.02, 0.15])}
        options |= draw.choice([{}, {"baseline": 0.8}, {"start_from_epoch": 3}, {"baseline": 1.2, "start_from_epoch": 2}])
        yield {"callback": "early", "options": options, "values": values(14)}
    for _ in range(25):
        options = {"mode": draw.choice(["min", "max"]), "patience": draw.choice([0, 1, 2, 3]), "min_delta": draw.choice([0, 0.02, 0.15])}
        options |= {"factor": draw.choice([0.1, 0.5]), "cooldown": draw.choice([0, 1, 3]), "min_lr": draw.choice([0, 0.02])}
        yield {"callback": "plateau", "options": options, "values": values(14)}
    yield {"callback": "csv", "options": {}, "values": [0.1, 1e-9, 1 / 3, 12345678.9, -0.0, 2.0]}


SCRIPTS = list(scripts())


@pytest.fixture(scope="module")
def keras(tmp_path_factory, compilation_cache):
    """The results of Keras."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    root = tmp_path_factory.mktemp("keras")
    networks = {}
    for number, name in enumerate(NETWORKS):
        x, y = data_of(name)
        layers = [np.asarray(layer[leaf]) for layer in params_of(name).values() for leaf in ("kernel", "bias")]
        weights = {f"w{index}": layer for index, layer in enumerate(layers)}
        np.savez(root / f"{number}.npz", x=x, y=y, **weights)
        networks[name] = {**NETWORKS[name], "arrays": str(root / f"{number}.npz"), "rate": 0.05, "epochs": 3, "batch_size": 16}
    (root / "job.json").write_text(json.dumps({"networks": networks, "scripted": SCRIPTS}))
    command = [sys.executable, str(ROOT / "tests/keras_script.py"), str(root / "job.json"), str(root / "result.json")]
    done = subprocess.run(command, env=os.environ | compilation_cache, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((root / "result.json").read_text())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_the_same_network_on_the_same_ragged_batches_gives_the_numbers_of_keras(name, keras):
    job, (x, y), theirs = NETWORKS[name], data_of(name), keras["networks"][name]
    trainer = fitflax.Trainer(MODULES[job["kind"]](job["outputs"]))
    trainer.compile("sgd", job["loss"], job["metrics"], learning_rate=0.05)
    trainer.build((x[:16], y[:16]))
    trainer.replace_state(trainer.state.replace_params(params_of(name)))
    history = trainer.fit(x, y, batch_size=16, epochs=3, shuffle=False, validation_data=(x[:9], y[:9]), verbose=0).history
    assert set(history) == set(theirs["history"])
    for key, values in theirs["history"].items():
        np.testing.assert_allclose(history[key], values, atol=1e-4, err_msg=key)
    found = trainer.evaluate(x, y, batch_size=16, verbose=0)
    np.testing.assert_allclose([found[key] for key in sorted(found)], [theirs["evaluate"][key] for key in sorted(found)], atol=1e-4)
    np.testing.assert_allclose(trainer.predict(x, batch_size=16), theirs["outputs"], atol=1e-4)


class Script(Callback):
    """Puts given values into the logs, and records the learning rates of the epochs."""

    phase = Phase.CHANGE

    def __init__(self, values):
        self.values, self.rates = values, []

    def on_epoch_begin(self, epoch, logs):
        self.rates.append(self.trainer.learning_rate)

    def on_epoch_end(self, epoch, logs):
        logs["score"] = self.values[epoch]


def run_script(script, tmp_path):
    kinds = {"early": EarlyStopping, "plateau": ReduceLROnPlateau}
    callback = CSVLogger(tmp_path / "log.csv") if script["callback"] == "csv" else kinds[script["callback"]]("score", **script["options"])
    play = Script(script["values"])
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", learning_rate=1.0)
    trainer.fit(np.zeros((1, 1)), np.zeros((1, 1)), epochs=len(script["values"]), callbacks=[play, callback], verbose=0)
    return play.rates


@pytest.mark.parametrize("kind", ["early", "plateau"])
@pytest.mark.slow
def test_stops_and_learning_rates_match_keras(kind, keras, tmp_path):
    wrong = []
    for script, theirs in zip(SCRIPTS, keras["scripted"], strict=True):
        if script["callback"] == kind:
            rates = run_script(script, tmp_path)
            if rates != theirs["rates"]:
                wrong.append((script, rates, theirs["rates"]))
    assert not wrong, wrong[0]
    stops = {theirs["epochs"] for script, theirs in zip(SCRIPTS, keras["scripted"], strict=True) if script["callback"] == "early"}
    assert len(stops) > 4  # Not all the same.


@pytest.mark.slow
def test_rows_of_a_csv_file_match_keras(keras, tmp_path):
    run_script(SCRIPTS[-1], tmp_path)
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = [{"epoch": row["epoch"], "score": row["score"]} for row in csv.DictReader(file)]
    # Keras adds a column for the validation of each monitor; there is none here.
    assert rows == [{"epoch": row["epoch"], "score": row["score"]} for row in keras["scripted"][-1]["rows"]]
