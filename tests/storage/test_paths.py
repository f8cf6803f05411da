"""Paths and URLs: nothing that takes a path mistakes a URL for a local directory. Names that users choose become names of files inside their directory."""

import itertools
import os
import pathlib
from pathlib import Path

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax import __main__ as command
from fitflax.callbacks import BestCheckpoint, CSVLogger, JSONLogger, ModelCheckpoint, Profiler, TensorBoard
from fitflax.checkpoints import CheckpointStore, load_inference_state
from fitflax.errors import CheckpointError, ConfigError, FitflaxError
from fitflax.storage import locate
from fitflax.storage.paths import name_of_component, path_component, relative_path

X, Y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


def built():
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    trainer.build((X, Y))
    return trainer


TAKERS = {
    "ModelCheckpoint": (ModelCheckpoint, CheckpointError),
    "ModelCheckpoint, orbax": (lambda url: ModelCheckpoint(url, backend="orbax"), CheckpointError),
    "BestCheckpoint": (BestCheckpoint, CheckpointError),
    "CheckpointStore": (CheckpointStore, CheckpointError),
    "save": (lambda url: built().save(url), CheckpointError),
    "restore": (lambda url: built().restore(url), CheckpointError),
    "resume": (lambda url: built().fit(X, Y, resume=url, verbose=0), CheckpointError),
    "hunt_nan": (lambda url: built().hunt_nan(X, Y, restore_from=url), CheckpointError),
    "load_inference_state": (load_inference_state, CheckpointError),
    "export": (lambda url: built().export(url), ConfigError),
    "TensorBoard": (TensorBoard, ConfigError),
    "CSVLogger": (CSVLogger, ConfigError),
    "JSONLogger": (JSONLogger, ConfigError),
    "Profiler": (Profiler, ConfigError),
    "enable_compilation_cache": (fitflax.enable_compilation_cache, ConfigError),
}
UNKNOWN = ("hdfs://namenode/run", "https://example.com/run", "S3A://bucket/run", Path("gcs://bucket/run"))


@pytest.mark.parametrize("name", TAKERS)
def test_a_url_with_an_unknown_scheme_is_a_clear_error_and_nothing_is_written(name, tmp_path, monkeypatch):
    take, kind = TAKERS[name]
    monkeypatch.chdir(tmp_path)
    for url in UNKNOWN:
        with pytest.raises(kind, match=f"Received: '{os.fspath(url)}'"):
            take(url)
    assert not any(tmp_path.iterdir())


def test_the_command_line_rejects_an_unknown_scheme_too(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["checkpoints", UNKNOWN[0]])
    assert UNKNOWN[0] in capsys.readouterr().err


def test_a_file_url_is_treated_as_the_path_that_it_names(tmp_path):
    url = f"file://{tmp_path}/run%201"
    assert locate(url, owner="x", error=FitflaxError) == tmp_path / "run 1"
    trainer = built()
    trainer.fit(X, Y, callbacks=[ModelCheckpoint(f"{url}/checkpoints"), CSVLogger(f"{url}/log.csv")], verbose=0)
    assert (tmp_path / "run 1/checkpoints/step_00000001").is_dir() and (tmp_path / "run 1/log.csv").exists()
    trainer.restore(f"{url}/checkpoints")
    with pytest.raises(ConfigError, match=r"three slashes\. Use file:///home/me/run"):
        locate("file://home/me/run", owner="x", error=ConfigError)


def test_a_file_url_does_not_lose_characters_that_end_the_path_of_other_urls():
    for url in ("file:///tmp/exp#1", "file:///tmp/exp?", "file:/tmp/exp#1"):
        with pytest.raises(ConfigError, match=r"write # as %23 and \? as %3F"):
            locate(url, owner="x", error=ConfigError)
    assert [locate(f"file:///tmp/a%{code}1", owner="x", error=ConfigError) for code in ("23", "3F")] == [Path("/tmp/a#1"), Path("/tmp/a?1")]


@pytest.mark.parametrize("path", ["runs/a", "/tmp/a:b", "C:/runs", "a:/b", "runs/s3://x"])
def test_other_paths_are_local(path):
    assert locate(path, owner="x", error=FitflaxError) == Path(path)


ORDINARY = ["val", "dev_2", "night shift", "50%", "a.b", "...", ".hidden", "größe", "a\\b", "x" * 255, "~", "100%2f"]
UNSAFE = ["/", "/data/night", "../other", "..", ".", "a/b", "a//b", "a\0b", "a\nb", "a%2Fb", "%2E", "\ud800", "x" * 256, "x" * 300, "é" * 200, "a/" * 200]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_name_stays_as_it_is(name):
    assert path_component(name) == relative_path(name) == name_of_component(name) == name


@pytest.mark.parametrize("name", UNSAFE)
def test_any_name_becomes_a_file_inside_its_directory(name, tmp_path):
    path = tmp_path / path_component(name)
    path.mkdir()
    assert path.resolve().parent == tmp_path.resolve() and [path] == list(tmp_path.iterdir())
    nested = tmp_path / "nested"
    (nested / relative_path(name)).mkdir(parents=True)
    assert (nested / relative_path(name)).resolve().is_relative_to(nested.resolve() / "") and (nested / relative_path(name)).resolve() != nested.resolve()


@pytest.mark.parametrize("make", [path_component, relative_path])
def test_different_names_stay_different(make):
    names = {"".join(parts) for count in range(1, 6) for parts in itertools.product(["/", ".", "%", "2", "F", "E", "5"], repeat=count)}
    names |= {*ORDINARY, *UNSAFE}
    assert len({pathlib.PurePath(make(name)) for name in names}) == len(names)


@pytest.mark.parametrize("name", [name for name in UNSAFE if len(name.encode(errors="surrogatepass")) < 200])
def test_the_name_is_read_from_the_component(name):
    assert name_of_component(path_component(name)) == name
