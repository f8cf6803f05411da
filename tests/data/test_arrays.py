import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.data import Batcher, FedBatch, Feed, Position
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import in_one_piece
from fitflax.data.sources import DataOptions
from fitflax.errors import ConfigError, DataError


def array_source(x, y=(), weights=None, *, shuffle: bool = False, **options) -> ArraySource:
    return ArraySource(x, DataOptions(y, weights, shuffle=shuffle, **options))


def rows_of(source: ArraySource, passes: int = 0, examples: int = 0) -> list[list[float]]:
    return [np.asarray(triple.x).tolist() for triple in source.open(Position(passes, examples))]


def pass_of(source: ArraySource, passes: int = 0) -> list[float]:
    return list(itertools.chain(*rows_of(source, passes)))


# -- batches of a pass --


@pytest.mark.parametrize(
    ("rows", "size", "lengths"),
    [(34, 16, [16, 16, 2]), (100, 32, [32, 32, 32, 4]), (8, 4, [4, 4]), (3, 8, [3])],
)
def test_a_pass_consists_of_full_batches_and_the_remainder(rows: int, size: int, lengths: list[int]):
    source = array_source(np.arange(rows), batch_size=size)
    assert [len(batch) for batch in rows_of(source)] == lengths
    assert source.num_batches == len(lengths)
    assert source.num_examples == rows


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_without_elements_are_split_into_batches(shuffle: bool):
    feed = Feed(array_source(np.zeros((5, 0)), batch_size=2, shuffle=shuffle), Batcher(size=2))
    assert [fed.batch.x.shape for fed in iter(feed.next, None)] == [(2, 0)] * 3


def test_drop_remainder_omits_the_short_batch():
    source = array_source(np.arange(10), batch_size=4, drop_remainder=True)
    assert rows_of(source) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (source.num_batches, source.num_examples) == (2, 8)


def test_drop_remainder_with_shuffling_drops_different_rows_in_each_pass():
    source = array_source(np.arange(10), batch_size=4, drop_remainder=True, shuffle=True)
    seen = [pass_of(source, passes) for passes in range(6)]
    assert all(len(set(rows)) == 8 for rows in seen)
    assert set().union(*seen) == set(range(10))


def test_targets_and_weights_follow_their_rows_through_the_shuffle():
    x = np.arange(50)
    source = array_source({"a": x, "b": (x * 2,)}, x * 3, x * 4.0, batch_size=8, shuffle=True)
    for triple in source.open(Position(2)):
        np.testing.assert_array_equal(triple.x["b"][0], triple.x["a"] * 2)
        np.testing.assert_array_equal(triple.y, triple.x["a"] * 3)
        np.testing.assert_array_equal(triple.weights, triple.x["a"] * 4)


# -- order --


def test_every_pass_has_its_own_permutation_determined_by_seed_and_pass():
    first, again, other = (array_source(np.arange(40), batch_size=7, shuffle=True, seed=seed) for seed in (3, 3, 4))
    passes = [pass_of(first, number) for number in range(3)]
    assert all(sorted(rows) == list(range(40)) for rows in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    # Another source, read in another order, has the same passes.
    assert [pass_of(again, number) for number in (2, 0, 1)] == [passes[2], passes[0], passes[1]]
    assert pass_of(other, 0) not in passes


def test_the_order_does_not_depend_on_the_batch_size():
    orders = [pass_of(array_source(np.arange(40), batch_size=size, shuffle=True), 5) for size in (1, 7, 40)]
    assert orders[0] == orders[1] == orders[2]


def test_shuffling_neither_uses_nor_changes_numpys_global_generator():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    one = rows_of(array_source(np.arange(10), shuffle=True))
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.seed(1)
    assert rows_of(array_source(np.arange(10), shuffle=True)) == one


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("begin", [0, 4, 8, 12])
def test_seeking_gives_the_same_batches_as_reading_up_to_the_position(shuffle: bool, begin: int):
    source = array_source(np.arange(14), batch_size=4, shuffle=shuffle)
    assert rows_of(source, 1, begin) == rows_of(source, 1)[begin // 4 :]


def test_nothing_is_left_at_the_end_of_a_pass():
    source = array_source(np.arange(14), batch_size=4)
    assert rows_of(source, 0, 14) == []
    assert rows_of(array_source(np.arange(14), batch_size=4, drop_remainder=True), 0, 12) == []


def test_two_passes_can_be_open_simultaneously():
    source = array_source(np.arange(4), batch_size=2)
    one, two = source.open(Position()), source.open(Position())
    assert next(one).x.tolist() == next(two).x.tolist() == [0, 1]


# -- conversion of arrays --


def test_unshuffled_batches_are_views_of_the_users_arrays():
    x, y = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.int32)
    for triple in array_source(x, y, batch_size=3).open(Position()):
        assert np.shares_memory(triple.x, x) and np.shares_memory(triple.y, y)


def test_shuffling_does_not_modify_the_users_arrays():
    x = np.arange(8, dtype=np.float32)
    list(array_source(x, batch_size=3, shuffle=True).open(Position()))
    assert x.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("given", "becomes"),
    [("float64", "float32"), ("float32", "float32"), ("float16", "float16"), ("int64", "int32"), ("uint64", "uint32"), ("uint8", "uint8"), ("bool", "bool")],
)
def test_arrays_are_converted_to_the_dtypes_that_jax_uses(given: str, becomes: str):
    source = array_source(np.zeros(4, given), np.zeros(4, given))
    triple = next(source.open(Position()))
    assert triple.x.dtype == triple.y.dtype == becomes


def test_jax_arrays_and_pandas_columns_are_accepted():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6]}, index=[7, 8, 9])
    triple = next(array_source({"j": jnp.arange(3), "p": frame}, frame["b"], batch_size=2).open(Position()))
    assert triple.x["j"].tolist() == [0, 1]
    assert triple.x["p"].tolist() == [[1, 4], [2, 5]] and triple.x["p"].dtype == np.float32
    assert triple.y.tolist() == [4, 5]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(triple))


# -- splitting --


@pytest.mark.parametrize(("rows", "fraction", "cut"), [(100, 0.2, 80), (10, 0.25, 7), (5, 0.5, 2), (3, 0.34, 1)])
def test_the_split_is_the_last_part_in_the_original_order(rows: int, fraction: float, cut: int):
    x = np.arange(rows)
    (x1, y1, w1), (x2, y2, w2) = (part.read(slice(None)) for part in array_source(x, x * 2, x * 3.0, shuffle=True).divide(fraction))
    assert (x1.tolist(), x2.tolist()) == (x[:cut].tolist(), x[cut:].tolist())
    assert (y1.tolist(), y2.tolist()) == ((x * 2)[:cut].tolist(), (x * 2)[cut:].tolist())
    assert (w1.tolist(), w2.tolist()) == ((x * 3)[:cut].tolist(), (x * 3)[cut:].tolist())


def test_the_split_includes_all_rows_even_with_drop_remainder():
    head, tail = array_source(np.arange(10), batch_size=4, drop_remainder=True).divide(0.3)
    assert (len(head.x), len(tail.x), tail.num_examples) == (7, 3, 3)


@pytest.mark.parametrize("fraction", [0.7, 0.999])
def test_a_split_that_leaves_a_part_empty_is_an_error(fraction: float):
    with pytest.raises(DataError, match=rf"validation_split={fraction} of 3 examples leaves"):
        array_source(np.arange(3)).divide(fraction)


# -- errors --


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "32"])
def test_a_batch_size_must_be_a_positive_integer(size: object):
    with pytest.raises(ConfigError, match="batch_size must be a positive integer"):
        array_source(np.zeros(4), batch_size=size)


def test_numpy_integers_are_valid_batch_sizes():
    assert array_source(np.zeros(4), batch_size=np.int64(2)).num_batches == 2


def test_unequal_lengths_are_an_error_that_lists_them():
    with pytest.raises(DataError, match="same number of examples: `x` has 4, `y` has 3, `sample_weight` has 2"):
        array_source(np.zeros(4), np.zeros(3), np.zeros(2))
    with pytest.raises(DataError, match=r"x\['a'\] has 4, x\['b'\] has 5"):
        array_source({"a": np.zeros(4), "b": np.zeros(5)})


def test_data_without_examples_is_an_error():
    with pytest.raises(DataError, match="0 examples"):
        array_source(np.zeros((0, 3)))
    with pytest.raises(DataError, match="3 examples, batch_size=4, drop_remainder=True"):
        array_source(np.zeros(3), batch_size=4, drop_remainder=True)


def test_text_is_an_error():
    with pytest.raises(DataError, match=r"y must hold numbers, but its dtype is <U3; encode them"):
        array_source(np.zeros(2), np.array(["cat", "dog"]))


def test_the_held_out_part_may_have_a_different_batch_size():
    train, held_out = array_source(np.arange(20.0), batch_size=4).divide(0.5, 3)
    assert (train.batch_size, held_out.batch_size, held_out.num_batches) == (4, 3, 4)


def test_batches_of_arrays_are_not_checked_again(monkeypatch):
    source = array_source(np.arange(6.0), np.arange(6.0), batch_size=2)
    monkeypatch.setattr("fitflax.data.padding.to_numpy", lambda *_, **__: pytest.fail("checked once more"))
    assert Feed(source, Batcher(size=2)).next().num_real == 2


def fed_rows(source: ArraySource, begin: int = 0, *, ahead: int = 1, **options) -> list[FedBatch]:
    feed = Feed(source, Batcher(**{"size": source.batch_size, **options}), Position(passes=2, examples=begin))
    return list(iter(lambda: feed.next(ahead), None))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("weights", [None, np.arange(50.0)])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
@pytest.mark.parametrize("options", [{}, {"num_shards": 4}, {"pad": False}, {"class_weight": {1: 2.0}}])
def test_batches_read_together_equal_those_read_one_by_one_from_any_position(batch_size, options, weights, monkeypatch):
    x = np.arange(50.0, dtype=np.float32)[:, None]
    source = array_source(x, np.arange(50) % 3, weights, batch_size=batch_size, shuffle=True, seed=3)
    together = fed_rows(source, **options)
    assert source.batches_at_once == 16 and len(together) == source.num_batches
    monkeypatch.setattr("fitflax.data.arrays._MAX_BATCHES", 1)
    assert source.batches_at_once == 1
    for begin in range(0, 50, batch_size):
        for ours, theirs in zip(together[begin // batch_size :], fed_rows(source, begin, **options), strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours[:3], theirs[:3])


@pytest.mark.parametrize("shuffle", [False, True])
def test_as_many_batches_as_will_be_requested_are_read_in_one_piece(shuffle):
    x = np.arange(100.0, dtype=np.float32)
    feed = Feed(array_source({"a": x}, -x, batch_size=2, shuffle=shuffle, seed=1), Batcher(size=2))
    for count, begin in ((20, 0), (3, 40), (16, 46), (7, 78)):
        group = [feed.next(count)]
        group += feed.next_like(group[0].batch, count - 1)
        whole, batches = in_one_piece(group), [fed.batch for fed in group]
        assert group[-1].position.examples == begin + 2 * count
        np.testing.assert_array_equal(whole.x["a"], np.concatenate([batch.x["a"] for batch in batches]))
        np.testing.assert_array_equal(whole.y, np.concatenate([batch.y for batch in batches]))
    assert in_one_piece([feed.next(1), feed.next(1)]) is None


def test_a_short_last_batch_is_an_error_only_when_it_is_reached():
    feed = Feed(array_source(np.arange(7.0), batch_size=2), Batcher(num_shards=2, size=2, pad=False))
    assert [feed.next(9).num_real for _ in range(3)] == [2, 2, 2]
    with pytest.raises(DataError, match=r"a multiple of 2 \(devices: 2, accumulate_steps: 1\)\. Received: 1 examples"):
        feed.next()


def test_batches_read_ahead_and_pushed_back_are_returned_again_after_closing_the_feed():
    feed = Feed(array_source(np.arange(8.0), batch_size=2), Batcher(size=2))
    first = feed.next()
    feed.next_like(first.batch, 1)
    feed.close()
    feed.push_back()
    assert [fed.batch.x.tolist() for fed in iter(feed.next, None)] == [[2, 3], [4, 5], [6, 7]]
    assert feed.next().batch.x.tolist() == [0, 1]


def test_large_rows_are_read_batch_by_batch():
    assert array_source(np.zeros((8, 600_000), np.float32), batch_size=2, shuffle=True).batches_at_once == 1


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16", "bool", "int32"])
def test_shuffled_rows_are_aligned_so_that_jax_uses_them_without_a_copy(dtype):
    x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 2, (50, 3, 1)), dtype))
    source = array_source(x, batch_size=16, shuffle=True, seed=4)
    for triple in (source.read(np.array([7, 0, 49, 7])), *source.open(Position())):
        assert triple.x.__array_interface__["data"][0] % 64 == 0 and triple.x.dtype == x.dtype and triple.x.flags.c_contiguous
    np.testing.assert_array_equal(source.read(np.array([7, 0, 49, 7])).x, x[[7, 0, 49, 7]])
    assert source.read(np.array([], int)).x.shape == (0, 3, 1)


@pytest.mark.parametrize(
    "layout",
    [np.asfortranarray, lambda x: x.transpose(0, 2, 1), lambda x: x[:, :-1], lambda x: x[::2], lambda x: np.frombuffer(b" " + x.tobytes(), x.dtype, offset=1)],
    ids=["Fortran", "transposed", "columns", "every second row", "not aligned"],
)
def test_shuffled_rows_of_any_memory_layout_are_read_without_a_copy_of_the_whole_array(layout):
    x = layout(np.arange(2_000_000, dtype=np.float32).reshape(1000, 40, 50))
    source = array_source(x, batch_size=2, shuffle=True, seed=4)
    tracemalloc.start()
    try:
        rows = source.read(np.array([7, 0, 99])).x
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(rows, x[[7, 0, 99]])
    assert rows.flags.c_contiguous and rows.__array_interface__["data"][0] % 64 == 0
    assert peak < x.nbytes / 10
