"""Metrics of `clu` in `fit` and `evaluate`. `tests/models/test_nnx_model.py` tests those of NNX."""

from typing import Any

import flax
import jax
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import MetricError
from fitflax.metrics.foreign import adapt_clu
from fitflax.parallel import DataParallel
from tests.run_script import differences, directory_of, leaves_of, state_of

RNG = np.random.default_rng(3)
ROWS = 11  # In batches of 4: 4, 4, 3.
WEIGHTS = RNG.uniform(0.1, 2.0, size=ROWS).astype(np.float32)
WEIGHTS[3] = 0


class Scale(nn.Module):
    """Returns its inputs times a parameter, so that its ranking is known in advance."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("scale", nn.initializers.ones, ())


def make(metrics=None, *, devices=1, rate=0.0, weighted=None, loss="binary_crossentropy"):
    trainer = fitflax.Trainer(Scale(), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile(optax.sgd(rate), loss, metrics, weighted_metrics=weighted)
    return trainer


def without_loss(logs):
    return {key: value for key, value in logs.items() if key != "loss"}


def everything(trainer, root):
    checkpoints = directory_of(root)
    for checkpoint in checkpoints.values():
        checkpoint.pop("closing")
    return {"state": state_of(trainer), "history": leaves_of(trainer.history.rows), "checkpoints": checkpoints}


@pytest.fixture
def clu():
    return pytest.importorskip("clu.metrics")


def classes():
    logits = RNG.normal(size=(ROWS, 3)).astype(np.float32)
    return logits, np.arange(ROWS) % 3


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_classes_of_clu_can_be_used_as_metrics(clu, devices):
    @flax.struct.dataclass
    class Several(clu.Collection):
        accuracy: clu.Accuracy
        mean_loss: clu.Average.from_output("loss")

    @flax.struct.dataclass
    class AveragePrecision(clu.CollectingMetric.from_outputs(("labels", "logits"))):
        def compute(self):
            values = super().compute()
            return sklearn.metrics.average_precision_score(values["labels"] == 1, values["logits"][:, 1])

    logits, labels = classes()
    trainer = make([Several, AveragePrecision], devices=devices, loss="sparse_categorical_crossentropy")
    history = trainer.fit(logits, labels, batch_size=4, verbose=0).history
    # Padding has weight zero; the batches have 4, 4 and 3 rows.
    expected = {
        "accuracy": np.mean(logits.argmax(-1) == labels),
        "mean_loss": sklearn.metrics.log_loss(labels, jax.nn.softmax(logits)),
        "average_precision": sklearn.metrics.average_precision_score(labels == 1, logits[:, 1]),
    }
    assert {key: value[0] for key, value in history.items() if key != "loss"} == pytest.approx(expected, rel=1e-5)
    assert without_loss(trainer.evaluate(logits, labels, batch_size=4, verbose=0)) == pytest.approx(expected, rel=1e-5)
    assert history["loss"][0] == pytest.approx(history["mean_loss"][0])


@pytest.mark.parametrize(("devices", "accumulate_steps"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_the_last_value_of_clu_is_the_mean_over_the_last_batch(clu, devices, accumulate_steps):
    logits, labels = classes()
    expected = float(optax.softmax_cross_entropy_with_integer_labels(logits, labels)[8:].mean())
    trainer = make(devices=devices)
    trainer.compile(optax.sgd(0.0), "sparse_categorical_crossentropy", [clu.LastValue.from_output("loss")], accumulate_steps=accumulate_steps)
    history = trainer.fit(logits, labels, batch_size=4, shuffle=False, verbose=0).history
    assert history["from_output"] == pytest.approx([expected], rel=1e-5)
    assert trainer.evaluate(logits, labels, batch_size=4, verbose=0)["from_output"] == pytest.approx(expected, rel=1e-5)


def test_a_collection_of_clu_may_have_postponed_annotations(clu):
    postponed = flax.struct.dataclass(type("Postponed", (clu.Collection,), {"__annotations__": {"hits": "Accuracy"}, "__module__": clu.__name__}))
    logits, labels = classes()
    hits = adapt_clu(postponed)["hits"].update(logits, labels.astype(np.int32), np.ones(ROWS))
    assert hits.compute() == pytest.approx(np.mean(logits.argmax(-1) == labels))
    for name, fault in {"Missing": "name 'Missing' is not defined", "dataclasses.Missing": "module 'dataclasses' has no attribute 'Missing'"}.items():
        unknown = type("Unknown", (clu.Collection,), {"__annotations__": {"hits": name}, "__module__": flax.struct.__name__})
        with pytest.raises(MetricError, match=rf"annotations of Unknown cannot be evaluated: {fault}\. Check the names, or define it without `from __future__"):
            make([unknown])


def test_a_class_of_clu_may_be_passed_under_a_key(clu):
    logits, labels = classes()
    trainer = make({"acc": clu.Accuracy, "xent": clu.Average.from_output("loss")}, loss="sparse_categorical_crossentropy")
    history = trainer.fit(logits, labels, batch_size=4, verbose=0).history
    assert set(history) == {"loss", "acc", "xent"} and history["xent"] == pytest.approx(history["loss"])


@pytest.mark.slow
def test_metrics_of_clu_ignore_weights_and_cannot_be_weighted(clu):
    logits, labels = classes()
    trainer = make([clu.Accuracy], loss="sparse_categorical_crossentropy")
    history = trainer.fit(logits, labels, WEIGHTS, batch_size=4, verbose=0).history
    assert history["accuracy"] == pytest.approx([np.mean(logits.argmax(-1) == labels)])
    for weighted in ([clu.Accuracy], {"acc": clu.Accuracy}, clu.Accuracy):
        with pytest.raises(MetricError, match=r"The metric 'accuracy' of clu can mask examples, but not weight them\. Pass it in metrics="):
            make(weighted=weighted)


@pytest.mark.slow
def test_a_run_with_metrics_of_clu_resumes_bit_for_bit(clu, tmp_path):
    def one(root, **options):
        trainer = make(
            [clu.Accuracy, clu.Average.from_output("loss")],
            loss="sparse_categorical_crossentropy",
            rate=0.1,
        )
        store = ModelCheckpoint(root, every=fitflax.every(steps=1), keep=None)
        trainer.fit(*classes_of_this_test, batch_size=4, callbacks=[store], resume="auto", verbose=0, **options)
        return everything(trainer, root)

    classes_of_this_test = classes()
    uninterrupted = one(tmp_path / "never", steps=5)
    one(tmp_path / "stopped", steps=2)
    assert not differences(one(tmp_path / "stopped", steps=5), uninterrupted)


def test_a_collecting_metric_of_clu_must_collect_rows(clu):
    @flax.struct.dataclass
    class Total(clu.CollectingMetric):
        @classmethod
        def from_model_output(cls, *, logits, **_):
            return cls(values={"total": logits.sum()})

    logits, labels = classes()
    with pytest.raises(MetricError, match=r"Total collects \['total'\], which must have one row per example"):
        make([Total], loss="sparse_categorical_crossentropy").fit(logits, labels, batch_size=4, verbose=0)


@pytest.mark.slow
def test_metrics_adapted_from_clu_can_be_called_directly(clu):
    logits, labels = classes()
    labels = labels.astype(np.int32)
    accuracy = adapt_clu(clu.Accuracy)
    assert float(accuracy.empty().update(logits, labels, np.ones(ROWS)).compute()) == pytest.approx(np.mean(logits.argmax(-1) == labels))
    broken = np.where(np.arange(ROWS)[:, None] == 1, np.nan, logits)
    for weights in (np.ones(ROWS), np.arange(ROWS) != 1):
        assert np.isnan(accuracy.empty().update(broken, labels, weights).compute()) == weights[1]
    half = np.arange(ROWS) < ROWS // 2
    collected = adapt_clu(clu.CollectingMetric.from_outputs(("labels",)))
    assert np.isnan(collected.empty().compute())
    parts = [collected.empty().update_from({}, logits, labels, weights) for weights in (half, ~half)]
    assert parts[0].merge(parts[1]).compute()["labels"].tolist() == labels.tolist()
