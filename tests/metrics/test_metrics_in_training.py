"""Metrics in `fit` and `evaluate`, compared with scikit-learn over all rows; other modules test metrics that collect rows or return arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax import metrics
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(5)
ROWS, CLASSES, BINS = 10, 3, 8
WEIGHTS = RNG.uniform(0.1, 3.0, size=ROWS).astype(np.float32)
WEIGHTS[4] = 0
YES = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 1], np.float32)
LOGIT = (RNG.normal(size=ROWS) + YES - 0.5).astype(np.float32)
CLASS = np.array([0, 1, 2, 1, 0, 0, 2, 1, 1, 2])
LOGITS = (RNG.normal(size=(ROWS, CLASSES)) + np.eye(CLASSES)[CLASS]).astype(np.float32)


class Identity(nn.Module):
    """Returns its inputs, so that the expected value of every metric is known."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        self.param("unused", nn.initializers.zeros, ())
        return x


def by_sklearn(weights: Any) -> dict[str, float]:
    calls, options = LOGIT > 0, {"sample_weight": weights}
    counted = np.ones(ROWS, bool) if weights is None else weights > 0
    return {
        "precision": sklearn.metrics.precision_score(YES, calls, **options),
        "recall": sklearn.metrics.recall_score(YES, calls, **options),
        "f1": sklearn.metrics.f1_score(YES, calls, **options),
        "mean_iou": sklearn.metrics.jaccard_score(YES, calls, average="macro", **options),
        "binned": sklearn.metrics.roc_auc_score(YES, np.floor(BINS / (1 + np.exp(-LOGIT))), **options),
        "explained_variance": sklearn.metrics.explained_variance_score(
            YES[counted], LOGIT[counted].astype(np.float64), sample_weight=None if weights is None else weights[counted]
        ),
    }


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.mostly_slow
def test_metrics_of_ten_rows_in_batches_of_four_agree_with_scikit_learn(num_devices: int, devices: Callable[[int], list[jax.Device]]):
    chosen = ["precision", "recall", "f1", "mean_iou", metrics.AUC(num_thresholds=BINS, name="binned"), "explained_variance"]
    trainer = fitflax.Trainer(Identity(), parallel=DataParallel(devices(num_devices)))
    trainer.compile(optax.sgd(0.0), "binary_crossentropy", chosen, weighted_metrics=chosen)
    trainer.build(LOGIT[:, None])
    logs = trainer.evaluate(LOGIT[:, None], YES[:, None], WEIGHTS, batch_size=4, verbose=0)
    expected = by_sklearn(None) | {f"weighted_{key}": value for key, value in by_sklearn(WEIGHTS).items()}
    assert {key: value for key, value in logs.items() if key != "loss"} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if num_devices == 2:
        history = trainer.fit(LOGIT[:, None], YES[:, None], WEIGHTS, batch_size=4, verbose=0).history
        assert {key: value[0] for key, value in history.items() if key != "loss"} == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_macro_averages_over_classes_agree_with_scikit_learn(devices: Callable[[int], list[jax.Device]]):
    trainer = fitflax.Trainer(Identity(), parallel=DataParallel(devices(4)))
    trainer.compile(optax.sgd(0.0), "sparse_categorical_crossentropy", ["f1", "mean_iou", metrics.AUC(num_thresholds=BINS)])
    trainer.build(LOGITS)
    logs = trainer.evaluate(LOGITS, CLASS, batch_size=4, verbose=0)
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    assert logs["f1"] == pytest.approx(sklearn.metrics.f1_score(CLASS, LOGITS.argmax(-1), average="macro"), rel=1e-5)
    assert logs["mean_iou"] == pytest.approx(sklearn.metrics.jaccard_score(CLASS, LOGITS.argmax(-1), average="macro"), rel=1e-5)
    assert logs["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(np.eye(CLASSES)[CLASS], np.floor(BINS * probabilities)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_after_a_divergence_classification_metrics_are_nan_and_the_best_model_is_an_earlier_one(kind: str, tmp_path: Any):
    class Diverges(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any) -> None:
            if epoch == 2:
                self.trainer.replace_state(self.trainer.state.replace_params(jax.tree.map(lambda leaf: leaf * jnp.nan, self.trainer.state.params)))

    # Class 0 is the most frequent one, so calling NaN class 0 would be the best accuracy.
    classes = np.array([0] * 9 + [1], np.int32)
    names = ["accuracy", "top_k_accuracy", "precision", "recall", "f1", "specificity", "mean_iou", "auc", metrics.AUC(num_thresholds=9, name="binned")]
    trainer = fitflax.Trainer(nn.Dense(6) if kind == "linen" else nnx.Linear(CLASSES, 6, rngs=nnx.Rngs(0)), seed=0)
    trainer.compile("sgd", "sparse_categorical_crossentropy", [*names, nnx.MultiMetric(theirs=nnx.metrics.Accuracy())])
    best, stop = BestCheckpoint(tmp_path, monitor="val_accuracy"), EarlyStopping("val_accuracy", patience=9, restore_best=True)
    history = trainer.fit(LOGITS, classes, epochs=4, validation_data=(LOGITS, classes), callbacks=[Diverges(), best, stop], verbose=0).history
    for name in [*names[:-1], "binned", "theirs"]:
        assert np.isnan(history[f"val_{name}"]).tolist() == [False, False, True, True], name
    assert best.best is not None and stop.best_epoch is not None and stop.best_epoch < 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state.params))
