"""Trains a CNN with several outputs: which digit is on a canvas, and where; each output has its own loss, loss weight and metrics.

python examples/several_outputs.py [--directory runs/several_outputs] [--epochs 30]
"""

import argparse
import pathlib

import numpy as np
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import BestCheckpoint, ModelCheckpoint

SIZE = 16  # Rows and columns of the canvas.


class CNN(nn.Module):
    """A body and two heads, for images `[batch, SIZE, SIZE, 1]`: logits of ten classes, and the upper left corner of the digit, `[batch, 2]`."""

    features: int = 32

    @nn.compact
    def __call__(self, x, *, train: bool):
        for depth in (1, 2):
            x = nn.relu(nn.Conv(self.features * depth, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(4 * self.features)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return {"digit": nn.Dense(10, name="digit")(x), "place": nn.Dense(2, name="place")(x)}


def load(seed: int = 0):
    """Returns `(images, {"digit": labels, "place": rows and columns})` for training, validation and test: digits at random places on a dark canvas."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    places = rng.integers(0, SIZE - 8, size=(len(order), 2), endpoint=True)
    images = np.zeros((len(order), SIZE, SIZE, 1), np.float32)
    for image, (row, column), pixels in zip(images, places, digits.images[order], strict=True):
        image[row : row + 8, column : column + 8, 0] = pixels / 16
    labels = {"digit": digits.target[order].astype(np.int32), "place": places.astype(np.float32)}
    parts = slice(0, 1200), slice(1200, 1500), slice(1500, None)
    return [(images[part], {name: values[part] for name, values in labels.items()}) for part in parts]


def main(directory: str | pathlib.Path = "runs/several_outputs", epochs: int = 30, features: int = 32, verbose: int | str = "auto") -> dict[str, float]:
    """Trains, and returns the test values: `digit_accuracy`, `place_mae` in pixels, and the parts of the loss."""
    directory = pathlib.Path(directory)
    train, valid, test = load()
    trainer = fitflax.Trainer(CNN(features))
    trainer.compile(
        "adam",
        loss={"digit": "sparse_categorical_crossentropy", "place": "mse"},
        loss_weights={"place": 0.1},
        metrics={"digit": ["accuracy"], "place": ["mae"]},
        learning_rate=2e-3,
    )
    best = BestCheckpoint(directory / "best", monitor="val_loss", restore_best=True)
    callbacks = [best, ModelCheckpoint(directory / "checkpoints")]
    trainer.fit(*train, batch_size=64, epochs=epochs, validation_data=valid, callbacks=callbacks, resume="auto", verbose=verbose)

    values = trainer.evaluate(*test, verbose=0)
    if verbose:
        guess = np.abs(test[1]["place"] - train[1]["place"].mean(axis=0)).mean()
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(f"best checkpoint: {best.store.path(best.best_step)}")
        print("test set: digit accuracy {digit_accuracy:.3f}, place error {place_mae:.2f} pixels".format(**values) + f" (always the center: {guess:.2f})")
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
