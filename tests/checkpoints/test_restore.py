"""Which arrays of a checkpoint go where, on trees of NumPy arrays."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.restore import RestoreReport, check_mapping, match, moved
from fitflax.errors import ConfigError, RestoreError
from fitflax.state import TrainState

NORM = {"mean": np.full(2, 7, np.float32)}
PARAMS = {"body": {"kernel": np.full((3, 2), 1, np.float32), "bias": np.full(2, 2, np.float32)}, "head": {"kernel": np.full((2, 5), 3, np.float32)}}


def saved(params: Any = PARAMS, model_state: Any = None, impls: dict[str, str] | None = None, **rest: Any) -> Saved:
    state = {"batch_stats": {"norm": NORM}} if model_state is None else model_state
    return Saved(pathlib.Path("runs/a"), {"key_impls": impls or {}}, {"params": params, "model_state": state, **rest}, {})


def model(params: Any, **collections: Any) -> TrainState:
    """The shapes of a module's state; tuples are shapes."""

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, np.float32), tree, is_leaf=lambda node: isinstance(node, tuple))

    return TrainState(step=np.int32(0), params=shapes(params), model_state=shapes(collections), opt_state=(), key=jax.random.key(0))


def at(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        tree = tree[key]
    return tree


BODY = {"kernel": (3, 2), "bias": (2,)}
SAME = {"body": BODY, "head": {"kernel": (2, 5)}}


def test_arrays_with_the_same_path_are_restored_and_the_rest_are_listed():
    target = model({"body": BODY, "new": {"kernel": (2, 4)}}, batch_stats={"norm": {"mean": (2,)}, "other": {"mean": (4,)}})
    parts, report = match(saved(), target, {})
    assert at(parts, "params/body/kernel") is PARAMS["body"]["kernel"] and at(parts, "params/body/bias") is PARAMS["body"]["bias"]
    assert at(parts, "model_state/batch_stats/norm/mean") is NORM["mean"]
    assert at(parts, "params/new/kernel") == jax.ShapeDtypeStruct((2, 4), np.float32)
    assert report == RestoreReport(
        restored=("batch_stats/norm/mean", "params/body/bias", "params/body/kernel"),
        initialized=("batch_stats/other/mean", "params/new/kernel"),
        unused=("params/head/kernel",),
    )


def restored_by(target: TrainState, mapping: dict[str, str | None], checkpoint: Saved | None = None) -> dict[str, Any]:
    """Returns the first value of the array restored to each path of the model, or `None` if it is initialized."""
    parts, report = match(checkpoint or saved(), target, mapping)
    flat, _ = jax.tree.flatten_with_path(parts)
    values = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    result = {path.removeprefix("model_state/"): None if isinstance(leaf, jax.ShapeDtypeStruct) else float(leaf.flat[0]) for path, leaf in values.items()}
    assert sorted(path for path, value in result.items() if value is None) == list(report.initialized)
    assert sorted(path for path, value in result.items() if value is not None) == list(report.restored)
    return result


def test_a_mapping_gives_the_path_of_a_subtree_or_an_array_in_the_checkpoint():
    target = model({"encoder": BODY, "out": {"w": (2, 5)}})
    mapping: dict[str, str | None] = {"params/encoder": "params/body", "params/out/w": "params/head/kernel"}
    assert restored_by(target, mapping) == {"params/encoder/kernel": 1, "params/encoder/bias": 2, "params/out/w": 3}


def test_a_model_can_be_a_submodule_of_the_saved_one_or_contain_it():
    assert restored_by(model(BODY), {"params": "params/body"}) == {"params/kernel": 1, "params/bias": 2}
    assert restored_by(model({"net": SAME}), {"params/net": "params"}) == {"params/net/body/kernel": 1, "params/net/body/bias": 2, "params/net/head/kernel": 3}


def test_the_longest_path_takes_precedence():
    target = model({"encoder": BODY, "body": BODY})
    mapping = {"params/encoder": "params/body", "params/encoder/bias": None, "params/body": None, "params/body/bias": "params/body/bias"}
    assert restored_by(target, mapping) == {"params/encoder/kernel": 1, "params/encoder/bias": None, "params/body/kernel": None, "params/body/bias": 2}


def test_a_path_does_not_match_a_longer_name_that_starts_with_it():
    params = {"body": BODY, "body2": BODY}
    assert restored_by(model(params), {"params/body": None, "params/body2/kernel": "params/body/kernel"}) == {
        "params/body/kernel": None,
        "params/body/bias": None,
        "params/body2/kernel": 1,
        "params/body2/bias": None,
    }


def test_two_subtrees_can_use_the_same_saved_one_and_two_can_be_swapped():
    two = {"teacher": BODY, "student": BODY}
    both = restored_by(model(two), {"params/teacher": "params/body", "params/student": "params/body"})
    assert both == {"params/teacher/kernel": 1, "params/teacher/bias": 2, "params/student/kernel": 1, "params/student/bias": 2}
    checkpoint = saved({"teacher": PARAMS["body"], "student": {name: -leaf for name, leaf in PARAMS["body"].items()}})
    swapped = restored_by(model(two), {"params/teacher": "params/student", "params/student": "params/teacher"}, checkpoint)
    assert swapped == {"params/teacher/kernel": -1, "params/teacher/bias": -2, "params/student/kernel": 1, "params/student/bias": 2}


def test_none_initializes_what_the_checkpoint_has():
    assert restored_by(model(SAME), {"params/head": None})["params/head/kernel"] is None
    assert match(saved(), model(SAME), {"params/head": None})[1].unused == ("batch_stats/norm/mean", "params/head/kernel")


def test_averaged_parameters_can_be_used_as_parameters_and_are_not_listed_as_unused():
    averaged = saved(ema_params={"body": {name: leaf * 10 for name, leaf in PARAMS["body"].items()}})
    target = model({"body": BODY})
    assert restored_by(target, {"params": "ema_params"}, averaged) == {"params/body/kernel": 10, "params/body/bias": 20}
    assert match(averaged, target, {})[1].unused == ("batch_stats/norm/mean", "params/head/kernel")


def test_names_with_slashes_are_escaped_as_in_errors():
    checkpoint = saved({"a/b": {"w": np.ones(2, np.float32)}}, {})
    assert restored_by(model({"x": {"w": (2,)}}), {"params/x": "params/a~1b"}, checkpoint) == {"params/x/w": 1}
    renamed = moved(checkpoint, None, {"params/c~1d": "params/a~1b"})
    assert list(renamed.train["params"]) == ["c/d"]


def test_typed_keys_are_restored_as_keys_at_any_path():
    key = jax.random.key(7, impl="rbg")
    checkpoint = saved({}, {"noise": {"key": np.asarray(jax.random.key_data(key))}}, {"train/model_state/noise/key": "rbg", "run/x": "rbg"})
    target = model({})
    target.model_state["other"] = {"key": jax.ShapeDtypeStruct((), key.dtype)}
    parts, _ = match(checkpoint, target, {"other": "noise"})
    assert parts["model_state"]["other"]["key"] == key
    renamed = moved(checkpoint, None, {"other": "noise"})
    assert renamed.metadata["key_impls"] == {"train/model_state/other/key": "rbg", "run/x": "rbg"}
    assert checkpoint.metadata["key_impls"].keys() == {"train/model_state/noise/key", "run/x"}


def test_different_shapes_and_dtypes_are_one_error_with_advice_that_works():
    target = model({"encoder": {"kernel": (3, 4), "bias": (2,)}, "head": {"kernel": (2, 3)}, "body": BODY})
    target.params["body"]["bias"] = jax.ShapeDtypeStruct((2,), np.float16)
    mapping: dict[str, str | None] = {"params/encoder": "params/body", "params/body": "params/body"}
    with pytest.raises(RestoreError) as caught:
        match(saved(), target, mapping)
    advice, _, message = str(caught.value).partition(" Different: ")
    assert message == (
        "params/body/bias is float32, expected float16; params/encoder/kernel (from params/body/kernel) has shape (3, 2), expected (3, 4); "
        "params/head/kernel has shape (2, 5), expected (2, 3)."
    )
    advice = advice.removeprefix("runs/a does not fit this model. To restore only what matches, call Trainer.restore(path, partial=True, mapping=")
    assert restored_by(target, {**mapping, **eval(advice.removesuffix("). If you pass a mapping, map these to None in it."))})["params/encoder/bias"] == 2


def test_with_many_differences_the_advice_comes_first_and_only_some_are_listed():
    target = model({"body": {str(number): {"bias": (2,)} for number in range(10)}})
    checkpoint = saved({"body": {str(number): {"bias": np.ones(3, np.float32)} for number in range(10)}}, {})
    with pytest.raises(RestoreError) as caught:
        match(checkpoint, target, {})
    assert str(caught.value) == (
        "runs/a does not fit this model. To restore only what matches, call Trainer.restore(path, partial=True, mapping={'params/body/0/bias': None, "
        "'params/body/1/bias': None, 'params/body/2/bias': None, ...}). If you pass a mapping, map these to None in it. "
        "Different: params/body/0/bias has shape (3,), expected (2,); params/body/1/bias has shape (3,), expected (2,); "
        "params/body/2/bias has shape (3,), expected (2,); and 7 more."
    )


FAULTS: dict[str, tuple[dict[str, str | None], str]] = {
    "unknown here": ({"params/boddy": "params/body"}, r"'params/boddy': the model has no 'params/boddy' \(Did you mean 'params/body'\?\)"),
    "unknown there": ({"params/body": "params/bodi"}, r"'params/body': the checkpoint has no 'params/bodi' \(Did you mean 'params/body'\?\)"),
    "unknown none": ({"params/foot": None}, "'params/foot': the model has no 'params/foot'"),
    "whole words": ({"params/bod": "params/body"}, "'params/bod': the model has no 'params/bod'"),
    "collections": ({"model_state/batch_stats/norm": None}, "Did you mean 'batch_stats/norm'"),
    "a slash too many": ({"params/body/": "params/body"}, "Did you mean 'params/body'"),
    "shadowed": ({"params/head": "params/head", "params/head/kernel": None}, "'params/head': longer paths of the mapping cover everything below it"),
    "nothing in common": (
        {"params/head": "params/body/bias"},
        r"'params/head': no array of 'params/body/bias' matches \(the model has params/head/kernel; the checkpoint has params/body/bias\)",
    ),
    "by name": ({"params/extra": "params/body"}, "'params/extra' uses 'params/body', and so does the model's own 'params/body'"),
    "all at once": ({"params/foot": None, "params/body": "params/arm"}, "the model has no 'params/foot'.*; 'params/body': the checkpoint has no 'params/arm'"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_mapping_without_effect_or_in_conflict_with_a_name_is_an_error(case):
    mapping, message = FAULTS[case]
    target = model({**SAME, "extra": BODY}, batch_stats={"norm": {"mean": (2,)}})
    with pytest.raises(RestoreError, match=message):
        match(saved(), target, mapping)
    if None not in mapping.values():
        with pytest.raises(RestoreError, match=message):
            moved(saved(), target, mapping)


def test_both_suggested_mappings_for_an_inserted_layer_work():
    """flax numbers layers: with one more in front, `Dense_1` is not the same layer as the saved `Dense_1`."""
    checkpoint = saved({"Dense_0": {"bias": np.full(2, 1, np.float32)}, "Dense_1": {"bias": np.full(2, 2, np.float32)}}, {})
    target = model({f"Dense_{number}": {"bias": (2,)} for number in range(3)})
    mapping = {"params/Dense_2": "params/Dense_1"}
    with pytest.raises(RestoreError, match="'params/Dense_1': 'params/Dense_1' to use it for both, or 'params/Dense_1': None to initialize it"):
        match(checkpoint, target, mapping)
    inserted = restored_by(target, {**mapping, "params/Dense_1": None}, checkpoint)
    assert list(inserted.values()) == [1, None, 2]
    assert list(restored_by(target, {**mapping, "params/Dense_1": "params/Dense_1"}, checkpoint).values()) == [1, 2, 2]


def test_nothing_in_common_is_an_error_that_shows_both_sides():
    with pytest.raises(
        RestoreError, match=r"has no arrays with the paths of this model\. .* It has batch_stats/norm/mean, .*; the model has params/net/w"
    ) as caught:
        match(saved(), model({"net": {"w": (2,)}}), {})
    assert "mapping=" in str(caught.value)


@pytest.mark.parametrize("mapping", [["params/a"], {"params/a": 1}, {1: "params/a"}, "params"])
def test_a_mapping_must_be_a_dict_of_paths(mapping):
    with pytest.raises(ConfigError, match="mapping must be a dict"):
        check_mapping(mapping, partial=True)


def test_none_in_a_mapping_requires_partial():
    with pytest.raises(ConfigError, match=r"mapping\['params/head'\] is None.*partial=True"):
        check_mapping({"params/body": "params/x", "params/head": None}, partial=False)
    assert check_mapping({"params/head": None}, partial=True) == {"params/head": None} and check_mapping(None, partial=False) == {}


def test_renaming_in_a_whole_state_includes_all_that_is_named_after_parameters():
    def moments(sign: int) -> Any:
        return {"body": {name: sign * leaf for name, leaf in PARAMS["body"].items()}, "head": {"kernel": sign * PARAMS["head"]["kernel"]}}

    opt_state = {"0": {"count": np.int32(5), "mu": moments(10), "nu": moments(20)}, "1": {}}
    checkpoint = saved(step=np.int32(5), key=np.arange(2, dtype=np.uint32), opt_state=opt_state, ema_params=moments(30), impls={"train/key": "threefry2x32"})
    mapping = {"params/net/encoder": "params/body", "params/head/w": "params/head/kernel", "batch_stats/n": "batch_stats/norm"}
    for target in (None, model({"net": {"encoder": BODY}, "head": {"w": (2, 5)}}, batch_stats={"n": {"mean": (2,)}})):
        renamed = moved(checkpoint, target, mapping)
        assert renamed.train["step"] == 5 and renamed.train["key"] is checkpoint.train["key"] and renamed.metadata["key_impls"] == {"train/key": "threefry2x32"}
        assert renamed.train["model_state"] == {"batch_stats": {"n": NORM}}
        for path, factor in {"params": 1, "opt_state/0/mu": 10, "opt_state/0/nu": 20, "ema_params": 30}.items():
            tree = at(renamed.train, path)
            assert jax.tree.map(lambda leaf: float(leaf.flat[0]), tree) == {
                "net": {"encoder": {"kernel": factor, "bias": 2 * factor}},
                "head": {"w": 3 * factor},
            }
        assert at(renamed.train, "opt_state/0/count") == 5
    assert list(checkpoint.train["params"]) == ["body", "head"] and moved(checkpoint, None, {}) is checkpoint


def test_every_array_must_have_a_place_when_a_whole_state_is_renamed():
    checkpoint = saved({"body": PARAMS["body"], "old": PARAMS["body"]}, {})
    with pytest.raises(RestoreError, match=r"pass partial=True\. Left out: params/body/bias, params/body/kernel\."):
        moved(checkpoint, model({"body": BODY}), {"params/body": "params/old"})
    with pytest.raises(RestoreError, match="params/body/bias/x/kernel conflicts with the path of another array"):
        moved(checkpoint, None, {"params/body/bias/x": "params/old"})
    assert list(moved(checkpoint, None, {"params/new": "params/old"}).train["params"]) == ["body", "new"]


def test_a_report_is_short_for_a_model_of_any_size():
    paths = tuple(f"params/Dense_{number}/kernel" for number in range(10))
    report = RestoreReport(restored=("params/a",), initialized=paths, unused=())
    assert str(report).splitlines() == ["Restored 1 of 11 arrays.", f"Initialized: {', '.join(paths[:8])}, and 2 more"]
    assert repr(report) == "<RestoreReport: 1 restored, 10 initialized, 0 unused>"
