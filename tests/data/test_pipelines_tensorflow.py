from typing import Any

import numpy as np
import pytest

from fitflax.callbacks import BestCheckpoint, LambdaCallback
from fitflax.data import Batcher, Feed, Position, adapt
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


@pytest.mark.parametrize("k", [3, 4, 7])
def test_a_function_that_creates_the_data_set_resumes_in_the_original_order(make, k, tmp_path):
    assert_resumes(tmp_path, lambda: lambda: make({"seed": 3}), k, *([CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 else []))


@pytest.mark.parametrize(("k", "steps_per_epoch", "messages"), [(2, 2, [CANNOT_SEEK.format(2 * BATCH)]), (3, None, [])], ids=["inside", "end"])
def test_a_function_that_returns_one_data_set_resumes_in_the_original_order(make, k, steps_per_epoch, messages, tmp_path):
    def one() -> Any:
        data = make({"seed": 3})
        return lambda: data

    assert_resumes(tmp_path, one, k, *messages, steps_per_epoch=steps_per_epoch, callbacks=[LambdaCallback(on_epoch_begin=lambda epoch, logs: None)])


@pytest.mark.parametrize("saves_best", [False, True])
def test_a_function_that_creates_the_data_set_is_called_after_on_epoch_begin_in_a_resume_at_the_end_of_an_epoch(make, saves_best, tmp_path):
    def run_with(root: Any, steps: int) -> dict[str, Any]:
        seeds = {"seed": 1}
        callbacks = [LambdaCallback(on_epoch_begin=lambda epoch, logs: seeds.update(seed=1 + epoch))]
        if saves_best:  # The second save of an epoch follows the call of the function for the first one.
            callbacks.append(BestCheckpoint(root / "best", monitor="loss"))
        return run(root, lambda: make(seeds), steps, callbacks=callbacks)

    uninterrupted = run_with(tmp_path / "never", 8)
    run_with(tmp_path / "stopped", 3)
    with warned():
        resumed = run_with(tmp_path / "stopped", 8)
    assert_same(resumed, uninterrupted)


@pytest.mark.filterwarnings("ignore:This data source cannot seek:fitflax.errors.FitflaxWarning")
@pytest.mark.parametrize("steps_per_epoch", [None, 2, 3])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_evaluations_that_share_the_shuffling_do_not_change_the_order_of_a_resumed_run(make, k, steps_per_epoch, tmp_path):
    def run_with(root: Any, steps: int, fails: bool = False) -> dict[str, Any]:
        data, begun = make({"seed": 3}), []

        def fail(batch: int, logs: Any) -> None:
            begun.append(batch)
            if fails and len(begun) == 6:  # In the second validation of this process.
                raise ArithmeticError

        options = {"steps_per_epoch": steps_per_epoch, "callbacks": [LambdaCallback(on_test_batch_begin=fail)]}
        return run(root, data, steps, validation_data={"again": data, "part": data.take(1)}, **options)

    uninterrupted = run_with(tmp_path / "never", 8)
    run_with(tmp_path / "stopped", k)
    with pytest.raises(ArithmeticError):
        run_with(tmp_path / "stopped", 8, fails=True)
    assert_same(run_with(tmp_path / "stopped", 8), uninterrupted)


@pytest.mark.parametrize("holds_passes", [False, True])
def test_an_evaluation_after_a_save_does_not_change_the_pass_that_was_saved(make, holds_passes):
    def open_feed(position: Position) -> tuple[Any, Feed]:
        data = make({"seed": 3})
        return data, Feed(adapt(data), Batcher(size=BATCH), position, is_saved=True)

    data, feed = open_feed(Position())
    if holds_passes:
        feed.hold_passes()
    while feed.next() is not None:
        pass
    states = [(feed.state_dict(Position(1)), feed.source.num_started)]
    next(adapt(data).open(Position()))
    states.append((feed.state_dict(Position(1)), feed.source.num_started))
    expected = feed.next().batch.x
    for state, num_started in states[1 if holds_passes else 0 :]:  # A pass that is held back begins after the evaluation.
        _, resumed = open_feed(Position(1))
        resumed.load_state_dict(state, num_started)
        np.testing.assert_array_equal(resumed.next().batch.x, expected)


@pytest.mark.parametrize("loader", [None, {"at": 3}], ids=["fitflax 0.1", "another library"])
@pytest.mark.parametrize("passes", [0, 2])
def test_a_checkpoint_without_counts_of_iterators_resumes_in_the_order_after_an_evaluation(make, passes, loader):
    data, resumed_data = make({"seed": 3}), make({"seed": 3})
    iterations = [next(adapt(data).open(Position())).x for _ in range(4)]
    next(adapt(resumed_data).open(Position()))
    feed = Feed(adapt(resumed_data), Batcher(size=BATCH), Position(passes), is_saved=True)
    feed.load_state_dict(loader and {"passes": passes, "examples": 0, "loader": loader})
    assert not feed.can_reread
    feed.catch_up()
    np.testing.assert_array_equal(feed.next().batch.x, iterations[1 + passes])


def test_a_checkpoint_without_counts_of_iterators_resumes_in_the_order_of_a_new_data_set(make):
    feed = Feed(adapt(lambda: make({"seed": 3})), Batcher(size=BATCH), Position(2), is_saved=True)
    feed.load_state_dict({})
    with warned("The checkpoint does not contain the state of the data. If the function returns the same object in each pass, this run will differ"):
        np.testing.assert_array_equal(feed.next().batch.x, next(adapt(make({"seed": 3})).open(Position())).x)


def test_a_resume_with_a_data_set_that_was_read_further_warns(make, tmp_path):
    data = make({"seed": 3})
    run(tmp_path, data, 4)
    with warned(f"The tf.data.Dataset has been iterated over before, {NO_ORDER}", CANNOT_SEEK.format(BATCH)):
        run(tmp_path, data, 6)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_data_set_with_one_shuffled_order_resumes_after_other_iterations(make, tf, repeats, tmp_path):
    def repeated() -> Any:
        return make({"seed": 3, "reshuffle_each_iteration": False}).repeat(repeats)

    data, steps = repeated(), 3 * repeats
    run(tmp_path / "stopped", data, steps + 1)
    with warned(CANNOT_SEEK.format(BATCH)):
        resumed = run(tmp_path / "stopped", data, steps + 2)
    assert_same(resumed, run(tmp_path / "never", repeated(), steps + 2))


def test_a_repeated_shuffle_warns_that_its_order_cannot_be_repeated_in_a_later_pass(tf, tmp_path):
    def make() -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=3).repeat(2).batch(BATCH)

    assert_resumes(tmp_path / "first", make, 4, CANNOT_SEEK.format(4 * BATCH), between=(0, 1))  # Two steps later, the second pass has begun.
    run(tmp_path / "second", make(), 6)
    with warned(f"The tf.data.Dataset repeats a part that draws random numbers, {NO_ORDER}", CANNOT_SEEK.format(BATCH)):
        run(tmp_path / "second", make(), 8)
    callbacks = [LambdaCallback(on_epoch_begin=lambda epoch, logs: None)]  # A resume would read the shapes from a separate iterator.
    for name, returns in (("end", lambda data: data), ("end of a function", lambda data: lambda: data)):
        run(tmp_path / name, returns(make()), 5, callbacks=callbacks)
        with warned(f"The tf.data.Dataset repeats a part that draws random numbers, {NO_ORDER}"):
            run(tmp_path / name, returns(make()), 8, callbacks=callbacks)


def test_shuffling_without_a_seed_warns_that_the_order_cannot_be_repeated(make, tmp_path):
    for options in ({}, {"reshuffle_each_iteration": False}):
        root = tmp_path / str(len(options))
        run(root, make(options), 3)
        with warned(f"The tf.data.Dataset shuffles without a seed, {NO_ORDER}"):
            run(root, make(options), 6)


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
