"""Fine-tunes a pretrained network: it learns the digits 0 to 6, and then 7, 8 and 9 from one example of each.

python examples/fine_tuning.py [--directory runs/fine_tuning] [--epochs 10]
"""

import argparse
import pathlib

import numpy as np
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax import optimizers
from fitflax.callbacks import BestCheckpoint


class CNN(nn.Module):
    """A backbone with a linear head, for images `[batch, 8, 8, 1]`."""

    classes: int
    features: int = 16

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = Backbone(self.features, name="backbone")(x, train=train)
        return nn.Dense(self.classes, name="head")(x)


class Backbone(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(2 * self.features, (3, 3))(x)).reshape(x.shape[0], -1)
        return nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(64)(x)))


def load(digits: range, seed: int = 0):
    """Returns images of these digits in random order, and labels that start at 0."""
    data = load_digits()
    chosen = np.flatnonzero(np.isin(data.target, digits))
    chosen = np.random.default_rng(seed).permutation(chosen)
    return (data.images[chosen, :, :, None] / 16).astype(np.float32), (data.target[chosen] - digits[0]).astype(np.int32)


def trainer_of(optimizer, classes: int, features: int, seed: int) -> fitflax.Trainer:
    trainer = fitflax.Trainer(CNN(classes, features), seed=seed)
    trainer.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return trainer


def main(directory: str | pathlib.Path = "runs/fine_tuning", epochs: int = 10, features: int = 16, verbose: int | str = "auto") -> dict[str, float]:
    """Trains, and returns the mean accuracy of three networks on the digits 7 to 9 for each way of fine-tuning on three examples."""
    directory = pathlib.Path(directory)
    x, y = load(range(7))
    best = BestCheckpoint(directory / "pretrained", monitor="val_accuracy", overwrite=True)
    trainer_of("adam", 7, features, seed=0).fit(x, y, epochs=epochs, validation_split=0.2, callbacks=[best], verbose=verbose)

    x, y = load(range(7, 10))
    few = np.array([np.flatnonzero(y == label)[0] for label in range(3)])
    test = np.setdiff1d(np.arange(len(y)), few)
    adam = optimizers.get("adam", 1e-2)
    ways = {
        "from scratch": (adam, False),
        "everything": (adam, True),
        "all but the first layer": (optimizers.freeze(adam, "backbone/Conv_0"), True),
        "head and biases": (optimizers.freeze(adam, "backbone/*/kernel"), True),
        "only the head": (optimizers.freeze(adam, "backbone"), True),
    }
    accuracies = {}
    for name, (optimizer, is_tuned) in ways.items():
        first, found = trainer_of(optimizer, 3, features, seed=1), []
        for seed in range(1, 4):
            trainer = first.with_seed(seed)  # Shares the compiled steps.
            trainer.build((x[:1], y[:1]))
            if is_tuned:
                trainer.restore(directory / "pretrained", partial=True, mapping={"params/head": None})
            trainer.fit(x[few], y[few], epochs=10 * epochs, verbose=0)
            found.append(trainer.evaluate(x[test], y[test], verbose=0)["accuracy"])
        accuracies[name] = float(np.mean(found))
    if verbose:
        print(f"pretrained: {directory / 'pretrained'}")
        print(f"accuracy on {len(test)} images of 7, 8 and 9, after training on {len(few)}:")
        for name, accuracy in accuracies.items():
            print(f"{name:<24} {accuracy:.3f}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
