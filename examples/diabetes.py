"""Regression with uncertainty: five networks predict a mean and a scale for each patient of the diabetes data (Lakshminarayanan et al., 2017).

python examples/diabetes.py [--directory runs/diabetes] [--epochs 200]
"""

import argparse
import pathlib

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, r2_score

import fitflax
from fitflax.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint


class MLP(nn.Module):
    """One hidden layer with dropout, for rows `[batch, features]`. It returns the mean and log scale of a normal distribution, `[batch, 2]`."""

    features: int = 64

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(nn.Dense(self.features)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2)(x)


def nats(outputs, targets):
    """Returns the negative log density of each target, `[batch]`. It penalizes wrong means, and scales that are too small or too large for the errors."""
    mean, log_scale = outputs[:, 0], outputs[:, 1]
    return 0.5 * ((targets - mean) / jnp.exp(log_scale)) ** 2 + log_scale + 0.5 * np.log(2 * np.pi)


def covered(outputs, targets):
    """Returns whether each target is in the predicted interval that should contain 90% of all targets, `[batch]`."""
    return abs(targets - outputs[:, 0]) < 1.645 * jnp.exp(outputs[:, 1])


class Standardizer:
    """Scales columns to the mean 0 and standard deviation 1 of the training data, and back."""

    def __init__(self, values: np.ndarray):
        self.mean, self.deviation = values.mean(axis=0), values.std(axis=0)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return ((values - self.mean) / self.deviation).astype(np.float32)

    def back(self, values: np.ndarray) -> np.ndarray:
        return values * self.deviation + self.mean


def load(seed: int = 0):
    """Returns `(x, y)` for training, validation and test: 10 measurements of each patient, and the progression of the disease a year later (25 to 346)."""
    data = load_diabetes(scaled=False)
    order = np.random.default_rng(seed).permutation(len(data.target))
    return [(data.data[part], data.target[part]) for part in (order[:264], order[264:353], order[353:])]


def mixture(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and scale, `[batch]` each, of a mixture of networks, `[networks, batch, 2]`. The scale is larger where the networks disagree."""
    means, scales = outputs[..., 0], np.exp(outputs[..., 1])
    return means.mean(axis=0), np.sqrt((scales**2).mean(axis=0) + means.var(axis=0))


def scores(mean: np.ndarray, scale: np.ndarray | float, targets: np.ndarray) -> dict[str, float]:
    """Returns the scores of predicted normal distributions, in the units of the targets. `scale` may be a single number."""
    outputs = np.stack([mean, np.broadcast_to(np.log(scale), mean.shape)], axis=-1)
    of_scale = {function.__name__: float(function(outputs, targets).mean()) for function in (nats, covered)}
    return {"r2": r2_score(targets, mean), "mae": mean_absolute_error(targets, mean), **of_scale}


def main(directory: str | pathlib.Path = "runs/diabetes", epochs: int = 200, networks: int = 5, verbose: bool = True) -> dict[str, dict[str, float]]:
    """Trains, and returns the test scores of each predictor, and of the networks for the half with smaller scales and for the other half."""
    directory = pathlib.Path(directory)
    train, valid, test = load()
    scale_x, scale_y = Standardizer(train[0]), Standardizer(train[1])
    first = fitflax.Trainer(MLP())
    first.compile("adamw", loss=nats, metrics=[covered], learning_rate=3e-3)
    standardized = [(scale_x(x), scale_y(y)) for x, y in (train, valid)]
    outputs = []
    for seed in range(networks):
        trainer = first.with_seed(seed)  # Shares the compiled steps.
        callbacks = [
            early := EarlyStopping("val_loss", patience=25, restore_best=True),
            CSVLogger(directory / f"network_{seed}/log.csv"),
            ModelCheckpoint(directory / f"network_{seed}/checkpoints", every=fitflax.every(epochs=20)),
        ]
        trainer.fit(*standardized[0], epochs=epochs, validation_data=standardized[1], callbacks=callbacks, resume="auto", verbose=0)
        if verbose:
            print(f"network {seed}: best validation loss {early.best:.3f}, {trainer.step} steps, in {directory / f'network_{seed}'}")
        outputs.append([trainer.predict(scale_x(x)) for x in (valid[0], test[0])])

    on_valid, on_test = (mixture(np.stack(each)) for each in zip(*outputs, strict=True))
    mean, scale = scale_y.back(on_test[0]), scale_y.deviation * on_test[1]
    # "networks, one scale" and the linear regression use the standard deviation of their errors on the validation set as the scale.
    errors = scale_y.back(on_valid[0]) - valid[1]
    linear = LinearRegression().fit(*train)
    is_confident = scale < np.median(scale)
    result = {
        "networks": scores(mean, scale, test[1]),
        "networks, one scale": scores(mean, errors.std(), test[1]),
        "linear regression": scores(linear.predict(test[0]), np.std(linear.predict(valid[0]) - valid[1]), test[1]),
        "mean": scores(np.full(len(test[1]), train[1].mean()), train[1].std(), test[1]),
        "networks, confident": scores(mean[is_confident], scale[is_confident], test[1][is_confident]),
        "networks, uncertain": scores(mean[~is_confident], scale[~is_confident], test[1][~is_confident]),
    }
    if verbose:
        print(f"{'test set':<20} {'r2':>6} {'mae':>6} {'nats':>6} {'in 90 %':>8}")
        for name, score in result.items():
            print("{:<20} {r2:6.3f} {mae:6.1f} {nats:6.3f} {covered:8.3f}".format(name, **score))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
