from typing import Any

import numpy as np
import pytest

from fitflax.data import Position, adapt
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import Selection
from fitflax.errors import DataError
from tests.data.same_training import BATCH, X, Y, assert_same, make_trainer, of_arrays, outcome

pandas = pytest.importorskip("pandas")


# An index that contradicts the order of the rows, to show that it is ignored.
INDEX = list(range(9, -1, -1))


def frame() -> Any:
    return pandas.DataFrame(X, columns=list("abc"), index=INDEX)


def target() -> Any:
    return pandas.Series(Y[:, 0], name="y", index=list("abcdefghij"))


def first(*data: Any, selection: Selection = Selection(), **options: Any) -> Any:  # noqa: B008
    return next(adapt(*data, selection=selection, shuffle=False, **options).open(Position()))


def mixed() -> Any:
    return pandas.DataFrame(
        {
            "int": [1, 2],
            "bool": [True, False],
            "nullable": pandas.array([3, 4], dtype="Int64"),
            "nullable bool": pandas.array([True, False], dtype="boolean"),
            "float": [0.5, np.nan],
            "sparse": pandas.arrays.SparseArray([0.0, 1.0]),
        }
    )


def test_frames_of_inputs_and_targets_train_like_arrays():
    assert_same(outcome((frame(), pandas.DataFrame(Y, columns=["y"])), frame(), batch_size=BATCH, shuffle=False), of_arrays())


@pytest.mark.slow
def test_fit_evaluate_and_predict_accept_frames_and_series():
    flat = (X, Y[:, 0])
    results = []
    for x, y in (flat, (frame(), target())):
        trainer = make_trainer()
        trainer.compile("sgd", lambda outputs, targets: (outputs[:, 0] - targets) ** 2, learning_rate=0.1)
        history = trainer.fit(x, y, batch_size=BATCH, verbose=0, validation_data=(x, y)).history
        results.append((history, trainer.evaluate(x, y, verbose=0), trainer.predict(x).tolist()))
    assert results[0] == results[1]


def test_a_series_may_be_the_weights():
    assert first(frame(), target(), target().abs()).weights.tolist() == np.abs(Y[:, 0]).tolist()


def test_columns_are_picked_by_name():
    data = frame().assign(y=Y[:, 0], text="text")
    triple = first(data, selection=Selection(("a", "c"), "y"))
    assert [leaf.tolist() for leaf in triple.x] == [X[:, 0].tolist(), X[:, 2].tolist()]
    assert triple.y.tolist() == Y[:, 0].tolist()
    assert first(frame(), selection=Selection({"left": "a"}, "y"), inputs_only=True).x["left"].tolist() == X[:, 0].tolist()


def test_a_frame_in_a_dict_is_a_matrix():
    triple = first({"table": frame(), "row": target()}, selection=Selection("table", "row"))
    assert triple.x.tolist() == X.tolist() and triple.y.tolist() == Y[:, 0].tolist()


def test_columns_are_picked_from_batches_that_are_frames():
    batches = [frame().assign(y=Y[:, 0])[begin : begin + BATCH] for begin in range(0, 10, BATCH)]
    source = adapt(lambda: batches, selection=Selection(("a", "b"), "y"))
    assert [np.asarray(leaf).tolist() for leaf in next(source.open(Position())).x] == [X[:BATCH, 0].tolist(), X[:BATCH, 1].tolist()]


def test_booleans_and_nullable_columns_without_missing_values_are_numbers():
    source = adapt(mixed(), shuffle=False)
    assert isinstance(source, ArraySource)
    expected = np.array([[1, 1, 3, 1, 0.5, 0], [2, 0, 4, 0, np.nan, 1]], np.float32)
    np.testing.assert_array_equal(next(source.open(Position())).x, expected)


@pytest.mark.parametrize(
    ("column", "dtype"), [("int", np.int32), ("bool", np.bool_), ("nullable", np.int32), ("nullable bool", np.bool_), ("float", np.float32)]
)
def test_a_column_keeps_its_type(column, dtype):
    assert first(mixed()[column]).x.dtype == dtype
    assert first(mixed(), selection=Selection(column)).x.dtype == dtype
    assert first(mixed()[[column]]).x.dtype == dtype


def test_a_frame_has_the_common_type_of_its_columns():
    assert first(mixed()[["int", "bool"]]).x.dtype == np.int32
    assert first(mixed()[["bool", "nullable bool"]]).x.dtype == np.bool_
    assert first(pandas.DataFrame(X.astype(np.float16))).x.dtype == np.float16


def test_one_error_covers_all_non_numeric_columns():
    data = mixed().assign(
        text=["x", "y"],
        day=pandas.to_datetime(["2020-01-01", "2021-01-01"]),
        zone=pandas.to_datetime(["2020-01-01", "2021-01-01"]).tz_localize("UTC"),
        kind=pandas.Categorical([1, 2]),
        objects=pandas.Series([1, None], dtype="object"),
        missing=pandas.array([1, None], dtype="Int64"),
    )
    with pytest.raises(DataError, match="All columns of `data` must hold numbers") as caught:
        adapt(data)
    message = str(caught.value)
    for column in ("'text' is of type", "'day' is of type datetime64", "'zone' is of type", "'kind' is of type category", "'objects' is of type object"):
        assert column in message
    assert "and 1 more. " in message and "'missing'" not in message and "'int'" not in message
    assert message.endswith("Encode them as numbers, fill in missing values, or drop the columns first.")
    with pytest.raises(DataError, match="'missing' has missing values"):
        adapt(mixed().assign(missing=pandas.array([1, None], dtype="Int64")))


def test_columns_that_are_not_picked_may_hold_anything():
    assert first(mixed().assign(text="x"), selection=Selection("int")).x.tolist() == [1, 2]


@pytest.mark.parametrize("values", [["x", "y"], pandas.Categorical([1, 2]), pandas.array([1, None], dtype="Int64")], ids=["text", "categories", "missing"])
def test_a_series_of_text_categories_or_missing_values_is_an_error(values):
    with pytest.raises(DataError, match="`y` must hold numbers, but it "):
        adapt(X[:2], pandas.Series(values))


def test_a_missing_column_is_an_error_that_suggests_another():
    with pytest.raises(DataError, match=r"`data` does not have: \['alpha'\]\. Did you mean 'alpha1'\? Its columns: 'alpha1', 'b'\."):
        adapt(pandas.DataFrame({"alpha1": [1], "b": [2]}), selection=Selection("alpha"))


def test_duplicate_column_names_are_an_error_if_they_are_picked():
    data = pandas.DataFrame(X, columns=["a", "a", "b"])
    with pytest.raises(DataError, match=r"`data` has duplicate column names: \['a'\]"):
        adapt(data, selection=Selection("a"))
    assert first(data).x.tolist() == X.tolist()


def test_a_frame_without_columns_is_an_error():
    with pytest.raises(DataError, match="`data` has no columns"):
        adapt(pandas.DataFrame(index=[1, 2]))


def test_polars_frames_are_accepted_as_arrays():
    polars = pytest.importorskip("polars")
    data = polars.DataFrame({"a": [1, 2], "b": [True, False], "c": [0.5, 1.5]})
    assert first(data).x.tolist() == [[1, 1, 0.5], [2, 0, 1.5]]
    assert first(data, data["a"]).y.tolist() == [1, 2]
    assert first(data, selection=Selection(("a", "b"), "c")).y.tolist() == [0.5, 1.5]
    with pytest.raises(DataError, match="'text' is of type String, 'missing' has missing values"):
        adapt(data.with_columns(text=polars.lit("x"), missing=polars.Series([1, None])))
