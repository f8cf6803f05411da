"""All metrics by name: values over ragged batches, merging, names, directions, invalid numbers and errors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from flax import struct

from fitflax import losses, metrics
from fitflax.errors import MetricError
from fitflax.metrics import resolve
from fitflax.metrics.base import metric_direction, metric_name
from tests.metrics.batches import BINARY, CLASSES, LABELS, LOGITS, ONE_HOT, ROWS, VALUES, WEIGHTS, one_batch, over_batches, softmax

RNG = np.random.default_rng(0)
TARGETS = {
    "binary_crossentropy": BINARY,
    "binary_accuracy": BINARY,
    "categorical_crossentropy": ONE_HOT,
    "categorical_accuracy": ONE_HOT,
    "top_k_categorical_accuracy": ONE_HOT,
    "sparse_categorical_crossentropy": LABELS,
    "sparse_categorical_accuracy": LABELS,
    "sparse_top_k_categorical_accuracy": LABELS,
    "top_k_accuracy": LABELS,
    "accuracy": LABELS,
    "acc": LABELS,
    "perplexity": LABELS,
    **dict.fromkeys(("precision", "recall", "f1", "f1_score", "specificity", "mean_iou", "confusion_matrix"), LABELS),
    **dict.fromkeys(("auc", "roc_auc", "pr_auc", "average_precision"), LABELS),
}
# Every name with its own implementation, and one loss, because all losses become the same `Mean`.
ALIASES = {"acc", "f1_score", "r2_score", "root_mean_squared_error", "roc_auc", "average_precision", "sparse_top_k_categorical_accuracy"}
NAMES = sorted({*metrics.names()} - {*losses.names()} - ALIASES | {"mse", "cosine_similarity"})
ADDITIVE = [name for name in NAMES if metrics.get(name).additive]
COLLECTING = ["auc", "pr_auc"]
# One metric for each kind of state; metrics that are a `Mean` differ only in what they average.
STATES = ["accuracy", "confusion_matrix", "explained_variance", "mean_iou", "perplexity", "r2"]

BY_SKLEARN: dict[str, Callable[..., float]] = {
    "accuracy": lambda w: sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=w),
    "categorical_accuracy": lambda w: sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=w),
    "sparse_categorical_accuracy": lambda w: sklearn.metrics.accuracy_score(LABELS, LOGITS.argmax(-1), sample_weight=w),
    "binary_accuracy": lambda w: np.average((LOGITS > 0) == BINARY, axis=0, weights=w).mean(),
    "top_k_accuracy": lambda w: sklearn.metrics.top_k_accuracy_score(LABELS, LOGITS, k=5, sample_weight=w, labels=range(CLASSES)),
    "top_k_categorical_accuracy": lambda w: sklearn.metrics.top_k_accuracy_score(LABELS, LOGITS, k=5, sample_weight=w, labels=range(CLASSES)),
    "sparse_top_k_categorical_accuracy": lambda w: sklearn.metrics.top_k_accuracy_score(LABELS, LOGITS, k=5, sample_weight=w, labels=range(CLASSES)),
    "mse": lambda w: sklearn.metrics.mean_squared_error(VALUES, LOGITS, sample_weight=w),
    "mae": lambda w: sklearn.metrics.mean_absolute_error(VALUES, LOGITS, sample_weight=w),
    "rmse": lambda w: np.sqrt(sklearn.metrics.mean_squared_error(VALUES, LOGITS, sample_weight=w)),
    "r2": lambda w: sklearn.metrics.r2_score(VALUES, LOGITS, sample_weight=w),
    "perplexity": lambda w: np.exp(sklearn.metrics.log_loss(LABELS, softmax(LOGITS), sample_weight=w, labels=range(CLASSES))),
}


@pytest.mark.parametrize("name", BY_SKLEARN)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.mostly_slow
def test_metrics_over_ragged_batches_agree_with_scikit_learn(name: str, weighted: bool):
    weights = WEIGHTS if weighted else np.ones(ROWS, np.float32)
    expected = BY_SKLEARN[name](weights if weighted else None)
    for size, order in ((4, "left"), (5, "right"), (5, "tree"), (ROWS, "left")):
        result = over_batches(metrics.get(name), LOGITS, TARGETS.get(name, VALUES), weights, size=size, order=order).compute()
        assert (result.shape, result.dtype) == ((), jnp.float32)
        np.testing.assert_allclose(result, expected, rtol=1e-5, err_msg=f"{size} {order}")


@pytest.mark.parametrize("name", ["huber", "categorical_crossentropy", "sparse_categorical_crossentropy"])
@pytest.mark.mostly_slow
def test_a_loss_by_name_is_the_mean_of_its_values(name: str):
    targets = TARGETS.get(name, VALUES)
    metric = over_batches(metrics.get(name), LOGITS, targets, WEIGHTS, size=6)
    np.testing.assert_allclose(metric.compute(), np.average(losses.get(name)(LOGITS, targets), weights=WEIGHTS), rtol=1e-5)
    assert metric.direction == "min"


def test_every_loss_is_a_minimized_metric_except_cosine_similarity_which_is_maximized():
    for name in set(losses.names()) - {"cosine_similarity"}:
        metric = metrics.get(name)
        assert isinstance(metric, metrics.Mean)
        assert (metric.fn, metric.name, metric.direction) == (losses.get(name), name, "min")
    assert metrics.get("cosine_similarity").direction == "max"


@pytest.mark.parametrize("metric", [*map(metrics.get, STATES), metrics.AUC(num_thresholds=20)], ids=metric_name)
@pytest.mark.mostly_slow
def test_merging_preserves_structure_shapes_and_dtypes(metric: metrics.Metric):
    targets = TARGETS.get(metric.name, VALUES)

    def step(running: metrics.Metric, _: None) -> tuple[metrics.Metric, None]:
        return running.merge(running.empty().update(LOGITS, targets, WEIGHTS)), None

    later = step(metric.empty(), None)[0]
    begin = jax.tree.map(lambda empty, leaf: jnp.broadcast_to(empty, leaf.shape), metric.empty(), later)
    with jax.numpy_rank_promotion("raise"):
        result, _ = jax.lax.scan(step, begin, length=3)  # raises if structure, shape, dtype or weak type changes
    times = 3 if metric.name == "confusion_matrix" else 1
    np.testing.assert_allclose(result.compute(), times * later.compute(), rtol=1e-5)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(result))


def test_the_log_key_is_the_name_that_the_user_wrote():
    for name in metrics.names():
        metric = metrics.get(name)
        assert isinstance(metric, metrics.Metric)
        assert metric_name(metric) == name


def test_metrics_declare_whether_they_collect_rows_or_are_additive():
    assert [name for name in NAMES if metrics.get(name).collect] == COLLECTING
    assert {*NAMES} - {*ADDITIVE} - {*COLLECTING} == {"r2", "explained_variance"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.mostly_slow
def test_a_metric_of_no_examples_is_nan_and_merging_it_changes_nothing(name: str):
    metric = metrics.get(name)
    empty = 0.0 if name == "confusion_matrix" else np.nan  # Its value is a sum of weights.
    np.testing.assert_equal([float(metric.empty().compute()), float(metric.empty().merge(metric.empty()).compute())], [empty] * 2)
    nothing = metric.empty().update(np.full_like(LOGITS, np.nan), TARGETS.get(name, VALUES), np.zeros(ROWS, np.float32))
    np.testing.assert_equal(np.asarray(nothing.compute()), np.full_like(nothing.compute(), empty))
    some = metric.update(LOGITS, TARGETS.get(name, VALUES), WEIGHTS)
    for both in (some.merge(nothing), nothing.merge(some), some.merge(metric.empty()), metric.empty().merge(some)):
        np.testing.assert_array_equal(both.compute(), some.compute())
    assert np.any(some.compute())


@pytest.mark.parametrize(
    "metric", [*map(metrics.get, sorted({*STATES} & {*ADDITIVE})), metrics.F1(average=None), metrics.AUC(num_thresholds=20)], ids=metric_name
)
@pytest.mark.mostly_slow
def test_adding_the_leaves_of_additive_metrics_merges_them(metric: metrics.Metric):
    targets = TARGETS.get(metric.name, VALUES)
    parts = [one_batch(metric, LOGITS[rows], targets[rows], WEIGHTS[rows]) for rows in (slice(0, 7), slice(7, 14), slice(14, 21))]
    added = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *parts).compute()
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = functools.reduce(lambda done, part: done.merge(part), [parts[place] for place in order], metric.empty())
        np.testing.assert_allclose(added, merged.compute(), rtol=1e-6)
    assert np.any(added != parts[0].compute())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_equal_metrics_have_equal_structure_so_that_one_program_serves_both(name: str):
    assert jax.tree.structure(metrics.get(name)) == jax.tree.structure(metrics.get(name))
    assert jax.tree.structure(metrics.get(name)) == jax.tree.structure(metrics.get(name).update(LOGITS, TARGETS.get(name, VALUES), WEIGHTS))


def test_replicas_are_merged_by_adding_leaves(devices: Callable[[int], list[jax.Device]]):
    metric = metrics.get("mse")
    assert metric.additive
    assert not metrics.R2.additive

    def step(outputs: jax.Array, targets: jax.Array, weights: jax.Array) -> metrics.Metric:
        return jax.lax.psum(metric.empty().update(outputs, targets, weights), "replica")

    shape = lambda x: x[:20].reshape(4, 5, *x.shape[1:])  # noqa: E731
    summed = jax.pmap(step, axis_name="replica", out_axes=None, devices=devices(4))(shape(LOGITS), shape(VALUES), shape(WEIGHTS))
    np.testing.assert_allclose(summed.compute(), metric.update(LOGITS[:20], VALUES[:20], WEIGHTS[:20]).compute(), rtol=1e-6)


def test_errors_of_incompatible_shapes_name_the_metric_by_its_key():
    with pytest.raises(MetricError, match=r"Metric 'acc': It takes .* with integer or one-hot targets. Received: outputs \[23, 7\], targets \[5\]"):
        metrics.get("acc").update(LOGITS, LABELS[:5], WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'mse': mean_squared_error takes .* Received: outputs \[23, 7\], targets \[23\]"):
        metrics.get("mse").update(LOGITS, LABELS, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'r2_score': It takes outputs and targets of the same shape"):
        metrics.get("r2_score").update(LOGITS, LABELS, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'r2': Weights must"):
        metrics.get("r2").update(LOGITS, VALUES, np.ones((ROWS, CLASSES)))
    with pytest.raises(MetricError, match=r"Metric 'categorical_accuracy': It takes .* with one-hot targets"):
        metrics.get("categorical_accuracy").update(LOGITS, LABELS, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'sparse_categorical_accuracy': It takes .* with integer targets"):
        metrics.get("sparse_categorical_accuracy").update(LOGITS, ONE_HOT, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'accuracy': It takes outputs with a leading batch axis. Received: a scalar"):
        metrics.get("accuracy").update(np.float32(1.0), np.float32(1.0), WEIGHTS)
    with pytest.raises(MetricError, match=r"one array of targets. Received: a dict of length 1. Pass a loss and metrics for each"):
        metrics.get("accuracy").update(LOGITS, {"y": LABELS}, WEIGHTS)


CLASSIFICATION: dict[str, Callable[[], metrics.Metric]] = {
    **{name: functools.partial(metrics.get, name) for name in TARGETS if name not in ALIASES and "crossentropy" not in name},
    "auc binned": lambda: metrics.AUC(num_thresholds=20),
    **{
        f"{kind.__name__} {average}": functools.partial(kind, average=average)
        for kind in (metrics.Precision, metrics.Recall, metrics.Specificity, metrics.MeanIoU, metrics.F1, metrics.FBeta, metrics.AUC)
        for average in (None, "micro", "weighted")
    },
    **{f"matrix {how}": functools.partial(metrics.ConfusionMatrix, normalize=how) for how in ("true", "pred", "all")},
}


@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.mostly_slow
def test_a_nan_output_makes_a_classification_metric_nan_unless_its_weight_is_zero(name: str):
    metric, targets = CLASSIFICATION[name](), TARGETS.get(name.split()[0].removesuffix("_binned"), LABELS)
    outputs = LOGITS.copy()
    outputs[4, 2] = np.nan  # Not the output of the class, nor the largest.
    for weight in (0.0, 1.0):
        weights = np.where(np.arange(ROWS) == 4, weight, WEIGHTS).astype(np.float32)
        value = np.asarray(over_batches(metric, outputs, targets, weights, size=7).compute())
        if weight:
            assert np.isnan(value).all()
        else:
            np.testing.assert_array_equal(value, over_batches(metric, LOGITS, targets, weights, size=7).compute())


@pytest.mark.parametrize("make", [metrics.Precision, metrics.F1, metrics.MeanIoU, metrics.AUC, functools.partial(metrics.AUC, num_thresholds=9)])
@pytest.mark.mostly_slow
def test_a_nan_output_affects_all_classes_but_only_its_own_independent_label(make: Callable[..., metrics.Metric]):
    outputs = LOGITS.copy()
    outputs[4, 2] = np.nan
    for multi_label, targets, bad in ((False, LABELS, np.arange(CLASSES) >= 0), (True, BINARY, np.arange(CLASSES) == 2)):
        metric = make(average=None, multi_label=multi_label)
        value, healthy = (np.asarray(metric.update(rows, targets, WEIGHTS).compute()) for rows in (outputs, LOGITS))
        np.testing.assert_array_equal(value, np.where(bad, np.nan, healthy))
        assert np.isnan(make(multi_label=multi_label).update(outputs, targets, WEIGHTS).compute())


@pytest.mark.parametrize("name", ["accuracy", "binary_accuracy", "precision", "recall", "f1", "specificity", "mean_iou", "confusion_matrix", "auc"])
@pytest.mark.mostly_slow
def test_a_nan_logit_of_a_binary_target_makes_the_metric_nan(name: str):
    outputs, targets = LOGITS[:, 0].copy(), BINARY[:, 0]
    outputs[4] = np.nan
    for shape in ((ROWS,), (ROWS, 1)):
        assert np.isnan(metrics.get(name).update(outputs.reshape(shape), targets, WEIGHTS).compute()).all()


def test_names_directions_and_keys_are_as_documented():
    highest = {"accuracy", "acc", "binary_accuracy", "categorical_accuracy", "sparse_categorical_accuracy", "top_k_accuracy", "top_k_categorical_accuracy"}
    highest |= {"sparse_top_k_categorical_accuracy", "r2", "r2_score", "explained_variance", "cosine_similarity"}
    highest |= {"precision", "recall", "f1", "f1_score", "specificity", "mean_iou", "auc", "roc_auc", "pr_auc", "average_precision"}
    lowest = set(losses.names()) - {"cosine_similarity"} | {"rmse", "root_mean_squared_error", "perplexity"}
    directions = {name: metric_direction(metrics.get(name)) for name in metrics.names()}
    assert directions == dict.fromkeys(highest, "max") | dict.fromkeys(lowest, "min") | {"confusion_matrix": None}


@pytest.mark.parametrize(("name", "meant"), [("RootMeanSquaredError", "root_mean_squared_error"), ("accurracy", "accuracy"), ("R2Score", "r2_score")])
def test_unknown_names_are_errors_that_suggest_a_known_name(name: str, meant: str):
    with pytest.raises(MetricError, match=rf"There is no metric '{name}'. Did you mean '{meant}'\? Pass .*\. Known: \['acc', "):
        metrics.get(name)


@struct.dataclass
class CountOfExamples:
    """Duck-typed: not a subclass of `Metric`."""

    count: Any = 0.0

    def empty(self) -> "CountOfExamples":
        return CountOfExamples()

    def update(self, outputs: Any, targets: Any, weights: Any) -> "CountOfExamples":
        return CountOfExamples(self.count + weights.sum())

    def merge(self, other: "CountOfExamples") -> "CountOfExamples":
        return CountOfExamples(self.count + other.count)

    def compute(self) -> Any:
        return self.count


@struct.dataclass
class NeedsArgument(CountOfExamples):
    count: Any = struct.field(kw_only=True)


def test_resolve_accepts_names_objects_classes_factories_and_functions():
    assert resolve("acc").name == "acc"
    given = CountOfExamples()
    assert resolve(given) is given
    assert isinstance(resolve(CountOfExamples), CountOfExamples)
    assert isinstance(resolve(metrics.R2), metrics.R2)
    assert resolve(metrics.Accuracy).name == "accuracy"
    for maker, name in ((metrics.F1, "f1"), (metrics.AUC, "auc"), (metrics.Precision, "precision"), (metrics.CosineSimilarity, "cosine_similarity")):
        assert resolve(maker).name == name
    assert resolve(losses.huber).direction == "min"


@pytest.mark.parametrize("spec", [3, None, object(), dict, NeedsArgument])
def test_anything_but_a_metric_is_an_error(spec: Any):
    with pytest.raises(MetricError, match="Received: "):
        resolve(spec)


def test_names_and_directions_of_any_object_are_found():
    assert metric_name(CountOfExamples()) == "count_of_examples"
    assert metric_direction(CountOfExamples()) is None
    with pytest.raises(MetricError, match=r"direction of metric 'loss' must be 'max', 'min' or None. Received: 'up'"):
        metrics.Mean(name="loss", direction="up")  # type: ignore[arg-type]


def test_getting_a_metric_by_anything_but_a_name_is_an_error():
    with pytest.raises(MetricError, match=r"metrics\.get\(\) takes a name\. Received: 3\."):
        metrics.get(3)
