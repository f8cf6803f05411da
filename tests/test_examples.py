"""The examples, shrunk; as slow tests also as they stand, from the command line."""

import csv
import importlib.util
import math
import pathlib
import re
import subprocess
import sys
import time
import types

import jax
import nbclient
import nbformat
import numpy as np
import pytest
import scipy.stats

import fitflax
from fitflax.callbacks.event_files import events_of
from fitflax.parallel import DataParallel
from tests.run_script import differences, directory_of

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


def test_every_example_is_short_and_has_a_main():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 150 and "\ndef main(" in text, path.name


def test_every_example_says_how_to_run_it_and_is_in_the_readme_and_the_gallery():
    readme, gallery = (EXAMPLES.parent.joinpath(name).read_text(encoding="utf-8") for name in ("README.md", "docs/gallery.md"))
    for path in EXAMPLES.glob("*.py"):
        assert f"\npython examples/{path.name} [--directory runs/{path.stem}] [--" in path.read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        assert path.name == "__pycache__" or (f"(examples/{path.name})" in readme and f"(../examples/{path.name})" in gallery), path.name


# -- digits --


def test_digits_learns_and_goes_on_where_it_was(tmp_path):
    digits = load("digits")
    once = digits.main(tmp_path / "once", epochs=4, features=8, verbose=0)
    digits.main(tmp_path / "twice", epochs=2, features=8, verbose=0)
    assert digits.main(tmp_path / "twice", epochs=4, features=8, verbose=0) == once > 0.85
    assert list((tmp_path / "twice/tensorboard").rglob("*tfevents*"))


@pytest.mark.slow
def test_the_demo_ends_with_its_directories_and_an_accuracy_of_at_least_0_97(tmp_path, process_env):
    script = [sys.executable, str(EXAMPLES / "digits.py")]
    env = process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    lines = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert lines[-4:-2] == ["TensorBoard: runs/digits/tensorboard", "checkpoints: runs/digits/checkpoints"]
    assert lines[-2].startswith("best checkpoint: runs/digits/best/step_")
    assert float(re.fullmatch(r"test accuracy: (0\.9\d\d)", lines[-1])[1]) >= 0.97


# -- multi_process --


@pytest.mark.slow
def test_several_processes_train_are_killed_and_go_on(tmp_path, process_env):
    command = [sys.executable, str(EXAMPLES / "multi_process.py"), "--directory", str(tmp_path / "run")]
    done = subprocess.run(command, env=process_env, capture_output=True, text=True, timeout=300, check=True)
    assert "Killing process 1." in done.stdout and "Resumed at step" in done.stdout
    assert float(re.search(r"test accuracy: (0\.\d+)", done.stdout)[1]) > 0.9
    rows = columns(tmp_path / "run/log.csv")
    assert rows["epoch"] == [str(epoch) for epoch in range(12)]


# -- fine_tuning and grid_search --


def test_what_was_learned_on_other_digits_is_of_use(tmp_path):
    accuracies = load("fine_tuning").main(tmp_path, epochs=3, features=4, verbose=0)
    assert list(accuracies) == ["from scratch", "everything", "all but the first layer", "head and biases", "the head alone"]
    assert (tmp_path / "pretrained").is_dir() and all(0.2 < accuracy <= 1 for accuracy in accuracies.values())


@pytest.mark.slow
def test_tuning_is_better_than_beginning_from_scratch(tmp_path):
    accuracies = load("fine_tuning").main(tmp_path, verbose=0)
    assert accuracies["everything"] > accuracies["from scratch"] + 0.03 and accuracies["all but the first layer"] > accuracies["from scratch"] + 0.03


@pytest.mark.slow
def test_a_search_finds_a_model_and_leaves_it_in_a_file(tmp_path):
    assert load("grid_search").main(tmp_path, epochs=3, verbose=0) > 0.8
    assert (tmp_path / "search.pickle").is_file()


# -- modular_loop --


def scalars_of(directory):
    """`{(sub-directory, tag, step): value}` of all scalars that no clock measures."""
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


def test_the_modular_loop_goes_on_to_the_same_bits(tmp_path):
    modular = load("modular_loop")
    options = {"every": 2, "features": 8, "length": 16, "verbose": False}
    whole = modular.main(tmp_path / "whole", 6, **options)
    modular.main(tmp_path / "parts", 4, **options)  # Its last step, 4, is one that the whole run does not show.
    (tmp_path / "parts/checkpoints/step_00000004").rename(tmp_path / "later")
    assert modular.main(tmp_path / "parts", 6, **options)["step"] == whole["step"] == 6
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_the_modular_loop_is_killed_and_started_again_and_ends_with_the_same_bits(tmp_path, process_env):
    """Two kills: as soon as a checkpoint is there, and while one is written or just about to be."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import modular_loop; modular_loop.main(sys.argv[2], 6, every=2, features=8, length=16)"

    def start(name):
        command = [sys.executable, "-c", script, str(EXAMPLES), str(tmp_path / name)]
        return subprocess.Popen(command, env=process_env, stdout=subprocess.DEVNULL)

    assert start("whole").wait(timeout=300) == 0
    checkpoints = tmp_path / "parts/checkpoints"
    for step in (1, 3):
        process = start("parts")
        try:
            end = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < end:
                if any(int(path.name[5:]) >= step for path in checkpoints.glob("step_*")):
                    break
                time.sleep(0.001)
        finally:
            process.kill()
        process.wait(timeout=60)
    assert start("parts").wait(timeout=300) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# -- diabetes --


@pytest.mark.slow
def test_the_networks_of_diabetes_know_how_sure_they_are_and_go_on_where_they_were(tmp_path):
    diabetes = load("diabetes")
    diabetes.main(tmp_path, epochs=10, networks=2, verbose=False)
    result = diabetes.main(tmp_path, epochs=20, networks=2, verbose=False)
    assert result["linear regression"]["r2"] > 0.3 > 0.0 >= result["mean"]["r2"] > -0.1
    assert result["networks"]["r2"] > 0.25
    assert 10 < result["networks"]["mae"] < 0.9 * result["mean"]["mae"]  # in the target's units, or it would be below 1
    assert result["networks"]["nats"] < result["mean"]["nats"] - 0.1
    assert result["networks, surer"]["mae"] < result["networks, less sure"]["mae"]
    assert 0.8 < result["networks"]["covered"] < 1
    log = columns(tmp_path / "network_1/log.csv")
    assert log["epoch"] == [str(epoch) for epoch in range(20)]
    assert {"loss", "covered", "val_loss", "val_covered"} < set(log)


def test_the_loss_of_diabetes_is_the_density_of_a_normal_distribution_and_nine_of_ten_are_covered():
    diabetes = load("diabetes")
    mean, scale = np.float32(3), np.float32(2)
    targets = np.random.default_rng(0).normal(mean, scale, 20_000).astype(np.float32)
    outputs = np.tile(np.stack([mean, np.log(scale)]), (len(targets), 1))
    np.testing.assert_allclose(diabetes.nats(outputs, targets), -scipy.stats.norm(mean, scale).logpdf(targets), rtol=1e-4)
    assert diabetes.covered(outputs, targets).mean() == pytest.approx(0.9, abs=0.01)


def test_networks_that_disagree_are_less_sure_together():
    outputs = np.array([[[0.0, 0.0], [5.0, 0.0]], [[2.0, 0.0], [5.0, 0.0]]])
    mean, scale = load("diabetes").mixture(outputs)
    np.testing.assert_allclose(mean, [1, 5])
    np.testing.assert_allclose(scale, [2**0.5, 1])


def test_standardized_values_have_mean_0_and_deviation_1_and_come_back():
    values = np.random.default_rng(0).normal(150, 40, size=(50, 3))
    scale = load("diabetes").Standardizer(values)
    np.testing.assert_allclose(scale(values).mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(scale(values).std(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(scale.back(scale(values)), values, rtol=1e-5)


# -- char_lm --


@pytest.mark.slow
def test_char_lm_learns_and_goes_on_where_it_was(tmp_path):
    char_lm = load("char_lm")
    sizes = {"features": 32, "length": 16, "steps_per_epoch": 10, "limit": 512, "verbose": 0}
    first = char_lm.main(tmp_path, steps=20, **sizes)
    second = char_lm.main(tmp_path, steps=40, **sizes)
    assert second["history"][:2] == first["history"]
    assert len(second["history"]) == 4
    assert second["history"][0] > first["perplexity"] > second["perplexity"]
    assert second["perplexity"] == pytest.approx(second["history"][-1], rel=1e-6)  # In batches of another size.
    assert second["perplexity"] < second["frequency_perplexity"] < char_lm.CHARACTERS
    assert second["line"].startswith("    def ") and "\n" not in second["line"] and len(second["line"]) <= 80


def test_the_targets_of_char_lm_are_the_characters_that_follow():
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


def test_the_perplexity_of_guessing_by_frequency_is_that_of_the_distribution():
    even = np.arange(128).repeat(10_000)
    assert math.isclose(load("char_lm").frequency_perplexity(even, even), 128)


# -- own_training --


@pytest.mark.slow
def test_own_training_logs_the_parts_of_its_loss_and_goes_on_with_its_callback(tmp_path):
    own = load("own_training")
    first = own.main(tmp_path, epochs=2, features=32, verbose=0)
    assert math.isclose(first["loss"], first["reconstruction"] + first["kl"], rel_tol=1e-5)
    assert first["kl"] > 0
    assert first["images"].shape == (4, 64) and 0 <= first["images"].min() <= first["images"].max() <= 1
    # Nothing is left to do: what the callback knows, it knows from the checkpoint.
    again = own.main(tmp_path, epochs=2, features=32, verbose=0)
    assert again["active_units"] == first["active_units"]
    assert again["most"] == first["most"] == max(first["active_units"]) > 0
    more = own.main(tmp_path, epochs=4, features=32, verbose=0)
    assert more["active_units"][:2] == first["active_units"] and len(more["active_units"]) == 4
    assert more["loss"] < first["loss"]
    log = columns(tmp_path / "log.csv")
    assert [int(value) for value in log["active_units"]] == more["active_units"]
    assert {"reconstruction", "kl", "val_reconstruction", "val_kl"} < set(log)


def test_a_picture_in_text_has_a_shade_for_each_value():
    lines = load("own_training").draw(np.linspace(0, 1, 64)).splitlines()
    assert [len(line) for line in lines] == [16] * 8
    assert lines[0].startswith("  ") and lines[-1].endswith("@@")


# -- several_outputs --


@pytest.mark.slow
def test_several_outputs_learns_both_and_goes_on_where_it_was(tmp_path):
    example = load("several_outputs")
    first = example.main(tmp_path, epochs=2, features=8, verbose=0)
    more = example.main(tmp_path, epochs=4, features=8, verbose=0)
    assert list(more) == ["loss", "digit_loss", "place_loss", "digit_accuracy", "place_mae"]
    assert more["loss"] == pytest.approx(more["digit_loss"] + 0.1 * more["place_loss"], rel=1e-5)
    assert more["digit_accuracy"] > 0.12 and more["place_mae"] < first["place_mae"] < 2.1  # By guessing 0.1 and 2.2.


def test_a_digit_lies_where_its_place_says():
    images, targets = load("several_outputs").load()[0]
    for image, (row, column) in zip(images[:50], targets["place"].astype(int), strict=False):
        assert image[row : row + 8, column : column + 8].sum() == image.sum() > 0


# -- roman --


def test_numbers_are_written_as_the_romans_did():
    roman = load("roman").roman
    assert [roman(number) for number in (1, 4, 9, 14, 40, 90, 400, 1994, 2024)] == ["I", "IV", "IX", "XIV", "XL", "XC", "CD", "MCMXCIV", "MMXXIV"]
    assert max((roman(number) for number in range(1, 4000)), key=len) == "MMMDCCCLXXXVIII"


@pytest.mark.slow
def test_padding_counts_nowhere_in_roman(tmp_path, monkeypatch):
    example = load("roman")
    values = example.main(tmp_path, epochs=4, features=16, verbose=0)
    assert 0.3 < values["accuracy"] < 1 and values["loss"] < 2  # By guessing one of 8 letters 0.125 and 2.08.
    # Nothing is left to do, and now the letters have more padding.
    monkeypatch.setattr(example, "LENGTH", 24)
    assert example.main(tmp_path, epochs=4, features=16, verbose=0) == pytest.approx(values, rel=1e-5)


# -- gan --


@pytest.mark.slow
def test_the_gan_goes_on_where_it_was_and_its_players_are_a_match_for_each_other(tmp_path):
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
def test_own_loop_stops_by_its_rule_and_keeps_the_best_state(tmp_path, capsys):
    own = load("own_loop")
    result = own.main(tmp_path, steps=600, verbose=True)
    assert result["best_step"] < result["stopped_at"] < 600
    assert result["accuracy"] > 0.9
    store = fitflax.checkpoints.CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == list(range(100, result["stopped_at"] + 1, 100))[-3:]
    assert list((tmp_path / "tensorboard/valid").glob("*tfevents*"))
    out = capsys.readouterr().out
    assert f"\nleft at step {result['stopped_at']}: " in out
    assert f"Step{result['stopped_at']:7d}: valid             loss | " in out
    assert out.endswith(f"test accuracy of step {result['best_step']}: {result['accuracy']:.3f}\n")
    # A second run takes the first one's place; of one that is stopped by nothing the last step is the end.
    assert own.main(tmp_path, steps=60, verbose=False)["stopped_at"] == 60


def test_generalization_loss_stops_where_the_loss_lies_so_many_percent_above_its_best():
    stops = load("own_loop").GeneralizationLoss(5)
    summaries = [types.SimpleNamespace(step=step, state=f"state {step}", metrics={"valid": {"loss": loss}}) for step, loss in enumerate((3, 2, 2.09, 2.11))]
    assert [stops(summary) for summary in summaries] == [False, False, False, True]
    assert (stops.best_loss, stops.best_step, stops.best_state) == (2, 1, "state 1")


# -- notebook --


def test_the_notebook_is_stored_without_what_it_printed():
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


# -- the others, as they stand --


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "line", "least", "most"),
    [
        (["diabetes.py"], r"networks +(\d\.\d+) +\d+\.\d +\d\.\d+ +0\.\d+", 0.36, 0.5),  # of linear regression 0.337
        (["several_outputs.py"], r"test set: digits right (0\.\d+), places off by 0\.[1-6]\d pixels \(always the middle: 2\.20\)", 0.85, 1),
        (["roman.py"], r"2499 numbers .*: letters right 0\.9\d+, numerals written without a fault (0\.9\d+)", 0.98, 1),
        (["gan.py"], r"accuracy on real images by the nearest one that was drawn: (0\.9\d+) \(by the nearest real one: 0\.9\d+\)", 0.9, 1),
        (["char_lm.py", "--steps", "200"], r"perplexity on held-out text: (\d+\.\d+) \(by the frequency of characters alone: .*\)", 2, 6),
        (["own_training.py"], r"test set, nats an image: (\d+\.\d+) = reconstruction \d+\.\d+ \+ kl \d+\.\d+", 20, 25.5),
        (["fsdp_transformer.py", "--steps", "20"], r"held-out text: loss (\d+\.\d+), accuracy .*", 2.5, 4.5),
        (["own_loop.py"], r"test accuracy of step \d+: (\d\.\d+)", 0.92, 1),
    ],
    ids=["diabetes", "several_outputs", "roman", "gan", "char_lm", "own_training", "fsdp_transformer", "own_loop"],
)
def test_an_example_runs_in_any_directory_and_ends_with_its_figures(arguments, line, least, most, tmp_path, process_env):
    """Its time limit is that of an example, which trains for up to minutes, and a little more."""
    name, *options = arguments
    env = process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=True)
    assert done.stderr == ""
    figure = re.search(rf"^{line}$", "\n".join(done.stdout.splitlines()[-6:]), re.MULTILINE)
    assert figure and least < float(figure[1]) < most, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
