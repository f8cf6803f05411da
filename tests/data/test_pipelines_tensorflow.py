from typing import Any

import numpy as np
import pytest

from fitflax.data import Position, adapt
from fitflax.data.batch import Selection
from fitflax.errors import ConfigError, DataError
from tests.data.same_training import BATCH, CANNOT_SEEK, NO_ORDER, ROWS, X, Y, assert_resumes, assert_same, make_trainer, of_arrays, outcome, run, warned

# Importing TensorFlow takes seconds, so the tests import it when they run, not when they are collected.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


@pytest.fixture
def make(tf) -> Any:
    def batches(shuffle: dict[str, Any] | None = None, rows: int = ROWS) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows]))
        return (data if shuffle is None else data.shuffle(ROWS, **shuffle)).batch(BATCH)

    return batches


def test_a_tensorflow_data_set_trains_like_arrays(make):
    assert_same(outcome(make()), of_arrays())


def test_a_function_that_returns_a_data_set_trains_like_arrays(make):
    assert_same(outcome(make), of_arrays())


def test_inputs_and_targets_are_picked_from_dicts_by_key(tf):
    data = tf.data.Dataset.from_tensor_slices({"image": X, "label": Y, "id": ["text"] * ROWS}).batch(BATCH)
    assert_same(outcome(data, keys={"inputs": "image", "targets": "label"}), of_arrays())


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("shuffle", [None, {"seed": 3}, {"seed": 3, "reshuffle_each_iteration": False}], ids=["in order", "seed", "one order"])
def test_a_resumed_run_reads_up_to_its_position_in_the_original_order(make, k, shuffle, tmp_path):
    assert_resumes(tmp_path, lambda: make(shuffle), k, *([CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 else []))


def test_shuffling_without_a_seed_warns_that_the_order_cannot_be_repeated(make, tmp_path):
    run(tmp_path, make({}), 3)
    with warned(f"The tf.data.Dataset shuffles without a seed, {NO_ORDER}"):
        run(tmp_path, make({}), 6)


@pytest.fixture
def make_noisy(tf) -> Any:
    def batches(**options: Any) -> Any:
        seeds = tf.data.Dataset.random(rerandomize_each_iteration=True, **options)
        return tf.data.Dataset.zip(seeds, tf.data.Dataset.from_tensor_slices((X, Y))).map(
            lambda seed, row: (row[0] + tf.random.stateless_normal((3,), [seed, 0]), row[1]), num_parallel_calls=2
        )

    return lambda **options: batches(**options).batch(BATCH)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_random_numbers_that_differ_between_passes_are_repeated_on_a_resume(make_noisy, k, tmp_path):
    assert_resumes(tmp_path, lambda: make_noisy(seed=3), k, *([CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 else []))


def test_random_numbers_without_a_seed_warn_that_they_cannot_be_repeated(make_noisy, tmp_path):
    run(tmp_path, make_noisy(), 3)
    with warned(f"The tf.data.Dataset draws random numbers without a seed, {NO_ORDER}"):
        run(tmp_path, make_noisy(), 6)


def test_the_number_of_batches_is_known_if_tensorflow_knows_it(make):
    assert adapt(make()).num_batches == 3
    assert adapt(make().filter(lambda x, y: True)).num_batches is None
    endless = adapt(make().repeat())
    assert endless.is_endless and endless.num_batches is None
    with pytest.raises(ConfigError, match="never ends"):
        make_trainer().fit(make().repeat(), verbose=0)


def test_a_data_set_of_single_examples_is_an_error_that_says_to_batch_it(tf):
    for data, what in (((X, Y[:, 0]), "y is a single number"), ((X, X[:, :2]), "x has 3, y has 2"), (np.arange(4.0), "x is a single number")):
        with pytest.raises(DataError, match=rf"{what}.* Batch the tf\.data\.Dataset first: \.batch\(n\)"):
            adapt(tf.data.Dataset.from_tensor_slices(data))


def test_an_empty_data_set_is_an_error(make):
    with pytest.raises(DataError, match="is empty: it has 0 batches"):
        adapt(make().take(0))


def test_ragged_and_sparse_batches_are_an_error_if_they_are_picked(tf):
    ragged = tf.data.Dataset.from_tensor_slices({"x": tf.ragged.constant([[1.0], [1.0, 2.0]]), "z": np.zeros((2, 1), np.float32)}).batch(2)
    with pytest.raises(DataError, match=r"must be dense arrays, but x is a RaggedTensor\. Use \.padded_batch"):
        adapt(ragged, selection=Selection("x"))
    assert next(adapt(ragged, selection=Selection("z")).open(Position())).x.tolist() == [[0], [0]]
    sparse = tf.data.Dataset.from_tensor_slices((X[:2], tf.sparse.from_dense([[1, 0], [0, 2]]))).batch(2)
    with pytest.raises(DataError, match=r"y is a SparseTensor"):
        adapt(sparse)


def test_text_is_an_error(tf):
    with pytest.raises(DataError, match="x must hold numbers, but its dtype is object; encode them"):
        make_trainer().fit(tf.data.Dataset.from_tensor_slices((["a", "b"], [1, 2])).batch(2), verbose=0)


def test_tensors_are_in_memory_data(tf):
    source = adapt((tf.constant(X), tf.constant(Y)), batch_size=BATCH, shuffle=False)
    np.testing.assert_array_equal(next(source.open(Position())).x, X[:BATCH])


def test_batch_size_cannot_be_passed_with_a_data_set(make):
    with pytest.raises(ConfigError, match="batch_size can only be passed with in-memory arrays"):
        adapt(make(), batch_size=3)


def test_a_shorter_data_set_on_a_resume_is_an_error(make, tmp_path):
    run(tmp_path, make(), 2)
    with pytest.raises(DataError, match="had used 8 examples of this pass, but the data ends after 4"), warned(CANNOT_SEEK.format(8)):
        run(tmp_path, make(rows=4), 6)
