"""Trains the same tasks with `fit`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

import fitflax
from benchmarks.results.data import random_batches, windows
from benchmarks.results.settings import CharLM, Curves, Images, Settings
from fitflax.callbacks import Callback
from fitflax.parallel import DataParallel


class StepLosses(Callback):
    """Records the loss of each step."""

    every = fitflax.every(steps=1)
    needs_gradients_norm = False

    def __init__(self) -> None:
        self.values: list[float] = []

    @override
    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        self.values.append(checkpoint.loss)


class VAETrainer(fitflax.Trainer):
    """Minimizes the negative evidence lower bound, in nats per image."""

    @override
    def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
        logits, mean, log_variance = self.model.apply({"params": params}, batch.x, rngs=rngs)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch.x).sum(axis=-1)
        kl = 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum(axis=-1)
        return reconstruction + kl, {}, {}


def initial(trainer: fitflax.Trainer) -> Any:
    """Returns a copy of the variables, for a script that begins with the same ones."""
    return jax.tree.map(jnp.array, {"params": trainer.state.params, **trainer.state.model_state})


def make_trainer(settings: Settings, data: Any, seed: int) -> fitflax.Trainer:
    """Returns a trainer with its initial state."""
    options: dict[str, Any] = {"seed": seed, "parallel": DataParallel(jax.devices()[:1])}
    if isinstance(settings, CharLM):
        trainer = fitflax.Trainer(settings.model(len(data.vocabulary)), **options)
        trainer.compile(settings.optimizer(), "sparse_categorical_crossentropy")
        trainer.build(tuple(array[: settings.batch] for array in windows(data.valid, settings.length)))
    elif isinstance(settings, Images):
        trainer = fitflax.Trainer(settings.model(), rngs={"init": ("augment",), "train": ("augment",)}, **options)
        trainer.compile(settings.optimizer(len(data.x) // settings.batch * settings.epochs), "sparse_categorical_crossentropy", metrics=["accuracy"])
        trainer.build((data.x[: settings.batch], data.y[: settings.batch]))
    else:
        streams = ("latent",)
        trainer = VAETrainer(settings.model(), rngs={"init": streams, "train": streams, "eval": streams}, **options)
        trainer.compile(settings.optimizer())
        trainer.build((data.x[: settings.batch],))
    return trainer


def train(settings: Settings, data: Any, seed: int) -> tuple[Curves, Any]:
    """Trains with `fit`, and returns the curves and the variables."""
    trainer, noted = make_trainer(settings, data, seed), StepLosses()
    options: dict[str, Any] = {"callbacks": [noted], "verbose": 0}
    every = 1
    if isinstance(settings, CharLM):
        history = trainer.fit(
            lambda: random_batches(data.train, settings.length, settings.batch, seed),
            steps=settings.steps,
            steps_per_epoch=settings.every,
            validation_data=windows(data.valid, settings.length),
            validation_batch_size=128,
            **options,
        )
    elif isinstance(settings, Images):
        history = trainer.fit(
            data.x,
            data.y,
            batch_size=settings.batch,
            epochs=settings.epochs,
            drop_remainder=True,
            validation_data=(data.x_test, data.y_test),
            validation_batch_size=len(data.x_test),
            **options,
        )
    else:
        every = settings.every
        history = trainer.fit(
            data.x,
            batch_size=settings.batch,
            epochs=settings.epochs,
            drop_remainder=True,
            validation_data=data.x_test,
            validation_batch_size=settings.batch,
            validation_freq=every,
            **options,
        )
    steps = history.steps[every - 1 :: every]
    evaluations = {
        key: [float(value) for value in values if value == value][-len(steps) :] for key, values in history.history.items() if key.startswith("val_")
    }
    return Curves(noted.values, list(steps), evaluations), initial(trainer)
