"""docs/coming-from.md: it has a row for each feature of earlier systems and each part of a hand-written loop; each row's code line runs."""

import pathlib
import re

import pytest

from fitflax.callbacks.step_logger import Clock, Stamp
from tests.test_docs import ROW, run_rows

PAGE = (pathlib.Path(__file__).resolve().parent.parent / "docs/coming-from.md").read_text(encoding="utf-8")

# The features, by words that their rows must contain.
FEATURES = {
    "flax_extra": (
        *("TrainTask(apply", "TrainLoop(init", "iterating", "next_step", "n_steps`", "Checkpoint`:", "at its total", "EvalTask", "SummaryLogger"),
        *("SummaryWriter", "CheckpointFileWriter(output_dir, keep", "HighestCheckpointFileWriter", "split_per_device", "normalize_batch", "serial", "messages"),
    ),
    "bobbin": (
        *("compute_loss", "reduce_extra_vars", "get_rng_dict", "make_training_step_fn", "extra_vars`, `model_vars", "write_trainer_log", "EvalResults"),
        *("eval_datasets", "keep_best_checkpoint", "SampledSet", "CronTab", "ThreadedSummaryWriter", "MplImageSummary", "publish_trainer_env_info"),
        *("tpmap", "gather_from_jax_processes", "var_util"),
    ),
    "Hand-written loops": (
        *("TrainState.create", "value_and_grad", "donate_argnums", "fold_in", "mutable=", "for epoch", "permutation", "means of batches", "float(loss)"),
        *("train=False", "save_checkpoint", "early_stopping", "pmap", "NamedSharding", "MultiSteps", "lax.scan", "moving average", "bfloat16"),
        *("two optimizers", "tqdm"),
    ),
    "T5X": ("param_states", "as_logical_axes", "InferenceState"),
}


def rows(system: str) -> list[re.Match[str]]:
    """Returns the rows of the table under a system's heading."""
    section = next(part for part in PAGE.split("\n## ") if part.startswith(system))
    return list(ROW.finditer(section))


@pytest.mark.parametrize("system", FEATURES)
def test_every_feature_has_one_row_with_a_line_of_code(system):
    found = [row["there"] for row in rows(system)]
    for words in FEATURES[system]:
        assert len([there for there in found if words in there]) == 1, words
    section = next(part for part in PAGE.split("\n## ") if part.startswith(system))
    lines = [line for line in section.splitlines() if line.startswith("| ") and "|---" not in line]
    assert len(found) == len(FEATURES[system]) == len(lines) - 1  # Without the header row.


def test_steps_per_second_are_measured_between_two_writes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("fitflax.callbacks.step_logger.time.monotonic", lambda: now[0])
    clock = Clock()
    assert clock.rates(Stamp(10, None, now[0])) == {}
    now[0] = 1010.0
    assert clock.rates(Stamp(133, None, now[0])) == {"time/steps_per_second": 12.3}


@pytest.mark.slow
def test_the_code_line_of_every_row_runs(tmp_path, monkeypatch, capsys):
    run_rows(PAGE, [row for system in FEATURES for row in rows(system)], tmp_path, monkeypatch)
    assert list(tmp_path.glob("runs/a/tensorboard/**/*.tfevents.*"))
