import collections
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.data import Batcher, Feed, Position, Source, adapt
from fitflax.data.arrays import ArraySource, is_in_memory
from fitflax.data.batch import Selection
from fitflax.data.sources import FunctionSource, OneShotSource
from fitflax.errors import ConfigError, DataError

X, Y, W = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.int32), np.arange(6, dtype=np.float32)


def batches():
    yield X[:4], Y[:4]
    yield X[4:], Y[4:]


def first(source: Source):
    return next(source.open(Position()))


# -- in-memory data --


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
def test_anything_else_is_not_in_memory(data: object):
    assert not is_in_memory(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (batches(), OneShotSource),
        (batches, FunctionSource),
        (lambda: [(X, Y)], FunctionSource),
        (iter([(X, Y)]), OneShotSource),
        (map(tuple, [(X, Y)]), OneShotSource),
        (itertools.cycle([(X, Y)]), OneShotSource),
    ],
    ids=["generator", "function", "lambda", "iterator", "map", "cycle"],
)
def test_functions_and_iterators_become_sources_of_batches(data: object, kind: type):
    source = adapt(data)
    assert type(source) is kind
    np.testing.assert_array_equal(first(source).x[:4], X[:4])


def test_an_iterable_object_is_iterated_again_for_each_pass_and_reports_its_length():
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


def test_an_object_that_supports_indexing_yields_batches():
    class Sequence:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int):
            return list(batches())[index]

    assert [len(triple.x) for triple in adapt(Sequence()).open(Position())] == [4, 2]


def test_a_callable_iterable_is_treated_as_an_iterable():
    class Both(list):
        def __call__(self):
            raise AssertionError

    assert len(first(adapt(Both([{"x": X, "y": 1}]), selection=Selection("x"))).x) == 6


def test_a_source_is_returned_unchanged():
    source = adapt(X)
    assert adapt(source) is source


# -- inputs, targets, and weights --


def test_the_second_and_third_elements_of_a_tuple_are_targets_and_weights():
    source = adapt((X, Y, W), shuffle=False)
    triple = first(source)
    assert (triple.x.tolist(), triple.y.tolist(), triple.weights.tolist()) == (X.tolist(), Y.tolist(), W.tolist())


def test_a_tuple_with_separate_targets_is_several_inputs():
    triple = first(adapt((X, W), Y, shuffle=False))
    assert [leaf.tolist() for leaf in triple.x] == [X.tolist(), W.tolist()]
    assert triple.y.tolist() == Y.tolist()


def test_predict_treats_a_tuple_as_several_inputs():
    triple = first(adapt((X, Y), shuffle=False, inputs_only=True))
    assert [leaf.tolist() for leaf in triple.x] == [X.tolist(), Y.tolist()]
    assert triple.y == ()


def test_a_list_is_one_argument():
    triple = first(adapt([X, W], Y, shuffle=False))
    assert isinstance(triple.x, list) and len(triple.x) == 2


def test_keys_pick_inputs_and_targets_from_dicts_of_arrays():
    data = {"image": X, "label": Y, "id": W}
    triple = first(adapt(data, selection=Selection("image", "label"), shuffle=False))
    assert (triple.x.tolist(), triple.y.tolist()) == (X.tolist(), Y.tolist())
    assert first(adapt({"image": X}, selection=Selection("image", "label"), shuffle=False, inputs_only=True)).x.tolist() == X.tolist()


def test_sample_weight_with_a_pair_of_arrays_sets_its_weights():
    assert first(adapt((X, Y), sample_weight=W, shuffle=False)).weights.tolist() == W.tolist()


def test_passing_weights_twice_is_an_error():
    with pytest.raises(ConfigError, match="sample_weight is passed twice"):
        adapt((X, Y, W), sample_weight=W)


@pytest.mark.parametrize("shuffle", ["batch", "False", None, 2])
def test_shuffle_must_be_true_or_false(shuffle: object):
    with pytest.raises(ConfigError, match=rf"shuffle must be True or False\. Received: {shuffle!r}\. "):
        adapt(X, shuffle=shuffle)
    assert [adapt(X, shuffle=value).shuffles for value in (True, np.False_)] == [True, False]


def test_the_default_batch_size_is_32():
    assert adapt(np.zeros(100)).num_batches == 4
    assert adapt(np.zeros(100), batch_size=10).num_batches == 10


@pytest.mark.parametrize("given", [{"y": Y}, {"sample_weight": W}, {"batch_size": 3}, {"drop_remainder": True}], ids=lambda given: next(iter(given)))
def test_arguments_for_in_memory_arrays_cannot_be_passed_with_batches(given: dict):
    for data, kind in ((batches, "function"), (adapt(X), "ArraySource")):
        with pytest.raises(
            ConfigError, match=rf"{next(iter(given))} can only be passed with in-memory arrays\. `data` is a {kind}, which defines its own batches"
        ):
            adapt(data, **given)


@pytest.mark.parametrize("data", ["text", b"bytes", 3, 2.5, None, object()])
def test_an_object_that_cannot_yield_batches_is_an_error(data: object):
    with pytest.raises(DataError, match=f"Received: a {type(data).__name__}"):
        adapt(data)


@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array", "coo_matrix"])
def test_a_sparse_matrix_is_an_error_that_says_how_to_convert_it(kind: str):
    sparse = getattr(pytest.importorskip("scipy.sparse"), kind)(X)
    cases = [
        (lambda: adapt(sparse, Y), "data"),
        (lambda: adapt(sparse, inputs_only=True, name="x"), "x"),
        (lambda: adapt((sparse, Y)), r"data\[0\]"),
        (lambda: adapt({"a": X, "b": sparse}, Y), r"data\['b'\]"),
        (lambda: adapt(X, sparse), "y"),
        (lambda: Feed(adapt(iter([(sparse, Y)])), Batcher()).next(), "x"),
    ]
    for call, name in cases:
        with pytest.raises(DataError, match=rf"^{name} is a sparse matrix\. Convert it: {name}\.toarray\(\), or a batch at a time in a generator\.$"):
            call()


def test_an_empty_list_is_an_error():
    with pytest.raises(DataError, match="is an empty list"):
        adapt([])


@pytest.mark.parametrize("batches", [[(X, Y), (X, Y)], [(X, Y)], [{"x": X}, {"x": X}]], ids=["pairs", "one pair", "dicts"])
def test_a_list_of_batches_is_not_mistaken_for_arrays(batches: list):
    with pytest.raises(DataError, match="To pass a list of batches, use a function"):
        adapt(batches)


def test_a_tuple_of_four_arrays_is_an_error():
    with pytest.raises(DataError, match="a tuple of 4 elements"):
        adapt((X, Y, W, W))


# -- endless data --


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
def test_endless_iterators_of_itertools_are_recognized(data: object, is_endless: bool):
    assert adapt(data).is_endless == is_endless


def test_named_tuples_of_arrays_stay_named_tuples():
    pandas = pytest.importorskip("pandas")
    Inputs = collections.namedtuple("Inputs", ["image", "age"])
    data = Inputs(np.ones((4, 2), np.float32), pandas.Series([1.0, 2.0, 3.0, 4.0], dtype="float32"))
    batch = next(adapt((data, np.zeros(4)), batch_size=2, shuffle=False, seed=0).open(Position(0, 0)))
    assert type(batch.x) is Inputs and batch.x.age.tolist() == [1.0, 2.0]
