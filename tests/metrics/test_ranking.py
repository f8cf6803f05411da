"""Areas under curves agree with scikit-learn, and `SampleCollector` draws uniform samples that do not depend on the batches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from flax import linen as nn

import fitflax
from fitflax import metrics
from fitflax.errors import MetricError
from fitflax.metrics import SampleCollector
from fitflax.parallel import DataParallel
from tests.metrics.batches import one_batch, over_batches, softmax

RNG = np.random.default_rng(2)
ROWS, CLASSES, LABELS, BINS = 67, 4, 3, 20
WEIGHTS = RNG.uniform(0.1, 3.0, size=ROWS).astype(np.float32)
ONES = np.ones(ROWS, np.float32)
YES = (RNG.random(ROWS) < 0.3).astype(np.int32)
LOGIT = (RNG.normal(size=ROWS) + YES).astype(np.float32)
TIES = np.round(LOGIT * 2) / 2
CLASS = RNG.integers(CLASSES, size=ROWS)
LOGITS = (RNG.normal(size=(ROWS, CLASSES)) + np.eye(CLASSES)[CLASS]).astype(np.float32)
FLAGS = (RNG.random((ROWS, LABELS)) < [0.2, 0.5, 0.8]).astype(np.int32)
SEVERAL = np.round(RNG.normal(size=(ROWS, LABELS)) + FLAGS, 1).astype(np.float32)
SCORES: dict[str, Callable[..., Any]] = {"ROC": sklearn.metrics.roc_auc_score, "PR": sklearn.metrics.average_precision_score}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def binned(scores: np.ndarray) -> np.ndarray:
    return np.minimum(np.floor(scores * BINS), BINS - 1)


def one_vs_rest(curve: str, scores: np.ndarray, average: Any, weights: np.ndarray) -> Any:
    return SCORES[curve](np.eye(CLASSES)[CLASS], scores, average=average, sample_weight=weights)


@pytest.mark.parametrize("curve", SCORES)
@pytest.mark.parametrize("scores", [LOGIT, TIES], ids=["no ties", "ties"])
def test_the_exact_area_agrees_with_scikit_learn(scores: np.ndarray, curve: Any):
    metric = metrics.AUC(curve=curve)
    for weights in (ONES, WEIGHTS):
        expected = SCORES[curve](YES, scores, sample_weight=weights)
        for size, order in ((4, "left"), (16, "right"), (16, "tree"), (ROWS, "left")):
            result = over_batches(metric, scores, YES, weights, size=size, order=order).compute()
            assert (result.shape, result.dtype) == ((), np.float32)
            np.testing.assert_allclose(result, expected, rtol=1e-6, err_msg=f"{size} {order}")


@pytest.mark.parametrize("curve", SCORES)
@pytest.mark.slow
def test_the_binned_area_agrees_with_scikit_learn_on_binned_scores(curve: Any):
    metric = metrics.AUC(curve=curve, num_thresholds=BINS)
    for weights in (ONES, WEIGHTS):
        expected = SCORES[curve](YES, binned(sigmoid(LOGIT)), sample_weight=weights)
        assert expected != pytest.approx(SCORES[curve](YES, LOGIT, sample_weight=weights), abs=1e-4), "as exact without bins: the test shows nothing"
        for size, order in ((16, "left"), (16, "right"), (16, "tree"), (ROWS, "left")):
            result = over_batches(metric, LOGIT, YES, weights, size=size, order=order).compute()
            assert (result.shape, result.dtype) == ((), jnp.float32)
            np.testing.assert_allclose(result, expected, rtol=1e-5, err_msg=f"{size} {order}")


@pytest.mark.parametrize("average", ["macro", "weighted", "micro", None])
@pytest.mark.parametrize("curve", SCORES)
@pytest.mark.slow
def test_classes_are_ranked_one_against_the_rest_by_their_softmax(curve: Any, average: Any):
    exact, coarse = (metrics.AUC(curve=curve, num_thresholds=bins, average=average) for bins in (None, BINS))
    for weights in (ONES, WEIGHTS):
        probabilities = softmax(LOGITS)
        for targets in (CLASS, CLASS[:, None], np.eye(CLASSES)[CLASS]):
            result = over_batches(exact, LOGITS, targets, weights, size=ROWS, compiled=False).compute()
            np.testing.assert_allclose(result, one_vs_rest(curve, probabilities, average, weights), rtol=1e-6)
        result = over_batches(coarse, LOGITS, CLASS, weights, size=ROWS, compiled=False).compute()
        np.testing.assert_allclose(result, one_vs_rest(curve, binned(probabilities), average, weights), rtol=1e-5)
    if curve == "ROC":  # the call that the documentation names
        expected = sklearn.metrics.roc_auc_score(CLASS, softmax(LOGITS), multi_class="ovr", average=average, sample_weight=None if average is None else WEIGHTS)
        result = exact.update(LOGITS, CLASS, ONES if average is None else WEIGHTS).compute()
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("average", ["macro", "weighted", "micro", None])
@pytest.mark.parametrize("curve", SCORES)
@pytest.mark.slow
def test_labels_are_ranked_column_by_column(curve: Any, average: Any):
    for weights in (ONES, WEIGHTS):
        for bins, scores in ((None, SEVERAL), (BINS, binned(sigmoid(SEVERAL)))):
            metric = metrics.AUC(curve=curve, num_thresholds=bins, average=average, multi_label=True)
            result = over_batches(metric, SEVERAL, FLAGS, weights, size=ROWS, compiled=False).compute()
            expected = SCORES[curve](FLAGS, scores, average=average, sample_weight=weights)
            assert result.shape == np.shape(expected)
            np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.slow
def test_one_column_of_labels_is_still_a_column():
    for bins in (None, 20):
        metric = metrics.AUC(average=None, multi_label=True, num_thresholds=bins).update(LOGIT[:, None], YES[:, None], WEIGHTS)
        assert metric.compute().shape == (1,)
        assert metrics.AUC(average=None, num_thresholds=bins).update(LOGIT[:, None], YES, WEIGHTS).compute().shape == ()


@pytest.mark.parametrize("bins", [None, BINS])
@pytest.mark.slow
def test_tokens_are_ranked_one_by_one(bins: int | None):
    scores, targets = RNG.normal(size=(6, 5, 1)).astype(np.float32), RNG.integers(2, size=(6, 5))
    weights = (RNG.uniform(size=(6, 5)) * (RNG.random((6, 5)) < 0.8)).astype(np.float32)
    counted = weights.ravel() > 0
    scores[weights == 0], garbage = np.nan, np.where(weights == 0, -9, targets)
    real = scores.ravel()[counted]
    expected = sklearn.metrics.roc_auc_score(targets.ravel()[counted], real if bins is None else binned(sigmoid(real)), sample_weight=weights.ravel()[counted])
    np.testing.assert_allclose(over_batches(metrics.AUC(num_thresholds=bins), scores, garbage, weights, size=4).compute(), expected, rtol=1e-5)
    logits, labels = RNG.normal(size=(6, 5, CLASSES)).astype(np.float32), RNG.integers(CLASSES, size=(6, 5))
    flat = softmax(logits).reshape(30, CLASSES)
    expected = sklearn.metrics.roc_auc_score(
        np.eye(CLASSES)[labels.ravel()], flat if bins is None else binned(flat), sample_weight=np.repeat(WEIGHTS[:6], 5), average="weighted"
    )
    metric = metrics.AUC(num_thresholds=bins, average="weighted")
    np.testing.assert_allclose(over_batches(metric, logits, labels, WEIGHTS[:6], size=4).compute(), expected, rtol=1e-5)


@pytest.mark.parametrize("bins", [None, BINS])
@pytest.mark.slow
def test_an_undefined_area_is_nan_and_excluded_from_averages(bins: int | None):
    one_class = np.zeros(ROWS)
    for targets, curve in ((one_class, "ROC"), (one_class + 1, "ROC"), (one_class, "PR")):
        assert np.isnan(metrics.AUC(num_thresholds=bins, curve=curve).update(LOGIT, targets, WEIGHTS).compute())
    np.testing.assert_allclose(metrics.AUC(num_thresholds=bins, curve="PR").update(LOGIT, one_class + 1, WEIGHTS).compute(), 1.0, rtol=1e-6)
    wide = np.concatenate([LOGITS, LOGITS[:, :1]], axis=1)  # a class that never occurs
    for average in ("macro", "weighted"):
        each = metrics.AUC(num_thresholds=bins, average=None).update(wide, CLASS, WEIGHTS).compute()
        assert np.isnan(each).tolist() == [False] * CLASSES + [True]
        shares = np.bincount(CLASS, WEIGHTS) if average == "weighted" else np.ones(CLASSES)
        joined = metrics.AUC(num_thresholds=bins, average=average).update(wide, CLASS, WEIGHTS).compute()
        np.testing.assert_allclose(joined, np.average(each[:CLASSES], weights=shares), rtol=1e-5)
        all_one = metrics.AUC(num_thresholds=bins, average=average).update(wide, np.zeros(ROWS, int), WEIGHTS)
        assert np.isnan(all_one.compute())


@pytest.mark.parametrize("bins", [None, BINS])
@pytest.mark.slow
def test_the_area_of_no_examples_is_nan_whether_or_not_their_shape_is_known(bins: int | None):
    for average, shape in (("macro", ()), ("micro", ()), (None, (CLASSES,))):
        metric = metrics.AUC(num_thresholds=bins, average=average)
        assert np.shape(metric.empty().compute()) == ()
        nothing = metric.update(LOGITS, CLASS, 0 * WEIGHTS).compute()
        np.testing.assert_array_equal(nothing, np.full(shape, np.nan))
        rows = metric.update(LOGITS[:0], CLASS[:0], WEIGHTS[:0]).compute()
        np.testing.assert_array_equal(rows, np.full(shape, np.nan))


@pytest.mark.parametrize("bins", [None, BINS])
@pytest.mark.mostly_slow
def test_an_example_with_an_invalid_label_is_excluded(bins: int | None):
    known = np.arange(ROWS) >= 8
    unknown = np.where(known, CLASS, np.resize([-1, CLASSES, 255], ROWS))
    for average in ("macro", "micro"):
        metric = metrics.AUC(num_thresholds=bins, average=average)
        expected = metric.update(LOGITS[known], CLASS[known], WEIGHTS[known]).compute()
        np.testing.assert_allclose(metric.update(LOGITS, unknown, WEIGHTS).compute(), expected, rtol=1e-6)
    some = np.where(RNG.random(FLAGS.shape) < 0.2, -1, FLAGS)
    each = metrics.AUC(num_thresholds=bins, average=None, multi_label=True)
    for column in range(LABELS):
        known = some[:, column] >= 0
        scores = SEVERAL[known, column] if bins is None else binned(sigmoid(SEVERAL[known, column]))
        expected = sklearn.metrics.roc_auc_score(FLAGS[known, column], scores, sample_weight=WEIGHTS[known])
        np.testing.assert_allclose(each.update(SEVERAL, some, WEIGHTS).compute()[column], expected, rtol=1e-5)


@pytest.mark.parametrize("bins", [None, BINS])
@pytest.mark.slow
def test_a_nan_among_the_scores_makes_the_area_nan(bins: int | None):
    broken = SEVERAL.copy()
    broken[3, 1] = np.nan
    each = metrics.AUC(num_thresholds=bins, average=None, multi_label=True).update(broken, FLAGS, WEIGHTS).compute()
    assert np.isnan(each).tolist() == [False, True, False]
    assert np.isnan(metrics.AUC(num_thresholds=bins, multi_label=True).update(broken, FLAGS, WEIGHTS).compute())
    without = np.where(np.arange(ROWS) == 3, 0, WEIGHTS)
    assert np.isfinite(metrics.AUC(num_thresholds=bins, multi_label=True).update(broken, FLAGS, without).compute())


def test_the_exact_area_distinguishes_logits_with_equal_float32_softmax():
    logits, labels = np.float32([[0, 20], [0, 21], [0, 22], [0, 23]]), np.array([0, 1, 0, 1])
    assert len(np.unique(np.asarray(jax.nn.softmax(logits)[:, 1]))) == 1
    assert float(metrics.AUC().update(logits, labels, np.ones(4)).compute()) == 0.75


@pytest.mark.slow
def test_extreme_scores_fall_into_the_first_and_last_bins():
    scores, labels = np.float32([-200, -100, 100, 200]), np.array([0, 1, 0, 1])
    assert float(metrics.AUC(num_thresholds=2).update(scores, labels, np.ones(4)).compute()) == 0.5
    assert float(metrics.AUC(num_thresholds=2).update(np.float32([-np.inf, np.inf]), np.array([0, 1]), np.ones(2)).compute()) == 1.0
    assert float(metrics.AUC().update(np.float32([-np.inf, np.inf]), np.array([0, 1]), np.ones(2)).compute()) == 1.0


def test_rows_depend_only_on_the_shape_of_the_batch_and_stay_on_the_host():
    for metric, outputs, targets, widths in (
        (metrics.AUC(), LOGIT, YES, [1, 1, 1]),
        (metrics.AUC(), LOGITS, CLASS, [CLASSES, 1, 1]),
        (metrics.AUC(multi_label=True), SEVERAL, FLAGS, [LABELS, LABELS, 1]),
        (metrics.AUC(), LOGITS.reshape(1, ROWS, CLASSES), CLASS.reshape(1, ROWS), [CLASSES, 1, 1]),
    ):
        weights = WEIGHTS if len(outputs) == ROWS else ONES[:1]
        shapes = jax.eval_shape(one_batch, metric, outputs, targets, weights)
        assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [(ROWS, width) for width in widths]
        assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}
    halves = [jax.tree.map(np.asarray, metrics.AUC().update(LOGIT[rows], YES[rows], WEIGHTS[rows])) for rows in (slice(0, 30), slice(30, None))]
    whole = functools.reduce(lambda done, part: done.merge(part), halves, metrics.AUC().empty())
    assert all(type(leaf) is np.ndarray and len(leaf) == ROWS for leaf in jax.tree.leaves(whole))
    appended = jax.tree.map(lambda *leaves: np.concatenate(leaves), *halves)  # as in the loop, which appends all parts together
    np.testing.assert_array_equal(appended.scores, whole.scores)
    assert float(halves[1].merge(halves[0]).compute()) == float(whole.compute()) == float(appended.compute())


def test_exact_and_binned_areas_have_the_expected_flags_and_names():
    exact, coarse = metrics.AUC(), metrics.AUC(num_thresholds=10)
    assert (exact.collect, exact.additive, coarse.collect, coarse.additive) == (True, False, False, True)
    assert [metrics.AUC(curve=curve, num_thresholds=bins).name for curve in ("ROC", "PR") for bins in (None, 5)] == ["auc", "auc", "pr_auc", "pr_auc"]
    assert metrics.AUC(curve="PR", name="ap").name == "ap"
    assert (exact.direction, coarse.direction) == ("max", "max")
    expected = sklearn.metrics.average_precision_score(YES, LOGIT)
    for name in ("pr_auc", "average_precision"):
        np.testing.assert_allclose(metrics.get(name).update(LOGIT, YES, ONES).compute(), expected, rtol=1e-6)


def test_wrong_arguments_and_shapes_are_errors():
    with pytest.raises(MetricError, match=r"AUC\(curve=...\) must be one of \['ROC', 'PR'\]. Received: 'roc'"):
        metrics.AUC(curve="roc")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match=r"AUC\(average=...\) must be one of .* Received: 'binary'"):
        metrics.AUC(average="binary")  # type: ignore[arg-type]
    for bins in (1, 0, 2.5, True):
        with pytest.raises(MetricError, match=r"num_thresholds=...\) must be an integer of at least 2, or None for the exact area. Received: "):
            metrics.AUC(num_thresholds=bins)
    for bins in (None, 20):
        with pytest.raises(MetricError, match=r"Metric 'a': It takes outputs \[..., classes\] .* targets \[5\]"):
            metrics.AUC(name="a", num_thresholds=bins).update(LOGITS, CLASS[:5], WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'auc' cannot merge rows of 4 scores and 1 labels with rows of 1 and 1"):
        metrics.AUC().update(LOGITS, CLASS, ONES).merge(metrics.AUC().update(LOGIT, YES, ONES))


# --- `SampleCollector`: a uniform sample of fixed size that does not depend on how the examples are batched ---


SAMPLED_ROWS = np.arange(40, dtype=np.float32)


def collected(parts, **options):
    collector = SampleCollector(**{"max_size": 8, **options})
    state = collector.empty()
    for part in parts:
        state = state.merge(collector.empty().update(part, None, np.ones(len(part), np.float32)))
    return np.asarray(jax.tree.map(np.asarray, state).compute()).tolist()


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 33], [13, 13, 14]])
def test_the_sample_does_not_depend_on_how_examples_are_batched(sizes):
    assert collected(np.split(SAMPLED_ROWS, np.cumsum(sizes)[:-1])) == collected([SAMPLED_ROWS])


def test_the_sample_holds_distinct_examples_in_the_order_of_the_data():
    sample = collected([SAMPLED_ROWS])
    assert len(sample) == 8
    assert sample == sorted(set(sample))
    assert set(sample) <= set(SAMPLED_ROWS.tolist())


def test_all_examples_are_kept_if_there_are_fewer_than_the_sample_size():
    assert collected([SAMPLED_ROWS[:5]]) == SAMPLED_ROWS[:5].tolist()
    assert collected([]) == []


def test_each_example_is_as_likely_as_any_other():
    hits = np.zeros(40)
    for seed in range(2000):
        hits[np.asarray(collected([SAMPLED_ROWS], seed=seed), int)] += 1
    # Each example has 400 expected hits, with a standard deviation of 18.
    assert abs(hits - 400).max() < 5 * 18


def test_different_seeds_draw_different_samples():
    assert collected([SAMPLED_ROWS], seed=1) != collected([SAMPLED_ROWS], seed=2)


def test_padding_and_examples_with_zero_weight_are_never_drawn():
    weights = (SAMPLED_ROWS % 2).astype(np.float32)
    sample = SampleCollector(50).update(SAMPLED_ROWS, None, weights).compute()
    assert np.asarray(sample).tolist() == SAMPLED_ROWS[1::2].tolist()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("batch_size", [4, 7, 32])
@pytest.mark.mostly_slow
def test_evaluate_gives_the_same_sample_for_any_batch_size_and_number_of_devices(devices, batch_size):
    trainer = fitflax.Trainer(nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile("sgd", "mse", metrics=[SampleCollector(8, fn=lambda outputs, targets: outputs[:, 0] - targets[:, 0])])
    trainer.build((SAMPLED_ROWS[:, None], SAMPLED_ROWS[:, None]))
    found = trainer.evaluate(SAMPLED_ROWS[:, None], np.zeros((40, 1), np.float32), batch_size=batch_size, verbose=0)["samples"]
    assert found.tolist() == collected([SAMPLED_ROWS])


def test_anything_but_one_array_with_a_batch_axis_is_an_error():
    with pytest.raises(MetricError, match=r"must be one array \[4, ...\]. Received: shape \[\]"):
        SampleCollector(fn=lambda outputs, targets: outputs.sum()).update(SAMPLED_ROWS[:4], None, np.ones(4))
    with pytest.raises(MetricError, match=r"samples outputs, which must be one array.*Received: a tuple"):
        SampleCollector().update((SAMPLED_ROWS[:4], SAMPLED_ROWS[:4]), None, np.ones(4))
    with pytest.raises(MetricError, match="max_size"):
        SampleCollector(0)


def test_history_holds_no_samples(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse", [SampleCollector(2)])
    seen: list[set[str]] = []
    watch = fitflax.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(set(logs)))
    x = np.ones((8, 2), np.float32)
    history = trainer.fit(x, x[:, :1], callbacks=[watch], verbose=0)
    assert seen[0] - set(history.history) == {"samples"}


def test_merging_an_empty_sample_changes_nothing():
    one = SampleCollector(2, fn=lambda outputs, targets: outputs)
    rows = one.empty().update(np.ones((3, 1), np.float32), (), np.ones(3))
    assert rows.merge(one.empty()) is rows and one.empty().merge(rows).rows.tolist() == [[1.0]] * 3
