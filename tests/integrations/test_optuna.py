"""`OptunaPruning` and `resume_trials` with real studies on SQLite; the process that runs a study is really killed."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
from fitflax.errors import CallbackError, ConfigError, MonitorError
from fitflax.integrations.optuna import OptunaPruning, resume_trials
from fitflax.parallel import launch
from tests.integrations.servers import script_env
from tests.test_docs import ROOT, blocks

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "optuna_script.py"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture
def trainer():
    result = fitflax.Trainer(nn.Dense(1))
    result.compile("sgd", "mse", learning_rate=0.1)
    return result


class Pruner(optuna.pruners.BasePruner):
    """Prunes at given steps."""

    def __init__(self, *steps):
        self.steps = steps

    def prune(self, study, trial):
        return trial.last_step in self.steps


def study_in(directory, pruner=None, **options):
    return optuna.create_study(storage=f"sqlite:///{directory}/study.db", pruner=pruner or Pruner(), **options)


def fit(trainer, *callbacks, **options):
    options = {"batch_size": 8, "epochs": 4, "validation_data": (X, Y), "verbose": 0} | options
    return trainer.fit(X, Y, callbacks=list(callbacks), **options).history


def test_a_pruned_run_ends_normally_and_fit_raises(trainer, tmp_path):
    study = study_in(tmp_path, Pruner(2))

    def objective(trial):
        fit(trainer, OptunaPruning(trial), ModelCheckpoint(tmp_path / "checkpoints"), CSVLogger(tmp_path / "log.csv"))
        raise AssertionError("not reached")

    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "PRUNED" and sorted(trial.intermediate_values) == [0, 1, 2]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    losses = [float(line.split(",")[lines[0].split(",").index("val_loss")]) for line in lines[1:]]
    assert losses == pytest.approx([*trial.intermediate_values.values()], rel=1e-5)
    assert trainer.stop_reason.startswith("OptunaPruning: val_loss is ") and trainer.step == 15
    again = trainer.with_hyperparams()
    with pytest.raises(optuna.TrialPruned, match="at epoch index 2"):  # A pruned trial stays pruned.
        fit(again, OptunaPruning(study.ask()), ModelCheckpoint(tmp_path / "checkpoints"), CSVLogger(tmp_path / "log.csv"), resume="auto")
    assert again.step == 15


def test_a_pruned_trial_is_not_a_failure_of_the_process(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(launch._Exit, "failure", None)
    study_in(tmp_path, Pruner(0)).optimize(lambda trial: fit(trainer, OptunaPruning(trial)), n_trials=1)
    assert launch._Exit.failure is None


def test_a_run_that_is_not_pruned_ends_normally(trainer, tmp_path):
    study = study_in(tmp_path)
    study.optimize(lambda trial: fit(trainer, OptunaPruning(trial))["val_loss"][-1], n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "COMPLETE" and trial.intermediate_values[3] == trial.value and len(trial.intermediate_values) == 4


def test_trials_of_another_study_do_not_resume_those_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = [block.code for block in blocks((ROOT / "docs/how-to/search-hyperparameters.md").read_text()) if block.language == "python"]
    values = []
    for name in ("rates", "other"):
        scope = {}
        for part in code[0], next(part for part in code if "import optuna" in part):
            exec(part.replace('"rates"', f'"{name}"'), scope)
        values += [trial.value for trial in scope["study"].trials[:2]]  # The pruner does not prune these.
    assert len({*values}) == 4


def test_a_value_that_was_already_reported_is_not_reported_again(trainer, tmp_path):
    trial = study_in(tmp_path).ask()
    trial.report(7.0, 1)
    fit(trainer, OptunaPruning(trial))  # Optuna would warn about a second report.
    assert trial.study.trials[0].intermediate_values[1] == 7.0 and len(trial.study.trials[0].intermediate_values) == 4


def test_validations_are_reported_by_step(trainer, tmp_path):
    study = study_in(tmp_path, Pruner(8))
    options = {"epochs": None, "steps": 12, "validation_freq": fitflax.every(steps=4)}
    study.optimize(lambda trial: fit(trainer, OptunaPruning(trial, at="validation"), **options), n_trials=1)
    assert [*study.trials[0].intermediate_values] == [4, 8] and study.trials[0].state.name == "PRUNED" and trainer.step == 8


def test_an_error_is_not_mistaken_for_pruning(trainer, tmp_path):
    study = study_in(tmp_path, Pruner(0))

    def fail(checkpoint):
        raise ZeroDivisionError

    failing = fitflax.callbacks.LambdaCallback(fail, every=fitflax.every(epochs=1))
    with pytest.raises(ZeroDivisionError):
        fit(trainer, OptunaPruning(study.ask()), failing)


def test_a_run_that_another_callback_stops_is_not_pruned(trainer, tmp_path):
    fit(trainer, EarlyStopping("val_loss", stopping_threshold=1e9), OptunaPruning(study_in(tmp_path, Pruner(0)).ask()))
    assert trainer.stop_reason.startswith("EarlyStopping")


def test_a_killed_study_resumes_its_trials(tmp_path):
    def start(directory):
        directory.mkdir(exist_ok=True)
        return subprocess.Popen([sys.executable, str(SCRIPT), str(directory)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=script_env(), text=True)

    def trials(directory):
        study = optuna.load_study(study_name="rates", storage=f"sqlite:///{directory}/study.db")
        return [(trial.number, trial.state.name, trial.params, trial.value, trial.intermediate_values) for trial in study.trials]

    uninterrupted = start(tmp_path / "never")
    assert uninterrupted.communicate(timeout=120)[0].endswith("done\n")
    for number, step in ((0, 12), (2, 17), (3, 31)):
        process = start(tmp_path / "killed")
        for line in process.stdout:
            if line.split() == [str(number), str(step)]:
                break
        else:
            raise AssertionError("the trial was not there")
        process.kill()
        process.wait()
        process.stdout.close()
    assert start(tmp_path / "killed").communicate(timeout=120)[0].endswith("done\n")
    expected = trials(tmp_path / "never")
    assert [state for _, state, *_ in expected] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert trials(tmp_path / "killed") == expected


def test_a_resumed_trial_that_raises_is_marked_as_failed(tmp_path):
    study = study_in(tmp_path)
    study.ask()
    with pytest.raises(ZeroDivisionError):
        resume_trials(study, lambda trial: 1 / 0)
    assert study.trials[0].state.name == "FAIL" and resume_trials(study, lambda trial: 1 / 0) == []
    study.ask()
    assert resume_trials(study, lambda trial: 7.0) == [1] and study.trials[1].value == 7.0


def test_mistakes_are_errors(trainer, tmp_path):
    study = study_in(tmp_path)
    with pytest.raises(CallbackError, match="must be the trial"):
        OptunaPruning(study)
    with pytest.raises(CallbackError, match="'epoch' or 'validation'"):
        OptunaPruning(study.ask(), at="step")
    with pytest.raises(CallbackError, match="one objective"):
        OptunaPruning(optuna.create_study(directions=["minimize", "maximize"]).ask())
    with pytest.raises(CallbackError, match="a value to minimize, but the study has direction='maximize'"):
        fit(trainer, OptunaPruning(optuna.create_study(direction="maximize").ask()))
    with pytest.raises(MonitorError, match="no validation data"):
        fit(trainer, OptunaPruning(study.ask()), validation_data=None)
    with pytest.raises(ConfigError, match=r"optuna\.Study"):
        resume_trials("study.db", len)
    fit(trainer, OptunaPruning(optuna.trial.FixedTrial({})))  # For trying out an objective without a study.


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'fitflax\[optuna\]'"):
        OptunaPruning(None)
