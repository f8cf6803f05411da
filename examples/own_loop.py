"""A custom loop over `train_loop`: it evaluates and logs every 25 steps, and stops by a rule that no built-in callback has.

python examples/own_loop.py [--directory runs/own_loop] [--steps 2000]
"""

import argparse
import pathlib

import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import ModelCheckpoint, SummaryLogger, TensorBoard


class MLP(nn.Module):
    """One hidden layer, for images `[batch, 64]` and ten classes."""

    features: int = 64

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.features)(x))
        return nn.Dense(10)(x)


class GeneralizationLoss:
    """Stops when the validation loss is more than `percent` above its minimum so far (GL of Prechelt, "Early stopping - but when?", 1998).

    It keeps the state with the minimum.
    """

    def __init__(self, percent: float):
        self.percent = percent
        self.best_loss, self.best_step, self.best_state = np.inf, None, None

    def __call__(self, summary: fitflax.Summary) -> bool:
        loss = summary.metrics["valid"]["loss"]
        if loss < self.best_loss:
            # Reading a checkpoint's state copies it, so later steps do not change this one.
            self.best_loss, self.best_step, self.best_state = loss, summary.step, summary.state
        return 100 * (loss / self.best_loss - 1) > self.percent


def load(seed: int = 0):
    """Returns `(images, labels)` for training, validation and test. The training part is small, so that the network overfits."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = digits.data[order].astype(np.float32) / 16, digits.target[order].astype(np.int32)
    return [(images[part], labels[part]) for part in (slice(0, 300), slice(300, 600), slice(600, None))]


def main(directory: str | pathlib.Path = "runs/own_loop", steps: int = 2000, every: int = 25, percent: float = 5.0, verbose: bool = True) -> dict[str, float]:
    """Trains, and returns the step at which the loop stopped, the best step, and the test accuracy of the best step."""
    directory = pathlib.Path(directory)
    train, valid, test = load()
    trainer = fitflax.Trainer(MLP())
    trainer.compile(optax.adam(5e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    if verbose:
        trainer.summary(train)

    loop = trainer.train_loop(*train, batch_size=32, steps=steps, every=fitflax.every(steps=every))
    # Functions that take and return a checkpoint, called in order. All except the first can have a separate `every`.
    process = fitflax.serial(
        trainer.eval_loop(*valid, name="valid"),
        *([SummaryLogger()] if verbose else []),
        TensorBoard(directory / "tensorboard", every=fitflax.every(steps=every)),
        ModelCheckpoint(directory / "checkpoints", every=fitflax.every(steps=4 * every), overwrite=True),  # A second run replaces the first.
    )
    stops = GeneralizationLoss(percent)
    # Leaving the `with` block ends the run and closes the writers, also after `break` or an exception.
    with loop, process:
        for checkpoint in loop:
            summary = process(checkpoint)
            if stops(summary):
                break
    if verbose:
        loss = summary.metrics["valid"]["loss"]
        print(f"stopped at step {trainer.step}: validation loss {loss:.4f}; best: {stops.best_loss:.4f} at step {stops.best_step}")

    stopped_at = trainer.step
    trainer.replace_state(stops.best_state)
    trainer.save(directory / "best")
    accuracy = trainer.evaluate(*test, verbose=0)["accuracy"]
    if verbose:
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(f"TensorBoard: {directory / 'tensorboard'}")
        print(f"best checkpoint: {directory / 'best'}")
        print(f"test accuracy of step {trainer.step}: {accuracy:.3f}")
    return {"stopped_at": stopped_at, "best_step": stops.best_step, "accuracy": accuracy}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--steps", type=int)
    main(**vars(parser.parse_args()))
