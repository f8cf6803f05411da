"""Regression on scikit-learn's diabetes data, with inputs and targets standardized, beside the predictors that a network has to beat.

python examples/diabetes.py [--directory runs/diabetes] [--epochs 200]
"""

import argparse
import pathlib

import numpy as np
from flax import linen as nn
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, r2_score

import fitflax
from fitflax.callbacks import CSVLogger, EarlyStopping, ReduceLROnPlateau


class MLP(nn.Module):
    """One hidden layer with dropout, for rows `[batch, features]` and one number each, `[batch]`."""

    features: int = 64

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(nn.Dense(self.features)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(1)(x)[:, 0]


class Standardizer:
    """Scales columns to mean 0 and deviation 1 by those of the training data, and back."""

    def __init__(self, values: np.ndarray):
        self.mean, self.deviation = values.mean(axis=0), values.std(axis=0)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return ((values - self.mean) / self.deviation).astype(np.float32)

    def back(self, values: np.ndarray) -> np.ndarray:
        return values * self.deviation + self.mean


def load(seed: int = 0):
    """Returns `(x, y)` to train, validate and test on: 10 measurements of a patient, and how far the disease is a year later (25 to 346)."""
    data = load_diabetes(scaled=False)
    order = np.random.default_rng(seed).permutation(len(data.target))
    return [(data.data[part], data.target[part]) for part in (order[:264], order[264:353], order[353:])]


def main(directory: str | pathlib.Path = "runs/diabetes", epochs: int = 200, seed: int = 0, verbose: int | str = "auto") -> dict[str, dict[str, float]]:
    """Trains, and returns `r2` and `mae` (in units of the target) on the test set, by predictor."""
    directory = pathlib.Path(directory)
    train, valid, test = load(seed)
    scale_x, scale_y = Standardizer(train[0]), Standardizer(train[1])

    trainer = fitflax.Trainer(MLP(), seed=seed)
    # By name: an optimizer whose learning rate callbacks can set.
    trainer.compile("adamw", loss="mse", metrics=["mae", "rmse", "r2"], learning_rate=3e-3)
    trainer.fit(
        scale_x(train[0]),
        scale_y(train[1]),
        batch_size=32,
        epochs=epochs,
        validation_data=(scale_x(valid[0]), scale_y(valid[1])),
        callbacks=[
            ReduceLROnPlateau("val_loss", factor=0.3, patience=8),
            EarlyStopping("val_loss", patience=25, restore_best=True),
            CSVLogger(directory / "log.csv"),
        ],
        verbose=verbose,
    )

    # The network's outputs are standardized, the targets of the test set never were.
    predictions = {
        "network": scale_y.back(trainer.predict(scale_x(test[0]))),
        "linear regression": LinearRegression().fit(*train).predict(test[0]),
        "mean": np.full(len(test[1]), train[1].mean()),
    }
    scores = {name: {"r2": r2_score(test[1], outputs), "mae": mean_absolute_error(test[1], outputs)} for name, outputs in predictions.items()}
    if verbose:
        print(f"log: {directory / 'log.csv'}")
        print(f"{'on the test set':<20} {'r2':>6} {'mae':>6}")
        for name, score in scores.items():
            print(f"{name:<20} {score['r2']:6.3f} {score['mae']:6.1f}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="runs/diabetes")
    parser.add_argument("--epochs", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs)
