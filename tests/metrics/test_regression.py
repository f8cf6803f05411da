import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from fitflax import losses, metrics
from fitflax.errors import MetricError
from tests.metrics.batches import over_batches

RNG = np.random.default_rng(3)
WEIGHTS = RNG.uniform(0.1, 3.0, size=23).astype(np.float32)
SCORES = {metrics.R2: sklearn.metrics.r2_score, metrics.ExplainedVariance: sklearn.metrics.explained_variance_score}


@pytest.mark.parametrize(("columns", "weighted"), [(None, False), (3, True)])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.slow
def test_variance_scores_are_accurate_for_targets_far_from_zero(kind: type[metrics.Metric], columns: int | None, weighted: bool):
    shape = (500,) if columns is None else (500, columns)
    targets = np.sort(RNG.normal(1000.0, 1.0, size=shape), axis=0).astype(np.float32)  # sorted: every batch has a different mean
    outputs = (targets + RNG.normal(0.1, 0.5, size=shape)).astype(np.float32)
    weights = RNG.uniform(0.1, 3.0, size=500).astype(np.float32) if weighted else np.ones(500, np.float32)
    expected = SCORES[kind](targets.astype(np.float64), outputs.astype(np.float64), sample_weight=weights)
    for size, order in ((7, "left"), (7, "right"), (7, "tree"), (500, "left")):
        np.testing.assert_allclose(over_batches(kind(), outputs, targets, weights, size=size, order=order).compute(), expected, atol=1e-5)


def test_r2_over_a_hundred_thousand_merges_is_accurate():
    targets = np.sort(RNG.normal(1000.0, 1.0, size=(100_000, 1)), axis=0).astype(np.float32)
    outputs = (targets + RNG.normal(0.0, 0.5, size=targets.shape)).astype(np.float32)

    @jax.jit
    def run() -> jax.Array:
        begin = jax.tree.map(lambda empty, leaf: jnp.broadcast_to(empty, leaf.shape), metrics.R2(), metrics.R2().update(outputs[:1], targets[:1], jnp.ones(1)))
        step = lambda r2, row: (r2.merge(r2.empty().update(row[0][None], row[1][None], jnp.ones(1))), None)  # noqa: E731
        return jax.lax.scan(step, begin, (outputs, targets))[0].compute()

    np.testing.assert_allclose(run(), sklearn.metrics.r2_score(targets.astype(np.float64), outputs.astype(np.float64)), atol=1e-6)


@pytest.mark.slow
def test_r2_of_constant_targets_agrees_with_scikit_learn():
    for constant in (0.0, 0.5, 1000.25, 0.1, 1000.1):
        targets = np.full(10, constant, np.float32)
        for outputs, expected in ((targets, 1.0), (targets + 1, 0.0)):
            assert float(over_batches(metrics.R2(), outputs, targets, WEIGHTS[:10], size=3).compute()) == expected
            if constant not in (0.1, 1000.1):  # there, scikit-learn divides by the rounding error of its mean
                assert sklearn.metrics.r2_score(targets.astype(np.float64), outputs.astype(np.float64)) == expected
    rng = np.random.default_rng(0)
    for constant in rng.normal(size=60) * 10.0 ** rng.integers(-3, 5, size=60):  # the mean of some is not exact
        targets, weights = np.full(185, constant, np.float32), rng.uniform(0.1, 3.0, 185).astype(np.float32)
        assert float(over_batches(metrics.R2(), targets + 1, targets, weights, size=37).compute()) == 0.0
    two_columns = np.stack([np.full(4, 0.3), np.arange(4)], 1).astype(np.float32)
    assert float(metrics.R2().update(two_columns, two_columns, np.ones(4)).compute()) == 1.0


@pytest.mark.slow
def test_explained_variance_ignores_a_constant_offset():
    targets = RNG.normal(size=(23, 2)).astype(np.float32)
    metric = over_batches(metrics.ExplainedVariance(), targets + np.float32([3.0, -700.0]), targets, WEIGHTS, size=4)
    assert float(metric.compute()) == pytest.approx(1.0, abs=1e-6)
    for constant in (0.0, 0.5, 1000.25):
        targets = np.full(10, constant, np.float32)
        for outputs in (targets, targets + 1, targets + np.arange(10, dtype=np.float32)):
            expected = sklearn.metrics.explained_variance_score(targets.astype(np.float64), outputs.astype(np.float64))
            assert float(over_batches(metrics.ExplainedVariance(), outputs, targets, np.ones(10), size=3).compute()) == expected


@pytest.mark.slow
def test_explained_variance_accepts_tokens_but_not_incompatible_shapes():
    outputs, targets = RNG.normal(size=(2, 6, 5, 3)).astype(np.float32)
    weights = RNG.uniform(size=(6, 5)).astype(np.float32)
    weights[2, 3], outputs[2, 3] = 0.0, np.nan
    counted = weights.reshape(-1) != 0
    flat = [array.reshape(30, -1)[counted] for array in (targets, outputs, weights)]
    expected = sklearn.metrics.explained_variance_score(flat[0], flat[1], sample_weight=flat[2][:, 0])
    np.testing.assert_allclose(over_batches(metrics.ExplainedVariance(), outputs, targets, weights, size=4).compute(), expected, atol=1e-5)
    with pytest.raises(MetricError, match=r"Metric 'ev': It takes outputs and targets of the same shape .* Received: outputs \[6, 5, 3\], targets \[6\]"):
        metrics.ExplainedVariance(name="ev").update(outputs, targets[:, 0, 0], weights)


def test_cosine_similarity_is_the_mean_cosine_and_zero_for_zero_vectors():
    outputs, targets = RNG.normal(size=(2, 23, 4)).astype(np.float32)
    outputs[3], targets[4], outputs[5], outputs[6] = 0, 0, outputs[5] * 1e-25, outputs[6] * 1e25
    lengths = np.linalg.norm(outputs.astype(np.float64), axis=-1) * np.linalg.norm(targets.astype(np.float64), axis=-1)
    cosine = np.sum(outputs.astype(np.float64) * targets, axis=-1) / np.where(lengths == 0, 1, lengths)
    metric = over_batches(metrics.get("cosine_similarity"), outputs, targets, WEIGHTS, size=5)
    np.testing.assert_allclose(metric.compute(), np.average(cosine, weights=WEIGHTS), atol=1e-6)
    assert (metric.name, metric.direction, cosine[3], cosine[4]) == ("cosine_similarity", "max", 0.0, 0.0)
    tokens = metrics.CosineSimilarity().update(outputs.reshape(1, 23, 4), targets.reshape(1, 23, 4), WEIGHTS[None])
    np.testing.assert_allclose(tokens.compute(), np.average(cosine, weights=WEIGHTS), atol=1e-6)
    for shape in ((23,), (23, 1)):
        with pytest.raises(MetricError, match="with at least two features"):
            metrics.CosineSimilarity().update(np.ones(shape), np.ones(shape), WEIGHTS)


def test_the_cosine_similarity_metric_is_the_negative_of_the_loss():
    outputs, targets = RNG.normal(size=(2, 23, 4)).astype(np.float32)
    loss = losses.get("cosine_similarity")(outputs, targets).mean()
    np.testing.assert_allclose(metrics.get("cosine_similarity").update(outputs, targets, np.ones(23)).compute(), -loss, atol=1e-6)


def test_errors_of_complex_numbers_are_measured_by_their_magnitudes():
    targets = (RNG.normal(size=(23, 3)) + 1000 + 1j * RNG.normal(size=(23, 3))).astype(np.complex64)
    outputs = (targets + RNG.normal(size=(23, 3)) + 1j * RNG.normal(size=(23, 3))).astype(np.complex64)
    weights = RNG.uniform(0.1, 3.0, size=23).astype(np.float32)
    wide, mean = targets.astype(np.complex128), np.average(targets.astype(np.complex128), axis=0, weights=weights)
    residual, spread = (np.average(np.abs(wide - other) ** 2, axis=0, weights=weights) for other in (outputs, mean))
    expected = {
        "mse": residual.mean(),
        "rmse": np.sqrt(residual.mean()),
        "mae": np.average(np.abs(outputs - wide), axis=0, weights=weights).mean(),
        "r2": (1 - residual / spread).mean(),
    }
    for name, value in expected.items():
        metric = metrics.get(name).empty()
        for begin in range(0, 23, 5):
            rows = slice(begin, begin + 5)
            metric = metric.merge(metric.empty().update(outputs[rows], targets[rows], weights[rows]))
        assert float(metric.compute()) == pytest.approx(value, rel=1e-4), name
    assert float(metrics.R2().update(np.full(3, 1 + 2j), np.full(3, 1 + 2j), np.ones(3)).compute()) == 1.0
    assert float(metrics.R2().update(np.full(3, 1 + 1j), np.full(3, 1 + 2j), np.ones(3)).compute()) == 0.0


def test_metrics_without_a_magnitude_reject_complex_numbers():
    complex_ones, ones = np.ones((4, 3), np.complex64), np.ones((4, 3), np.float32)
    for name in {*metrics.names()} - {"mse", "mean_squared_error", "mae", "mean_absolute_error", "rmse", "root_mean_squared_error", "r2", "r2_score"}:
        for outputs, targets, role in ((complex_ones, ones, "outputs"), (ones, complex_ones, "targets")):
            with pytest.raises(MetricError, match=f"takes real {role}. Received: {role} of dtype complex64. Use 'mse'"):
                metrics.get(name).update(outputs, targets, np.ones(4))
    with pytest.raises(MetricError, match=r"Values must be real numbers. Received: complex64"):
        metrics.Mean(lambda outputs, targets: outputs[:, 0]).update(complex_ones, ones, np.ones(4))
