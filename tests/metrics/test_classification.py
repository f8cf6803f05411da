"""Precision, recall and related metrics, IoU, and confusion matrices agree with scikit-learn over ragged batches and with weights (case 37)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from fitflax import metrics
from fitflax.errors import MetricError
from fitflax.metrics import ConfusionTable
from tests.metrics.batches import merged, one_batch, over_batches

RNG = np.random.default_rng(1)
ROWS, CLASSES, LABELS = 41, 6, 5
WEIGHTS = RNG.uniform(0.1, 3.0, size=ROWS).astype(np.float32)
ONES = np.ones(ROWS, np.float32)

LOGIT = RNG.normal(size=ROWS).astype(np.float32)
YES = (RNG.random(ROWS) < 0.4).astype(np.int32)
# Class 5 is neither a target nor predicted, class 4 is predicted but never a target, and class 3 is a target but never predicted.
LOGITS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32) + np.float32([0, 0, 0, -50, 0, -50])
CLASS = RNG.integers(4, size=ROWS)
SEVERAL = RNG.normal(size=(ROWS, LABELS)).astype(np.float32) + np.float32([0, 0, 0, 0, -50])
FLAGS = (RNG.random((ROWS, LABELS)) < [0.2, 0.5, 0.8, 0.0, 0.0]).astype(np.int32)  # the last one is never predicted either

KINDS = {"one logit": (LOGIT, YES), "classes": (LOGITS, CLASS), "labels": (SEVERAL, FLAGS)}
DECISIONS = {"one logit": LOGIT > 0, "classes": LOGITS.argmax(-1), "labels": SEVERAL > 0}
AVERAGES = {
    "one logit": ("binary", "micro", "macro", "weighted", None),
    "classes": ("micro", "macro", "weighted", None),
    "labels": ("micro", "macro", "weighted", None),
}
MAKERS: dict[str, Callable[..., Any]] = {
    "precision": metrics.Precision,
    "recall": metrics.Recall,
    "f1": metrics.F1,
    "fbeta": lambda **options: metrics.FBeta(beta=0.5, **options),
    "mean_iou": metrics.MeanIoU,
}
SCORES: dict[str, Callable[..., Any]] = {
    "precision": sklearn.metrics.precision_score,
    "recall": sklearn.metrics.recall_score,
    "f1": sklearn.metrics.f1_score,
    "fbeta": lambda *args, **options: sklearn.metrics.fbeta_score(*args, beta=0.5, **options),
    "mean_iou": sklearn.metrics.jaccard_score,
}


def by_sklearn(name: str, targets: Any, decisions: Any, average: Any, weights: Any, **options: Any) -> Any:
    if average is None and np.ndim(targets) == 1:
        options["labels"] = range(2 if decisions.dtype == bool else CLASSES)
    return SCORES[name](targets, decisions, average=average, sample_weight=weights, zero_division=0, **options)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_every_average_agrees_with_scikit_learn(kind: str, name: str):
    outputs, targets = KINDS[kind]
    for average in AVERAGES[kind]:
        metric = MAKERS[name](average=average, multi_label=kind == "labels")
        for weights in (ONES, WEIGHTS):
            result = one_batch.__wrapped__(metric, outputs, targets, weights).compute()
            expected = by_sklearn(name, targets, DECISIONS[kind], average, weights)
            assert (result.shape, result.dtype) == (np.shape(expected), jnp.float32)
            np.testing.assert_allclose(result, expected, rtol=1e-5, err_msg=f"{average}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_results_do_not_depend_on_how_rows_are_cut_into_padded_batches(kind: str):
    outputs, targets = KINDS[kind]
    metric = metrics.F1(average="macro", multi_label=kind == "labels")
    expected = by_sklearn("f1", targets, DECISIONS[kind], "macro", WEIGHTS)
    for size, order in ((4, "left"), (4, "right"), (16, "tree")):
        result = over_batches(metric, outputs, targets, WEIGHTS, size=size, order=order).compute()
        np.testing.assert_allclose(result, expected, rtol=1e-5, err_msg=f"{size} {order}")


@pytest.mark.parametrize(("kind", "average"), [("one logit", "binary"), ("classes", "macro"), ("labels", "macro")])
@pytest.mark.slow
def test_the_default_average_is_binary_for_one_logit_and_macro_for_several(kind: str, average: str):
    outputs, targets = KINDS[kind]
    for name, maker in MAKERS.items():
        chosen = maker(multi_label=kind == "labels").update(outputs, targets, WEIGHTS).compute()
        expected = "macro" if name == "mean_iou" else average  # for MeanIoU, one logit means two classes of pixels
        np.testing.assert_allclose(chosen, by_sklearn(name, targets, DECISIONS[kind], expected, WEIGHTS), rtol=1e-5)


def test_two_logits_are_two_classes_and_not_one_binary_decision():
    two = np.stack([np.zeros_like(LOGIT), LOGIT], axis=1)
    for average in ("macro", None):
        expected = by_sklearn("recall", YES, LOGIT > 0, average, WEIGHTS)
        np.testing.assert_allclose(metrics.Recall(average=average).update(two, YES, WEIGHTS).compute(), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.Recall().update(two, YES, WEIGHTS).compute(), by_sklearn("recall", YES, LOGIT > 0, "macro", WEIGHTS), rtol=1e-5)
    with pytest.raises(MetricError, match=r"Metric 'recall': average='binary' takes one logit per example.*outputs \[41, 2\]. For several classes"):
        metrics.Recall(average="binary").update(two, YES, WEIGHTS)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (LOGIT[:, None], YES),
        (LOGIT, YES[:, None]),
        (LOGIT[:, None], YES[:, None].astype(bool)),
        (LOGIT, YES.astype(np.float32)),
        (LOGITS, CLASS[:, None]),
        (LOGITS, np.eye(CLASSES)[CLASS]),
        (LOGITS, CLASS.astype(np.int8)),
        (jnp.asarray(LOGITS, jnp.bfloat16), CLASS.astype(np.uint8)),
    ],
)
def test_the_kind_of_classification_is_inferred_from_the_shapes(outputs: Any, targets: Any):
    kind = "classes" if outputs.shape[-1] == CLASSES else "one logit"
    expected = metrics.Precision().update(*KINDS[kind], WEIGHTS).compute()
    np.testing.assert_allclose(metrics.Precision().update(outputs, targets, WEIGHTS).compute(), expected, rtol=1e-6)


def test_tokens_count_individually_with_weights_per_example_or_per_token():
    outputs, targets = RNG.normal(size=(6, 5, CLASSES)).astype(np.float32), RNG.integers(CLASSES, size=(6, 5))
    per_token = (RNG.uniform(size=(6, 5)) * (RNG.random((6, 5)) < 0.7)).astype(np.float32)
    outputs[per_token == 0] = np.nan
    counted = per_token.ravel() > 0
    for one_logit in (False, True):
        z, t = (outputs[..., :1], (targets > 2).astype(int)) if one_logit else (outputs, targets)
        decisions = (z[..., 0] > 0) if one_logit else z.argmax(-1)
        expected = by_sklearn("f1", t.ravel()[counted], decisions.ravel()[counted], "macro", per_token.ravel()[counted])
        np.testing.assert_allclose(over_batches(metrics.F1(average="macro"), z, t, per_token, size=4).compute(), expected, rtol=1e-5)
    outputs = np.nan_to_num(outputs)
    expected = by_sklearn("f1", targets.ravel(), outputs.argmax(-1).ravel(), "macro", np.repeat(WEIGHTS[:6], 5))
    np.testing.assert_allclose(over_batches(metrics.F1(), outputs, targets, WEIGHTS[:6], size=4).compute(), expected, rtol=1e-5)


def test_the_threshold_applies_to_the_outputs():
    probabilities = 1 / (1 + np.exp(-LOGIT))
    for threshold in (0.5, 0.3):
        expected = sklearn.metrics.precision_score(YES, probabilities > threshold)
        np.testing.assert_allclose(metrics.Precision(threshold=threshold).update(probabilities, YES, ONES).compute(), expected, rtol=1e-5)
        matrix = metrics.ConfusionMatrix(threshold=threshold).update(probabilities, YES, ONES).compute()
        np.testing.assert_allclose(matrix, sklearn.metrics.confusion_matrix(YES, probabilities > threshold), rtol=1e-5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("multi_label", [False, True])
def test_an_output_at_the_threshold_is_not_positive(multi_label: bool):
    outputs, targets = jnp.array([[0.0], [1.0]]), jnp.array([[0], [1]])
    assert float(metrics.Precision(multi_label=multi_label).update(outputs, targets, jnp.ones(2)).compute()) == 1.0


def test_specificity_is_the_recall_of_the_negatives():
    one = metrics.Specificity().update(LOGIT, YES, WEIGHTS).compute()
    np.testing.assert_allclose(one, sklearn.metrics.recall_score(1 - YES, LOGIT <= 0, sample_weight=WEIGHTS), rtol=1e-5)
    predicted = LOGITS.argmax(-1)
    tables = [sklearn.metrics.confusion_matrix(c == CLASS, c == predicted, sample_weight=WEIGHTS, labels=[False, True]) for c in range(CLASSES)]
    each = np.array([table[0, 0] / table[0].sum() for table in tables])
    np.testing.assert_allclose(metrics.Specificity(average=None).update(LOGITS, CLASS, WEIGHTS).compute(), each, rtol=1e-5)
    np.testing.assert_allclose(metrics.Specificity().update(LOGITS, CLASS, WEIGHTS).compute(), each[:5].mean(), rtol=1e-5)  # class 5 does not occur
    micro = sum(table[0, 0] for table in tables) / sum(table[0].sum() for table in tables)
    np.testing.assert_allclose(metrics.Specificity(average="micro").update(LOGITS, CLASS, WEIGHTS).compute(), micro, rtol=1e-5)


@pytest.mark.slow
def test_an_invalid_label_counts_only_as_a_false_positive_of_the_predicted_class():
    unknown = CLASS.copy()
    unknown[:9] = [-1, CLASSES, 255, -1, -1, 1000, -7, CLASSES, CLASSES]
    for name in MAKERS:
        for average in ("micro", "macro", "weighted", None):
            # scikit-learn counts the same way if the classes are given; classes that do not occur would enter its macro average.
            classes = range(CLASSES) if average is None else np.union1d(unknown[9:], LOGITS.argmax(-1))
            expected = SCORES[name](unknown, LOGITS.argmax(-1), labels=classes, average=average, sample_weight=WEIGHTS, zero_division=0)
            result = MAKERS[name](average=average).update(LOGITS, unknown, WEIGHTS).compute()
            np.testing.assert_allclose(result, expected, rtol=1e-5, err_msg=f"{name} {average}")
    matrix = metrics.ConfusionMatrix().update(LOGITS, unknown, WEIGHTS).compute()
    np.testing.assert_allclose(matrix, sklearn.metrics.confusion_matrix(unknown, LOGITS.argmax(-1), labels=range(CLASSES), sample_weight=WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(metrics.Specificity(average="micro").update(LOGITS[:9], unknown[:9], ONES[:9]).compute(), 0.0)
    fractions = metrics.Precision(average="micro").update(LOGITS, CLASS + 0.5, ONES)
    assert float(fractions.compute()) == 0.0


@pytest.mark.slow
def test_a_target_other_than_0_or_1_counts_only_as_a_false_positive_if_1_is_predicted():
    outputs, targets = np.float32([1, 1, 1, -1, -1, -1]), np.array([1, 2, -1, 0, 2, -1])
    for maker, expected in ((metrics.Precision, 1 / 3), (metrics.Recall, 1.0), (metrics.Specificity, 1 / 3)):
        assert float(maker().update(outputs, targets, np.ones(6)).compute()) == pytest.approx(expected)
        columns = maker(multi_label=True, average=None).update(outputs[:, None], targets[:, None], np.ones(6)).compute()
        np.testing.assert_allclose(columns, [expected], rtol=1e-6)


def test_classes_that_occur_only_in_examples_with_zero_weight_are_ignored():
    weights = np.where(CLASS == 3, 0, WEIGHTS)
    counted = weights > 0
    expected = by_sklearn("recall", CLASS[counted], LOGITS[counted].argmax(-1), "macro", weights[counted])
    result = metrics.Recall().update(np.where(counted[:, None], LOGITS, np.nan), np.where(counted, CLASS, -7), weights).compute()
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_zero_denominator_gives_zero():
    never = metrics.Precision().update(-np.ones(4), np.array([1, 0, 1, 0]), np.ones(4))
    assert float(never.compute()) == 0.0
    assert float(metrics.Recall().update(np.ones(4), np.zeros(4), np.ones(4)).compute()) == 0.0
    assert float(metrics.F1().update(-np.ones(4), np.zeros(4), np.ones(4)).compute()) == 0.0
    assert float(metrics.Specificity().update(np.ones(4), np.ones(4), np.ones(4)).compute()) == 0.0


@pytest.mark.slow
def test_the_confusion_matrix_agrees_with_scikit_learn():
    for (outputs, targets), decisions, classes in ((KINDS["one logit"], LOGIT > 0, 2), (KINDS["classes"], LOGITS.argmax(-1), CLASSES)):
        for weights in (ONES, WEIGHTS):
            metric = over_batches(metrics.ConfusionMatrix(), outputs, targets, weights, size=16)
            for normalize in (None, "true", "pred", "all"):
                expected = sklearn.metrics.confusion_matrix(targets, decisions, labels=range(classes), sample_weight=weights, normalize=normalize)
                result = dataclasses.replace(metric, normalize=normalize).compute()
                assert (result.shape, result.dtype) == ((classes, classes), jnp.float32)
                np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-7)


def test_mean_iou_of_segmentations_ignores_pixels_with_zero_weight():
    outputs, targets = RNG.normal(size=(3, 4, 5, CLASSES)).astype(np.float32), RNG.integers(3, size=(3, 4, 5))
    weights = (RNG.random((3, 4, 5)) < 0.8).astype(np.float32)
    counted = weights.ravel() > 0
    expected = sklearn.metrics.jaccard_score(targets.ravel()[counted], outputs.argmax(-1).ravel()[counted], average="macro", zero_division=0)
    ignored = np.where(weights > 0, targets, 255)
    np.testing.assert_allclose(over_batches(metrics.get("mean_iou"), outputs, ignored, weights, size=2).compute(), expected, rtol=1e-5)


@pytest.mark.slow
def test_counting_continues_beyond_what_float32_can_count():
    metric = metrics.Precision().update(np.float32([1.0]), np.array([1]), np.float32([2.0**24]))
    one = metrics.Precision().update(np.float32([1.0, -1.0]), np.array([1, 0]), np.ones(2))
    for _ in range(3):
        metric = metric.merge(one)
    np.testing.assert_array_equal(np.asarray(metric.counts, np.float64).sum(-1)[0, 1], [2**24 + 3, 0, 0, 3])


@pytest.mark.slow
def test_one_program_serves_all_batches_and_merges():
    metric = metrics.Precision(average=None)
    parts = [one_batch(metric, LOGITS[rows], CLASS[rows], WEIGHTS[rows]) for rows in (slice(0, 20), slice(20, 40))]
    both = merged(*parts)
    before = one_batch._cache_size(), merged._cache_size()
    other = one_batch(metrics.Precision(average=None), LOGITS[10:30], CLASS[10:30], WEIGHTS[10:30])
    merged(parts[1], other)
    assert (one_batch._cache_size(), merged._cache_size()) == before
    whole = metric.update(LOGITS[:40], CLASS[:40], WEIGHTS[:40]).compute()
    np.testing.assert_allclose(both.compute(), whole, rtol=1e-6)
    np.testing.assert_allclose(parts[1].merge(parts[0]).compute(), whole, rtol=1e-6)


def test_counts_of_different_numbers_of_classes_cannot_be_merged():
    with pytest.raises(MetricError, match=r"Metric 'f1' cannot merge counts of different shapes: \[6, 4\] and \[1, 2, 4\]"):
        metrics.F1().update(LOGITS, CLASS, ONES).merge(metrics.F1().update(LOGIT, YES, ONES))


def test_wrong_arguments_are_errors():
    with pytest.raises(MetricError, match=r"Metric 'recall': average must be one of \['auto', 'binary', .*None\]. Received: 'samples'"):
        metrics.Recall(average="samples")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match=r"Metric 'f1': average='binary' is for one logit per example, not for multi_label=True"):
        metrics.F1(average="binary", multi_label=True)
    for beta in (0, -1.0, float("nan"), "1", True):
        with pytest.raises(MetricError, match=r"FBeta\(beta=...\) must be a number larger than 0. Received: "):
            metrics.FBeta(beta=beta)
    with pytest.raises(MetricError, match=r"ConfusionMatrix\(normalize=...\) must be one of \[None, 'true', 'pred', 'all'\]. Received: True"):
        metrics.ConfusionMatrix(normalize=True)  # type: ignore[arg-type]


def test_errors_of_incompatible_shapes_name_the_metric_by_its_key():
    with pytest.raises(MetricError, match=r"Metric 'p': It takes outputs \[..., classes\] .* Received: outputs \[41, 6\], targets \[5\]"):
        metrics.Precision(name="p").update(LOGITS, CLASS[:5], WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'confusion_matrix': It takes .* Received: outputs \[41\], targets \[41, 5\]"):
        metrics.ConfusionMatrix().update(LOGIT, FLAGS, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'recall': It takes outputs and targets of the same shape .* Received: outputs \[41, 6\], targets \[41\]"):
        metrics.Recall(multi_label=True).update(LOGITS, CLASS, WEIGHTS)
    with pytest.raises(
        MetricError, match=r"Metric 'recall': It takes outputs and targets \[batch, ..., labels\] with multi_label=True. Received: outputs \[41\]"
    ):
        metrics.Recall(multi_label=True).update(LOGIT, YES, WEIGHTS)
    with pytest.raises(MetricError, match=r"Metric 'recall': Weights must .* weights \[41, 5\] for values \[41\]"):
        metrics.Recall(multi_label=True).update(SEVERAL, FLAGS, np.ones((ROWS, LABELS)))
    with pytest.raises(MetricError, match=r"Metric 'f1': It takes one array of outputs. Received: a dict of length 1"):
        metrics.F1().update({"a": LOGIT}, YES, WEIGHTS)


@pytest.mark.slow
def test_counts_of_replicas_are_merged_by_one_sum(devices: Callable[[int], list[jax.Device]]):
    metric = metrics.F1(average=None)

    def step(outputs: jax.Array, targets: jax.Array, weights: jax.Array) -> metrics.Metric:
        return jax.lax.psum(metric.empty().update(outputs, targets, weights), "replica")

    shards = [array[:40].reshape(4, 10, *array.shape[1:]) for array in (LOGITS, CLASS, WEIGHTS)]
    summed = jax.pmap(step, axis_name="replica", out_axes=None, devices=devices(4))(*shards)
    np.testing.assert_allclose(summed.compute(), metric.update(LOGITS[:40], CLASS[:40], WEIGHTS[:40]).compute(), rtol=1e-5)


# --- `ConfusionTable`: as text and as HTML ---


def test_rows_and_columns_have_the_names_of_their_classes():
    table = ConfusionTable(np.float32([[3, 1], [0, 0]]), labels=["<cat>", "dog"])
    page = table._repr_html_()
    assert repr(table).splitlines()[1].split() == ["<cat>", "3", "1"]
    assert page.count("&lt;cat&gt;") == 2 and "0.75)" in page and page.count("0.00)") == 2
    assert repr(ConfusionTable(np.eye(2) / 3)).splitlines()[0].split() == ["target", "/", "prediction", "0", "1"]
    assert "nan" in repr(ConfusionTable([[np.nan]]))


@pytest.mark.parametrize(("matrix", "labels", "words"), [([1, 2], None, "shape"), ([[1, 2]], None, "shape"), ([[1]], ["a", "b"], "2 names")])
def test_an_invalid_matrix_or_number_of_labels_is_an_error(matrix, labels, words):
    with pytest.raises(MetricError, match=words):
        ConfusionTable(matrix, labels)
