"""States of loaders in checkpoints, and where a run resumes in a loader."""

import collections
import enum
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.checkpoints.restore import from_saved
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.checkpoints.save import save_checkpoint
from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.data.loader_state import Bookmark, Bookmarks, LoaderPass, Pass, UnstorableError, decode, encode
from fitflax.data.sources import Source
from fitflax.errors import DataError, FitflaxWarning
from tests.data.same_training import BATCH, CANNOT_SEEK, ROWS, X, Y, assert_resumes, assert_same, of_arrays, outcome, run, warned

# -- the form of a state in a checkpoint --


def through_a_file(state: object, path) -> object:
    """Saves a state in a checkpoint and returns it as a resume reads it."""
    save_checkpoint(path, train={}, run={"data": {"loader": encode(state)}}, metadata={"step": 0, "epoch": 0, "metrics": {}})
    saved = load_checkpoint(path)
    return decode(from_saved(saved.run["data"], root="run/data", key_impls=saved.metadata["key_impls"])["loader"])


STATE = {
    "numbers": [0, -(2**63), 2**63, -(2**200), 1.5, math.inf, True, False, None],
    "tuple": (1, (2, [3, ()]), {}),
    "text": ["", "grün", "\ud800 is no text", b"", b"\x00\xff"],
    "keys": {1: "int", "1": "str", None: "none", (2, "a"): "tuple"},
    "mark": {"__fitflax__": "tuple", "value": [1]},
    "chunked": {"__msgpack_chunked_array__": 1},
    "a/b": {"~": {}},
    "random": __import__("random").Random(3).getstate(),
}


def test_a_state_is_restored_unchanged_from_a_checkpoint(tmp_path):
    restored = through_a_file(STATE, tmp_path / "checkpoint")
    assert restored == STATE
    assert [type(number) for number in restored["numbers"]] == [type(number) for number in STATE["numbers"]]


def test_arrays_are_restored_with_their_types(tmp_path):
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "empty": np.zeros((0, 2), np.complex64),
        "scalar": np.float32(0.1),
        "bool": np.bool_(True),
        "jax": jnp.arange(3),
    }
    restored = through_a_file(state, tmp_path / "checkpoint")
    for name, value in state.items():
        assert type(restored[name]) is type(value) or (isinstance(value, jax.Array) and isinstance(restored[name], jax.Array))
        assert restored[name].dtype == value.dtype
        np.testing.assert_array_equal(restored[name], value)


def test_tensors_are_restored_as_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"generator": torch.Generator().manual_seed(3).get_state(), "step": torch.tensor(4)}
    restored = through_a_file(state, tmp_path / "checkpoint")
    assert all(torch.equal(restored[name], value) and restored[name].dtype == value.dtype for name, value in state.items())
    torch.Generator().set_state(restored["generator"])


def test_a_state_is_copied_when_it_is_encoded_and_decoded():
    state = {"array": np.zeros(2), "list": [0]}
    encoded = encode(state)
    state["array"][0] = state["list"][0] = 1
    first = decode(encoded)
    first["array"][1] = 1
    assert decode(encoded)["array"].tolist() == [0, 0] and encoded["list"] == [0]


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, object()]}, r"state\['a'\]\[1\] is a builtins.object"),
        ({"a": {1, 2}}, r"state\['a'\] is a builtins.set"),
        (Color.RED, r"state is a .*Color"),
        (collections.OrderedDict(a=1), "state is a collections.OrderedDict"),
        (np.array([None]), "state is a numpy.ndarray"),
        (np.array(["text"]), "state is a numpy.ndarray"),
        (np.datetime64("2020"), "state is a numpy.datetime64"),
        ({"key": jax.random.key(0)}, r"state\['key'\] is a"),
        ({object(): 1}, r"a key of state is a builtins.object"),
    ],
    ids=["object", "set", "enum", "ordered dict", "objects", "strings", "date", "key", "key of a dict"],
)
def test_the_error_names_what_cannot_be_stored(state, message):
    with pytest.raises(UnstorableError, match=message):
        encode(state)


def test_a_state_that_contains_itself_is_an_error():
    state: dict = {}
    state["again"] = state
    with pytest.raises(UnstorableError, match="more than 40 levels deep"):
        encode(state)


def test_a_sparse_tensor_cannot_be_stored():
    torch = pytest.importorskip("torch")
    with pytest.raises(UnstorableError, match=r"state is a torch\.Tensor"):
        encode(torch.zeros(2, 2).to_sparse())


def test_the_deepest_allowed_state_fits_in_a_checkpoint(tmp_path):
    state: object = 1
    for _ in range(40):
        state = (state,)
    assert through_a_file(state, tmp_path / "checkpoint") == state


# -- loaders --


class Loader:
    """Yields batches `[number]` in an order that depends on all previous passes; counts the batches drawn."""

    def __init__(self, seed: int = 0, batches: int = 5) -> None:
        self.random = np.random.default_rng(seed)
        self.batches = batches
        self.order: list[int] | None = None
        self.index = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        if self.order is None:
            self.order, self.index = self.random.permutation(self.batches).tolist(), 0
        while self.index < self.batches:
            self.index += 1
            self.drawn += 1
            yield np.full(2, self.order[self.index - 1])
        self.order = None

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "order": self.order, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]
        self.order, self.index = state["order"], state["index"]


class Cursor:
    """An iterable over batches `[number]`; each of its iterators has its own state."""

    def __init__(self, refuses: bool = False, names: tuple[str, str] = ("get_state", "set_state")) -> None:
        self.refuses = refuses
        self.names = names
        self.drawn = 0

    def __iter__(self) -> Any:
        outer = self

        class Iterating:
            def __init__(self) -> None:
                self.index = 0
                setattr(self, outer.names[0], lambda: self.index)
                setattr(self, outer.names[1], self.put)

            def put(self, index: int) -> None:
                if outer.refuses:
                    raise ValueError("of another data set")
                self.index = index

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> np.ndarray:
                if self.index == 5:
                    raise StopIteration
                self.index += 1
                outer.drawn += 1
                return np.full(2, self.index - 1)

        return Iterating()


class Clock:
    """Advances by `step` seconds whenever it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def make_feed(data: Any, position: Position = Position(), step: float = 0.0) -> Feed:  # noqa: B008
    """Returns a feed that takes a state before each batch or, with `step`, only when necessary."""
    return Feed(adapt(data), Batcher(size=2), position, is_saved=True, clock=Clock(step))


def walk(feed: Feed, calls: int) -> list[int | None]:
    return [None if (fed := feed.next()) is None else int(fed.batch.x[0]) for _ in range(calls)]


def resumed(data: Any, position: Position, state: dict[str, Any]) -> Feed:
    feed = make_feed(data, position)
    feed.load_state_dict(state)
    return feed


# -- where a loader resumes --


@pytest.mark.parametrize("step", [0.0, 1.0], ids=["a state before each batch", "a state before each pass"])
@pytest.mark.parametrize("calls", range(1, 14))
def test_a_loader_with_a_state_resumes_where_training_stopped(calls, step):
    whole = walk(make_feed(Loader()), 20)
    feed = make_feed(Loader(), step=step)
    assert walk(feed, calls) == whole[:calls]
    position = feed.position
    feed.next()  # The loop reads one batch ahead.
    state = feed.state_dict(position)
    loader = Loader(seed=99)
    with warned():
        assert walk(resumed(loader, position, state), 20 - calls) == whole[calls:]
    passes = sum(batch is not None for batch in whole[calls:])
    assert loader.drawn == passes + (position.examples - state["examples"]) // 2


def test_a_state_before_each_batch_means_that_nothing_is_drawn_twice():
    feed = make_feed(Loader())
    walk(feed, 3)
    position = feed.position
    feed.next()
    assert feed.state_dict(position)["examples"] == position.examples == 6


def test_taking_states_costs_at_most_one_percent_of_the_time():
    """Each clock reading takes one second, and so does taking a state. The next one is taken 100 seconds later, with two readings per batch.

    The state at the beginning of the pass, which always has to be taken, is not counted.
    """
    feed = make_feed(Loader(batches=200), step=1.0)
    states = []
    for _ in range(150):
        position = feed.position
        feed.next()
        states.append(feed.state_dict(position)["examples"] // 2)
    taken = [states.index(state) for state in sorted(set(states))]
    assert taken[:2] == [0, 1] and np.diff(taken[1:]).min() >= 100 / 2
    assert len(taken) == 3


def test_a_state_at_the_beginning_of_a_pass_does_not_delay_the_next_one():
    class Starting(Pass):
        """Its first state waits for worker processes."""

        def __next__(self) -> Any:
            raise StopIteration

        def snapshot(self) -> int:
            clock.now += 0.001 if clock.now else 5.0
            return 0

    clock, opened = Clock(), Starting()
    bookmarks = Bookmarks(clock)
    assert bookmarks.take(Position(), opened, force=True) and not bookmarks.take(Position(), opened)
    assert bookmarks.take(Position(0, 2), opened) and not bookmarks.take(Position(0, 4), opened)
    clock.now += 0.2
    assert bookmarks.take(Position(0, 6), opened)


@pytest.mark.parametrize("kind", ["iterable", "iterator", "one-shot iterator"])
@pytest.mark.parametrize("between", [0, 1])
def test_a_state_that_is_wrong_until_a_batch_is_read_is_not_saved_after_a_resume(kind, between):
    class Late:
        """Reports the beginning until a batch is read, like streams of Hugging Face."""

        def __init__(self) -> None:
            self.index = self.reported = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> np.ndarray:
            if self.index == 5:
                raise StopIteration
            self.index = self.reported = self.index + 1
            return np.full(2, self.index - 1)

        def state_dict(self) -> int:
            return self.reported

        def load_state_dict(self, state: int) -> None:
            self.index = state

    class Data:
        def __init__(self) -> None:
            self.late = Late()
            if kind == "iterable":
                self.state_dict, self.load_state_dict = self.late.state_dict, self.late.load_state_dict

        def __iter__(self) -> Late:
            return self.late

    def data() -> Any:
        return Late() if kind == "one-shot iterator" else Data()

    feed = make_feed(data())
    walk(feed, 2)
    again = resumed(data(), feed.position, feed.state_dict(feed.position))
    assert walk(again, 1) == [2]
    again.push_back()
    walk(again, between)
    assert walk(resumed(data(), again.position, again.state_dict(again.position)), 2) == [2 + between, 3 + between]


def test_a_batch_that_is_pushed_back_is_drawn_again_after_a_resume():
    feed = make_feed(Loader())
    whole = walk(make_feed(Loader()), 8)
    walk(feed, 4)
    feed.push_back()
    state = feed.state_dict(feed.position)
    assert walk(resumed(Loader(seed=9), feed.position, state), 5) == whole[3:]
    assert walk(feed, 5) == whole[3:]


def test_a_checkpoint_between_two_passes_holds_the_state_of_the_next_pass():
    whole = walk(make_feed(Loader()), 12)
    feed = make_feed(Loader())
    walk(feed, 6)
    assert feed.position == Position(1)
    state = feed.state_dict(Position(1))
    assert (state["passes"], state["examples"]) == (1, 0)
    assert walk(feed, 6) == whole[6:]
    assert walk(resumed(Loader(seed=9), Position(1), state), 6) == whole[6:]


def test_an_unfinished_pass_of_an_earlier_run_is_not_continued():
    class Restarting(Loader):
        def __iter__(self) -> Iterator[np.ndarray]:
            self.order = None
            return super().__iter__()

    loader = Restarting()
    walk(make_feed(loader), 2)
    feed = make_feed(loader, Position(1))
    first = walk(feed, 1)
    again = resumed(Loader(), Position(1), feed.state_dict(Position(1)))
    assert walk(again, 5) == first + walk(feed, 4)


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
@pytest.mark.parametrize("calls", [1, 3, 5, 6, 8])
def test_iterators_with_a_state_resume_where_training_stopped(names, calls):
    feed = make_feed(Cursor(names=names))
    whole = walk(make_feed(Cursor()), 12)
    walk(feed, calls)
    loader = Cursor(names=names)
    with warned():
        assert walk(resumed(loader, feed.position, feed.state_dict(feed.position)), 12 - calls) == whole[calls:]
    assert loader.drawn <= sum(batch is not None for batch in whole[calls:]) + 1


def test_an_iterator_that_refuses_its_state_is_read_up_to_the_position():
    feed = make_feed(Cursor())
    walk(feed, 3)
    state = feed.state_dict(feed.position)
    with warned("The Iterating cannot load the state in the checkpoint: of another data set. The data is read", CANNOT_SEEK.format(6)):
        assert walk(resumed(Cursor(refuses=True), feed.position, state), 2) == [3, 4]


def test_a_loader_that_refuses_its_state_is_an_error():
    feed = make_feed(Loader())
    walk(feed, 3)
    state = feed.state_dict(feed.position)
    state["loader"] = {"no": "state"}
    with pytest.raises(DataError, match="The Loader cannot load the state in the checkpoint: 'random'"):
        resumed(Loader(), feed.position, state).next()


class Unreadable:
    """An array that is decoded when it is converted, which fails."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_batch_that_cannot_be_converted_is_read_again_after_a_resume(reads_ahead):
    class Failing(Loader):
        def __iter__(self) -> Iterator[Any]:
            return (Unreadable() if self.drawn == 3 else batch for batch in super().__iter__())

    feed, whole = make_feed(Failing()), walk(make_feed(Loader()), 5)
    first = feed.next()
    if reads_ahead:
        assert len(feed.next_like(first.batch, 4)) == 1
    else:
        feed.next()
        with pytest.raises(DataError, match="the disk is gone"):
            feed.next()
    position = feed.position
    assert walk(resumed(Loader(seed=9), position, feed.state_dict(position)), 3) == whole[2:]


def test_a_one_shot_iterator_resumes_where_training_stopped():
    whole = walk(make_feed(iter(Cursor())), 6)
    feed = make_feed(iter(Cursor()))
    walk(feed, 3)
    feed.push_back()
    state = feed.state_dict(feed.position)
    loader = Cursor()
    with warned():
        assert walk(resumed(iter(loader), feed.position, state), 4) == whole[2:]
    assert loader.drawn == 3


def test_a_function_that_returns_loaders_resumes_where_training_stopped():
    feed = make_feed(Cursor)
    walk(feed, 8)
    with warned():
        assert walk(resumed(Cursor, feed.position, feed.state_dict(feed.position)), 3) == [2, 3, 4]


# -- data without a state --


def test_arrays_and_generators_have_no_state():
    def batches() -> Iterator[np.ndarray]:
        opened.append(1)
        yield np.zeros(2)

    opened: list[int] = []
    for data in (np.zeros(4), batches):
        feed = Feed(adapt(data), Batcher(size=2), is_saved=True)
        while feed.next() is not None:
            assert feed.state_dict(feed.position) == {}
        assert feed.state_dict(feed.position) == {}
    assert opened == [1]  # Saving does not call the user's function for the next pass.


def test_no_state_is_taken_if_nothing_is_saved():
    class Strict(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    feed = Feed(adapt(Strict()), Batcher())
    walk(feed, 7)
    assert feed.state_dict(feed.position) == {}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"seen": {1, 2}},
            r"cannot be saved in checkpoints: state\['seen'\] is a builtins.set\. A resumed run will read the data from the beginning of the pass",
        ),
        (OSError("gone"), r"could not be read: OSError\('gone'\)"),
    ],
    ids=["a set", "an error"],
)
def test_an_unavailable_state_causes_one_warning_and_the_data_is_read_instead(state, message):
    class Odd(Loader):
        def state_dict(self) -> Any:
            if isinstance(state, OSError):
                raise state
            return state

    feed = make_feed(Odd())
    with pytest.warns(FitflaxWarning, match=message) as caught:
        walk(feed, 9)
    assert len(caught) == 1
    assert feed.state_dict(feed.position) == {}
    position = feed.position
    with warned(CANNOT_SEEK.format(position.examples), "The state of this data source c"):
        walk(resumed(Odd(), position, {}), 1)


def test_a_pass_that_cannot_be_opened_does_not_prevent_a_checkpoint():
    class Once:
        calls = 0

        def __call__(self) -> Loader:
            self.calls += 1
            if self.calls == 2:
                raise OSError("the disk is gone")
            return Loader()

    feed = make_feed(Once())
    walk(feed, 6)
    with pytest.warns(FitflaxWarning, match=r"The next pass over the data could not be opened, so .*: OSError\('the disk is gone'\)"):
        assert feed.state_dict(feed.position) == {}
    failing = make_feed(Once())
    walk(failing, 6)
    with pytest.raises(OSError, match="the disk is gone"):
        failing.next()
    with warned():
        assert failing.state_dict(failing.position) == {}


def test_a_state_of_another_pass_is_not_used():
    feed = make_feed(Loader())
    walk(feed, 8)
    state = feed.state_dict(feed.position)
    assert walk(resumed(Cursor(), Position(0), state), 2) == [0, 1]


# -- closing --


def test_closing_a_feed_closes_its_pass_but_not_the_users_iterator():
    closed: list[str] = []

    def batches() -> Iterator[np.ndarray]:
        try:
            while True:
                yield np.zeros(2)
        finally:
            closed.append("closed")

    class Iterable:
        def __iter__(self) -> Iterator[np.ndarray]:
            return batches()

    for data in (Iterable(), batches):
        feed = make_feed(data)
        feed.next()
        del data
        feed.close()
    assert closed == ["closed"] * 2
    given = batches()
    feed = make_feed(given)
    feed.next()
    feed.push_back()
    feed.close()
    next(given)
    assert closed == ["closed"] * 2


# -- custom sources --


class CustomSource(Source):
    """A source that implements only what is required."""

    def open(self, position: Position) -> Iterator[Any]:
        return iter([])


def test_a_custom_source_needs_only_open():
    assert list(CustomSource().reopen(Position(), None)) == []
    feed = Feed(CustomSource(), Batcher(), is_saved=True)
    feed.load_state_dict({})
    assert feed.next() is None and feed.state_dict(feed.position) == {}


def test_a_custom_pass_can_take_snapshots():
    class Counting(Pass):
        def __init__(self, begin: int) -> None:
            self.next_row = begin

        def __next__(self) -> Any:
            self.next_row += 1
            return adapt(np.full(1, self.next_row - 1), shuffle=False).open(Position()).__next__()

        def snapshot(self) -> int:
            return self.next_row

    class Seeking(Source):
        def open(self, position: Position) -> Counting:
            return Counting(0)

        def reopen(self, position: Position, bookmark: Bookmark | None) -> Counting:
            assert bookmark is not None and bookmark.position == position
            return Counting(bookmark.state)

    feed = make_feed(Seeking())
    walk(feed, 3)
    assert walk(resumed(Seeking(), feed.position, feed.state_dict(feed.position)), 2) == [3, 4]


# -- through fit --


class Batches(Loader):
    """Yields batches of the data that all tests share."""

    def __iter__(self) -> Iterator[Any]:
        for order in super().__iter__():
            begin = int(order[0]) * BATCH
            yield X[begin : begin + BATCH], Y[begin : begin + BATCH]


@pytest.mark.slow
def test_a_loader_in_order_trains_like_arrays():
    class InOrder:
        def __iter__(self) -> Iterator[Any]:
            return iter([(X[begin : begin + BATCH], Y[begin : begin + BATCH]) for begin in range(0, ROWS, BATCH)])

    assert_same(outcome(InOrder()), of_arrays())


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("steps_per_epoch", [None, 2])
@pytest.mark.mostly_slow
def test_a_run_over_a_loader_with_a_state_resumes_bit_for_bit_without_a_warning(k, steps_per_epoch, tmp_path):
    seeds = itertools.chain((1, 1), itertools.repeat(99))
    assert_resumes(tmp_path, lambda: Batches(next(seeds), batches=3), k, steps_per_epoch=steps_per_epoch)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("cost_ratio", "is_read"),
    [(0.0, False), (1e9, False), (0.0, True)],
    ids=["states before each batch", "a state at the beginning alone", "a batch that cannot be converted"],
)
def test_a_run_interrupted_by_an_error_in_the_data_resumes_bit_for_bit(cost_ratio, is_read, tmp_path, monkeypatch):
    monkeypatch.setattr("fitflax.data.loader_state._COST_RATIO", cost_ratio)

    class Failing(Batches):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                if self.drawn == 5 and self.fails and not is_read:
                    raise OSError("the disk is gone")
                yield (Unreadable(), batch[1]) if self.drawn == 5 and self.fails else batch

    def make(fails: bool, seed: int = 1) -> Failing:
        loader = Failing(seed, batches=3)
        loader.fails = fails
        return loader

    uninterrupted = run(tmp_path / "never", make(False), 8)
    with pytest.raises(DataError if is_read else OSError, match="the disk is gone"):
        run(tmp_path / "broken", make(True), 8)
    with warned():
        assert_same(run(tmp_path / "broken", make(False, 99), 8), uninterrupted)


def test_an_iterator_that_no_longer_has_state_methods_is_read_up_to_the_position():
    loader = LoaderPass([np.ones((2, 1)), np.zeros((2, 1))], lambda item: item, {"step": 1})
    assert not loader.took_state and next(loader).sum() == 2
