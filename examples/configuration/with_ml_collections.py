"""Configures a run with a ConfigDict and absl flags, as in Flax's examples: pip install ml_collections.

python examples/configuration/with_ml_collections.py [--config.optimizer.learning_rate=0.003] [--config.width=64] [--directory=runs/with_ml_collections]
"""

import pathlib

import optax
from absl import app, flags
from flax import linen as nn
from ml_collections import ConfigDict, config_flags
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import ModelCheckpoint


def get_config() -> ConfigDict:
    """Returns the default configuration."""
    return ConfigDict({"optimizer": {"learning_rate": 0.001, "weight_decay": 1e-4}, "width": 32, "epochs": 10, "seed": 0})


def train(config: ConfigDict, directory: pathlib.Path) -> float:
    """Trains, and returns the validation accuracy."""
    x, y = load_digits(return_X_y=True)
    trainer = fitflax.Trainer(nn.Sequential([nn.Dense(config.width), nn.relu, nn.Dense(10)]), seed=config.seed)
    trainer.compile(optax.adamw(**config.optimizer), "sparse_categorical_crossentropy", metrics=["accuracy"])
    checkpoints = ModelCheckpoint(directory)
    history = trainer.fit(x / 16, y, epochs=config.epochs, validation_split=0.2, callbacks=[checkpoints], config=config, resume="auto")
    return history.history["val_accuracy"][-1]


def main(argv: list[str]) -> None:
    """Trains with the configuration from the flags."""
    print(f"validation accuracy: {train(CONFIG.value, pathlib.Path(DIRECTORY.value)):.3f}")


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_dict("config", get_config())
    DIRECTORY = flags.DEFINE_string("directory", "runs/with_ml_collections", "where checkpoints go")
    app.run(main)
