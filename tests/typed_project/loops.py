"""Hand-written loops over checkpoints."""

from pathlib import Path
from typing import Any, assert_type

from network import Network, apply, init, make_data

import fitflax
from fitflax.callbacks import ModelCheckpoint, TensorBoard


def shout(checkpoint: fitflax.Checkpoint) -> fitflax.Checkpoint:
    print(f"STEP {checkpoint.step}")
    return checkpoint


def hand_written(directory: Path) -> float:
    x, y = make_data()
    trainer = fitflax.Trainer(Network())
    trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    evaluate = assert_type(trainer.eval_loop(x, y, name="valid"), fitflax.EvalLoop)
    loop = assert_type(trainer.train_loop(x, y, steps=4, every=fitflax.every(steps=2)), fitflax.TrainLoop)
    best = 0.0
    with fitflax.serial(TensorBoard(directory / "tensorboard"), fitflax.serial(shout), ModelCheckpoint(directory / "checkpoints")) as finish:
        for checkpoint in loop:
            assert_type(checkpoint, fitflax.Checkpoint)
            assert_type(checkpoint.step, int)
            assert_type(checkpoint.epoch, int)
            assert_type(checkpoint.step_in_epoch, int)
            assert_type(checkpoint.n_completed_steps, int)
            assert_type(checkpoint.data_position, fitflax.data.Position)
            assert_type(checkpoint.loss, float)
            assert_type(checkpoint.gradients_norm, float)
            assert_type(checkpoint.elapsed_time, float)
            assert_type(checkpoint.state, fitflax.TrainState)
            assert_type(checkpoint.metrics, dict[str, dict[str, Any]])
            summary = assert_type(evaluate(checkpoint), fitflax.Summary)
            best = max(best, float(summary.metrics["valid"]["accuracy"]))
            print(assert_type(finish(summary), fitflax.Checkpoint).metrics)
    return best


def of_functions() -> None:
    x, y = make_data()
    with fitflax.TrainLoop(init, apply, optimizer="sgd", loss="sparse_categorical_crossentropy", data=(x, y), steps=3, rngs="dropout") as loop:
        assert_type(loop.next_step(), fitflax.Checkpoint | None)
        loop.steps = assert_type(loop.steps, int) + 1
        for checkpoint in loop:
            print(assert_type(checkpoint.step, int))
