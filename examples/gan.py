"""A custom update: a conditional GAN (Mirza and Osindero, 2014) draws handwritten digits, and a classifier learns from only these drawings.

python examples/gan.py [--directory runs/gan] [--epochs 200]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import fitflax
from fitflax.callbacks import CSVLogger, ModelCheckpoint

# Each of the two networks has its own optimizer. The labels are the names of the module's parts.
OPTIMIZER = optax.multi_transform(
    {"generator": optax.adam(2e-3, b1=0.5), "discriminator": optax.adam(2e-3, b1=0.5)}, param_labels=lambda params: {name: name for name in params}
)


class GAN(nn.Module):
    """Draws images `[batch, 64]` of the requested digits `[batch]`, and judges images."""

    features: int = 128
    noise: int = 16

    def setup(self):
        self.generator = nn.Sequential([nn.Dense(self.features), nn.leaky_relu, nn.Dense(self.features), nn.leaky_relu, nn.Dense(64), nn.sigmoid])
        self.discriminator = nn.Sequential([nn.Dense(self.features), nn.leaky_relu, nn.Dense(self.features), nn.leaky_relu, nn.Dense(1)])

    def __call__(self, labels):
        noise = jax.random.normal(self.make_rng("noise"), (len(labels), self.noise))
        images = self.generator(jnp.concatenate([noise, jax.nn.one_hot(labels, 10)], axis=-1))
        if self.is_initializing():
            self.judge(images, labels)  # Parameters are created only for layers that are called.
        return images

    def judge(self, images, labels):
        """Returns the logits `[batch]` that the images are real."""
        return self.discriminator(jnp.concatenate([images, jax.nn.one_hot(labels, 10)], axis=-1))[:, 0]


class GANTrainer(fitflax.Trainer):
    """Trains the discriminator to tell real images from drawn ones, and the generator to draw images that the discriminator considers real."""

    def train_step(self, state, batch):
        labels, images, mask = batch.x, batch.y, batch.mask
        # Each device has a shard of the batch. Sums over all devices make the step the same as on one device.
        num_examples = self.sum_replicas(mask.sum())
        rngs = self.step_rngs(state)

        def mean(values):
            return jnp.sum(values * mask) / num_examples

        def draw(params):
            return self.model.apply({"params": params}, labels, rngs=rngs)

        def judge(params, images):
            return self.model.apply({"params": params}, images, labels, method="judge")

        drawn = draw(state.params)

        def discriminator_loss(params):
            of_real, of_drawn = judge(params, images), judge(params, drawn)
            values = nn.softplus(-of_real) + nn.softplus(of_drawn)
            return mean(values), {"discriminator_loss": values, "discriminator_accuracy": 0.5 * (of_real > 0) + 0.5 * (of_drawn < 0)}

        def generator_loss(params):
            values = nn.softplus(-judge(params, draw(params)))
            return mean(values), {"generator_loss": values}

        by_discriminator, values = jax.grad(discriminator_loss, has_aux=True)(state.params)
        by_generator, more_values = jax.grad(generator_loss, has_aux=True)(state.params)
        # Each network gets the gradient of its own loss only.
        grads = {"generator": by_generator["generator"], "discriminator": by_discriminator["discriminator"]}
        state = state.apply_gradient(self.sum_replicas(grads), self.optimizer)
        # Each log is a sum and a weight, so that an epoch's logs are means over its examples.
        return state, {name: (jnp.sum(each * mask), jnp.sum(mask)) for name, each in {**values, **more_values}.items()}


def load(seed: int = 0):
    """Returns `(labels, images)` for training and test; images are `[examples, 64]` in [0, 1]."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    labels, images = digits.target[order].astype(np.int32), digits.data[order].astype(np.float32) / 16
    return [(labels[part], images[part]) for part in (slice(0, 1200), slice(1200, None))]


def picture(images: np.ndarray) -> str:
    """Returns images `[images, 64]` in [0, 1] as eight lines of text, next to each other."""
    shades = " .:-=+*#%@"
    return "\n".join("  ".join("".join(2 * shades[int(value * 9.999)] for value in row) for row in rows) for rows in images.reshape(-1, 8, 8).swapaxes(0, 1))


def main(directory: str | pathlib.Path = "runs/gan", epochs: int = 200, features: int = 128, verbose: int | str = "auto") -> dict[str, float]:
    """Trains, and returns the accuracies on real images of a classifier that has seen only drawn images, and of one that has seen real images."""
    directory = pathlib.Path(directory)
    train, test = load()
    # Prediction draws noise, too.
    trainer = GANTrainer(GAN(features), rngs={"init": ("noise",), "train": ("noise",), "eval": ("noise",)})
    trainer.compile(OPTIMIZER)
    callbacks = [CSVLogger(directory / "log.csv"), ModelCheckpoint(directory / "checkpoints", every=fitflax.every(epochs=10))]
    trainer.fit(*train, batch_size=64, epochs=epochs, callbacks=callbacks, resume="auto", verbose=verbose)

    labels = np.arange(2000, dtype=np.int32) % 10
    images = trainer.predict(labels)
    nearest = KNeighborsClassifier(n_neighbors=1)
    result = {"drawn": nearest.fit(images, labels).score(*test[::-1]), "real": nearest.fit(*train[::-1]).score(*test[::-1])}
    if verbose:
        print(f"{picture(images[:5])}\n\n{picture(images[5:10])}")
        print(f"log: {directory / 'log.csv'}")
        print(f"checkpoints: {directory / 'checkpoints'}")
        print("nearest-neighbor accuracy on real images: {drawn:.3f} with generated images, {real:.3f} with real ones".format(**result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
