import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from fitflax.errors import ConfigError, ShardingError
from fitflax.parallel.partition import Partition, checked_rules
from fitflax.state import AxisNames, TrainState

SIZES = {"data": 4, "model": 2}
RULES = (("batch", "data"), ("embed", "data"), ("mlp", "model"), ("kv", None), ("both", ("data", "model")), ("data", "data"), ("model", "model"))
PARTITION = Partition(SIZES, RULES, ("data",), 16)


def state_of(shapes: dict[str, tuple[int, ...]], names: dict[str, Any], optimizer: Any = None, *, is_known: bool = True) -> TrainState:
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    axes = AxisNames({f"params/{name}": each for name, each in names.items()}, is_known=is_known)
    opt_state = jax.eval_shape((optimizer or optax.sgd(0.1)).init, params)
    return TrainState(step=np.int32(0), params=params, model_state={}, opt_state=opt_state, key=jax.random.key(0), axes=axes)


@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        ((8, 6), ("embed", "mlp"), P("data", "model")),
        ((8, 6), ("embed", "kv"), P("data")),
        ((6, 8), (None, "mlp"), P(None, "model")),
        ((3, 5), (None, None), P()),
        ((8, 8), ("embed", "batch"), P(None, "data")),  # The rule for "batch" comes first, and a mesh axis can be used only once.
        ((16, 3), ("both", None), P(("data", "model"))),
        ((16, 3), (("model", "data"), None), P(("model", "data"))),
        ((8, 6), ("data", "model"), P("data", "model")),  # As in nn.with_partitioning.
        ((), (), P()),
    ],
)
def test_an_array_with_axis_names_is_split_as_the_rules_say(shape, names, spec):
    assert PARTITION.spec("w", shape, names) == spec


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 16), P(None, "data")),  # The largest.
        ((8, 8), P("data")),  # The first of equals.
        ((8, 9), P("data")),  # The largest that can be split evenly.
        ((7, 9), P()),
        ((3, 5, 8), P(None, None, "data")),
        ((15,), P()),
        ((16,), P("data")),
        ((3, 4), P()),  # Too small.
        ((), P()),
        ((0, 4), P()),
    ],
)
def test_an_array_without_names_is_split_along_the_largest_axis_that_splits_evenly(shape, spec):
    assert PARTITION.spec("w", shape, None) == spec


def test_arrays_without_names_stay_whole_without_fsdp():
    assert dataclasses.replace(PARTITION, fsdp_axes=()).spec("w", (64, 64), None) == P()


def test_a_split_over_two_mesh_axes_requires_a_size_divisible_by_their_product():
    both = dataclasses.replace(PARTITION, fsdp_axes=("data", "model"))
    assert both.spec("w", (8, 12), None) == P(("data", "model"))
    assert both.spec("w", (12, 12), None) == P()


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((8, 6), ("embed", "mpl"), r"w has axis names that are neither in rules nor axes of the mesh: 'mpl' \(did you mean 'mlp'\?\)"),
        ((8, 6), (("data", "modle"), None), "neither in rules nor axes of the mesh: 'modle'"),
        ((8, 6), ("foo", "bar"), "neither in rules nor axes of the mesh: 'foo', 'bar'"),
        (
            (8, 7),
            ("embed", "mlp"),
            r"w \[8, 7\]: axis 'mlp' of size 7 cannot be split evenly over model=2 \(choose a multiple of 2, or add the rule \('mlp', None\)\)",
        ),
        ((12,), ("both",), r"w \[12\]: axis 'both' of size 12 cannot be split evenly over data=4, model=2"),
        ((8, 8), ("embed", "embed"), r"w \[8, 8\] has the axis name 'embed' more than once"),
        ((8, 8), (("data",), ("data", "model")), "would be split over the same mesh axis twice"),
        ((8,), ("embed", "mlp"), r"w \[8\] has 2 axis names, \['embed', 'mlp'\], for 1 axes"),
    ],
)
def test_axis_names_that_do_not_fit_are_errors_with_the_path(shape, names, message):
    with pytest.raises(ShardingError, match=message):
        PARTITION.spec("w", shape, names)


def test_axes_after_the_named_ones_are_not_split_as_in_jax():
    """Kernels of linen's attention are created as matrices with two axis names, but have three axes."""
    assert PARTITION.spec("w", (8, 6, 5), ("embed", "mlp")) == P("data", "model")
    assert PARTITION.spec("w", (8, 8), ("embed",)) == P("data")


def test_one_error_lists_all_mistakes_in_a_state_and_moments_do_not_repeat_them():
    state = state_of({"a": (8, 7), "b": (3,), "c": (8, 8)}, {"a": ("embed", "mlp"), "b": ("mpl",), "c": ("embed", "mlp")}, optax.adam(0.1))
    with pytest.raises(ShardingError, match=r"does not fit the mesh \{'data': 4, 'model': 2\} with the rules .*: params/a .*; params/b ") as caught:
        PARTITION.specs(state)
    assert str(caught.value).count("params/a") == 1 and "opt_state" not in str(caught.value)


def test_moments_and_averages_are_split_like_their_parameters():
    state = state_of({"a": (8, 6), "b": (16, 3)}, {"a": ("embed", "mlp")}, optax.chain(optax.clip(1.0), optax.adamw(0.1)))
    specs = PARTITION.specs(dataclasses.replace(state, ema_params=state.params))
    expected = {"a": P("data", "model"), "b": P("data")}
    assert specs.params == specs.ema_params == specs.opt_state[1][0].mu == specs.opt_state[1][0].nu == expected
    assert (specs.step, specs.key, specs.opt_state[1][0].count) == (P(), P(), P())


def test_factored_moments_are_split_by_their_size():
    state = state_of({"a": (256, 512)}, {"a": ("embed", "mlp")}, optax.adafactor(0.1))
    specs = PARTITION.specs(state).opt_state
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))
    }
    assert [spec for path, spec in named.items() if path.endswith(("v_row/a", "v_col/a"))] == [P("data"), P("data")]


def test_a_state_with_unknown_axis_names_is_split_over_the_whole_mesh():
    shapes = {"a": (8, 6), "b": (2, 2), "largest that divides": (500, 516), "half": (7, 6), "none": (7, 9)}
    specs = PARTITION.specs(state_of(shapes, {}, is_known=False))
    assert specs.params == {"a": P(("data", "model")), "b": P(), "largest that divides": P(None, "data"), "half": P(None, "model"), "none": P()}


def test_large_arrays_that_stay_whole_are_listed_largest_first():
    shapes = {"a": (512, 1024), "b": (1024, 1024), "small": (4, 4), "split": (1024, 1024), **{f"c{index}": (512, 513) for index in range(5)}}
    names = dict.fromkeys(shapes, (None, None)) | {"split": (None, "mlp")}
    words = PARTITION.describe_large(state_of(shapes, names))
    assert words is not None
    why = "not split by the rules for its axis names"
    assert words.startswith(f"params/b (4.0 MB, {why}), params/a (2.0 MB, {why}), params/c0 (1.0 MB, {why}), ") and ", and 2 more; 11.0 MB in total" in words
    assert "params/small" not in words and "params/split" not in words
    assert dataclasses.replace(PARTITION, sizes={"data": 1, "model": 1}).describe_large(state_of(shapes, names)) is None


def test_the_description_says_why_an_array_stays_whole():
    state = state_of({"a": (1001, 1003)}, {})
    assert "no axis of [1001, 1003] is a multiple of 4" in str(PARTITION.describe_large(state))
    assert "smaller than fsdp_min_size" in str(dataclasses.replace(PARTITION, fsdp_min_size=2**30).describe_large(state))
    assert "no axis names" in str(dataclasses.replace(PARTITION, fsdp_axes=()).describe_large(state))


def test_an_unknown_name_is_reported_once_with_the_first_array_that_has_it():
    shapes = {f"a{index}": (8, 8) for index in range(9)} | {"b": (8, 8)}
    names = dict.fromkeys(shapes, ("foo", "bar")) | {"b": ("foo", "other")}
    with pytest.raises(ShardingError) as caught:
        PARTITION.specs(state_of(shapes, names, optax.adam(0.1)))
    text = str(caught.value)
    assert text.count("'bar'") == text.count("'other'") == 1 and "params/a0" in text and "params/b" in text and "params/a1" not in text
    assert text.endswith("Add a rule for every name, such as ('name', None) for an axis that is not split.")


def test_mesh_axes_that_split_nothing_are_found():
    named = state_of({"a": (8, 6)}, {"a": ("embed", "mlp")})
    assert PARTITION.idle_axes(named, ()) == []
    assert PARTITION.idle_axes(state_of({"a": (8, 6)}, {}), ()) == ["model"]
    assert PARTITION.idle_axes(state_of({"a": (2, 2)}, {}), ("data",)) == ["model"]
    assert dataclasses.replace(PARTITION, sizes={"data": 4, "model": 1}).idle_axes(state_of({"a": (8, 6)}, {}), ()) == []


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("mlp", "modle")], r"maps 'mlp' to 'modle', but the mesh has the axes \['data', 'model'\]. Did you mean 'model'\?"),
        (["mlp"], r"takes pairs \(logical name, mesh axis\), such as .* Received: 'mlp'."),
        ([("mlp", "data", "model")], "takes pairs"),
        ([(1, "data")], "takes pairs"),
        ({"mlp": 1}, "must map each logical name to a mesh axis, a tuple of them, or None. Received: 'mlp': 1."),
        ({"mlp": ("data", 2)}, "a tuple of them"),
    ],
)
def test_invalid_rules_are_errors(rules, message):
    with pytest.raises(ConfigError, match=message):
        checked_rules(rules, SIZES)


def test_rules_can_be_pairs_or_a_dict():
    assert checked_rules(None, SIZES) == ()
    assert checked_rules({"a": ["data", "model"], "b": None}, SIZES) == checked_rules((("a", ("data", "model")), ["b", None]), SIZES)
