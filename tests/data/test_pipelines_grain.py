import gc
import multiprocessing
from typing import Any

import numpy as np
import pytest

from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.errors import ConfigError, DataError
from tests.data.same_training import BATCH, CANNOT_SEEK, ROWS, X, Y, assert_resumes, assert_same, make_trainer, of_arrays, outcome, run, warned

grain = pytest.importorskip("grain.python")
flags = pytest.importorskip("absl.flags")


class Rows:
    """A source of single examples; Grain checks its name when it restores a state."""

    def __init__(self, name: str = "rows") -> None:
        self.name = name

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return X[row], Y[row]

    def __repr__(self) -> str:
        return f"Rows({self.name})"


def mapped(**options: Any) -> Any:
    data = grain.MapDataset.source(Rows())
    return (data.shuffle(seed=3) if options.get("shuffle") else data).batch(BATCH)


def streamed(**options: Any) -> Any:
    return mapped(**options).to_iter_dataset()


def loader(*, shuffle: bool = False, num_epochs: int | None = 1, rows: Any = None, **options: Any) -> Any:
    sampler = grain.IndexSampler(ROWS, grain.NoSharding(), shuffle=shuffle, num_epochs=num_epochs, seed=3)
    return grain.DataLoader(data_source=rows or Rows(), sampler=sampler, operations=[grain.Batch(BATCH)], **{"worker_count": 0, **options})


KINDS = pytest.mark.parametrize("make", [mapped, streamed, loader])


@KINDS
@pytest.mark.slow
def test_grain_data_trains_like_arrays(make):
    assert_same(outcome(make()), of_arrays())


@KINDS
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_grain_data_resumes_where_training_stopped_without_a_warning(make, k, tmp_path):
    assert_resumes(tmp_path, lambda: make(shuffle=True), k)


@pytest.mark.slow
def test_a_grain_iterator_resumes_where_training_stopped(tmp_path):
    assert_resumes(tmp_path, lambda: iter(mapped(shuffle=True).repeat(9).to_iter_dataset()), 5)


@pytest.mark.slow
def test_endless_grain_data_resumes_where_training_stopped(tmp_path):
    def make() -> Any:
        return grain.MapDataset.source(Rows()).shuffle(seed=3).repeat().batch(BATCH)

    assert_resumes(tmp_path, make, 5, steps_per_epoch=3)


@pytest.mark.slow
def test_a_loader_over_other_data_is_read_up_to_the_position(tmp_path):
    """Grain rejects a state if its source has a different name, and a source without `__repr__` has a different name in each process."""
    uninterrupted = run(tmp_path / "never", loader(shuffle=True), 8)
    run(tmp_path / "stopped", loader(shuffle=True), 4)
    with warned("The DataLoaderIterator cannot load the state in the checkpoint", CANNOT_SEEK.format(BATCH)):
        assert_same(run(tmp_path / "stopped", loader(shuffle=True, rows=Rows("other")), 8), uninterrupted)


def test_the_number_of_batches_is_known_if_the_data_set_has_a_length():
    assert adapt(mapped()).num_batches == 3
    assert adapt(streamed()).num_batches is None and adapt(loader()).num_batches is None


@pytest.mark.parametrize(
    ("make", "is_endless"),
    [
        (lambda: mapped(), False),
        (lambda: mapped().repeat(5), False),
        (lambda: mapped().repeat(), True),
        (lambda: grain.MapDataset.source(Rows()).repeat().batch(1000), True),
        (lambda: mapped().repeat().to_iter_dataset(), True),
        (lambda: grain.MapDataset.source(Rows()).repeat().to_iter_dataset().batch(BATCH), True),
        (streamed, False),
        (loader, False),
        (lambda: loader(num_epochs=None), True),
    ],
    ids=["map", "repeat 5", "repeat", "repeat and batch", "stream of repeat", "batches of a stream", "stream", "loader", "endless loader"],
)
def test_endless_grain_data_is_recognized(make, is_endless):
    source = adapt(make())
    assert source.is_endless == is_endless
    if is_endless:
        assert source.num_batches is None
        with pytest.raises(ConfigError, match="never ends"):
            make_trainer().fit(make(), verbose=0)


def test_grain_data_of_single_examples_is_an_error():
    with pytest.raises(DataError, match="Put single examples into batches first"):
        make_trainer().fit(grain.MapDataset.source(np.arange(4.0)), verbose=0)


def test_empty_grain_data_is_an_error():
    with pytest.raises(DataError, match="is an empty"):
        adapt(grain.MapDataset.source([]))


def test_batch_size_cannot_be_passed_with_grain_data():
    with pytest.raises(ConfigError, match="batch_size can only be passed with in-memory arrays"):
        adapt(mapped(), batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("make", [loader, lambda **options: iter(loader(**options))], ids=["loader", "iterator"])
def test_all_workers_start_with_the_first_batch_after_taking_a_state_and_after_a_resume(make):
    """Grain itself would start each worker only when that worker's first batch is requested."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()

    def workers() -> int:
        return len(multiprocessing.active_children())

    gc.collect()
    before = workers()
    feed = Feed(adapt(make(worker_count=2)), Batcher(size=BATCH), is_saved=True)
    feed.next()
    assert workers() == before + 2
    position, state = feed.position, feed.state_dict(feed.position)
    expected = feed.next().batch
    feed.close()
    del feed
    gc.collect()
    before = workers()
    feed = Feed(adapt(make(worker_count=2)), Batcher(size=BATCH), position, is_saved=True)
    feed.load_state_dict(state)
    np.testing.assert_array_equal(feed.next().batch.x, expected.x)
    assert workers() == before + 2
    feed.close()


def test_closing_a_pass_closes_the_grain_iterator():
    opened = adapt(mapped()).open(Position())
    next(opened)
    iterator = opened._iterator
    opened.close()
    with pytest.raises(Exception, match="closed"):
        next(iterator)
