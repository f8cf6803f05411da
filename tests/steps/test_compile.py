"""The cache of compiled programs on disk, and the warning if data causes a step to be compiled again."""

import gc
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
from fitflax.errors import ConfigError, FitflaxWarning, ModelError
from fitflax.parallel import DataParallel
from fitflax.state import Batch
from fitflax.steps import compile as compilation
from fitflax.steps.compile import share_programs, trim_heap, without_full_collections
from fitflax.steps.shapes import CompiledShapes

OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
    "jax_enable_compilation_cache": True,
}

# -- the cache --

# Something is compiled before the cache is enabled, as in a notebook that makes the call late.
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
def test_the_next_process_compiles_nothing_and_its_results_are_bit_for_bit_identical(tmp_path: pathlib.Path, process_env: dict[str, str]):
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
    """A process in which no option of the cache is set. Call the value with options to set them. The earlier options are set again at the end."""
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


def test_the_directory_comes_from_the_argument_the_environment_jax_or_the_user(fresh, tmp_path, monkeypatch):
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
    # Otherwise, others could put programs there that this user's processes would run.
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_another_directory_is_used_from_the_call_on_even_if_jax_already_uses_one(fresh, tmp_path):
    for name in ("a", "b"):
        fitflax.enable_compilation_cache(tmp_path / name)
        jax.jit(lambda x, name=name: x + ord(name))(np.ones(3))
    assert all(len(list((tmp_path / name).glob("jit_*"))) == 1 for name in ("a", "b"))


def test_options_that_are_already_set_are_kept(fresh, tmp_path, monkeypatch):
    fitflax.enable_compilation_cache(tmp_path)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0
    assert jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == -1
    fresh(jax_persistent_cache_min_compile_time_secs=7.0, jax_persistent_cache_min_entry_size_bytes=0)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    fitflax.enable_compilation_cache(tmp_path)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 7
    assert jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == 0


def test_an_unwritable_directory_is_an_error_that_names_it_and_changes_nothing(fresh, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"enable_compilation_cache cannot write to {path}: .*Pass another directory, or set JAX_COMPILATION_CACHE_DIR"):
            fitflax.enable_compilation_cache(path)
    assert {option: jax.config.values[option] for option in OPTIONS} == OPTIONS


def test_a_process_shares_programs_if_there_is_no_cache(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "_shared", [])
    for options in ({"jax_compilation_cache_dir": str(tmp_path)}, {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": False}):
        fresh(**options)
        share_programs()
        assert jax.config.values["jax_compilation_cache_dir"] == options["jax_compilation_cache_dir"] and not compilation._shared
    fresh(jax_enable_compilation_cache=True)
    share_programs()
    directory = jax.config.values["jax_compilation_cache_dir"]
    share_programs()
    assert [shared.name for shared in compilation._shared] == [directory] and pathlib.Path(directory).is_dir()
    assert fitflax.enable_compilation_cache() == tmp_path / "caches" / "fitflax" / "xla"  # Not the one that is deleted with the process.


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_directory_without_write_permission_is_an_error(fresh, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        fitflax.enable_compilation_cache(tmp_path)


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        (3, "takes the path of a directory. Received: 3"),
        ("", "takes the path of a directory. Received: ''"),
        (b"cache", "takes the path of a directory"),
        ("gs://bucket/cache", r"takes a local directory. Received: 'gs://bucket/cache'. .*jax.config.update\('jax_compilation_cache_dir', ...\)"),
    ],
)
def test_a_value_that_is_not_a_local_directory_is_an_error(fresh, directory, message):
    with pytest.raises(ConfigError, match=message):
        fitflax.enable_compilation_cache(directory)


def test_the_option_that_turns_off_all_caches_of_jax_is_kept_with_a_warning(fresh, tmp_path):
    fresh(jax_enable_compilation_cache=False)
    with pytest.warns(FitflaxWarning, match="Nothing will be cached, because JAX's option jax_enable_compilation_cache is off"):
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
def test_each_new_shape_warns_and_compiles_once_in_training_evaluation_and_prediction(compilations):
    trainer = trainer_of()
    batches = [batch_of(length) for length in (28, 28, 30, 28, 30, 31)]
    calls = {"train on": lambda: trainer.fit(batches_of(batches), verbose=0), "evaluate": lambda: trainer.evaluate(batches_of(batches), verbose=0)}
    calls["predict"] = lambda: trainer.predict(batches_of(batches))
    for verb, call in calls.items():
        first, second = messages(call)
        assert first == (
            f"The shapes or dtypes of batches to {verb} have changed, so the step is compiled again: x: float32[4, 28] -> float32[4, 30]. "
            "Pad or truncate examples to one or a few lengths, each of which is compiled once; drop a last batch that differs (drop_remainder)."
        )
        assert "x: float32[4, 30] -> float32[4, 31]. " in second
        with compilations.counted() as counted:
            assert messages(call) == []
        assert counted.count == 0, counted.names


def batches_of(batches: list[Any]) -> Callable[[], Iterator[Any]]:
    return lambda: iter(batches)


@pytest.mark.slow
def test_methods_for_single_batches_warn_too():
    trainer = trainer_of()
    for call in (trainer.train_on_batch, trainer.test_on_batch, lambda batch: trainer.predict_on_batch(batch[0])):
        found = messages(lambda call=call: [call(batch_of(length)) for length in (28, 30, 28, 30)])
        assert [message.split(". ")[0].split(": ", 1)[1] for message in found] == ["x: float32[4, 28] -> float32[4, 30]"]


def test_a_mistake_in_a_single_batch_is_an_error_without_a_warning_before_it():
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


def test_a_larger_batch_causes_one_warning_and_a_smaller_one_is_padded():
    found = messages(lambda: trainer_of().fit(batches_of([batch_of(28, rows) for rows in (4, 3, 6, 5)]), verbose=0))
    assert [message.split(",")[0] for message in found] == ["A batch of 6 examples follows batches of 4"]


def test_without_padding_new_batch_sizes_are_compiled_without_a_warning():
    assert messages(lambda: trainer_of(pad=False).fit(batches_of([batch_of(28, rows) for rows in (4, 3, 6)]), verbose=0)) == []


@pytest.mark.slow
def test_several_steps_per_call_warn_like_single_steps():
    batches = [batch_of(length) for length in (28, 28, 28, 30, 30, 28, 28)]
    found = messages(lambda: trainer_of(steps_per_call=2).fit(batches_of(batches), verbose=0))
    assert [message.split(". ")[0].split(": ", 1)[1] for message in found] == ["x: float32[4, 28] -> float32[4, 30]"]


def seen(*batches: Batch) -> list[str]:
    shapes = CompiledShapes("train on")
    return messages(lambda: [shapes.check(batch) for batch in batches])


MASK = np.ones(4, bool)


def test_the_warning_names_what_differs_and_what_to_do():
    x, y = np.ones((4, 3), np.float32), {"label": np.ones(4, np.int32)}
    base = Batch({"image": x, "size": np.ones((4, 2), np.float32)}, y, MASK)
    (found,) = seen(base, base._replace(x={**base.x, "image": np.ones((4, 3), np.int8)}))
    assert found.endswith("again: x['image']: float32[4, 3] -> int8[4, 3]. Use one dtype for all batches.")
    (found,) = seen(base, Batch({"image": np.ones((6, 5), np.int8), "size": np.ones((6, 2), np.float32)}, (), np.ones(6, bool)))
    assert "again: x['image']: float32[4, 3] -> int8[6, 5]. Pad or truncate" in found and found.endswith("Use one dtype for all batches.")


@pytest.mark.slow
def test_sample_weights_in_only_some_batches_cause_no_warning():
    x = np.ones((4, 3), np.float32)
    batches = [Batch(x, x, MASK), Batch(x, x, MASK, np.ones(4, np.float32)), Batch(x[:2], x[:2], MASK[:2])]
    assert seen(*batches, *batches) == []
    trainer = trainer_of()
    assert messages(lambda: [trainer.train_on_batch((x, x[:, :1], *more)) for more in ((), (np.ones(4),), ())]) == []


def test_differences_that_compile_nothing_cause_no_warning():
    x, y = np.ones((4, 3), np.float32), np.ones(4, np.int32)
    same = [Batch(x, y, MASK), Batch(x.astype(np.float64), y.astype(np.int64), MASK), Batch(jax.numpy.asarray(x), y, MASK)]
    assert seen(*same, Batch(x[:2], y[:2], MASK[:2]), *same) == []


def test_a_warning_turned_into_an_error_is_raised_once():
    shapes, batches = CompiledShapes("predict"), [Batch(np.ones((4, length)), (), MASK) for length in (3, 5)]
    shapes.check(batches[0])
    with pytest.raises(FitflaxWarning):
        shapes.check(batches[1])
    shapes.check(batches[1])


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked for it")
def test_freed_memory_is_returned_to_the_operating_system():
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [bytes(2**16) for _ in range(2**11)]  # Too small to be mapped one by one: 128 MB of heap.
    last = bytes(2**16)  # The heap ends here, so the rest of it stays when it is freed.
    before = resident()
    del blocks
    trim_heap()
    assert before - resident() > 2**26
    assert len(last) == 2**16


@pytest.mark.slow
def test_the_heap_is_trimmed_only_for_a_large_state(monkeypatch):
    calls: list[None] = []
    monkeypatch.setattr("fitflax.steps.program.trim_heap", lambda: calls.append(None))
    for width in (8, 2**12 + 2**11):  # With Adam's moments 3 * 6144 * 1024 * 4 bytes.
        trainer = fitflax.Trainer(nn.Dense(width))
        trainer.compile("adam", "mse")
        trainer.fit(np.ones((8, 1024), np.float32), np.ones((8, width), np.float32), epochs=1, batch_size=8, verbose=0)
        assert len(calls) == (width > 8)


NO_INCREMENTS = pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 collects garbage in increments")


@pytest.mark.slow
@NO_INCREMENTS
def test_full_garbage_collections_are_postponed_while_a_step_is_traced():
    seen, before = [], gc.get_threshold()

    class Watched(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(gc.get_threshold())
            return nn.Dense(3)(x)

    trainer = fitflax.Trainer(Watched())
    trainer.compile("sgd", "mse")
    trainer.fit(np.ones((8, 2), np.float32), np.ones((8, 3), np.float32), verbose=0)
    postponed = [oldest > 10**9 for *_, oldest in seen]
    assert postponed == [True] * 3 and {(youngest, younger) for youngest, younger, _ in seen} == {before[:2]}  # Initialization, dry run, step.
    with pytest.raises(ModelError):
        trainer.predict(np.ones((8, 3), np.float32))
    assert gc.get_threshold() == before


@NO_INCREMENTS
def test_the_threshold_of_full_collections_is_reset_even_after_a_block_was_interrupted():
    before = gc.get_threshold()
    with pytest.raises(KeyboardInterrupt), without_full_collections():
        raise KeyboardInterrupt
    assert gc.get_threshold() == before
    with without_full_collections():
        never = gc.get_threshold()
    gc.set_threshold(*never)  # As left by a Ctrl-C in the first instruction of the end of a block.
    with without_full_collections():
        pass
    assert gc.get_threshold() == before
