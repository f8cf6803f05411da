from collections.abc import Iterator

import flax
import numpy as np
import pytest

from fitflax.data import Batcher, Feed, Position, Source, adapt, padding
from fitflax.errors import DataError, FitflaxWarning

SIZES = (4, 4, 2)


def batches(sizes: tuple[int, ...] = SIZES) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    begin = 0
    for size in sizes:
        rows = np.arange(begin, begin + size, dtype=np.float32)
        yield rows, rows * 10
        begin += size


def stream(sizes: tuple[int, ...] = SIZES) -> Source:
    return adapt(lambda: batches(sizes))


def real_rows(fed) -> list[float] | None:
    return None if fed is None else np.asarray(fed.batch.x)[: fed.num_real].tolist()


# -- Feed --


@pytest.mark.parametrize("make", [stream, lambda: adapt(np.arange(10.0), batch_size=4, shuffle=False)], ids=["stream", "arrays"])
def test_a_feed_reads_one_pass_after_another_and_reports_its_position(make):
    feed = Feed(make(), Batcher(size=4))
    seen = [feed.next() for _ in range(9)]
    assert [real_rows(fed) for fed in seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], None, [0, 1, 2, 3], [4, 5, 6, 7], [8, 9], None, [0, 1, 2, 3]]
    positions = [fed.position for fed in seen if fed is not None]
    assert positions == [Position(0, 4), Position(0, 8), Position(0, 10), Position(1, 4), Position(1, 8), Position(1, 10), Position(2, 4)]
    assert feed.position == Position(2, 4)


def test_a_position_counts_real_examples_but_not_padding():
    feed = Feed(stream((3, 1)), Batcher(num_shards=4))
    assert [feed.next().position.examples for _ in range(2)] == [3, 4]


def test_a_batch_that_is_pushed_back_is_returned_again():
    feed = Feed(stream(), Batcher(size=4))
    first = feed.next()
    feed.push_back()
    assert feed.position == Position()
    again = feed.next()
    assert again.position == first.position and real_rows(again) == real_rows(first)
    assert real_rows(feed.next()) == [4, 5, 6, 7]


def test_a_feed_over_arrays_knows_when_its_pass_has_ended():
    feed = Feed(adapt(np.arange(6.0), batch_size=4), Batcher(size=4))
    ended = []
    for _ in range(2):
        feed.next()
        ended.append(feed.pass_has_ended)
    assert ended == [False, True]


def test_a_feed_over_a_stream_does_not_know_when_its_pass_has_ended():
    feed = Feed(stream(), Batcher(size=4))
    feed.next()
    assert feed.pass_has_ended is None


def test_batches_are_taken_one_at_a_time():
    taken = []

    def counting() -> Iterator[np.ndarray]:
        for number in range(4):
            taken.append(number)
            yield np.zeros(2)

    feed = Feed(adapt(counting), Batcher())
    feed.next()
    assert taken == [0]
    feed.next()
    assert taken == [0, 1]


# -- seeking --


@pytest.mark.parametrize("shuffle", [False, True])
def test_seeking_in_arrays_gives_the_same_batches_as_reading_up_to_the_position(shuffle: bool):
    def feed(position: Position) -> Feed:
        return Feed(adapt(np.arange(10.0), batch_size=4, shuffle=shuffle, seed=3), Batcher(size=4), position)

    for count in range(8):
        walked, position = feed(Position()), Position()
        for _ in range(count):
            fed = walked.next()
            position = position if fed is None else fed.position
        sought = feed(position)
        rest, found = ([real_rows(each.next()) for _ in range(8)] for each in (walked, sought))
        # At the end of a pass, one of the two may still have to notice it.
        assert [rows for rows in rest if rows][:5] == [rows for rows in found if rows][:5]


def test_a_stream_is_read_up_to_its_position_with_a_warning_that_names_the_cost():
    feed = Feed(stream(), Batcher(size=4), Position(3, 8))
    with pytest.warns(FitflaxWarning, match="cannot seek, so 8 examples are read and dropped"):
        fed = feed.next()
    assert real_rows(fed) == [8, 9]
    assert fed.position == Position(3, 10)


def test_a_stream_at_the_beginning_of_a_pass_drops_no_examples():
    assert real_rows(Feed(stream(), Batcher(size=4), Position(3, 0)).next()) == [0, 1, 2, 3]


def test_a_position_between_batches_is_an_error():
    feed = Feed(stream(), Batcher(size=4), Position(0, 6))
    with (
        pytest.warns(FitflaxWarning, match="cannot seek"),
        pytest.raises(DataError, match=r"after 6 examples of this pass, is inside a batch that ends after 8"),
    ):
        feed.next()


def test_a_position_beyond_the_data_is_an_error():
    feed = Feed(stream(), Batcher(size=4), Position(0, 40))
    with pytest.warns(FitflaxWarning, match="cannot seek"), pytest.raises(DataError, match="used 40 examples of this pass, but the data ends after 10"):
        feed.next()


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_batches_of_a_loader_that_refills_its_buffer_are_copied(kind: str):
    buffer = np.zeros((2, 1), np.float32)
    filled = pytest.importorskip("torch").from_numpy(buffer) if kind == "tensor" else buffer

    def refilled() -> Iterator[object]:
        for number in range(3):
            buffer[:] = number
            yield filled

    feed = Feed(adapt(refilled), Batcher(size=2))
    batches = [feed.next().batch.x for _ in range(3)]
    assert [batch.tolist() for batch in batches] == [[[number]] * 2 for number in range(3)]


def test_batches_of_a_mapped_file_are_plain_arrays_that_are_checked_once(tmp_path, monkeypatch):
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(12, 2))
    mapped[:] = np.arange(24).reshape(12, 2)
    checked, check = [], padding.form_of
    monkeypatch.setattr(padding, "form_of", lambda *arguments, **options: checked.append(True) or check(*arguments, **options))
    feed = Feed(adapt(lambda: ((mapped[i : i + 4], mapped[i : i + 4, 0]) for i in range(0, 12, 4))), Batcher(size=4))
    batches = [feed.next().batch for _ in range(3)]
    assert all(type(leaf) is np.ndarray for batch in batches for leaf in (batch.x, batch.y)) and len(checked) == 1
    assert np.array_equal(np.concatenate([batch.x for batch in batches]), mapped) and batches[2].y.tolist() == [16, 18, 20, 22]


@pytest.mark.parametrize("order", ["C", "F"])
def test_copies_of_large_batches_are_aligned_so_that_jax_does_not_copy_them_again(order):
    wide = np.asarray(np.random.default_rng(0).random((2**10, 2**8)), order=order)
    feed = Feed(adapt(lambda: iter([wide] * 8)), Batcher(size=2**10))
    for copy in [feed.next().batch.x for _ in range(8)]:
        assert copy.ctypes.data % 64 == 0 and copy.flags.c_contiguous and not np.shares_memory(copy, wide)
        assert copy.dtype == np.float64 and np.array_equal(copy, wide)


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.full((2**10, 2**8), "a", object), "must hold numbers, but its dtype is object"), (np.ma.masked_all((2**10, 2**8)), "has missing values")],
    ids=["objects", "masked"],
)
def test_large_batches_that_are_not_plain_numbers_are_errors_after_a_copy(values, message):
    with pytest.raises(DataError, match=message):
        Feed(adapt(lambda: iter([values])), Batcher(size=2**10)).next()


def test_tensors_of_all_kinds_make_batches():
    torch = pytest.importorskip("torch")
    rows = torch.arange(4.0)
    tensors = [rows.to(torch.bfloat16), rows.clone().requires_grad_(), rows.half()]
    feed = Feed(adapt(lambda: iter([{str(number): tensor for number, tensor in enumerate(tensors)}])), Batcher(size=4))
    batch = feed.next().batch.x
    assert [leaf.dtype.name for leaf in batch.values()] == ["bfloat16", "float32", "float16"]
    assert all(leaf.astype(np.float32).tolist() == [0, 1, 2, 3] for leaf in batch.values())


# -- functions and iterators --


def test_a_function_may_return_a_list_or_a_generator():
    for make in (lambda: list(batches()), batches):
        source = adapt(make)
        assert [len(triple.x) for triple in source.open(Position())] == [4, 4, 2]


def test_a_function_may_return_a_tuple_of_batches_that_are_structures():
    @flax.struct.dataclass
    class Pair:
        a: np.ndarray
        b: np.ndarray

    source = adapt(lambda: (Pair(np.ones(4), np.ones(2)), Pair(np.zeros(4), np.ones(2))))
    assert [triple.x.a[0] for triple in source.open(Position())] == [1, 0]


def test_a_function_that_does_not_return_an_iterable_is_an_error():
    with pytest.raises(DataError, match=r"must return an iterable of batches\. Received: a int"):
        adapt(lambda: 3).open(Position())


@pytest.mark.parametrize("made", [np.ones((3, 2)), (np.ones((3, 2)), np.ones(3)), {"a": np.ones(3)}, ((np.ones(3), np.ones(3)), np.ones(3))])
def test_a_function_that_returns_arrays_is_an_error(made: object):
    with pytest.raises(DataError, match=rf"The function `data` returned arrays \(a {type(made).__name__}\)\. Pass the arrays directly, or return an iterator"):
        adapt(lambda: made).open(Position())


def test_a_function_may_return_a_tuple_of_batches():
    assert [len(triple.x) for triple in adapt(lambda: tuple(batches())).open(Position())] == [4, 4, 2]


def test_an_iterator_continues_where_it_stopped():
    source = adapt(batches())
    first = source.open(Position())
    assert next(first).x.tolist() == [0, 1, 2, 3]
    assert source.taken == 4
    # As when a run continues in the same process: the iterator is already at the position, so nothing is dropped.
    assert next(source.open(Position(0, 4))).x.tolist() == [4, 5, 6, 7]
    assert not source.can_restart


def test_a_new_iterator_is_read_up_to_the_position_of_the_run():
    source = adapt(batches())
    with pytest.warns(FitflaxWarning, match="8 examples are read and dropped"):
        assert next(source.open(Position(0, 8))).x.tolist() == [8, 9]


def test_exceptions_of_the_users_iterator_propagate():
    def failing() -> Iterator[np.ndarray]:
        yield np.zeros(2)
        raise OSError("the disk is gone")

    feed = Feed(adapt(failing), Batcher())
    feed.next()
    with pytest.raises(OSError, match="the disk is gone"):
        feed.next()


# --- Several batches together ---


def feed_of(lengths: list[int], *, fails: bool = False, **options) -> Feed:
    def batches():
        for number, length in enumerate(lengths):
            yield np.full((length, 1), number, np.float32), np.zeros(length)
        if fails:
            raise ValueError("torn")

    return Feed(adapt(lambda: batches()), Batcher(**options))


def test_batches_of_the_same_shape_and_pass_are_returned_together():
    feed = feed_of([4, 4, 4, 4, 2], pad=False)
    first = feed.next()
    assert [fed.position.examples for fed in feed.next_like(first.batch, 2)] == [8, 12]
    later = feed.next()
    assert later.position.examples == 16 and feed.next_like(later.batch, 5) == []
    assert feed.next().num_real == 2 and feed.next() is None and feed.next().position == Position(passes=1, examples=4)


def test_the_end_of_a_pass_and_an_error_while_reading_ahead_are_kept_for_the_next_call():
    feed = feed_of([4, 4])
    assert len(feed.next_like(feed.next().batch, 5)) == 1
    assert feed.next() is None and feed.next().position == Position(passes=1, examples=4)
    feed = feed_of([4, 4], fails=True)
    assert len(feed.next_like(feed.next().batch, 5)) == 1
    with pytest.raises(ValueError, match="torn"):
        feed.next()


def test_batches_that_were_returned_together_can_be_pushed_back():
    feed = feed_of([4, 4, 4, 4])
    first = feed.next()
    feed.next_like(first.batch, 2)
    feed.push_back(3)
    assert feed.position == Position()
    assert [float(feed.next().batch.x[0, 0]) for _ in range(4)] == [0, 1, 2, 3]


def test_no_more_batches_than_requested_are_taken_from_an_iterator():
    taken = []

    def numbers():
        for number in range(10):
            taken.append(number)
            yield np.full((2, 1), number, np.float32), np.zeros(2)

    source = adapt(numbers())
    feed = Feed(source, Batcher())
    feed.next_like(feed.next().batch, 3)
    assert taken == [0, 1, 2, 3]
    feed.push_back(2)
    assert [float(Feed(source, Batcher(), Position(examples=4)).next().batch.x[0, 0])] == [2]


def test_an_iterator_that_is_past_the_saved_position_warns():
    source = adapt(batches())
    for _ in range(2):
        next(source.open(Position(examples=source.taken)))
    with pytest.warns(FitflaxWarning, match="The generator is 4 examples past the saved position. This run will differ from an uninterrupted one"):
        assert next(source.reopen(Position(0, 4), None)).x.tolist() == [8, 9]
