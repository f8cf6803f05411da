"""Trains a small CNN on scikit-learn's handwritten digits; if you interrupt it with Ctrl-C, it resumes when you run it again.

python examples/digits.py [--directory runs/digits] [--epochs 15]
"""

import argparse
import pathlib

import numpy as np
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import BestCheckpoint, EarlyStopping, ModelCheckpoint, TensorBoard


class CNN(nn.Module):
    """Two convolutions with batch normalization and dropout, for images `[batch, 8, 8, 1]` and ten classes."""

    features: int = 32

    @nn.compact
    def __call__(self, x, *, train: bool):
        for depth in (1, 2):
            x = nn.Conv(self.features * depth, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(10)(x)


def load(seed: int = 0):
    """Returns `(images, labels)` for training, validation and test; images are in [0, 1]."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = digits.images[order, :, :, None].astype(np.float32) / 16
    labels = digits.target[order].astype(np.int32)
    return [(images[part], labels[part]) for part in (slice(0, 1200), slice(1200, 1500), slice(1500, None))]


def main(directory: str | pathlib.Path = "runs/digits", epochs: int = 15, features: int = 32, verbose: int | str = "auto") -> float:
    """Trains, and returns the test accuracy."""
    directory = pathlib.Path(directory)
    train, valid, test = load()
    trainer = fitflax.Trainer(CNN(features), seed=0)
    trainer.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=2e-3)
    best = BestCheckpoint(directory / "best", monitor="val_accuracy", restore_best=True)
    board = TensorBoard(directory / "tensorboard", histograms=fitflax.every(epochs=5))
    callbacks = [ModelCheckpoint(directory / "checkpoints"), best, EarlyStopping("val_loss", patience=5), board]
    trainer.fit(*train, batch_size=64, epochs=epochs, validation_data=valid, callbacks=callbacks, resume="auto", verbose=verbose)
    accuracy = trainer.evaluate(*test, verbose=0)["accuracy"]
    if verbose:
        print(f"TensorBoard: {directory / 'tensorboard'}")
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(f"best checkpoint: {best.store.path(best.best_step)} (validation accuracy {best.best:.3f})")
        print(f"test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
