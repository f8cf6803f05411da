"""Losses in `fit` and `evaluate`: the weighted mean over all real examples, regardless of the batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(3)
OUTPUTS = RNG.normal(size=(10, 3)).astype(np.float32)
WEIGHTS = np.float32([1, 0, 2, 0.5, 3, 1, 0, 0.1, 4, 1.5])
LABELS = RNG.integers(3, size=10)
ONE_HOT = np.eye(3)[LABELS]
PROBABILITIES = RNG.dirichlet(np.ones(3), size=10)
Z = OUTPUTS.astype(np.float64)
LENGTHS = np.sqrt((Z**2).sum(-1) * (PROBABILITIES**2).sum(-1))


class Shifted(nn.Module):
    """Returns its inputs, shifted by parameters that are initialized to 0."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.param("shift", nn.initializers.zeros, (3,))


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("cosine_similarity", PROBABILITIES, -(Z * PROBABILITIES).sum(-1) / LENGTHS),
        ("kl_divergence", PROBABILITIES, (PROBABILITIES * (np.log(PROBABILITIES) - Z)).sum(-1) + np.log(np.exp(Z).sum(-1))),
        ("hinge", ONE_HOT, np.maximum(1 - (2 * ONE_HOT - 1) * Z, 0).mean(-1)),
        ("multiclass_perceptron_loss", LABELS, Z.max(-1) - (Z * ONE_HOT).sum(-1)),
    ],
)
@pytest.mark.slow
def test_fit_and_evaluate_give_the_weighted_mean_over_ragged_batches(name: str, targets: np.ndarray, expected: np.ndarray):
    assert len(OUTPUTS) % 4  # the last batch is padded
    trainer = fitflax.Trainer(Shifted(), parallel=DataParallel(jax.devices()[:2]))
    trainer.compile(optax.sgd(0.0), name)
    targets = targets if targets is LABELS else targets.astype(np.float32)
    mean = (WEIGHTS * expected).sum() / WEIGHTS.sum()
    history = trainer.fit(OUTPUTS, targets, WEIGHTS, epochs=1, batch_size=4, verbose=0)
    assert history.history["loss"] == [pytest.approx(mean, rel=1e-5)]
    assert trainer.evaluate(OUTPUTS, targets, WEIGHTS, batch_size=4, verbose=0)["loss"] == pytest.approx(mean, rel=1e-5)
    assert trainer.evaluate(OUTPUTS, targets, batch_size=4, verbose=0)["loss"] == pytest.approx(expected.mean(), rel=1e-5)


def test_a_step_descends_the_gradient_of_the_weighted_mean():
    trainer = fitflax.Trainer(Shifted(), parallel=DataParallel(jax.devices()[:2]))
    trainer.compile(optax.sgd(1.0), "poisson")
    counts = RNG.poisson(2.0, size=(10, 3)).astype(np.float32)
    trainer.fit(OUTPUTS, counts, WEIGHTS, epochs=1, batch_size=12, verbose=0)
    slope = (WEIGHTS[:, None] * (np.exp(Z) - counts)).sum(0) / WEIGHTS.sum() / 3
    np.testing.assert_allclose(jnp.asarray(trainer.state.params["shift"]), -slope, rtol=1e-5)
