"""`SampleCollector`: a uniform sample of fixed size that does not depend on how the examples are batched."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.errors import MetricError
from fitflax.metrics import SampleCollector
from fitflax.parallel import DataParallel

ROWS = np.arange(40, dtype=np.float32)


def collected(parts, **options):
    collector = SampleCollector(**{"max_size": 8, **options})
    state = collector.empty()
    for part in parts:
        state = state.merge(collector.empty().update(part, None, np.ones(len(part), np.float32)))
    return np.asarray(jax.tree.map(np.asarray, state).compute()).tolist()


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 33], [13, 13, 14]])
def test_the_sample_does_not_depend_on_how_examples_are_batched(sizes):
    assert collected(np.split(ROWS, np.cumsum(sizes)[:-1])) == collected([ROWS])


def test_the_sample_holds_distinct_examples_in_the_order_of_the_data():
    sample = collected([ROWS])
    assert len(sample) == 8
    assert sample == sorted(set(sample))
    assert set(sample) <= set(ROWS.tolist())


def test_all_examples_are_kept_if_there_are_fewer_than_the_sample_size():
    assert collected([ROWS[:5]]) == ROWS[:5].tolist()
    assert collected([]) == []


def test_each_example_is_as_likely_as_any_other():
    hits = np.zeros(40)
    for seed in range(2000):
        hits[np.asarray(collected([ROWS], seed=seed), int)] += 1
    # Each example has 400 expected hits, with a standard deviation of 18.
    assert abs(hits - 400).max() < 5 * 18


def test_different_seeds_draw_different_samples():
    assert collected([ROWS], seed=1) != collected([ROWS], seed=2)


def test_padding_and_examples_with_zero_weight_are_never_drawn():
    weights = (ROWS % 2).astype(np.float32)
    sample = SampleCollector(50).update(ROWS, None, weights).compute()
    assert np.asarray(sample).tolist() == ROWS[1::2].tolist()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("batch_size", [4, 7, 32])
@pytest.mark.mostly_slow
def test_evaluate_gives_the_same_sample_for_any_batch_size_and_number_of_devices(devices, batch_size):
    trainer = fitflax.Trainer(nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile("sgd", "mse", metrics=[SampleCollector(8, fn=lambda outputs, targets: outputs[:, 0] - targets[:, 0])])
    trainer.build((ROWS[:, None], ROWS[:, None]))
    found = trainer.evaluate(ROWS[:, None], np.zeros((40, 1), np.float32), batch_size=batch_size, verbose=0)["samples"]
    assert found.tolist() == collected([ROWS])


def test_anything_but_one_array_with_a_batch_axis_is_an_error():
    with pytest.raises(MetricError, match=r"must be one array \[4, ...\]. Received: shape \[\]"):
        SampleCollector(fn=lambda outputs, targets: outputs.sum()).update(ROWS[:4], None, np.ones(4))
    with pytest.raises(MetricError, match=r"samples outputs, which must be one array.*Received: a tuple"):
        SampleCollector().update((ROWS[:4], ROWS[:4]), None, np.ones(4))
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
