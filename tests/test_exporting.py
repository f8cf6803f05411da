"""`Trainer.export`: the file computes what `predict` does, without fitflax and without the module's code."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fitflax
import fitflax.exporting as exporting
from fitflax.errors import ConfigError, ModelError, NotReadyError
from fitflax.parallel import DataParallel
from tests.test_examples import load

pytestmark = pytest.mark.optimized
pytest.importorskip("flatbuffers")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 8, 8, 1)).astype(np.float32)
Y = RNG.integers(0, 10, 70).astype(np.int32)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = nn.Dropout(0.5, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(10)(x)


def trained(model=None, x=X, y=Y, devices=1, loss="sparse_categorical_crossentropy", **options):
    names = ("precision", "ema_decay")
    trainer = fitflax.Trainer(model or CNN(), parallel=DataParallel(jax.devices()[:devices]), **{k: v for k, v in options.items() if k not in names})
    trainer.compile("adam", loss, **{k: v for k, v in options.items() if k in names})
    trainer.fit(x, y, batch_size=16, verbose=0)
    return trainer


def loaded(path):
    return jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes())).call


@pytest.mark.parametrize("options", [{}, {"devices": 2}, {"ema_decay": 0.5}, {"precision": "bfloat16"}])
@pytest.mark.mostly_slow
def test_the_file_computes_what_predict_does_for_any_batch_size(tmp_path, options):
    trainer = trained(**options)
    path = trainer.export(tmp_path / "models" / "cnn.jaxexport")
    run = loaded(path)
    for rows in (1, 7, 64):
        np.testing.assert_allclose(np.asarray(run(X[:rows])), trainer.predict(X[:rows]), atol=1e-2 if "precision" in options else 1e-6)
    assert [entry.name for entry in path.parent.iterdir()] == ["cnn.jaxexport"]


SCRIPT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fitflax", "flax", "optax", "orbax", "tests"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import jax, numpy as np
run = jax.export.deserialize(open(sys.argv[1], "rb").read()).call
given = np.load(sys.argv[2])
for rows in (1, 7, 64):
    found = np.asarray(jax.jit(run)(given["x"][:rows]))
    np.testing.assert_allclose(found, given["outputs"][:rows], rtol=1e-6, atol=1e-6 * np.abs(given["outputs"]).max())
print("equal")
"""


@pytest.mark.slow
def test_another_process_runs_the_file_without_fitflax_flax_or_the_modules_code(tmp_path):
    trainer = trained()
    path = trainer.export(tmp_path / "cnn")
    np.savez(tmp_path / "data.npz", x=X, outputs=trainer.predict(X))
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "run.py"), str(path), str(tmp_path / "data.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow  # Needs a package index.
@pytest.mark.timeout(900)
def test_the_digits_network_runs_in_an_environment_with_only_jax_and_flatbuffers(tmp_path):
    """Its time limit allows for a slow package index."""
    digits = load("digits")
    train, _, test = digits.load()
    trainer = trained(digits.CNN(), *train)
    path = trainer.export(tmp_path / "cnn")
    np.savez(tmp_path / "data.npz", x=test[0], outputs=trainer.predict(test[0]))
    (tmp_path / "run.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"jax=={jax.__version__}", "flatbuffers"], check=True, timeout=600)
    command = [python, str(tmp_path / "run.py"), str(path), str(tmp_path / "data.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout == "equal\n", done.stderr


class Two(nn.Module):
    @nn.compact
    def __call__(self, left, right):
        return {"sum": nn.Dense(1)(left + right), "both": (left, right)}


@pytest.mark.slow
def test_a_tuple_of_inputs_becomes_several_arguments_and_outputs_keep_their_structure(tmp_path):
    trainer = fitflax.Trainer(Two())
    trainer.compile("sgd", {"sum": "mse"})
    trainer.build(((X[:8, :, 0, 0], X[:8, :, 1, 0]), {"sum": X[:8, 0, 0]}))
    run = loaded(trainer.export(tmp_path / "two"))
    left, right = X[:5, :, 0, 0], X[:5, :, 1, 0]
    outputs = run(left, right)
    np.testing.assert_allclose(outputs["sum"], trainer.predict((left, right))["sum"], atol=1e-6)
    assert [part.tolist() for part in outputs["both"]] == [left.tolist(), right.tolist()]


@pytest.mark.slow
def test_inputs_by_name_are_one_dict(tmp_path):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, *, image):
            return nn.Dense(2)(image.reshape(image.shape[0], -1))

    trainer = fitflax.Trainer(Named(), inputs={"image": "pixels"}, targets="label")
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    trainer.fit({"pixels": X, "label": Y % 2}, batch_size=16, verbose=0)
    run = loaded(trainer.export(tmp_path / "named"))
    np.testing.assert_allclose(run({"image": X[:3]}), trainer.predict({"pixels": X[:3]}), atol=1e-6)


@pytest.mark.slow
def test_random_streams_of_evaluation_have_the_keys_of_the_first_batch(tmp_path):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x) + jax.random.normal(self.make_rng("noise"), (len(x), 2))

    trainer = fitflax.Trainer(Noisy(), rngs={"init": ["noise"], "train": ["noise"], "eval": ["noise"]}, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.build((X[:4, :, 0, 0], X[:4, :2, 0, 0]))
    run = loaded(trainer.export(tmp_path / "noisy", batch_size=4))
    np.testing.assert_allclose(run(X[:4, :, 0, 0]), trainer.predict_on_batch(X[:4, :, 0, 0]), atol=1e-6)


def test_weights_can_be_exported_before_compile_too(tmp_path):
    source = trained()
    source.save(tmp_path / "saved")
    trainer = fitflax.Trainer(CNN())
    trainer.replace_state(fitflax.checkpoints.load_inference_state(tmp_path / "saved"))
    path = trainer.export(tmp_path / "cnn", sample=X[:1])
    np.testing.assert_allclose(loaded(path)(X[:9]), source.predict(X[:9]), atol=1e-6)


@pytest.mark.slow
def test_one_file_can_support_several_platforms(tmp_path):
    path = trained().export(tmp_path / "cnn", platforms=["cpu", "cuda", "tpu"])
    assert jax.export.deserialize(bytearray(path.read_bytes())).platforms == ("cpu", "cuda", "tpu")


class Halves(nn.Module):
    @nn.compact
    def __call__(self, x):
        if x.shape[0] > 4:  # An unknown number of rows cannot answer this.
            return nn.Dense(2)(x)
        return nn.Dense(2)(x) + 1


class Measured(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x.reshape(len(x), -1))


@pytest.mark.slow
def test_a_module_that_depends_on_the_batch_size_is_an_error_and_exports_for_one_size(tmp_path):
    x = X[:, :, 0, 0]
    trainer = trained(Halves(), x, x[:, :2], loss="mse")
    with pytest.raises(ModelError, match=r"^Halves cannot be exported for inputs .*float32\[.*Its code depends on the batch size. Pass batch_size="):
        trainer.export(tmp_path / "halves")
    with pytest.raises(ModelError, match=r"^Measured cannot be exported.*TypeError.*use x\.shape\[0\] instead of len\(x\)"):
        trained(Measured(), x, x[:, :2], loss="mse").export(tmp_path / "halves")
    assert not (tmp_path / "halves").exists()
    run = loaded(trainer.export(tmp_path / "halves", batch_size=5))
    np.testing.assert_allclose(run(x[:5]), trainer.predict(x[:5], batch_size=5), atol=1e-6)


def test_an_export_that_cannot_work_is_one_clear_error(tmp_path, monkeypatch):
    trainer = fitflax.Trainer(CNN())
    with pytest.raises(NotReadyError, match="export: there is no state yet"):
        trainer.export(tmp_path / "cnn")
    trainer = trained()
    for platforms in ("cpu", [], ["gpu"]):
        with pytest.raises(ConfigError, match=r"must be a list of names from \['cpu', 'cuda', 'rocm', 'tpu'\]"):
            trainer.export(tmp_path / "cnn", platforms=platforms)
    with pytest.raises(ConfigError, match="batch_size"):
        trainer.export(tmp_path / "cnn", batch_size=0)
    monkeypatch.setattr(exporting, "_MAX_BYTES", 100)
    with pytest.raises(ConfigError, match=r"The parameters take .* GB, but a file of jax.export can hold less than 2"):
        trainer.export(tmp_path / "cnn")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r"pip install 'fitflax\[export\]'"):
        trainer.export(tmp_path / "cnn")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    trainer = trained()
    path = trainer.export(tmp_path / "cnn")
    before = path.read_bytes()
    trainer.fit(X, Y, batch_size=16, verbose=0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.export(path)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["cnn"]


@pytest.mark.slow
def test_a_module_that_uses_the_replica_axis_is_exported_as_the_only_replica(tmp_path):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.BatchNorm(use_running_average=not train, axis_name="replica")(nn.Dense(3)(x)) + jax.lax.pmean(jnp.float32(1), "replica")

    x = X[:, :, 0, 0]
    trainer = trained(Normed(), x, x[:, :3], loss="mse", devices=2)
    np.testing.assert_allclose(loaded(trainer.export(tmp_path / "normed"))(x[:6]), trainer.predict(x[:6]), atol=1e-6)


def test_the_permissions_of_a_file_follow_the_umask(tmp_path):
    path = trained().export(tmp_path / "cnn")
    (tmp_path / "other").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(ConfigError, match=r"export\(path\) must be a file, but .* is a directory\. Pass a path such as"):
        trained().export(tmp_path)


class Registered:
    """A custom container."""

    def __init__(self, value):
        self.value = value


jax.tree_util.register_pytree_node(Registered, lambda node: ((node.value,), None), lambda _, children: Registered(*children))


def test_outputs_in_a_custom_container_are_an_error_that_says_what_to_do(tmp_path):
    class Wrapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Registered(nn.Dense(1)(x.reshape(len(x), -1)))

    trainer = fitflax.Trainer(Wrapped())
    trainer.compile("sgd", lambda outputs, targets: outputs.value[:, 0] ** 2)
    trainer.build((X[:4], Y[:4]))
    with pytest.raises(ModelError, match=r"cannot be exported.* must be arrays in tuples, lists and dicts. Register other containers with jax\.export\."):
        trainer.export(tmp_path / "wrapped", batch_size=4)
    assert not list(tmp_path.iterdir())


def test_exporting_before_any_batch_is_an_error_that_names_sample(tmp_path):
    path = tmp_path / "saved"
    trained().save(path)
    trainer = fitflax.Trainer(CNN())
    trainer.compile("adam", "sparse_categorical_crossentropy")
    trainer.restore(path)
    with pytest.raises(NotReadyError, match=r"export needs the shapes of the inputs, but there has been no batch yet\. Pass export\(path, sample=x\)\."):
        trainer.export(tmp_path / "cnn")
    assert trainer.export(tmp_path / "cnn", sample=X[:1]).exists()
