"""`WandbLogger` in offline mode: tests read the files that it writes, and processes are really killed."""

import copy
import io
import json
import pathlib
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
from flax import linen as nn
from PIL import Image

import fitflax
from fitflax.callbacks import BestCheckpoint, ImageSummary
from fitflax.errors import CallbackError
from fitflax.integrations.tracker_base import Point
from fitflax.integrations.wandb import WandbLogger, records_of
from tests.integrations.servers import script_env

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "tracker_script.py"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_RUN_ID", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def files_in(directory):
    return sorted(pathlib.Path(directory).glob("wandb/offline-run-*/run-*.wandb"))


def wait_for_end(directory):
    """Waits until W&B's process has written the end of the last run, which it does after `finish` has returned."""
    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records_of(files_in(directory)[-1])):
        assert time.monotonic() < deadline, [path.name for path in files_in(directory)] + [path.read_text() for path in directory.glob("stderr.txt")]
        time.sleep(0.05)


def rows_of(directory):
    """Returns `{(key, step): value}` of all processes of a run without clocks and what W&B adds, and checks that each is there once."""
    wait_for_end(directory)
    rows = {}
    for path in files_in(directory):
        for record in records_of(path):
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith(("_", "time/")):
                        key = name, record.history.step.num
                        assert key not in rows, f"{key} is there twice"
                        rows[key] = json.loads(item.value_json)
    return rows


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("summaries", "map", ImageSummary(nn.sigmoid(x)[:, :, None, None]))
        return nn.Dense(2)(x)


X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def trained(*callbacks, steps=20, **options):
    trainer = fitflax.Trainer(Net())
    trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    trainer.fit(X, Y, batch_size=8, steps=steps, callbacks=callbacks, verbose=0, validation_data=(X[:16], Y[:16]), **options)
    return trainer


def test_rows_config_summary_images_and_the_best_checkpoint_are_in_the_files(tmp_path):
    best = BestCheckpoint(tmp_path / "best", monitor="val_loss")
    logger = WandbLogger("tests", directory=tmp_path, every=fitflax.every(steps=10), checkpoint=best)
    trainer = trained(best, logger, config={"note": "x"})
    rows = rows_of(tmp_path)
    assert [rows["val_loss", step] for step in (5, 10, 15, 20)] == trainer.history.history["val_loss"]
    assert rows["loss", 10] == trainer.history.history["loss"][1]
    assert {step for name, step in rows if name.startswith("summaries/map")} == {5, 10, 15, 20}
    (path,) = files_in(tmp_path)
    assert len(list((path.parent / "files/media").rglob("*.png"))) == 12  # Three at each of four steps.
    records = list(records_of(path))
    config = {item.key: json.loads(item.value_json) for record in records if record.HasField("run") for item in record.run.config.update}
    assert config["batch_size"] == 8 and config["model"] == "Net" and config["note"] == "x" and len(config["git_commit"]) == 40
    summary = {item.key or "/".join(item.nested_key): item.value_json for record in records if record.HasField("summary") for item in record.summary.update}
    assert json.loads(summary["val_accuracy"]) == trainer.history.history["val_accuracy"][-1]
    assert isinstance(pickle.loads(pickle.dumps(logger)), WandbLogger)
    (artifact,) = [record.artifact for record in records if record.HasField("artifact")]
    assert {entry.path for entry in artifact.manifest.contents} >= {"state.msgpack", "metadata.json"} or artifact.manifest.manifest_file_path


def test_no_name_of_an_image_leads_out_of_the_directory(tmp_path):
    logger = WandbLogger("tests", directory=tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    logger.tracker.prepare()
    logger.tracker.start("a", None, {})
    png = io.BytesIO()
    Image.new("L", (2, 2)).save(png, "png")
    logger.tracker.log([Point(1, 0.0, {}, {"../../../../../../other": png.getvalue()})])
    logger.tracker.finish("finished", {}, None)
    assert [path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.png")] == ["logs"]


def test_an_active_run_is_used_and_not_ended(tmp_path):
    import wandb

    with wandb.init(project="tests", dir=tmp_path) as run:
        logger = WandbLogger(every=fitflax.every(steps=10))
        trained(logger)
        assert logger.run_id == run.id and wandb.run is run
        run.log({"mine": 1.0}, step=21)
    rows = rows_of(tmp_path)
    assert rows["mine", 21] == 1.0 and {step for name, step in rows if name == "loss"} == {5, 10, 15, 20}


def test_a_run_that_could_not_be_ended_is_not_mistaken_for_a_run_of_the_user(tmp_path):
    import wandb

    logger = WandbLogger("tests", directory=tmp_path)
    abandoned, following = copy.copy(logger.tracker), copy.copy(logger.tracker)
    abandoned.prepare()
    assert abandoned.start("a", None, {}) == "a" and wandb.run.id == "a"
    following.prepare()
    assert not following.is_given
    assert following.start("b", None, {}) == "b" and wandb.run.id == "b"
    following.finish("finished", {}, None)
    with wandb.init(project="tests", dir=tmp_path, id="b"):
        following.prepare()
        assert following.is_given


def start(directory, steps=1200):
    command = [sys.executable, str(SCRIPT), str(directory), "wandb", str(steps)]
    directory.mkdir(exist_ok=True)
    with (directory / "stderr.txt").open("a") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=script_env(), text=True)


def test_a_repeatedly_killed_run_has_the_same_rows_as_an_uninterrupted_run(tmp_path):
    uninterrupted = start(tmp_path / "never")
    uninterrupted.communicate(timeout=600)
    rng = np.random.default_rng(0)
    begin = 0
    for _ in range(3):
        process = start(tmp_path / "killed")
        end = begin + int(rng.integers(60, 390))
        for line in process.stdout:
            what, _, step = line.partition(" ")
            if what == "step" and int(step) >= end:
                break
        process.kill()
        process.wait()
        process.stdout.close()
        begin = end // 25 * 25
        time.sleep(1)  # W&B names a directory after the second in which the run starts.
    last = start(tmp_path / "killed")
    output, _ = last.communicate(timeout=600)
    assert last.returncode == 0, output
    expected = rows_of(tmp_path / "never")
    assert len([step for name, step in expected if name == "loss"]) > 400
    assert rows_of(tmp_path / "killed") == expected
    assert len({path.name for path in files_in(tmp_path / "killed")}) == 1  # One id.


def test_an_unknown_mode_is_an_error_before_the_run():
    with pytest.raises(CallbackError, match=r"WandbLogger\(mode=\.\.\.\) must be 'online', 'offline', 'disabled' or None\. Received: 'ofline'"):
        WandbLogger("tests", mode="ofline")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'fitflax\[wandb\]'"):
        WandbLogger()
