import types
from typing import Any

import numpy as np
import pytest

from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.data.batch import Selection
from fitflax.data.pipelines import StreamSource, TableSource, _dtype_of, _stacked
from fitflax.errors import ConfigError, DataError, FitflaxWarning, RestoreError
from tests.data.same_training import (
    BATCH,
    CANNOT_SEEK,
    ROWS,
    X,
    Y,
    assert_resumes,
    assert_resumes_twice,
    assert_same,
    make_trainer,
    of_arrays,
    outcome,
    run,
    warned,
)

KEYS = {"inputs": "image", "targets": "label"}
PICK = Selection("image", "label")


@pytest.fixture(scope="module", autouse=True)
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the library with a temporary cache and without network access."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_DATASETS_OFFLINE", "1")
    yield pytest.importorskip("datasets")
    patch.undo()


def columns(**more: Any) -> dict[str, Any]:
    return {"image": X, "label": Y, "id": list("abcdefghij"), **more}


@pytest.fixture
def table(datasets) -> Any:
    return datasets.Dataset.from_dict(columns())


def first(data: Any, selection: Selection = PICK, **options: Any) -> Any:
    return next(adapt(data, selection=selection, **{"shuffle": False, **options}).open(Position()))


# -- tables --


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle": True}, {"shuffle": True, "drop_remainder": True}], ids=["in order", "shuffled", "dropped"])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_a_table_trains_like_arrays(table, options):
    assert_same(outcome(table, keys=KEYS, batch_size=BATCH, **options), of_arrays(**options))


@pytest.mark.slow
def test_a_table_is_split_and_validated_like_arrays(table):
    def trained(data: Any, **keys: Any) -> Any:
        return make_trainer(**keys).fit(data, epochs=2, batch_size=3, validation_split=0.3, verbose=0).history

    assert trained(table, **KEYS) == trained((X, Y))


@pytest.mark.slow
def test_validation_on_a_dict_of_splits_logs_each_split_by_name(datasets, table):
    splits = datasets.DatasetDict({"dev": table.select(range(4)), "test": table})
    history = make_trainer(**KEYS).fit(table, batch_size=BATCH, validation_data=splits, verbose=0).history
    assert {"dev_loss", "test_loss"} <= set(history)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.mostly_slow
def test_a_table_seeks_to_the_position_immediately(table, k, tmp_path):
    assert_resumes(tmp_path, lambda: table, k, keys=KEYS, batch_size=BATCH)


def test_resuming_with_a_table_of_a_different_length_is_an_error(table, tmp_path):
    run(tmp_path, table, 2, keys=KEYS)
    with pytest.raises(RestoreError, match="num_examples was 10 and is now 9"):
        run(tmp_path, table.select(range(9)), 4, keys=KEYS)


def test_only_the_rows_and_columns_of_a_batch_are_read(table):
    source = adapt(table, selection=PICK, batch_size=BATCH)
    assert isinstance(source, TableSource)
    read: list[Any] = []
    inner = source._table

    class RecordingTable:
        def __getitem__(self, rows: Any) -> Any:
            read.append((len(range(ROWS)[rows]) if isinstance(rows, slice) else len(rows), inner.column_names))
            return inner[rows]

    source._table = RecordingTable()
    assert sum(len(triple.x) for triple in source.open(Position())) == ROWS
    assert read == [(4, ["image", "label"]), (4, ["image", "label"]), (2, ["image", "label"])]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64, np.bool_])
@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3)])
def test_columns_have_the_same_dtypes_as_arrays(datasets, dtype, shape):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    data = datasets.Dataset.from_dict({"image": values, "label": Y[:4]})
    found, expected = first(data).x, next(adapt(values, shuffle=False).open(Position())).x
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_a_column_with_an_integer_that_jax_cannot_hold_is_an_error_that_names_it(datasets):
    for dtype, value, fits in (("int64", 1_700_000_000_000, False), ("uint32", 2**32 - 1, True), ("uint64", 2**32, False)):
        features = datasets.Features({"image": datasets.Value(dtype), "label": datasets.Value("float32")})
        data = datasets.Dataset.from_dict({"image": [0, value], "label": [0.0, 1.0]}, features=features)
        if fits:
            assert first(data).x.tolist() == [0, value]
        else:
            with pytest.raises(DataError, match=rf"data\['image'\] holds the integer {value}, which does not fit"):
                first(data)


def test_columns_of_class_labels_and_fixed_size_arrays_are_numeric(datasets):
    features = datasets.Features({"image": datasets.Array2D((2, 3), "uint8"), "label": datasets.ClassLabel(names=["cat", "dog"])})
    data = datasets.Dataset.from_dict({"image": np.ones((4, 2, 3), np.uint8), "label": [0, 1, 1, 0]}, features=features)
    triple = first(data)
    assert (triple.x.shape, triple.x.dtype, triple.y.tolist()) == ((4, 2, 3), np.uint8, [0, 1, 1, 0])


def test_a_custom_transform_is_applied(table):
    doubled = table.with_transform(lambda batch: {"image": [2 * np.asarray(x, np.float32) for x in batch["image"]], "label": np.asarray(batch["label"])})
    np.testing.assert_array_equal(first(doubled).x, 2 * X)


def test_a_custom_format_makes_no_difference(table):
    pytest.importorskip("torch")
    np.testing.assert_array_equal(first(table.with_format("torch")).x, X)


def test_several_inputs_and_targets_are_selected_by_name(datasets):
    data = datasets.Dataset.from_dict({"a": X, "b": Y, "c": Y})
    triple = first(data, Selection(("a", "b"), {"target": "c"}))
    assert [leaf.shape for leaf in triple.x] == [(ROWS, 3), (ROWS, 1)] and set(triple.y) == {"target"}


def test_predicting_needs_no_targets(table):
    trainer = make_trainer(**KEYS)
    trainer.fit(table, batch_size=BATCH, verbose=0)
    assert trainer.predict(table.remove_columns(["label", "id"])).shape == (ROWS, 1)


# -- errors --


def test_without_inputs_and_targets_the_error_lists_the_columns(table):
    for data in (table, table.to_iterable_dataset()):
        with pytest.raises(DataError, match=r"Trainer\(inputs=\.\.\., targets=\.\.\.\)\. Its columns: 'image', 'label', 'id'\."):
            adapt(data)


def test_a_missing_column_is_an_error_that_suggests_another(table):
    for data in (table, table.to_iterable_dataset()):
        columns = r"columns that `data` does not have: \['imag', 'no'\]\. Did you mean 'image'\? Its columns: 'image', 'label', 'id'\."
        with pytest.raises(DataError, match=columns):
            adapt(data, selection=Selection("imag", "no"))


def test_a_column_of_text_is_an_error_that_names_it(table):
    with pytest.raises(DataError, match=r"data\['id'\] must hold numbers, but its dtype is <U1; encode them"):
        adapt(table, selection=Selection("image", "id"))
    with pytest.raises(DataError, match=r"data\['id'\] must hold numbers"):
        first(table.to_iterable_dataset(), Selection("image", "id"))


def test_a_column_of_lists_of_different_lengths_is_an_error_that_names_it(datasets):
    data = datasets.Dataset.from_dict({"image": X[:3], "label": [[1], [1, 2], [3]]})
    for given in (data, data.to_iterable_dataset()):
        with pytest.raises(DataError, match=r"data\['label'\] holds lists of different lengths\. Pad them"):
            first(given)


def test_a_column_of_integers_with_missing_values_is_an_error_that_names_it(datasets):
    data = datasets.Dataset.from_dict({"image": X[:3], "label": [1, None, 3]})
    with pytest.raises(DataError, match=r"data\['label'\] is a column of dtype int64 with missing values"):
        first(data)


def test_a_dict_of_splits_is_an_error_that_lists_them(datasets, table):
    with pytest.raises(DataError, match=r"`data` is a DatasetDict with the splits \['train', 'test'\]\. Pass one of them: data\['train'\]"):
        adapt(datasets.DatasetDict({"train": table, "test": table}), selection=PICK)


@pytest.mark.parametrize("given", [{"y": Y}, {"sample_weight": Y}], ids=["y", "sample_weight"])
def test_passing_targets_or_weights_with_a_data_set_is_an_error(table, given):
    for data in (table, table.to_iterable_dataset()):
        with pytest.raises(ConfigError, match=f"{next(iter(given))} can only be passed with in-memory arrays"):
            adapt(data, selection=PICK, **given)


def test_an_empty_table_is_an_error(table):
    with pytest.raises(DataError, match=r"The data yields no batches. Received: 0 examples"):
        adapt(table.select([]), selection=PICK)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_batch_size_must_be_a_positive_integer(table, size):
    for data in (table, table.to_iterable_dataset()):
        with pytest.raises(ConfigError, match="batch_size must be a positive integer"):
            adapt(data, selection=PICK, batch_size=size)


# -- streams --


def test_a_stream_trains_like_arrays(table):
    assert_same(outcome(table.to_iterable_dataset(), keys=KEYS, batch_size=BATCH), of_arrays())


def test_a_stream_has_32_rows_per_batch_and_may_drop_the_last_batch(table):
    source = adapt(table.to_iterable_dataset(), selection=PICK)
    assert isinstance(source, StreamSource) and source.batch_size == 32 and source.num_batches is None
    dropped = adapt(table.to_iterable_dataset(), selection=PICK, batch_size=BATCH, drop_remainder=True)
    assert [len(triple.x) for triple in dropped.open(Position())] == [4, 4]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "changed",
    [
        lambda stream: stream,
        lambda stream: stream.map(lambda row: {"label": [value * 2 for value in row["label"]]}),
        lambda stream: stream.map(lambda rows: {"label": [[value * 2 for value in row] for row in rows["label"]]}, batched=True, batch_size=3),
    ],
    ids=["unchanged", "map", "map of batches"],
)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_stream_with_an_exact_state_resumes_without_a_warning(table, k, changed, tmp_path):
    assert_resumes(tmp_path, lambda: changed(table.to_iterable_dataset(num_shards=2)), k, keys=KEYS, batch_size=BATCH)


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("k", [7, 9])
def test_a_stream_whose_batches_cut_its_chunks_of_rows_keeps_all_rows_in_a_second_resume(datasets, k, batch_size):
    def make() -> Any:
        stream = table.to_iterable_dataset(num_shards=3)
        return stream if batch_size is None else stream.map(lambda rows: rows, batched=True, batch_size=batch_size)

    table = datasets.Dataset.from_dict({"image": np.arange(80.0), "label": np.arange(80.0)})
    assert_resumes_twice(make, k, 20, range(6), batch_size=BATCH, **KEYS)


def test_after_a_resume_inside_a_chunk_of_rows_states_are_taken_from_the_second_batch_on(datasets):
    def opened(*saved: Any) -> Feed:
        stream = datasets.Dataset.from_dict({"image": np.arange(80.0), "label": np.arange(80.0)}).to_iterable_dataset(num_shards=3)
        feed = Feed(adapt(stream, batch_size=4, selection=PICK), Batcher(size=4), *saved[:1], is_saved=True, clock=lambda: 0.0)
        if saved:
            feed.load_state_dict(saved[1])
        return feed

    def read(feed: Feed) -> int:
        feed.next()
        return feed.state_dict(feed.position)["examples"]

    first = opened()
    assert [read(first) for _ in range(7)][-1] == 28  # The first chunk has 27 rows.
    again = opened(first.position, first.state_dict(first.position))
    assert [read(again) for _ in range(3)] == [28, 36, 40]


def test_states_are_also_taken_after_a_resume_of_a_stream_that_maps_all_rows_together(table):
    def opened(*saved: Any) -> Feed:
        stream = table.to_iterable_dataset().map(lambda rows: rows, batched=True, batch_size=None)
        feed = Feed(adapt(stream, batch_size=2, selection=PICK), Batcher(size=2), *saved[:1], is_saved=True, clock=lambda: 0.0)
        if saved:
            feed.load_state_dict(saved[1])
        return feed

    first = opened()
    while first.next() is not None:
        pass
    again = opened(first.position, first.state_dict(first.position))
    again.next()
    assert again.state_dict(again.position)["examples"] == again.position.examples == 2
    np.testing.assert_array_equal(again.next().batch.x, PICK.split(table.with_format("numpy")[2:4])[0])


@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.mostly_slow
def test_a_stream_with_a_shuffle_buffer_is_read_up_to_the_position(table, k, tmp_path):
    def make() -> Any:
        return table.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5)

    assert_resumes(tmp_path, make, k, *([CANNOT_SEEK.format(BATCH)] if k % 3 else []), keys=KEYS, batch_size=BATCH)


def test_a_stream_whose_state_is_no_longer_exact_is_read_up_to_the_position(table, tmp_path):
    options = {"keys": KEYS, "batch_size": BATCH}
    uninterrupted = run(tmp_path / "never", table.to_iterable_dataset(), 8, **options)
    run(tmp_path / "stopped", table.to_iterable_dataset(), 4, **options)
    with warned(CANNOT_SEEK.format(BATCH)):
        resumed = run(tmp_path / "stopped", table.to_iterable_dataset().shuffle(seed=3, buffer_size=1), 8, **options)
    assert_same(resumed, uninterrupted)


def test_a_stream_is_reshuffled_in_each_pass_without_changing_its_epoch(table):
    stream = table.to_iterable_dataset().shuffle(seed=3, buffer_size=5)
    source = adapt(stream, selection=PICK, batch_size=BATCH)
    orders = [np.concatenate([triple.x for triple in source.open(Position(number))]).tolist() for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert stream.epoch == 0


def test_a_shorter_stream_on_a_resume_is_an_error(table, tmp_path):
    run(tmp_path, table.to_iterable_dataset().shuffle(seed=3, buffer_size=5), 2, keys=KEYS, batch_size=BATCH)
    with pytest.warns(FitflaxWarning), pytest.raises(DataError, match="the data ends after 4"):
        run(tmp_path, table.select(range(4)).to_iterable_dataset().shuffle(seed=3, buffer_size=5), 6, keys=KEYS, batch_size=BATCH)


def test_images_of_different_sizes_are_a_clear_error():
    with pytest.raises(DataError, match=r"x holds rows of different shapes\. Pad them first"):
        _stacked([np.ones((2, 2)), np.ones((3, 3))], "x")


@pytest.mark.parametrize("dtype", ["string", "timestamp[s]", None])
def test_a_non_numeric_feature_has_no_dtype(dtype):
    assert _dtype_of(types.SimpleNamespace(dtype=dtype)) is None
