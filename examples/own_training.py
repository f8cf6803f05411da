"""A custom loss and a custom callback: a variational autoencoder (Kingma and Welling, 2013) of digits, and a count of its active latent units.

python examples/own_training.py [--directory runs/own_training] [--epochs 60]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint


class VAE(nn.Module):
    """Encodes images `[batch, 64]` as normal distributions over `[batch, latents]`, and decodes samples from them."""

    latents: int = 16
    features: int = 128

    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(self.features), nn.relu, nn.Dense(2 * self.latents)])
        self.decoder = nn.Sequential([nn.Dense(self.features), nn.relu, nn.Dense(64)])

    def __call__(self, x):
        mean, log_variance = self.encode(x)
        z = mean + jnp.exp(log_variance / 2) * jax.random.normal(self.make_rng("latent"), mean.shape)
        return self.decode(z), mean, log_variance

    def encode(self, x):
        """Returns the mean and the log variance, `[batch, latents]` each."""
        return jnp.split(self.encoder(x), 2, axis=-1)

    def decode(self, z):
        """Returns the logits of the pixels, `[batch, 64]`."""
        return self.decoder(z)


class VAETrainer(fitflax.Trainer):
    """Minimizes the negative evidence lower bound, in nats per image."""

    def compute_loss(self, params, model_state, batch, *, rngs, train):
        logits, mean, log_variance = self.model.apply({"params": params}, batch.x, rngs=rngs)
        # One value per example, [batch]. The trainer computes the mean, over all devices and without padding.
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch.x).sum(axis=-1)
        kl = 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum(axis=-1)
        # No collections change. The two parts are logged next to their sum, for training and for validation.
        return reconstruction + kl, {}, {"reconstruction": reconstruction, "kl": kl}


class ActiveUnits(Callback):
    """Logs `active_units` after each epoch: the number of latent units whose mean has a variance above 0.01 over `images` (Burda et al., 2015).

    For the decoder, the other units are noise. Callbacks that see the logs later (CSVLogger, EarlyStopping, History, checkpoints) have this value, too.
    """

    def __init__(self, images):
        self.images = images
        self.most = 0
        self.encode = jax.jit(lambda module, params, x: module.apply({"params": params}, x, method="encode")[0], static_argnums=0)

    def on_train_begin(self, logs):
        self.most = 0

    def on_epoch_end(self, epoch, logs):
        means = self.encode(self.trainer.model, self.trainer.state.params, self.images)
        logs["active_units"] = int((np.var(means, axis=0) > 0.01).sum())
        self.most = max(self.most, logs["active_units"])

    # State that a resumed run cannot recompute. It is saved in every checkpoint.

    def state_dict(self):
        return {"most": self.most}

    def load_state_dict(self, state):
        self.most = state["most"]


def load(seed: int = 0) -> list[np.ndarray]:
    """Returns images `[examples, 64]` in [0, 1] for training, validation and test."""
    images = np.random.default_rng(seed).permutation(load_digits().data.astype(np.float32) / 16)
    return np.split(images, [1200, 1500])


def draw(image: np.ndarray) -> str:
    """Returns an image `[64]` in [0, 1] as eight lines of text."""
    shades = " .:-=+*#%@"
    return "\n".join("".join(2 * shades[int(value * 9.999)] for value in row) for row in image.reshape(8, 8))


def main(directory: str | pathlib.Path = "runs/own_training", epochs: int = 60, features: int = 128, verbose: int | str = "auto") -> dict[str, object]:
    """Trains, and returns the test values, `active_units` of each epoch, their maximum, and four images sampled from the prior, `[4, 64]`."""
    directory = pathlib.Path(directory)
    train, valid, test = load()
    # Evaluation samples latents, too, because the loss at their mean would not be a bound.
    trainer = VAETrainer(VAE(features=features), rngs={"init": ("latent",), "train": ("latent",), "eval": ("latent",)})
    trainer.compile(optax.adam(1e-2))
    active = ActiveUnits(valid)
    history = trainer.fit(
        train,
        batch_size=64,
        epochs=epochs,
        validation_data=valid,
        callbacks=[active, CSVLogger(directory / "log.csv"), EarlyStopping("val_loss", patience=5), ModelCheckpoint(directory / "checkpoints")],
        resume="auto",
        verbose=verbose,
    )
    logits = trainer.model.apply({"params": trainer.state.params}, jax.random.normal(jax.random.key(1), (4, trainer.model.latents)), method="decode")
    images = np.asarray(nn.sigmoid(logits))
    values = trainer.evaluate(test, verbose=0)
    if verbose:
        print("\n\n".join(draw(image) for image in images))
        print(f"log: {directory / 'log.csv'}")
        print(f"active units: {history.history['active_units'][-1]} of {trainer.model.latents}, at most {active.most}")
        print("test set, nats per image: {loss:.2f} = reconstruction {reconstruction:.2f} + kl {kl:.2f}".format(**values))
    return {**values, "active_units": history.history["active_units"], "most": active.most, "images": images}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
