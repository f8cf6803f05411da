import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.data import Batcher, Position, adapt, padding
from fitflax.data.batch import Triple, full_mask
from fitflax.data.padding import class_weights_of
from fitflax.errors import ConfigError, DataError, FitflaxWarning


def triple(rows: int, **kwargs: object) -> Triple:
    values = {"x": np.arange(rows, dtype=np.float32), "y": (), "weights": None} | kwargs
    return Triple(**values)


# -- checks --


def test_structure_and_dtypes_are_checked_once_for_each_shape(monkeypatch):
    checked, check = [], padding.form_of
    monkeypatch.setattr(padding, "form_of", lambda x, y, weights, **options: checked.append(len(y)) or check(x, y, weights, **options))
    batcher = Batcher(size=4)
    for rows in (4, 4, 3, 4, 3, 4):
        for wrap in (lambda x: {"a": x}, jnp.asarray):
            batch, real, *_ = batcher(triple(rows, x=wrap(np.arange(float(rows))), y=np.arange(rows), weights=np.ones(rows)))
            assert real == rows and jax.tree.leaves(batch.x)[0].tolist() == [0, 1, 2, 3 if rows == 4 else 0] and batch.mask.tolist() == [*[True] * 3, rows == 4]
    assert checked == [4, 4, 3, 3]
    for rows in range(1, 200):  # Data of many lengths does not fill the memory.
        batcher(triple(rows, x=np.zeros((4, rows)), y=np.zeros(4)))
    assert len(batcher._checked) <= 64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"y": {"a": np.array([0, 2**40, 2])}}, r"y\['a'\] holds the integer 1099511627776, which does not fit int32"),
        ({"weights": np.array([1.0, 1.0, -1.0])}, r"sample_weight must be at least 0. Received: -1 at index \[2\]"),
        ({"x": np.array(["a", "b", "c"])}, "x must hold numbers, but its dtype is <U1"),
        ({"y": {"a": np.arange(2)}}, r"batch\['x'\] has 3, batch\['y'\]\['a'\] has 2"),
        ({"weights": [np.ones(3)]}, "sample_weight must be one array"),
    ],
)
def test_a_bad_batch_is_an_error_after_a_good_one(change, match):
    batcher, good = Batcher(size=3), triple(3, y={"a": np.arange(3)}, weights=np.ones(3))
    batcher(good)
    batcher(good)
    with pytest.raises(DataError, match=match):
        batcher(good._replace(**change))
    assert batcher(good).num_real == 3


@pytest.mark.parametrize(
    ("y", "match"),
    [(np.array([0, 2**40, 2]), "y holds the integer 1099511627776"), (np.arange(2), r"batch\['x'\] has 3, batch\['y'\] has 2")],
)
def test_a_bad_batch_of_two_arrays_is_an_error_after_a_good_one(y, match):
    batcher, good = Batcher(size=3), triple(3, y=np.arange(3))
    assert batcher(good).position == Position(0, 3) and batcher(good, Position(2, 6)).position == Position(2, 9)
    with pytest.raises(DataError, match=match):
        batcher(good._replace(y=y))
    assert batcher(good).num_real == 3


# -- padding --


@pytest.mark.parametrize(("rows", "size", "replicas"), [(3, 4, 1), (1, 4, 2), (3, 8, 4), (5, 8, 8), (1, 1, 8), (7, 10, 4)])
def test_a_short_batch_is_padded_by_repeating_its_rows_in_order(rows: int, size: int, replicas: int):
    batch, real, *_ = Batcher(num_shards=replicas, size=size)(triple(rows, y=np.arange(rows) * 10, weights=np.arange(rows) + 1.0))
    full = -(-size // replicas) * replicas
    expected = [index % rows for index in range(full)]
    assert real == rows
    assert batch.x.tolist() == expected
    assert batch.y.tolist() == [row * 10 for row in expected]
    assert batch.weights.tolist() == [row + 1.0 for row in expected]
    assert batch.mask.dtype == bool
    assert batch.mask.tolist() == [index < rows for index in range(full)]


def test_weights_on_the_device_are_not_read_with_each_batch(monkeypatch):
    weights = jnp.array([1.0, -1.0, 1.0, 1.0])
    with jax.transfer_guard("disallow"), monkeypatch.context() as patch:
        patch.setattr(type(weights), "min", lambda self: pytest.fail("the weights were read"), raising=False)
        batch, *_ = Batcher(size=4)(triple(4, weights=weights))
    assert isinstance(batch.weights, jax.Array) and batch.weights.tolist() == weights.tolist()
    with pytest.raises(DataError, match=r"sample_weight must be at least 0. Received: -1 at index \[1\]"):
        Batcher(size=4)(triple(4, weights=np.asarray(weights)))
    with pytest.raises(DataError, match=r"sample_weight must be at least 0. Received: -1 at index \[1\]"):
        adapt(np.ones(4), np.ones(4), weights)


def test_a_full_batch_is_not_copied_and_has_the_shared_full_mask():
    given = triple(4, y=np.zeros(4))
    batch, *_ = Batcher(num_shards=2, size=4)(given)
    assert batch.x is given.x and batch.y is given.y
    assert batch.mask is full_mask(4)


def test_the_full_mask_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        full_mask(4)[0] = False


def test_padding_keeps_structure_dtypes_and_trailing_axes():
    x = {"image": np.zeros((3, 2, 2), np.uint8), "pair": (np.zeros(3, np.int32), np.ones((3, 1), bool))}
    batch, *_ = Batcher(size=4)(Triple(x, np.zeros((3, 5), np.float32), np.ones((3, 5), np.float32)))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), batch.x) == {
        "image": ((4, 2, 2), "uint8"),
        "pair": (((4,), "int32"), ((4, 1), "bool")),
    }
    assert batch.y.shape == batch.weights.shape == (4, 5)


def test_the_first_batch_determines_the_size_if_none_is_given():
    batcher = Batcher(num_shards=4)
    assert len(batcher(triple(6))[0].mask) == 8
    assert len(batcher(triple(1))[0].mask) == 8


def test_a_larger_later_batch_is_accepted_with_a_warning_about_compiling_again():
    batcher = Batcher(num_shards=2)
    batcher(triple(3))
    with pytest.warns(FitflaxWarning, match="A batch of 5 examples follows batches of 4, so the step is compiled again"):
        assert len(batcher(triple(5))[0].mask) == 6
    assert len(batcher(triple(3))[0].mask) == 6


def test_without_padding_every_batch_keeps_its_size():
    batcher = Batcher(num_shards=2, size=4, pad=False)
    assert [len(batcher(triple(rows))[0].mask) for rows in (4, 2, 6)] == [4, 2, 6]


def test_without_padding_a_batch_must_be_divisible_by_the_number_of_devices():
    with pytest.raises(DataError, match=r"With compile\(pad=False\), .* a multiple of 2 \(devices: 2, accumulate_steps: 1\)\. Received: 3 examples"):
        Batcher(num_shards=2, size=4, pad=False)(triple(3))


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, lambda array: __import__("pandas").Series(array)], ids=["numpy", "jax", "pandas"])
def test_arrays_and_series_make_batches(make):
    batch, real, *_ = Batcher(size=4)(Triple(make(np.arange(3.0, dtype=np.float32)), (), None))
    assert real == 3
    np.testing.assert_array_equal(batch.x, [0, 1, 2, 0])


# -- errors --


def test_leaves_of_unequal_length_are_an_error_that_lists_their_paths():
    bad = Triple({"image": np.zeros(4), "label": np.zeros(3)}, (), None)
    with pytest.raises(DataError, match=r"x.*\['image'\].* has 4.*\['label'\].* has 3"):
        Batcher()(bad)


@pytest.mark.parametrize("bad", [triple(4, y=np.zeros(3)), triple(4, weights=np.zeros(5))])
def test_targets_and_weights_must_have_as_many_examples_as_the_inputs(bad: Triple):
    with pytest.raises(DataError, match="same number of examples"):
        Batcher()(bad)


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (np.zeros((0, 3)), "a batch of 0 examples"),
        (np.array(["a", "b"]), "must hold numbers"),
        (np.array([1, "a"], object), "must hold numbers.*encode them"),
        (np.array(["2020-01-01"], "datetime64[D]"), "must hold numbers"),
        (np.float32(1.0), "leading axis"),
        ((), "holds no arrays"),
    ],
)
def test_anything_but_a_batch_of_numbers_is_an_error(x: object, match: str):
    with pytest.raises(DataError, match=match):
        Batcher()(Triple(x, (), None))


@pytest.mark.parametrize("x", [None, {}, (), [None]])
def test_a_batch_without_inputs_is_an_error(x: object):
    for call in (lambda: Batcher()(Triple(x, np.zeros(2), None)), lambda: adapt((None, np.zeros(2)))):
        with pytest.raises(DataError, match=r"^`x` holds no arrays\.$"):
            call()


# -- class weights --

WEIGHTS = {0: 1, 1: 2, 2: 3}
LABELS = np.array([0, 1, 0, 2])


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS[:, None], np.eye(3)[LABELS], np.eye(3, dtype=bool)[LABELS], LABELS.astype(np.float32), LABELS.astype(np.uint8), jnp.asarray(LABELS)],
    ids=["integer", "column", "one-hot", "bool one-hot", "float", "uint8", "jax"],
)
def test_class_weights_apply_to_labels_in_every_format(labels: np.ndarray):
    weights = class_weights_of(labels, WEIGHTS)
    assert weights.dtype == np.float32
    assert weights.tolist() == [1, 2, 1, 3]


def test_labels_without_a_class_weight_have_weight_one():
    assert class_weights_of(np.array([0, 5, -1]), {0: 0.5}).tolist() == [0.5, 1, 1]


def test_class_weights_multiply_sample_weights_per_example_and_per_token():
    batcher = Batcher(size=4, class_weight=WEIGHTS)
    per_example, *_ = batcher(triple(4, y=LABELS, weights=np.array([1.0, 10, 100, 1000])))
    assert per_example.weights.tolist() == [1, 20, 100, 3000]
    on_device, *_ = batcher(triple(4, y=LABELS, weights=jnp.array([1, 10, 100, 1000])))
    assert (on_device.weights.tolist(), on_device.weights.dtype) == ([1, 20, 100, 3000], np.float32)
    per_token, *_ = batcher(triple(4, y=LABELS, weights=np.arange(8.0).reshape(4, 2)))
    np.testing.assert_array_equal(per_token.weights, np.arange(8.0).reshape(4, 2) * np.array([1, 2, 1, 3])[:, None])


def test_class_weights_alone_become_sample_weights_and_are_padded_with_their_rows():
    batch, *_ = Batcher(size=4, class_weight=WEIGHTS)(triple(3, y=np.array([2, 1, 0])))
    assert batch.weights.tolist() == [3, 2, 1, 3]


@pytest.mark.parametrize("bad", [{"cat": 1}, {0.5: 1}, {True: 1}, {0: -1}, {0: float("nan")}, {0: None}, {0: "much"}, {0: [1, 2]}])
def test_class_weights_must_map_integers_to_nonnegative_weights(bad: dict):
    with pytest.raises(ConfigError, match="class_weight must map integer labels"):
        Batcher(class_weight=bad)


@pytest.mark.parametrize(
    "y",
    [(), (LABELS, LABELS), {"a": LABELS}, np.zeros((4, 2, 2)), np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[1, 1, 0], [0, 1, 0]])],
    ids=["none", "tuple", "dict", "cube", "soft", "several labels a row"],
)
def test_class_weights_need_one_label_per_example(y: object):
    with pytest.raises(DataError, match="class_weight needs"):
        class_weights_of(y, WEIGHTS)


# -- parts of batches, for several processes --


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16])
@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_a_batch_concatenate_to_the_whole_batch(rows, count):
    whole = Batcher(num_shards=4, size=8)(triple(rows, weights=np.arange(rows) + 1.0))
    parts = [Batcher(num_shards=4, size=8, part=(index, count))(triple(rows, weights=np.arange(rows) + 1.0)) for index in range(count)]
    for name in ("x", "mask", "weights"):
        np.testing.assert_array_equal(np.concatenate([getattr(part.batch, name) for part in parts]), getattr(whole.batch, name))
    assert {(part.num_real, part.num_rows) for part in parts} == {(rows, whole.num_rows)} == {(rows, len(whole.batch.mask))}
    size = whole.num_rows // count
    for part in parts:
        assert (part.batch.mask is full_mask(size)) == bool(part.batch.mask.all())


def test_the_parts_of_batches_cut_from_one_piece_concatenate_to_those_batches():
    whole = Batcher(num_shards=2, size=4).cut(Triple(np.arange(8.0), np.arange(8), None), 4, Position())
    parts = [Batcher(num_shards=2, size=4, part=(index, 2)).cut(Triple(np.arange(8.0), np.arange(8), None), 4, Position()) for index in range(2)]
    for number, fed in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([part[number].batch.x for part in parts]), fed.batch.x)
        assert [part[number].position for part in parts] == [fed.position] * 2


def test_only_the_first_batch_is_compared_across_processes():
    seen = []
    batcher = Batcher(size=4, compare=seen.append)
    batcher(triple(4))
    batcher(triple(4))
    batcher.cut(Triple(np.arange(8.0), (), None), 4, Position())
    assert len(seen) == 1
