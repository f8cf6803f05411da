"""Trains, evaluates, saves and restores, as a user's script does."""

import sys
from pathlib import Path
from typing import Any, assert_type

import estimators
import loops
from network import Largest, Network, make_data, smooth_crossentropy
from own_parts import Regularized, Reporter, Stepped

import fitflax
from fitflax.callbacks import BestCheckpoint, CSVLogger, EarlyStopping, LambdaCallback, LearningRateScheduler, ModelCheckpoint, ProgressBar, TensorBoard
from fitflax.checkpoints import RestoreReport
from fitflax.parallel import DataParallel, Sharded


def slower(epoch: int, rate: float) -> float:
    return rate / (1 + epoch)


def train(directory: Path) -> fitflax.Trainer:
    x, y = make_data()
    trainer = fitflax.Trainer(Network(width=16), eval_model=Network(width=16), seed=1, parallel=DataParallel())
    trainer.compile("adam", loss=smooth_crossentropy, metrics=["accuracy", Largest()], learning_rate=1e-2)
    history = trainer.fit(
        x,
        y,
        epochs=2,
        batch_size=16,
        validation_split=0.25,
        class_weight={0: 2.0, 1: 1.0},
        callbacks=[
            ModelCheckpoint(directory / "checkpoints", every=fitflax.every(steps=2) | fitflax.at(1, 3) | fitflax.first(1), keep=2),
            BestCheckpoint(str(directory / "best"), monitor="val_accuracy", mode="max"),
            TensorBoard(directory / "tensorboard", histograms=fitflax.every(epochs=1)),
            CSVLogger(directory / "log.csv"),
            EarlyStopping("val_loss", patience=3),
            LearningRateScheduler(lambda epoch: 1e-2 / (1 + epoch)),
            LambdaCallback(lambda checkpoint: print(checkpoint.step), every=fitflax.every(seconds=60)),
            Reporter(good=0.01),
            ProgressBar(),
        ],
        resume="auto",
    )
    assert_type(history, fitflax.History)
    assert_type(history.history, dict[str, list[float]])
    assert_type(history.epoch, list[int])
    return trainer


def use(trainer: fitflax.Trainer, directory: Path) -> None:
    x, y = make_data()
    assert_type(trainer.evaluate(x, y), dict[str, float])
    outputs = assert_type(trainer.predict(x, batch_size=8), Any)  # Any tree that the module returns.
    print(outputs.argmax(-1), [each.shape for each in trainer.predict_iter(x)])
    assert_type(trainer.train_on_batch((x, y)), dict[str, float])
    assert_type(trainer.test_on_batch((x, y)), dict[str, float])
    assert_type(trainer.learning_rate, float)
    trainer.learning_rate = 1e-3
    assert_type(trainer.learning_rates, dict[str, float])
    assert_type(trainer.step, int)
    assert_type(trainer.state, fitflax.TrainState)
    assert_type(trainer.history, fitflax.History)
    assert_type(trainer.stop_reason, str | None)
    assert_type(fitflax.__version__, str)
    trainer.summary()

    path = assert_type(trainer.save(directory / "saved"), Path)
    report = assert_type(trainer.restore(path), RestoreReport)
    assert_type(report.restored, tuple[str, ...])
    served = assert_type(fitflax.checkpoints.load_inference_state(path), fitflax.InferenceState)
    assert_type(trainer.with_seed(2), fitflax.Trainer)
    trainer.replace_state(served)


def diagnose(trainer: fitflax.Trainer) -> None:
    x, y = make_data()
    curve = assert_type(trainer.find_learning_rate(x, y, steps=10), fitflax.diagnostics.LearningRateCurve)
    assert_type(curve.suggestion, float | None)
    report = assert_type(trainer.hunt_nan(x, y), fitflax.diagnostics.NanReport | None)
    if report is not None:
        print(assert_type(report.step, int), [assert_type(origin.operation, str) for origin in report.origins])


def custom_steps() -> None:
    x, y = make_data()
    trainer = Regularized(Network(), parallel=Sharded({"data": -1}))
    trainer.compile("sgd", loss="sparse_categorical_crossentropy", steps_per_call="auto", precision="bfloat16")
    trainer.fit(x, y, steps=2, callbacks=[LearningRateScheduler(slower)], verbose=0)
    assert_type(trainer.with_seed(3), Regularized)
    stepped = Stepped(Network())
    stepped.compile("sgd", loss="sparse_categorical_crossentropy")
    print(stepped.fit(x, y, steps=2, verbose=0).history["examples"])


if __name__ == "__main__":
    here = Path(sys.argv[1])
    trained = train(here / "fit")
    diagnose(trained)
    use(trained, here)
    custom_steps()
    loops.hand_written(here / "loop")
    loops.of_functions()
    estimators.classify()
    estimators.regress()
