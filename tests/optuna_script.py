"""Runs a study of four trials on SQLite; tests kill and restart it.

`python optuna_script.py DIRECTORY` prints `TRIAL STEP` after each step, and `done` at the end.
"""

import pathlib
import sys
import time
import warnings

import numpy as np
from flax import linen as nn

import fitflax
from fitflax.callbacks import Callback, ModelCheckpoint

RATES = (0.02, 0.05, 1e-9, 0.1)  # The third one is pruned.


class PrintStep(Callback):
    def __init__(self, trial):
        self.trial = trial

    def on_train_batch_end(self, batch, logs):
        print(self.trial.number, self.trainer.step, flush=True)
        time.sleep(0.01)  # So that there is time to kill it.


def main(directory):
    import optuna

    from fitflax.integrations.optuna import OptunaPruning, resume_trials

    warnings.filterwarnings("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse", learning_rate=0.1)

    def objective(trial):
        rate = trial.suggest_float("learning_rate", 1e-9, 1.0, log=True)
        callbacks = [ModelCheckpoint(directory / f"trial-{trial.number}", every=fitflax.every(steps=5)), OptunaPruning(trial), PrintStep(trial)]
        member = trainer.with_hyperparams(learning_rate=rate)
        history = member.fit(x, y, batch_size=8, epochs=4, validation_data=(x, y), callbacks=callbacks, resume="auto", verbose=0)
        return history.history["val_loss"][-1]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(study_name="rates", storage=f"sqlite:///{directory}/study.db", load_if_exists=True, pruner=pruner)
    if not study.trials:
        for rate in RATES:
            study.enqueue_trial({"learning_rate": rate})
    resume_trials(study, objective)
    waiting = len(study.get_trials(states=(optuna.trial.TrialState.WAITING,)))
    if waiting:
        study.optimize(objective, n_trials=waiting)
    print("done", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
