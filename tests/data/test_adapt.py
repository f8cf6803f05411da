import collections
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.data import Position, Source, adapt
from fitflax.data.adapt import is_in_memory
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import Selection
from fitflax.data.streams import IterableSource, OneShotSource
from fitflax.errors import ConfigError, DataError

X, Y, W = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.int32), np.arange(6, dtype=np.float32)


def batches():
    yield X[:4], Y[:4]
    yield X[4:], Y[4:]


def first(source: Source):
    return next(source.open(Position()))


# -- what is in memory --


@pytest.mark.parametrize(
    "data",
    [
        X,
        jnp.asarray(X),
        (X, Y),
        [X, Y],
        {"a": X, "b": Y},
        {"a": (X, [Y]), "b": {"c": X}},
        ((X, X), {"o": Y}),
        (X, ()),
        (X, None, W),
    ],
    ids=["array", "jax", "tuple", "list", "dict", "nested", "nested tuple", "no targets", "weights without targets"],
)
def test_containers_with_nothing_but_arrays_are_in_memory(data: object):
    assert is_in_memory(data)
    assert isinstance(adapt(data), ArraySource)


def test_pandas_frames_and_series_are_in_memory():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    source = adapt(frame, frame["a"], shuffle=False)
    assert isinstance(source, ArraySource)
    assert first(source).x.tolist() == [[1, 3], [2, 4]] and first(source).y.tolist() == [1, 2]


@pytest.mark.parametrize("data", [(), [], {}, (None,), [X, 3], (X, "text"), {"a": X, "b": None}, [(X, Y), 3], "text", 3, None, (X, range(3))])
def test_anything_else_is_not(data: object):
    assert not is_in_memory(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (batches(), OneShotSource),
        (batches, IterableSource),
        (lambda: [(X, Y)], IterableSource),
        (iter([(X, Y)]), OneShotSource),
        (map(tuple, [(X, Y)]), OneShotSource),
        (itertools.cycle([(X, Y)]), OneShotSource),
    ],
    ids=["generator", "function", "lambda", "iterator", "map", "cycle"],
)
def test_everything_else_yields_batches(data: object, kind: type):
    source = adapt(data)
    assert type(source) is kind
    np.testing.assert_array_equal(first(source).x[:4], X[:4])


def test_an_iterable_object_is_iterated_anew_for_each_pass_and_tells_its_length():
    class Loader:
        def __init__(self) -> None:
            self.passes = 0

        def __len__(self) -> int:
            return 2

        def __iter__(self):
            self.passes += 1
            return batches()

    loader = Loader()
    source = adapt(loader)
    assert source.num_batches == 2 and source.can_restart and not source.knows_length
    assert [len(list(source.open(Position(number)))) for number in range(2)] == [2, 2]
    assert loader.passes == 2


def test_an_object_that_is_indexed_as_a_sequence_yields_batches():
    class Sequence:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int):
            return list(batches())[index]

    assert [len(triple.x) for triple in adapt(Sequence()).open(Position())] == [4, 2]


def test_a_callable_iterable_is_an_iterable():
    class Both(list):
        def __call__(self):
            raise AssertionError

    assert len(first(adapt(Both([{"x": X, "y": 1}]), selection=Selection("x"))).x) == 6


def test_a_source_is_passed_on():
    source = adapt(X)
    assert adapt(source) is source


# -- what of it is what --


def test_the_targets_and_weights_of_a_tuple_are_its_second_and_third():
    source = adapt((X, Y, W), shuffle=False)
    triple = first(source)
    assert (triple.x.tolist(), triple.y.tolist(), triple.weights.tolist()) == (X.tolist(), Y.tolist(), W.tolist())


def test_with_targets_of_its_own_a_tuple_is_several_inputs():
    triple = first(adapt((X, W), Y, shuffle=False))
    assert [leaf.tolist() for leaf in triple.x] == [X.tolist(), W.tolist()]
    assert triple.y.tolist() == Y.tolist()


def test_for_predict_a_tuple_is_several_inputs():
    triple = first(adapt((X, Y), shuffle=False, inputs_only=True))
    assert [leaf.tolist() for leaf in triple.x] == [X.tolist(), Y.tolist()]
    assert triple.y == ()


def test_a_list_is_one_argument():
    triple = first(adapt([X, W], Y, shuffle=False))
    assert isinstance(triple.x, list) and len(triple.x) == 2


def test_keys_pick_from_dicts_of_arrays():
    data = {"image": X, "label": Y, "id": W}
    triple = first(adapt(data, selection=Selection("image", "label"), shuffle=False))
    assert (triple.x.tolist(), triple.y.tolist()) == (X.tolist(), Y.tolist())
    assert first(adapt({"image": X}, selection=Selection("image", "label"), shuffle=False, inputs_only=True)).x.tolist() == X.tolist()


def test_weights_beside_a_pair_are_its_weights():
    assert first(adapt((X, Y), sample_weight=W, shuffle=False)).weights.tolist() == W.tolist()


def test_weights_given_twice_are_an_error():
    with pytest.raises(ConfigError, match="given twice"):
        adapt((X, Y, W), sample_weight=W)


def test_the_batch_size_is_32_unless_said():
    assert adapt(np.zeros(100)).num_batches == 4
    assert adapt(np.zeros(100), batch_size=10).num_batches == 10


@pytest.mark.parametrize("given", [{"y": Y}, {"sample_weight": W}, {"batch_size": 3}, {"drop_remainder": True}], ids=lambda given: next(iter(given)))
def test_what_batches_hold_themselves_cannot_be_given_beside_them(given: dict):
    with pytest.raises(ConfigError, match=rf"{next(iter(given))} can only be given with in-memory arrays; batches of `data` \(a function\)"):
        adapt(batches, **given)


@pytest.mark.parametrize("data", ["text", b"bytes", 3, 2.5, None, object()])
def test_what_yields_no_batches_is_an_error(data: object):
    with pytest.raises(DataError, match=f"Received: a {type(data).__name__}"):
        adapt(data)


def test_an_empty_list_is_an_error():
    with pytest.raises(DataError, match="is an empty list"):
        adapt([])


@pytest.mark.parametrize("batches", [[(X, Y), (X, Y)], [(X, Y)], [{"x": X}, {"x": X}]], ids=["pairs", "one pair", "dicts"])
def test_a_list_of_batches_is_not_taken_for_arrays(batches: list):
    with pytest.raises(DataError, match="For a list of batches give a function"):
        adapt(batches)


def test_a_tuple_of_four_arrays_is_an_error():
    with pytest.raises(DataError, match="a tuple of 4 elements"):
        adapt((X, Y, W, W))


# -- what is known to be endless --


@pytest.mark.parametrize(
    ("data", "is_endless"),
    [
        (itertools.cycle([X]), True),
        (itertools.count(), True),
        (itertools.repeat(X), True),
        (itertools.repeat(X, 3), False),
        (iter([X]), False),
        (batches(), False),
    ],
    ids=["cycle", "count", "repeat", "repeat 3", "iterator", "generator"],
)
def test_endless_iterators_of_itertools_are_known(data: object, is_endless: bool):
    assert adapt(data).is_endless == is_endless


def test_named_tuples_of_arrays_stay_named_tuples():
    pandas = pytest.importorskip("pandas")
    Inputs = collections.namedtuple("Inputs", ["image", "age"])
    data = Inputs(np.ones((4, 2), np.float32), pandas.Series([1.0, 2.0, 3.0, 4.0], dtype="float32"))
    batch = next(adapt((data, np.zeros(4)), batch_size=2, shuffle=False, seed=0).open(Position(0, 0)))
    assert type(batch.x) is Inputs and batch.x.age.tolist() == [1.0, 2.0]
