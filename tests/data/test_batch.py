import collections

import jax
import numpy as np
import pytest

from fitflax.data import Batcher, Position, adapt
from fitflax.data.batch import Selection, Triple, leaf_paths, num_examples, to_numpy
from fitflax.errors import ConfigError, DataError

# -- choosing inputs and targets --

BATCH = {"image": np.zeros(2), "mask": np.ones(2), "label": np.array([0, 1])}


@pytest.mark.parametrize(
    ("inputs", "targets", "x", "y"),
    [
        ("image", "label", BATCH["image"], BATCH["label"]),
        (("image", "mask"), "label", (BATCH["image"], BATCH["mask"]), BATCH["label"]),
        ({"img": "image", "m": "mask"}, "label", {"img": BATCH["image"], "m": BATCH["mask"]}, BATCH["label"]),
        ("image", ("label", "mask"), BATCH["image"], (BATCH["label"], BATCH["mask"])),
        ("image", {"cls": "label"}, BATCH["image"], {"cls": BATCH["label"]}),
        ("image", None, BATCH["image"], ()),
    ],
    ids=["key", "several inputs", "keywords", "several targets", "named targets", "no targets"],
)
def test_inputs_and_targets_are_picked_from_dicts(inputs, targets, x, y):
    picked = Selection(inputs, targets).split(BATCH)
    jax.tree.map(np.testing.assert_array_equal, (picked.x, picked.y), (x, y))
    assert picked.weights is None


def test_any_mapping_is_accepted():
    assert Selection("image").split(collections.UserDict(BATCH)).x is BATCH["image"]


def test_predict_needs_no_targets_in_its_dicts():
    assert Selection("image", "label").split({"image": BATCH["image"]}, inputs_only=True) == (BATCH["image"], (), None)


def test_without_keys_a_batch_is_inputs_targets_and_weights():
    a, b, c = np.zeros(2), np.ones(2), np.full(2, 2.0)
    assert Selection().split(a) == (a, (), None)
    assert Selection().split((a,)) == (a, (), None)
    assert Selection().split((a, b)) == (a, b, None)
    assert Selection().split((a, b, c)) == (a, b, c)
    assert Selection().split(((a, b), c)) == ((a, b), c, None)
    assert Selection().split((a, None, c)) == (a, (), c)
    assert Selection().split([a, b, c]) == (a, b, c)
    assert Selection().split([[a, b], c]) == ([a, b], c, None)
    assert Selection().split(BATCH).x is BATCH


@pytest.mark.parametrize("raw", [(), (1, 2, 3, 4)])
def test_a_batch_with_an_unsupported_number_of_elements_is_an_error(raw: tuple):
    with pytest.raises(DataError, match=rf"a tuple of {len(raw)} elements"):
        Selection().split(raw)


def test_a_missing_key_is_an_error_that_lists_the_available_keys():
    with pytest.raises(DataError, match=r"the key 'imag', which the batches do not have\. Did you mean 'image'\? Their keys: 'image', 'mask', 'label'\."):
        Selection("imag").split(BATCH)
    with pytest.raises(DataError, match=r"Trainer\(targets=...\) selects the key 'labels'"):
        Selection("image", "labels").split(BATCH)


def test_keys_require_batches_that_are_dicts():
    with pytest.raises(DataError, match=r"needs batches that are dicts\. Received: a tuple"):
        Selection("image", "label").split((np.zeros(2), np.zeros(2)))


@pytest.mark.parametrize("spec", [3, ("a", 1), {"a": 1}, ["a"]])
def test_a_selection_must_consist_of_keys(spec: object):
    with pytest.raises(ConfigError, match="must be a key, a tuple of keys or a dict"):
        Selection(inputs=spec)


def test_targets_without_inputs_are_an_error():
    with pytest.raises(ConfigError, match="also needs inputs="):
        Selection(targets="label")


def test_positions_compare_by_value():
    assert Position(1, 2) == Position(passes=1, examples=2) != Position(1, 3)


def test_the_error_for_an_indivisible_batch_names_the_required_multiple():
    batcher = Batcher(accumulate_steps=3, pad=False)
    with pytest.raises(DataError, match=r"a multiple of 3 \(devices: 1, accumulate_steps: 3\)\. Received: 32 examples\. .* drop_remainder=True"):
        batcher(Triple(np.zeros((32, 1)), (), None))


# -- integers --


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (np.array([0, 1_700_000_000_000]), "1700000000000, which does not fit int32"),
        (np.array([-(2**31) - 1, 5]), "-2147483649, which does not fit int32"),
        (np.array([2**32], np.uint64), "4294967296, which does not fit uint32"),
    ],
    ids=["too large", "too small", "unsigned"],
)
def test_an_integer_that_jax_cannot_hold_is_an_error_that_names_the_array_and_the_value(values, shown):
    with pytest.raises(DataError, match=rf"x\['time'\] holds the integer {shown}\. Encode it in a smaller range, or set JAX_ENABLE_X64=1\."):
        Batcher()(Triple({"time": values}, (), None))
    with pytest.raises(DataError, match=rf"x\['time'\] holds the integer {shown}"):
        adapt({"time": values})


def test_a_label_beyond_int32_is_an_error_although_it_would_wrap_to_a_valid_one():
    with pytest.raises(DataError, match="y holds the integer 4294967297, which does not fit int32"):
        Batcher()(Triple(np.zeros((2, 1)), np.array([0, 2**32 + 1]), None))


def test_the_largest_and_smallest_integers_are_accepted_unchanged():
    for narrow, wide in ((np.int32, np.int64), (np.uint32, np.uint64)):
        limits = np.array([np.iinfo(narrow).min, np.iinfo(narrow).max], wide)
        np.testing.assert_array_equal(adapt(limits, shuffle=False).read(slice(None)).x, limits)
        assert Batcher()(Triple(limits, (), None)).batch.x is limits  # JAX converts it.


def test_64_bits_are_accepted_if_jax_has_them():
    with jax.enable_x64(True):
        assert adapt(np.array([2**40]), shuffle=False).read(slice(None)).x.tolist() == [2**40]


def test_floats_and_narrow_integers_are_not_searched(monkeypatch):
    monkeypatch.setattr("fitflax.data.batch.check_fits", lambda *_, **__: pytest.fail("searched"))
    for dtype in (np.int32, np.uint32, np.int8, np.float64, bool):
        Batcher()(Triple(np.ones(2, dtype), (), None))


# -- dtypes --


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i8", ">c8"])
def test_arrays_in_another_byte_order_are_converted(dtype):
    values, batcher = np.arange(3).astype(dtype), Batcher()
    batches = [adapt(values, shuffle=False).read(slice(None)).x, *(batcher(Triple(values, (), None)).batch.x for _ in range(2))]
    for batch in batches:
        assert batch.dtype.isnative and jax.numpy.asarray(batch).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), r"it is a structured array with the fields \['a', 'b'\]\. Pass a dict of arrays"),
        (np.zeros(2, np.longdouble), r"has the dtype float\d+, which JAX does not have\. Convert it: x\['a'\]\.astype\(float\)"),
        (np.zeros(2, np.clongdouble), r"has the dtype complex\d+, which JAX does not have\. Convert it: x\['a'\]\.astype\(complex\)"),
        (np.ma.array([1.0, 2.0], mask=[False, True]), r"has missing values: it is a masked array\. .* x\['a'\]\.filled\(0\)"),
    ],
    ids=["structured", "long double", "complex long double", "masked"],
)
def test_arrays_that_jax_cannot_hold_are_an_error(values, message):
    if values.dtype in (np.float64, np.complex128) and values.dtype.char in "gG":
        pytest.skip("long double is double on this platform")
    for call in (lambda: Batcher()(Triple({"a": values}, (), None)), lambda: adapt({"a": values})):
        with pytest.raises(DataError, match=rf"^x\['a'\] .*{message}"):
            call()


def test_narrow_dtypes_of_jax_and_masked_arrays_without_masked_values_are_accepted():
    for values in (np.ones(2, jax.numpy.bfloat16), np.ones(2, jax.numpy.float8_e4m3fn), np.ma.array([1.0, 1.0])):
        batch = Batcher()(Triple(values, (), None)).batch.x
        assert type(batch) is np.ndarray and batch.dtype == values.dtype and batch.astype(np.float32).tolist() == [1, 1]


def test_num_examples_is_the_common_length():
    assert num_examples({"a": np.zeros((3, 2)), "b": (np.zeros(3),)}, name="x") == 3


def test_leaf_paths_are_written_as_in_python():
    assert [path for path, _ in leaf_paths({"a": [1, 2]}, "x")] == ["x['a'][0]", "x['a'][1]"]


def test_an_object_that_numpy_cannot_convert_is_a_clear_error():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("the file is gone")

    with pytest.raises(DataError, match=r"`x`\['image'\] cannot be converted to an array: the file is gone"):
        to_numpy({"image": Broken()}, name="`x`")
