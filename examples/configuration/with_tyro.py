"""Configures a run with nested dataclasses, which tyro turns into a command line: pip install tyro.

python examples/configuration/with_tyro.py [--optimizer.learning-rate 0.003] [--width 64] [--directory runs/with_tyro]
"""

import dataclasses
import pathlib

import optax
import tyro
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import ModelCheckpoint


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 0.001
    weight_decay: float = 1e-4

    def build(self) -> optax.GradientTransformation:
        return optax.adamw(self.learning_rate, weight_decay=self.weight_decay)


@dataclasses.dataclass(frozen=True)
class Config:
    """A small network on handwritten digits."""

    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    width: int = 32
    """Units of the hidden layer."""
    epochs: int = 10
    seed: int = 0
    directory: pathlib.Path = pathlib.Path("runs/with_tyro")


def main(config: Config) -> float:
    """Trains, and returns the validation accuracy."""
    x, y = load_digits(return_X_y=True)
    trainer = fitflax.Trainer(nn.Sequential([nn.Dense(config.width), nn.relu, nn.Dense(10)]), seed=config.seed)
    trainer.compile(config.optimizer.build(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    checkpoints = ModelCheckpoint(config.directory)
    history = trainer.fit(x / 16, y, epochs=config.epochs, validation_split=0.2, callbacks=[checkpoints], config=config, resume="auto")
    return history.history["val_accuracy"][-1]


if __name__ == "__main__":
    print(f"validation accuracy: {main(tyro.cli(Config)):.3f}")
