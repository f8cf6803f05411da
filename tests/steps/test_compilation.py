"""The cache of compiled programs on disk, and the warning when data has a step compiled once more."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import fitflax
from fitflax.errors import ConfigError, FitflaxWarning
from fitflax.parallel import DataParallel
from fitflax.state import Batch
from fitflax.steps.compilation import CompiledShapes

OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
    "jax_enable_compilation_cache": True,
}

# -- the cache --

# Something is compiled before the cache is there, as in a notebook where the call comes late.
SCRIPT = """
import collections, hashlib, json
import jax, numpy as np
import fitflax
from flax import linen as nn

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **kwargs: events.update([event.rpartition("/")[2]]))
jax.jit(lambda x: x + 1)(np.ones(3))
path = fitflax.enable_compilation_cache()
events.clear()


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(8)(x))))


x = np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4)
digest = hashlib.sha256()
for devices in (1, 2):
    trainer = fitflax.Trainer(Net(), parallel=fitflax.parallel.DataParallel(jax.devices()[:devices]))
    trainer.compile("adam", "mse", ["mae"])
    trainer.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=0)
    for leaf in jax.tree.leaves((trainer.predict(x), trainer.state.params, trainer.state.opt_state)):
        digest.update(np.asarray(leaf).tobytes())
counts = {name: events[name] for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")}
print(json.dumps({"path": str(path), "digest": digest.hexdigest(), **counts}))
"""


@pytest.mark.slow
def test_the_next_process_compiles_nothing_again_and_computes_the_same_bits(tmp_path: pathlib.Path, process_env: dict[str, str]):
    environment = {name: value for name, value in process_env.items() if "CACHE" not in name} | {"XDG_CACHE_HOME": str(tmp_path), "JAX_NUM_CPU_DEVICES": "2"}

    def run() -> dict[str, Any]:
        result = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    first, second = run(), run()
    assert first["path"] == second["path"] == str(tmp_path / "fitflax" / "xla")
    # Initialization, training and prediction, on one device and on two by pmap.
    assert first["cache_hits"] == 0 and first["cache_misses"] == first["compile_requests_use_cache"] >= 6
    assert second["cache_misses"] == 0 and second["cache_hits"] == second["compile_requests_use_cache"] == first["cache_misses"]
    assert first["digest"] == second["digest"]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Callable[..., None]]:
    """A process in which nobody has set anything about the cache; called with options, it sets these. What was set before is put back."""
    before = {option: jax.config.values[option] for option in OPTIONS}

    def update(**options: Any) -> None:
        for option, value in options.items():
            jax.config.update(option, value)

    for option in OPTIONS:
        monkeypatch.delenv(option.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    update(**OPTIONS)
    yield update
    update(**before)
    jax_cache.reset_cache()


def test_the_directory_is_the_one_given_or_of_the_environment_or_of_jax_or_of_the_user(fresh, tmp_path, monkeypatch):
    assert fitflax.enable_compilation_cache() == tmp_path / "caches" / "fitflax" / "xla"
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "caches" / "fitflax" / "xla")
    fresh(jax_compilation_cache_dir=str(tmp_path / "jax"))
    assert fitflax.enable_compilation_cache() == tmp_path / "jax"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "environment"))
    assert fitflax.enable_compilation_cache() == tmp_path / "environment"
    assert fitflax.enable_compilation_cache(tmp_path / "given") == tmp_path / "given"
    assert {path.name for path in tmp_path.iterdir()} == {"caches", "jax", "environment", "given"}
    monkeypatch.chdir(tmp_path / "given")
    assert fitflax.enable_compilation_cache("below") == tmp_path / "given" / "below"


@pytest.mark.parametrize("caches", ["", "not/absolute"])
def test_without_a_usable_xdg_cache_home_the_cache_is_in_the_home_directory(fresh, caches, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", caches)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = fitflax.enable_compilation_cache()
    assert path == tmp_path / ".cache" / "fitflax" / "xla"
    # Others could have this user's processes run what they put there.
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_another_directory_is_used_from_the_call_on_though_jax_has_begun_with_one(fresh, tmp_path):
    for name in ("a", "b"):
        fitflax.enable_compilation_cache(tmp_path / name)
        jax.jit(lambda x, name=name: x + ord(name))(np.ones(3))
    assert all(len(list((tmp_path / name).glob("jit_*"))) == 1 for name in ("a", "b"))


def test_what_somebody_set_stays(fresh, tmp_path, monkeypatch):
    fitflax.enable_compilation_cache(tmp_path)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0
    assert jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == -1
    fresh(jax_persistent_cache_min_compile_time_secs=7.0, jax_persistent_cache_min_entry_size_bytes=0)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    fitflax.enable_compilation_cache(tmp_path)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 7
    assert jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == 0


def test_a_directory_that_cannot_be_written_is_an_error_that_names_it_and_changes_nothing(fresh, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"enable_compilation_cache cannot write to {path}: .*Pass another directory, or set JAX_COMPILATION_CACHE_DIR"):
            fitflax.enable_compilation_cache(path)
    assert {option: jax.config.values[option] for option in OPTIONS} == OPTIONS


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_directory_of_somebody_else_is_an_error(fresh, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        fitflax.enable_compilation_cache(tmp_path)


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        (3, "takes the path of a directory. Received: 3"),
        ("", "takes the path of a directory. Received: ''"),
        (b"cache", "takes the path of a directory"),
        ("gs://bucket/cache", r"takes directories of this machine. Received: 'gs://bucket/cache'. .*jax.config.update\('jax_compilation_cache_dir', ...\)"),
    ],
)
def test_what_is_no_directory_is_an_error(fresh, directory, message):
    with pytest.raises(ConfigError, match=message):
        fitflax.enable_compilation_cache(directory)


def test_the_switch_that_jax_has_for_all_caches_is_left_alone_with_a_warning(fresh, tmp_path):
    fresh(jax_enable_compilation_cache=False)
    with pytest.warns(FitflaxWarning, match="Nothing will be cached: JAX's switch jax_enable_compilation_cache is off"):
        fitflax.enable_compilation_cache(tmp_path)
    assert not jax.config.values["jax_enable_compilation_cache"]


# -- the warning --


class Pooled(nn.Module):
    """Takes sequences of any length."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(x.mean(axis=1, keepdims=True))


def batch_of(length: int, rows: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((rows, length), np.float32), np.ones((rows, 1), np.float32)


def trainer_of(**options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Pooled(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", learning_rate=0.0, **options)
    return trainer


def messages(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(issubclass(one.category, FitflaxWarning) for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.slow
def test_each_new_shape_warns_once_for_training_evaluating_and_predicting_and_is_what_compiles(compilations):
    trainer = trainer_of()
    batches = [batch_of(length) for length in (28, 28, 30, 28, 30, 31)]
    calls = {"train on": lambda: trainer.fit(batches_of(batches), verbose=0), "evaluate": lambda: trainer.evaluate(batches_of(batches), verbose=0)}
    calls["predict"] = lambda: trainer.predict(batches_of(batches))
    for verb, call in calls.items():
        first, second = messages(call)
        assert first == (
            f"A batch to {verb} has other shapes than the one before, so its step is compiled again: x: float32[4, 28] -> float32[4, 30]. "
            "Pad or cut examples to a fixed length, or to a few, each of which is compiled once; drop a last batch that differs (drop_remainder)."
        )
        assert "x: float32[4, 30] -> float32[4, 31]. " in second
        with compilations.counted() as counted:
            assert messages(call) == []
        assert counted.count == 0, counted.names


def batches_of(batches: list[Any]) -> Callable[[], Iterator[Any]]:
    return lambda: iter(batches)


@pytest.mark.slow
def test_single_batches_warn_as_well():
    trainer = trainer_of()
    for call in (trainer.train_on_batch, trainer.test_on_batch, lambda batch: trainer.predict_on_batch(batch[0])):
        found = messages(lambda call=call: [call(batch_of(length)) for length in (28, 30, 28, 30)])
        assert [message.split(". ")[0].split(": ", 1)[1] for message in found] == ["x: float32[4, 28] -> float32[4, 30]"]


def test_a_mistake_in_a_single_batch_is_an_error_and_no_warning_comes_before_it():
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.train_on_batch(batch_of(3))
    with pytest.raises(fitflax.errors.ModelError):
        trainer.train_on_batch(batch_of(4))


@pytest.mark.slow
def test_the_first_batch_of_a_call_may_have_any_shape():
    trainer = trainer_of()
    sets = {"short": batch_of(5), "long": batch_of(9)}
    found = messages(lambda: [trainer.fit(*batch_of(length), batch_size=4, epochs=2, validation_data=sets, verbose=0) for length in (28, 30)])
    found += messages(lambda: [trainer.predict(batch_of(length)[0]) for length in (28, 30)])
    assert found == []


def test_a_larger_batch_is_warned_of_once_and_a_smaller_one_is_padded():
    found = messages(lambda: trainer_of().fit(batches_of([batch_of(28, rows) for rows in (4, 3, 6, 5)]), verbose=0))
    assert [message.split(":")[0] for message in found] == ["A batch of 6 examples follows batches of 4"]


def test_sizes_that_are_not_padded_are_compiled_in_silence_as_asked_for():
    assert messages(lambda: trainer_of(pad=False).fit(batches_of([batch_of(28, rows) for rows in (4, 3, 6)]), verbose=0)) == []


def test_several_steps_in_a_call_warn_as_single_ones_do():
    batches = [batch_of(length) for length in (28, 28, 28, 30, 30, 28, 28)]
    found = messages(lambda: trainer_of(steps_per_call=2).fit(batches_of(batches), verbose=0))
    assert [message.split(". ")[0].split(": ", 1)[1] for message in found] == ["x: float32[4, 28] -> float32[4, 30]"]


def seen(*batches: Batch) -> list[str]:
    shapes = CompiledShapes("train on")
    return messages(lambda: [shapes.see(batch) for batch in batches])


MASK = np.ones(4, bool)


def test_what_differs_is_named_with_what_to_do():
    x, y = np.ones((4, 3), np.float32), {"label": np.ones(4, np.int32)}
    base = Batch({"image": x, "size": np.ones((4, 2), np.float32)}, y, MASK)
    (found,) = seen(base, base._replace(x={**base.x, "image": np.ones((4, 3), np.int8)}))
    assert found.endswith("again: x['image']: float32[4, 3] -> int8[4, 3]. Use one dtype for all batches.")
    (found,) = seen(base, base._replace(x={**base.x, "image": np.ones((6, 5), np.int8)}, y=()))
    assert "again: x['image']: float32[4, 3] -> int8[6, 5]. Pad or cut" in found and found.endswith("Use one dtype for all batches.")


@pytest.mark.slow
def test_sample_weights_that_only_some_batches_have_are_the_callers_choice():
    x = np.ones((4, 3), np.float32)
    batches = [Batch(x, x, MASK), Batch(x, x, MASK, np.ones(4, np.float32)), Batch(x[:2], x[:2], MASK[:2])]
    assert seen(*batches, *batches) == []
    trainer = trainer_of()
    assert messages(lambda: [trainer.train_on_batch((x, x[:, :1], *more)) for more in ((), (np.ones(4),), ())]) == []


def test_what_compiles_nothing_is_no_difference():
    x, y = np.ones((4, 3), np.float32), np.ones(4, np.int32)
    same = [Batch(x, y, MASK), Batch(x.astype(np.float64), y.astype(np.int64), MASK), Batch(jax.numpy.asarray(x), y, MASK)]
    assert seen(*same, Batch(x[:2], y[:2], MASK[:2]), *same) == []


def test_a_warning_that_is_an_error_comes_once():
    shapes, batches = CompiledShapes("predict"), [Batch(np.ones((4, length)), (), MASK) for length in (3, 5)]
    shapes.see(batches[0])
    with pytest.raises(FitflaxWarning):
        shapes.see(batches[1])
    shapes.see(batches[1])
