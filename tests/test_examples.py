"""The examples at a small size; slow tests also run them unchanged from the command line."""

import csv
import functools
import importlib.util
import json
import math
import pathlib
import re
import signal
import subprocess
import sys
import types
import zlib

import jax
import jax.numpy as jnp
import jraph
import nbclient
import nbformat
import numpy as np
import optax
import pytest
import scipy.stats

import fitflax
from fitflax.callbacks.event_files import events_of
from fitflax.checkpoints import CheckpointStore
from fitflax.parallel import DataParallel
from tests.run_script import checkpoint_of, differences, directory_of, steps_in

pytestmark = pytest.mark.optimized
EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def columns(path):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: [row[key] for row in rows] for key in rows[0]}


def latest(directory):
    return CheckpointStore(directory).path(steps_in(directory)[-1])


@pytest.fixture
def one_device(monkeypatch):
    """Makes trainers use one device, as in the processes that are started here: for eight devices, XLA takes longer to compile and run everything."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)


def test_every_example_is_short_and_has_a_main():
    for path in EXAMPLES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 150 and ("\ndef main(" in text or path.parent != EXAMPLES), path.name


def test_every_example_says_how_to_run_it_and_is_in_the_gallery():
    gallery = EXAMPLES.parent.joinpath("docs/gallery.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"\npython examples/{path.name} [--directory runs/{path.stem}] [--" in path.read_text(encoding="utf-8")
    for path in (path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        assert f"(../examples/{path})" in gallery, path


# -- configurations --


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "arguments", "wrong"),
    [
        ("tyro", ["--width", "8", "--epochs", "2", "--optimizer.learning-rate", "0.01"], "--widht=8"),
        ("hydra", ["model.width=8", "epochs=2", "optimizer.learning_rate=0.01"], "model.widht=8"),
        ("ml_collections", ["--config.width=8", "--config.epochs=2", "--config.optimizer.learning_rate=0.01"], "--config.widht=8"),
    ],
    ids=["tyro", "hydra", "ml_collections"],
)
def test_a_configuration_comes_from_the_command_line_and_is_saved(library, arguments, wrong, tmp_path, process_env):
    pytest.importorskip(library)
    script, env = str(EXAMPLES / f"configuration/with_{library}.py"), process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    for _ in range(2):  # The second run resumes, and has nothing left to do.
        lines = subprocess.run([sys.executable, script, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    assert float(lines.splitlines()[-1].removeprefix("validation accuracy: ")) > 0.4
    config = json.loads(next(iter(tmp_path.rglob("step_00000090/metadata.json"))).read_text())["config"]
    assert config["epochs"] == 2 and config["optimizer"]["learning_rate"] == 0.01
    mistaken = subprocess.run([sys.executable, script, wrong], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert mistaken.returncode != 0 and "widht" in mistaken.stdout + mistaken.stderr


# -- digits --


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["digits", "nnx_digits"])
def test_digits_learns_and_resumes_where_it_stopped(name, tmp_path):
    digits = load(name)
    once = digits.main(tmp_path / "once", epochs=4, features=8, verbose=0)
    digits.main(tmp_path / "twice", epochs=2, features=8, verbose=0)
    assert digits.main(tmp_path / "twice", epochs=4, features=8, verbose=0) == once > 0.85
    assert list((tmp_path / "twice/tensorboard").rglob("*tfevents*"))


@pytest.mark.slow
def test_the_demo_ends_by_printing_its_directories_and_an_accuracy_of_at_least_0_97(tmp_path, process_env):
    script = [sys.executable, str(EXAMPLES / "digits.py")]
    env = process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    lines = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert lines[-4:-2] == ["TensorBoard: runs/digits/tensorboard", "checkpoints: runs/digits/checkpoints"]
    assert lines[-2].startswith("best checkpoint: runs/digits/best/step_")
    assert float(re.fullmatch(r"test accuracy: (0\.9\d\d)", lines[-1])[1]) >= 0.97


# -- multi_process --


@pytest.mark.slow
def test_several_processes_train_are_killed_and_resume(tmp_path, process_env):
    command = [sys.executable, str(EXAMPLES / "multi_process.py"), "--directory", str(tmp_path / "run")]
    env = process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert "Killing process 1." in done.stdout and "Resumed at step" in done.stdout
    assert float(re.search(r"test accuracy: (0\.\d+)", done.stdout)[1]) > 0.9
    rows = columns(tmp_path / "run/log.csv")
    assert rows["epoch"] == [str(epoch) for epoch in range(12)]


# -- fine_tuning and grid_search --


@pytest.mark.slow
def test_fine_tuning_is_better_than_training_from_scratch(tmp_path, one_device):
    accuracies = load("fine_tuning").main(tmp_path, verbose=0)
    assert list(accuracies) == ["from scratch", "everything", "all but the first layer", "head and biases", "only the head"]
    assert (tmp_path / "pretrained").is_dir() and all(0.2 < accuracy <= 1 for accuracy in accuracies.values())
    assert accuracies["everything"] > accuracies["from scratch"] + 0.03 and accuracies["all but the first layer"] > accuracies["from scratch"] + 0.03


@pytest.mark.slow
def test_a_search_finds_a_model_and_saves_it_to_a_file(tmp_path):
    assert load("grid_search").main(tmp_path, epochs=3, verbose=0) > 0.8
    assert (tmp_path / "search.pickle").is_file()


# -- from_huggingface --


@pytest.mark.slow
def test_a_hugging_face_model_is_fine_tuned_and_written_back_for_transformers(tmp_path, monkeypatch, one_device):
    for name in ("transformers", "torch"):
        pytest.importorskip(name, reason="make peers installs it")
    monkeypatch.syspath_prepend(EXAMPLES)
    main = load("from_huggingface").main
    main(tmp_path / "twice", steps=30, verbose=0)
    found = main(tmp_path / "twice", steps=60, verbose=0)
    assert found == main(tmp_path / "once", steps=60, verbose=0)
    assert found["after"] < found["before"] - 1 and found["read"] < 1e-4 and found["written"] < 1e-4
    assert {path.name for path in (tmp_path / "once/tuned").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    again = main(tmp_path / "again", model=tmp_path / "once/tuned", steps=1, verbose=0)
    assert abs(again["before"] - found["after"]) < 1e-4


# -- modular_loop --


def scalars_of(directory):
    """Returns `{(subdirectory, tag, step): value}` of all scalars except measured times."""
    found = {}
    for path in sorted(directory.rglob("*.tfevents.*")):
        for record in events_of(path):
            for value in record.event.summary.value:
                if value.WhichOneof("value") == "simple_value" and not value.tag.startswith("time/"):
                    key = (path.parent.name, value.tag, record.event.step)
                    assert key not in found, key
                    found[key] = value.simple_value
    return found


def assert_same_run(one, other):
    for name in ("checkpoints", "lowest"):
        assert not differences(directory_of(one / name), directory_of(other / name))
    assert scalars_of(one / "tensorboard") == scalars_of(other / "tensorboard")
    assert {step for _, _, step in scalars_of(one / "tensorboard")} == {1, 3, 5, 6}


@pytest.mark.slow
def test_the_modular_loop_resumes_bit_for_bit(tmp_path):
    modular = load("modular_loop")
    options = {"every": 2, "features": 8, "length": 16, "verbose": False}
    uninterrupted = modular.main(tmp_path / "whole", 6, **options)
    modular.main(tmp_path / "parts", 4, **options)  # The uninterrupted run does not show this last step, 4.
    (tmp_path / "parts/checkpoints/step_00000004").rename(tmp_path / "later")
    assert modular.main(tmp_path / "parts", 6, **options)["step"] == uninterrupted["step"] == 6
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# -- diabetes --


@pytest.mark.slow
def test_the_diabetes_networks_know_their_uncertainty_and_resume_where_they_stopped(tmp_path, one_device):
    diabetes = load("diabetes")
    diabetes.main(tmp_path, epochs=10, networks=2, verbose=False)
    result = diabetes.main(tmp_path, epochs=20, networks=2, verbose=False)
    assert result["linear regression"]["r2"] > 0.3 > 0.0 >= result["mean"]["r2"] > -0.1
    assert result["networks"]["r2"] > 0.25
    assert 10 < result["networks"]["mae"] < 0.9 * result["mean"]["mae"]  # in the target's units; otherwise it would be below 1
    assert result["networks"]["nats"] < result["mean"]["nats"] - 0.1
    assert result["networks, confident"]["mae"] < result["networks, uncertain"]["mae"]
    assert 0.8 < result["networks"]["covered"] < 1
    log = columns(tmp_path / "network_1/log.csv")
    assert log["epoch"] == [str(epoch) for epoch in range(20)]
    assert {"loss", "covered", "val_loss", "val_covered"} < set(log)


def test_the_diabetes_loss_is_a_negative_normal_log_density_and_nine_of_ten_are_covered():
    diabetes = load("diabetes")
    mean, scale = np.float32(3), np.float32(2)
    targets = np.random.default_rng(0).normal(mean, scale, 20_000).astype(np.float32)
    outputs = np.tile(np.stack([mean, np.log(scale)]), (len(targets), 1))
    np.testing.assert_allclose(diabetes.nats(outputs, targets), -scipy.stats.norm(mean, scale).logpdf(targets), rtol=1e-4)
    assert diabetes.covered(outputs, targets).mean() == pytest.approx(0.9, abs=0.01)


def test_networks_that_disagree_are_less_certain_together():
    outputs = np.array([[[0.0, 0.0], [5.0, 0.0]], [[2.0, 0.0], [5.0, 0.0]]])
    mean, scale = load("diabetes").mixture(outputs)
    np.testing.assert_allclose(mean, [1, 5])
    np.testing.assert_allclose(scale, [2**0.5, 1])


def test_standardized_values_have_mean_0_and_deviation_1_and_can_be_converted_back():
    values = np.random.default_rng(0).normal(150, 40, size=(50, 3))
    scale = load("diabetes").Standardizer(values)
    np.testing.assert_allclose(scale(values).mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(scale(values).std(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(scale.back(scale(values)), values, rtol=1e-5)


# -- graphs --


@pytest.mark.slow
def test_graphs_learns_and_resumes_where_it_stopped(tmp_path):
    graphs = load("graphs")
    sizes = {"molecules": 160, "features": 16, "verbose": 0}
    once = graphs.main(tmp_path / "once", epochs=3, **sizes)
    graphs.main(tmp_path / "twice", epochs=1, **sizes)
    assert graphs.main(tmp_path / "twice", epochs=3, **sizes) == once
    assert not differences(directory_of(tmp_path / "once/checkpoints"), directory_of(tmp_path / "twice/checkpoints"))
    assert list(once) == list(graphs.PROPERTIES) and all(0.3 < share <= 1 and 0.5 <= same < 0.9 for share, same in once.values())


@pytest.mark.slow
def test_graphs_resumes_inside_an_epoch_bit_for_bit(tmp_path, monkeypatch):
    graphs = load("graphs")
    sizes = {"epochs": 3, "molecules": 160, "features": 16, "verbose": 0}
    iterate, load_state = graphs.Shuffled.__iter__, graphs.Shuffled.load_state_dict
    loaded = []

    def interrupted(self):
        for batch in iterate(self):
            if (self.passes, self.taken) == (1, 4):
                signal.raise_signal(signal.SIGINT)
            yield batch

    once = graphs.main(tmp_path / "once", **sizes)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(graphs.Shuffled, "__iter__", interrupted)
        graphs.main(tmp_path / "twice", **sizes)
    progress = json.loads((latest(tmp_path / "twice/checkpoints") / "metadata.json").read_text())["progress"]
    assert progress["epoch"] == progress["position"]["passes"] == 1 and progress["position"]["examples"] > 0
    monkeypatch.setattr(graphs.Shuffled, "load_state_dict", lambda self, state: loaded.append(state) or load_state(self, state))
    assert graphs.main(tmp_path / "twice", **sizes) == once
    assert [state["passes"] for state in loaded] == [1] and loaded[0]["taken"] > 0
    one, two = (latest(tmp_path / name / "checkpoints") for name in ("once", "twice"))
    assert one.name == two.name and not differences(checkpoint_of(one), checkpoint_of(two))


@pytest.mark.slow
def test_graphs_equals_a_hand_written_loop_bit_for_bit():
    """The loop has the documented order of molecules and keys of dropout, and counts known properties of real molecules equally."""
    graphs, rng = load("graphs"), np.random.default_rng(2)
    molecules = [graphs.molecule(rng) for _ in range(120)]
    network, optimizer = graphs.GraphNet(features=16, rounds=2), optax.adam(1e-3)
    orders = [np.random.default_rng([0, number]).permutation(len(molecules)) for number in range(2)]
    batches = [batch for order in orders for batch in jraph.dynamically_batch((molecules[number] for number in order), **graphs.BUDGET)]
    trainer = fitflax.Trainer(network, seed=3, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.adam(1e-3), optax.sigmoid_binary_cross_entropy)
    trainer.build(next(graphs.batches(molecules)))
    params, key = jax.tree.map(jnp.array, trainer.state.params), trainer.state.key

    @jax.jit
    def step(params, opt_state, graph, number):
        known = jraph.get_graph_padding_mask(graph)[:, None] & ~jnp.isnan(graph.globals)
        labels, inputs = jnp.where(known, graph.globals, 0), graph._replace(globals=jnp.zeros((graph.globals.shape[0], 1)))
        rngs = {"dropout": jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, number), 0), zlib.crc32(b"dropout"))}

        def loss_fn(params):
            logits = network.apply({"params": params}, inputs, train=True, rngs=rngs)
            return jnp.sum(known * optax.sigmoid_binary_cross_entropy(logits, labels)) / jnp.sum(known)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    opt_state, number = optimizer.init(params), 0
    for checkpoint in trainer.train_loop(graphs.Shuffled(molecules), steps=len(batches)):
        loss, params, opt_state = step(params, opt_state, batches[number], number)
        number += 1
        assert checkpoint.loss == float(loss)
        jax.tree.map(np.testing.assert_array_equal, checkpoint.model_params, params)
    assert number == len(batches) > 6


@pytest.mark.slow
def test_the_properties_of_molecules_are_learned(tmp_path):
    result = load("graphs").main(tmp_path, verbose=0)
    assert all(share > 0.95 > same for share, same in result.values())


@pytest.mark.slow
def test_an_evaluation_of_molecules_equals_that_of_numpy_over_each_molecule_alone():
    graphs, rng = load("graphs"), np.random.default_rng(1)
    molecules = [graphs.molecule(rng) for _ in range(70)]
    network = graphs.GraphNet(features=8, rounds=1)
    trainer = fitflax.Trainer(network, parallel=DataParallel(jax.devices()[:2]))
    trainer.compile("adam", optax.sigmoid_binary_cross_entropy, weighted_metrics=[graphs.right])
    trainer.train_on_batch(next(graphs.batches(molecules)))
    found = trainer.evaluate(lambda: graphs.batches(molecules), verbose=0)
    apply = jax.jit(functools.partial(network.apply, train=False))
    values, hits = [], []
    for molecule in molecules:
        alone = jraph.pad_with_graphs(molecule._replace(globals=np.zeros((1, 1), np.float32)), 16, 32)
        outputs, labels = np.asarray(apply({"params": trainer.state.params}, alone))[0], molecule.globals[0]
        known = ~np.isnan(labels)
        values += list(np.logaddexp(0, outputs[known]) - outputs[known] * labels[known])
        hits += list((outputs[known] > 0) == labels[known])
    assert found == {"loss": pytest.approx(np.mean(values), rel=1e-4), "right": pytest.approx(np.mean(hits))}


# -- char_lm --


@pytest.mark.slow
def test_char_lm_learns_and_resumes_where_it_stopped(tmp_path, one_device):
    char_lm = load("char_lm")
    sizes = {"features": 32, "length": 16, "steps_per_epoch": 10, "limit": 512, "verbose": 0}
    first = char_lm.main(tmp_path, steps=20, **sizes)
    second = char_lm.main(tmp_path, steps=40, **sizes)
    assert second["history"][:2] == first["history"]
    assert len(second["history"]) == 4
    assert second["history"][0] > first["perplexity"] > second["perplexity"]
    assert second["perplexity"] == pytest.approx(second["history"][-1], rel=1e-6)  # With another batch size.
    assert second["perplexity"] < second["frequency_perplexity"] < char_lm.CHARACTERS
    assert second["line"].startswith("    def ") and "\n" not in second["line"] and len(second["line"]) <= 80


def test_the_targets_of_char_lm_are_the_next_characters():
    x, y = load("char_lm").windows(np.arange(13), 4)
    np.testing.assert_array_equal(x, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    np.testing.assert_array_equal(y, x + 1)
    assert len(load("char_lm").windows(np.arange(12), 4)[0]) == 2  # nothing follows 11


def test_char_lm_reads_real_text_and_holds_out_other_modules():
    char_lm = load("char_lm")
    train, valid = char_lm.read(char_lm.TRAIN), char_lm.read(char_lm.VALID)
    assert len(train) > 500_000 and len(valid) > 50_000
    assert valid.min() > 0 and train.max() < char_lm.CHARACTERS
    assert not set(char_lm.TRAIN) & set(char_lm.VALID)
    assert "".join(map(chr, valid)).count("def ") > 100


def test_the_perplexity_of_guessing_by_frequency_equals_that_of_the_distribution():
    even = np.arange(128).repeat(10_000)
    assert math.isclose(load("char_lm").frequency_perplexity(even, even), 128)


# -- own_training --


@pytest.mark.slow
def test_own_training_logs_the_parts_of_its_loss_and_resumes_with_its_callback(tmp_path, one_device):
    own = load("own_training")
    first = own.main(tmp_path, epochs=2, features=32, verbose=0)
    assert math.isclose(first["loss"], first["reconstruction"] + first["kl"], rel_tol=1e-5)
    assert first["kl"] > 0
    assert first["images"].shape == (4, 64) and 0 <= first["images"].min() <= first["images"].max() <= 1
    # Nothing is left to do, so what the callback knows comes from the checkpoint.
    again = own.main(tmp_path, epochs=2, features=32, verbose=0)
    assert again["active_units"] == first["active_units"]
    assert again["most"] == first["most"] == max(first["active_units"]) > 0
    more = own.main(tmp_path, epochs=4, features=32, verbose=0)
    assert more["active_units"][:2] == first["active_units"] and len(more["active_units"]) == 4
    assert more["loss"] < first["loss"]
    log = columns(tmp_path / "log.csv")
    assert [int(value) for value in log["active_units"]] == more["active_units"]
    assert {"reconstruction", "kl", "val_reconstruction", "val_kl"} < set(log)


def test_an_image_as_text_has_a_shade_for_each_value():
    lines = load("own_training").draw(np.linspace(0, 1, 64)).splitlines()
    assert [len(line) for line in lines] == [16] * 8
    assert lines[0].startswith("  ") and lines[-1].endswith("@@")


# -- several_outputs --


@pytest.mark.slow
def test_several_outputs_learns_both_and_resumes_where_it_stopped(tmp_path, one_device):
    example = load("several_outputs")
    first = example.main(tmp_path, epochs=2, features=8, verbose=0)
    more = example.main(tmp_path, epochs=4, features=8, verbose=0)
    assert list(more) == ["loss", "digit_loss", "place_loss", "digit_accuracy", "place_mae"]
    assert more["loss"] == pytest.approx(more["digit_loss"] + 0.1 * more["place_loss"], rel=1e-5)
    assert more["digit_accuracy"] > 0.12 and more["place_mae"] < first["place_mae"] < 2.1  # Guessing gives 0.1 and 2.2.


def test_a_digit_is_where_its_place_says():
    images, targets = load("several_outputs").load()[0]
    for image, (row, column) in zip(images[:50], targets["place"].astype(int), strict=False):
        assert image[row : row + 8, column : column + 8].sum() == image.sum() > 0


# -- roman --


def test_numbers_are_written_as_the_romans_did():
    roman = load("roman").roman
    assert [roman(number) for number in (1, 4, 9, 14, 40, 90, 400, 1994, 2024)] == ["I", "IV", "IX", "XIV", "XL", "XC", "CD", "MCMXCIV", "MMXXIV"]
    assert max((roman(number) for number in range(1, 4000)), key=len) == "MMMDCCCLXXXVIII"


@pytest.mark.slow
def test_padding_has_weight_zero_in_roman(tmp_path, monkeypatch, one_device):
    example = load("roman")
    values = example.main(tmp_path, epochs=4, features=16, verbose=0)
    assert 0.3 < values["accuracy"] < 1 and values["loss"] < 2  # Guessing one of 8 letters gives 0.125 and 2.08.
    # Nothing is left to do, and now the letters have more padding.
    monkeypatch.setattr(example, "LENGTH", 24)
    assert example.main(tmp_path, epochs=4, features=16, verbose=0) == pytest.approx(values, rel=1e-5)


# -- gan --


@pytest.mark.slow
def test_the_gan_resumes_where_it_stopped_and_its_players_are_balanced(tmp_path, one_device):
    example = load("gan")
    for epochs in (10, 20):
        assert example.main(tmp_path, epochs=epochs, features=32, verbose=0)["real"] > 0.97
    log = columns(tmp_path / "log.csv")
    assert log["epoch"] == [str(epoch) for epoch in range(20)]
    assert list(log)[1:] == ["discriminator_accuracy", "discriminator_loss", "generator_loss"]
    assert all(0.4 < float(value) < 1 for value in log["discriminator_accuracy"])


@pytest.mark.slow
def test_a_step_of_the_gan_is_the_same_on_several_devices_and_changes_both_players():
    example, states = load("gan"), []
    (labels, images), _ = example.load()
    for count in (1, 2):
        trainer = example.GANTrainer(example.GAN(features=8, noise=0), rngs=("noise",), parallel=DataParallel(jax.devices()[:count]))
        trainer.compile(example.OPTIMIZER)
        trainer.build((labels[:4], images[:4]))
        before = trainer.state.params
        trainer.train_on_batch((labels[:3], images[:3]))  # Three examples: on two devices one is padding.
        states.append(trainer.state.params)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5), *states)
    assert all(abs(old - new).max() > 1e-3 for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(states[1]), strict=True))


# -- own_loop --


@pytest.mark.slow
def test_own_loop_stops_by_its_rule_and_keeps_the_best_state(tmp_path, capsys, one_device):
    own = load("own_loop")
    result = own.main(tmp_path, steps=600, verbose=True)
    assert result["best_step"] < result["stopped_at"] < 600
    assert result["accuracy"] > 0.9
    store = fitflax.checkpoints.CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == list(range(100, result["stopped_at"] + 1, 100))[-3:]
    assert list((tmp_path / "tensorboard/valid").glob("*tfevents*"))
    out = capsys.readouterr().out
    assert f"\nstopped at step {result['stopped_at']}: " in out
    assert f"Step{result['stopped_at']:7d}: valid             loss | " in out
    assert out.endswith(f"test accuracy of step {result['best_step']}: {result['accuracy']:.3f}\n")
    # A second run replaces the first one; a run that the rule does not stop ends at its last step.
    assert own.main(tmp_path, steps=60, verbose=False)["stopped_at"] == 60


def test_generalization_loss_stops_when_the_loss_is_the_given_percentage_above_its_best():
    stops = load("own_loop").GeneralizationLoss(5)
    summaries = [types.SimpleNamespace(step=step, state=f"state {step}", metrics={"valid": {"loss": loss}}) for step, loss in enumerate((3, 2, 2.09, 2.11))]
    assert [stops(summary) for summary in summaries] == [False, False, False, True]
    assert (stops.best_loss, stops.best_step, stops.best_state) == (2, 1, "state 1")


# -- notebook --


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, process_env, monkeypatch):
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=process_env | {"JAX_NUM_CPU_DEVICES": "1", "IPYTHONDIR": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)})
    printed = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream")
    assert float(re.search(r"(0\.\d+) are right", printed)[1]) > 0.95
    shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type in ("display_data", "execute_result")]
    assert sum("image/png" in output.data for output in shown) == 3
    assert [output.data["text/plain"].splitlines()[0][:13] for output in shown if "|█" in output.data["text/plain"]] == ["Epoch 1/20: 1"]


# -- the others, unchanged --


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "line", "least", "most"),
    [
        (["diabetes.py"], r"networks +(\d\.\d+) +\d+\.\d +\d\.\d+ +0\.\d+", 0.36, 0.5),  # linear regression has 0.337
        (["several_outputs.py"], r"test set: digit accuracy (0\.\d+), place error 0\.[1-6]\d pixels \(always the center: 2\.20\)", 0.85, 1),
        (["roman.py"], r"2499 unseen numbers: accuracy of letters 0\.9\d+, of whole numerals (0\.9\d+)", 0.98, 1),
        (["gan.py"], r"nearest-neighbor accuracy on real images: (0\.9\d+) with generated images, 0\.9\d+ with real ones", 0.9, 1),
        (["char_lm.py", "--steps", "150"], r"perplexity on held-out text: (\d+\.\d+) \(from character frequencies alone: .*\)", 2, 6),
        (["own_training.py"], r"test set, nats per image: (\d+\.\d+) = reconstruction \d+\.\d+ \+ kl \d+\.\d+", 20, 25.5),
        (["fsdp_transformer.py", "--steps", "20"], r"held-out text: loss (\d+\.\d+), accuracy .*", 2.5, 4.5),
        (["own_loop.py"], r"test accuracy of step \d+: (\d\.\d+)", 0.92, 1),
    ],
    ids=["diabetes", "several_outputs", "roman", "gan", "char_lm", "own_training", "fsdp_transformer", "own_loop"],
)
def test_an_example_runs_in_any_directory_and_ends_by_printing_its_results(arguments, line, least, most, tmp_path, process_env):
    """Its time limit is longer because some examples train for minutes."""
    name, *options = arguments
    env = process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=True)
    assert done.stderr == ""
    figure = re.search(rf"^{line}$", "\n".join(done.stdout.splitlines()[-6:]), re.MULTILINE)
    assert figure and least < float(figure[1]) < most, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
