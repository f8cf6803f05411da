"""Configures a run with Hydra, with a directory per run and sweeps over values: pip install hydra-core.

python examples/configuration/with_hydra.py [model.width=64] [optimizer.learning_rate=0.003] [seed=1]
python examples/configuration/with_hydra.py --multirun model.width=16,64
"""

import pathlib

import hydra
import optax
from flax import linen as nn
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import ModelCheckpoint


def train(config: DictConfig, directory: pathlib.Path) -> float:
    """Trains, and returns the validation accuracy."""
    x, y = load_digits(return_X_y=True)
    trainer = fitflax.Trainer(nn.Sequential([nn.Dense(config.model.width), nn.relu, nn.Dense(10)]), seed=config.seed)
    trainer.compile(optax.adamw(**config.optimizer), "sparse_categorical_crossentropy", metrics=["accuracy"])
    checkpoints = ModelCheckpoint(directory / "checkpoints")
    history = trainer.fit(x / 16, y, epochs=config.epochs, validation_split=0.2, callbacks=[checkpoints], config=config, resume="auto")
    return history.history["val_accuracy"][-1]


@hydra.main(version_base=None, config_path=".", config_name="with_hydra")
def main(config: DictConfig) -> float:
    """Trains in the directory that Hydra created for the run, and returns the accuracy, which Hydra's sweepers read."""
    accuracy = train(config, pathlib.Path(HydraConfig.get().runtime.output_dir))
    print(f"validation accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
