"""`Mean`, and the metrics that are made of it: accuracies and means of functions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from fitflax import losses, metrics
from fitflax.errors import MetricError
from fitflax.metrics import resolve
from tests.metrics.batches import BINARY, LABELS, LOGITS, ONE_HOT, VALUES, WEIGHTS, over_batches

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_million_merges_lose_no_precision(compiled: bool):
    values = RNG.uniform(0.0, 2.0, size=1000).astype(np.float32)
    expected = values.astype(np.float64).mean()

    def merge_one(metric: metrics.Mean, value: jax.Array) -> tuple[metrics.Mean, None]:
        return metric.merge(metric.empty().add(value, 1.0)), None

    def epoch(carry: tuple[metrics.Mean, jax.Array], _: None) -> tuple[tuple[metrics.Mean, jax.Array], None]:
        metric, plain = carry
        return (jax.lax.scan(merge_one, metric, values)[0], jax.lax.fori_loop(0, 1000, lambda i, total: total + jnp.asarray(values)[i], plain)), None

    def run() -> tuple[metrics.Mean, jax.Array]:
        begin = jax.tree.map(jnp.asarray, metrics.Mean(name="loss"))
        return jax.lax.scan(epoch, (begin, jnp.float32(0)), length=1000)[0]

    metric, plain = (jax.jit(run) if compiled else run)()
    assert abs(float(plain) / 1e6 / expected - 1) > 1e-6, "plain float32 would do: the test shows nothing"
    assert abs(float(metric.compute()) / expected - 1) < 1e-7
    hi_and_lo = np.asarray(metric.total, np.float64).sum()
    assert abs(hi_and_lo / 1e6 / expected - 1) < 1e-10
    assert float(metric.weight.sum()) == 1e6


def test_counting_continues_beyond_what_float32_can_count():
    full = metrics.Mean(name="loss").add(1.0, 2.0**24)
    for _ in range(3):
        full = full.add(0.0, 1.0)
    assert np.asarray(full.weight, np.float64).sum() == 2**24 + 3


def test_infinite_and_nan_values_are_preserved():
    mean = metrics.Mean(name="loss")
    assert float(mean.add(np.inf, 1.0).add(1.0, 1.0).compute()) == np.inf
    assert np.isnan(float(mean.add(np.nan, 1.0).add(1.0, 1.0).compute()))


def test_a_function_of_per_example_values_is_averaged():
    def top_logit(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return outputs.max(-1)

    metric = resolve(top_logit)
    assert (metric.name, metric.direction) == ("top_logit", None)
    np.testing.assert_allclose(over_batches(metric, LOGITS, LABELS, WEIGHTS, size=8).compute(), np.average(LOGITS.max(-1), weights=WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(
        metrics.Mean(top_logit, transform="exp").update(LOGITS, LABELS, WEIGHTS).compute(), np.exp(np.average(LOGITS.max(-1), weights=WEIGHTS)), rtol=1e-5
    )


def test_a_mean_has_the_name_of_its_function():
    assert metrics.Mean(functools.partial(functools.partial(losses.huber, delta=2.0))).name == "huber"
    assert metrics.Mean(functools.partial(losses.huber, delta=2.0)).direction == "min"
    assert metrics.Mean(lambda outputs, targets: outputs).name == "lambda"
    assert metrics.Mean(losses.huber, name="h", direction="max").name == "h"
    assert metrics.Mean().name == "mean"

    class MarginOfSafety:
        def __call__(self, outputs: Any, targets: Any) -> Any:
            return outputs

    assert metrics.Mean(MarginOfSafety()).name == "margin_of_safety"


def test_a_mean_without_a_function_accepts_scalars_and_token_values():
    mean = metrics.Mean(name="aux").add(jnp.ones((2, 3)), jnp.array([1.0, 0.0])).add(5, 3)
    assert float(mean.compute()) == pytest.approx((3 + 15) / 6)
    with pytest.raises(MetricError, match="Metric 'aux' has no function"):
        mean.update(LOGITS, LABELS, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'aux': Weights must .* weights \[3\] for values \[\]"):
        mean.add(1.0, jnp.ones(3))


@pytest.mark.parametrize(
    ("fn", "returned"),
    [(lambda outputs, targets: outputs.mean(), r"\[\]"), (lambda outputs, targets: outputs.mean(0), r"\[7\]")],
)
def test_a_function_that_averages_over_the_batch_is_an_error(fn: Callable[..., Any], returned: str):
    with pytest.raises(MetricError, match=rf"Metric 'lambda' must return one value per example.*Received: {returned} for weights \[23\]. Do not average"):
        metrics.Mean(fn).update(LOGITS, VALUES, WEIGHTS)


@pytest.mark.parametrize(
    ("outputs", "targets", "expected"),
    [
        (LOGITS, LABELS, LOGITS.argmax(-1) == LABELS),
        (LOGITS, LABELS[:, None], LOGITS.argmax(-1) == LABELS),
        (LOGITS, ONE_HOT, LOGITS.argmax(-1) == LABELS),
        (LOGITS[:, 0], BINARY[:, 0], (LOGITS[:, 0] > 0) == BINARY[:, 0]),
        (LOGITS[:, :1], BINARY[:, 0], (LOGITS[:, 0] > 0) == BINARY[:, 0]),
        (LOGITS[:, 0], BINARY[:, :1], (LOGITS[:, 0] > 0) == BINARY[:, 0]),
        (LOGITS[:, :1], BINARY[:, :1].astype(bool), (LOGITS[:, 0] > 0) == BINARY[:, 0]),
        (np.stack([LOGITS, -LOGITS], 1), np.stack([LABELS, LABELS], 1), np.stack([LOGITS.argmax(-1) == LABELS, LOGITS.argmin(-1) == LABELS], 1)),
    ],
)
def test_accuracy_infers_its_kind_from_the_shapes(outputs: np.ndarray, targets: np.ndarray, expected: np.ndarray):
    weights = WEIGHTS if expected.ndim == 1 else np.stack([WEIGHTS, 2 * WEIGHTS], 1)
    np.testing.assert_allclose(metrics.Accuracy().update(outputs, targets, weights).compute(), np.average(expected, weights=weights), rtol=1e-5)


def test_binary_accuracy_applies_its_threshold_to_the_outputs():
    metric = metrics.BinaryAccuracy(threshold=0.5, name="p")
    assert float(metric.update(np.float32([0.4, 0.6, 0.9]), np.array([0, 1, 0]), np.ones(3)).compute()) == pytest.approx(2 / 3)
    assert metric.name == "p"


def test_top_k_counts_ties_as_keras_does_and_counts_invalid_labels_as_wrong():
    top2 = metrics.TopKAccuracy(k=2)
    one = np.ones(1, np.float32)
    for outputs, label, expected in (
        ([1.0, 1.0, 1.0, 0.0], 2, 1.0),  # two others are equally high, none is higher
        ([1.0, 2.0, 3.0, 0.0], 0, 0.0),
        ([1.0, 2.0, 3.0, 0.0], 1, 1.0),
        ([1.0, 2.0, 3.0, 0.0], -2, 0.0),
        ([1.0, 2.0, 3.0, 0.0], 4, 0.0),
    ):
        assert float(top2.update(np.float32([outputs]), np.array([label]), one).compute()) == expected, (outputs, label)
    np.testing.assert_allclose(top2.update(LOGITS, ONE_HOT, WEIGHTS).compute(), top2.update(LOGITS, LABELS.astype(np.int8), WEIGHTS).compute())
    assert float(metrics.TopKAccuracy(k=100).update(LOGITS, LABELS, WEIGHTS).compute()) == 1.0
    with pytest.raises(MetricError, match=r"k=...\) must be a positive integer. Received: 0"):
        metrics.TopKAccuracy(k=0)


def test_a_mean_of_anything_but_a_function_is_an_error():
    with pytest.raises(MetricError, match=r"Mean takes a function .* Received: 'mse'. To get a metric by name, use metrics.get"):
        metrics.Mean("mse")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match=r"transform=...\) must be one of \[None, 'sqrt', 'exp'\]. Received: 'log'"):
        metrics.Mean(losses.huber, transform="log")  # type: ignore[arg-type]


def test_a_subclass_of_mean_keeps_its_own_fields():
    @struct.dataclass
    class Scaled(metrics.Mean):
        scale: float = struct.field(pytree_node=False, default=2.0, kw_only=True)

        def compute(self) -> jax.Array:
            return self.scale * super().compute()

    assert float(Scaled(losses.mean_absolute_error, scale=3.0).empty().update(np.ones(2), np.zeros(2), np.ones(2)).compute()) == 3.0
