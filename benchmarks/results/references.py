"""Computes references for the results: the exact likelihood of an autoencoder with two latent dimensions, and scikit-learn's example."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from benchmarks.results.models import VAE

HALF_WIDTH, POINTS = 8.0, 401  # The grid in each dimension: a point every 0.04 standard deviations of the prior.


def _log_bernoulli(logits: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the log probability of each image for each code, `[images, codes]`."""
    return x @ logits.T - jax.nn.softplus(logits).sum(-1)


def exact_log_likelihood(module: VAE, params: Any, x: np.ndarray) -> float:
    """Returns the mean of log p(x) in nats, integrated over the two latent dimensions with the trapezoidal rule.

    The integrand vanishes at the edges. For such integrands, the rule converges faster than any power of the spacing.
    """
    axis = np.linspace(-HALF_WIDTH, HALF_WIDTH, POINTS, dtype=np.float32)
    rows = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    area = 2 * np.log(2 * HALF_WIDTH / (POINTS - 1))

    @jax.jit
    def of_row(z: jax.Array) -> jax.Array:
        prior = -0.5 * (z**2).sum(-1) - np.log(2 * np.pi)
        return jax.nn.logsumexp(_log_bernoulli(module.apply({"params": params}, z, method="decode"), x) + prior, axis=1)

    parts = np.stack([np.asarray(of_row(z), np.float64) for z in rows])
    return float((np.logaddexp.reduce(parts, axis=0) + area).mean())


def importance_sampled(module: VAE, params: Any, x: np.ndarray, samples: int, repeats: int = 1, *, from_prior: float = 0.0, seed: int = 0) -> float:
    """Returns the mean of the log of the average of `samples` importance weights.

    With a single sample from the encoder, this is the evidence lower bound. With more samples it increases to log p(x) (Burda et al., 2015), slowly where the
    encoder misses codes that explain an image. Additional samples from the prior bound the weights.

    Args:
        module: The autoencoder.
        params: Its parameters.
        x: Images `[images, pixels]`.
        samples: Samples per image.
        repeats: Number of estimates to average.
        from_prior: The fraction of samples from the prior, in [0, 1].
        seed: The seed of the samples.
    """

    @jax.jit
    def once(key: jax.Array) -> jax.Array:
        mean, log_variance = module.apply({"params": params}, x, method="encode")

        def weigh(key: jax.Array) -> jax.Array:
            noise_key, share_key = jax.random.split(key)
            noise = jax.random.normal(noise_key, mean.shape)
            is_prior = jax.random.uniform(share_key, (len(x), 1)) < from_prior
            z = jnp.where(is_prior, noise, mean + jnp.exp(log_variance / 2) * noise)
            logits = module.apply({"params": params}, z, method="decode")
            # Without the constant that the densities of prior and encoder share.
            prior = -0.5 * (z**2).sum(-1)
            encoder = -0.5 * ((z - mean) ** 2 / jnp.exp(log_variance) + log_variance).sum(-1)
            drawn_from = jnp.logaddexp(encoder + jnp.log1p(-from_prior), prior + jnp.log(from_prior))
            return (x * logits - jax.nn.softplus(logits)).sum(-1) + prior - drawn_from

        return jax.nn.logsumexp(jax.lax.map(weigh, jax.random.split(key, samples)), axis=0) - np.log(samples)

    return float(np.mean([np.asarray(once(key), np.float64).mean() for key in jax.random.split(jax.random.key(seed), repeats)]))


def independent_pixels(x: np.ndarray, x_test: np.ndarray) -> float:
    """Returns the mean of log p(x) for independent pixels, each with its frequency in the training images: a baseline."""
    rate = (x.sum(0) + 1) / (len(x) + 2)
    return float((x_test * np.log(rate) + (1 - x_test) * np.log1p(-rate)).sum(-1).mean())


def support_vectors() -> float:
    """Returns the accuracy of the support vector classifier of scikit-learn's example on the second half of the digits, trained on the first half."""
    digits = load_digits()
    half = len(digits.data) // 2
    return float(SVC(gamma=0.001).fit(digits.data[:half], digits.target[:half]).score(digits.data[half:], digits.target[half:]))
