"""Rules between the names and layouts of a file and those of a model."""

import numpy as np
import pytest

from fitflax.checkpoints import WeightRule
from fitflax.checkpoints.weight_rules import from_file, rules_of, to_file
from fitflax.errors import ConfigError, RestoreError
from tests.checkpoints.samples import both_ways

RNG = np.random.default_rng(0)
TURN = {"load": np.transpose, "save": np.transpose}


def test_one_rule_applies_to_all_layers_in_both_directions():
    arrays = {f"encoder.{layer}.{part}.weight": RNG.normal(size=(2, 3)) for layer in (0, 1, 11) for part in ("up", "down")}
    ours = both_ways(arrays, [WeightRule("encoder.{layer}.{part}.weight", "params/layer_{layer}/{part}/kernel", **TURN)])
    assert np.array_equal(ours["params/layer_11/up/kernel"], arrays["encoder.11.up.weight"].T) and len(ours) == 6


def test_a_field_matches_one_part_of_a_name_and_the_same_text_everywhere():
    rules = [WeightRule("a.{n}.w", "params/{n}/w")]
    with pytest.raises(RestoreError, match=r"does not cover all arrays.* Not covered: a\.0\.b\.w\."):
        from_file({"a.0.w": RNG.normal(size=2), "a.0.b.w": RNG.normal(size=2)}, rules, where="a file")
    ours, left = from_file({"{x}.w": np.ones(1), "1-1": np.ones(1), "1-2": np.ones(1)}, [WeightRule("{n}-{n}", "params/{n}")], where="a file", partial=True)
    assert list(ours) == ["params/1"] and left == ["1-2", "{x}.w"]


def test_one_array_can_become_several_and_several_can_become_one():
    split = WeightRule("qkv", ("params/q", "params/k"), lambda array: np.split(array, 2), lambda q, k: np.concatenate([q, k]))
    ours = both_ways({"qkv": np.arange(4)}, [split])
    assert ours["params/k"].tolist() == [2, 3]
    join = WeightRule(("a.{n}", "b.{n}"), "params/{n}", lambda a, b: np.stack([a, b]), tuple)
    assert both_ways({"a.0": np.arange(2), "b.0": np.arange(2) + 5}, [join])["params/0"].shape == (2, 2)
    with pytest.raises(RestoreError, match=r"'a.0' also needs 'b.0', which is missing"):
        from_file({"a.0": np.arange(2)}, [join], where="a file")


def test_a_dict_and_a_function_are_mappings_too():
    arrays = {"w": RNG.normal(size=(2, 3)), "b": np.ones(2), "junk": np.ones(1)}
    mapping = {"w": ("params/kernel", np.transpose), "b": "params/bias", "junk": None}
    ours, _ = from_file(arrays, rules_of(mapping, list(arrays)), where="a file")
    assert ours["params/kernel"].shape == (3, 2) and ours.keys() == {"params/kernel", "params/bias"}
    names = {"w{0}": np.ones(1), "b": np.ones(2)}
    found, left = from_file(names, rules_of(lambda name: None if name == "b" else f"params/{name}", list(names)), where="a file")
    assert list(found) == ["params/w{0}"] and left == []
    assert to_file({"params/bias": np.ones(2)}, rules_of({"b": "params/bias", "junk": None}, ()), where="a file").keys() == {"b"}


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ([WeightRule("w", "params/a")], r"does not cover all arrays.* Not covered: b, c\."),
        ([WeightRule("w", "params/a"), WeightRule("bb", "params/b"), WeightRule("c", "params/c")], r"there is no 'bb' \(Did you mean 'b'\?\)"),
        ([WeightRule("params/w", "w")], r"\(keys are names in the file, and values are paths in the model\)\.$"),
        ([WeightRule("w", "params/a"), WeightRule("b", "params/a"), WeightRule("c", None)], "two rules produce 'params/a'"),
        ([WeightRule("w", "params/a", lambda array: array.reshape(7))], r"mapping of w float64\[2, 3\] failed: ValueError"),
        ([WeightRule("w", ("params/a", "params/b"), lambda array: (array,))], "it must return 2 arrays, but returned 1"),
        ([WeightRule("w", ("params/a", "params/b"), lambda array: array)], r"mapping of w .*it must return 2 arrays as a tuple, but returned a ndarray"),
        ([WeightRule("w", ("params/a", "params/b"), lambda array: (array, None))], "it must return 2 arrays, but returned ndarray, NoneType"),
        ([WeightRule("w", "params/a", lambda array: None)], r"mapping of w .*it must return an array, but returned NoneType"),
        ([WeightRule("w", "params/a"), WeightRule("w", "params/b")], "two rules use 'w'"),
        ([WeightRule("{n}", "params/{n}"), WeightRule("w", "params/b")], "two rules use 'w'"),
    ],
)
def test_rules_that_do_not_fit_the_file_are_errors(rules, match):
    with pytest.raises(RestoreError, match=match):
        from_file({"w": np.ones((2, 3)), "b": np.ones(2), "c": np.ones(2)}, rules, where="a file")


def test_optional_arrays_may_be_missing():
    rules = [WeightRule("w", "params/w"), WeightRule("mask", None, optional=True), WeightRule("tied", "params/tied", optional=True)]
    assert both_ways({"w": np.ones(2)}, rules).keys() == {"params/w"}
    assert from_file({"w": np.ones(2), "mask": np.ones(1)}, rules, where="a file")[0].keys() == {"params/w"}


@pytest.mark.parametrize(
    "arguments",
    [
        *[("", "params/a"), ((), "params/a"), ("a", ()), ("a", ""), (7, "params/a"), ("a.{n}", "params/a"), ("a.{n}", "params/{m}"), (("a", "b"), "params/a")],
        *[(("a", "a"), "params/a", np.add), ("a", ("params/a", "params/a"), np.split), ("a.{0}", "params/{0}"), ("a.{}", "params/{}")],
    ],
    ids=lambda arguments: repr([getattr(argument, "__name__", argument) for argument in arguments]),
)
def test_a_rule_that_makes_no_sense_is_an_error(arguments):
    with pytest.raises(ConfigError, match="WeightRule"):
        WeightRule(*arguments)


@pytest.mark.parametrize("mapping", ["params", 7, [1], {"a": 1}, {"a": ("params/a", 1)}, {1: "params/a"}, lambda name: 7])
def test_a_value_that_is_not_a_mapping_is_an_error(mapping):
    with pytest.raises(ConfigError, match="mapping must be a list of WeightRule, a dict"):
        rules_of(mapping, ["a"])


def test_a_rule_that_drops_an_array_may_come_before_another_rule_for_it():
    rules = [WeightRule("b", None), WeightRule("a", "params/a"), WeightRule("b", "params/b")]
    assert from_file({"a": np.ones(1), "b": np.ones(1)}, rules, where="a file")[0].keys() == {"params/a"}


def test_braces_in_the_names_of_a_dict_are_literal():
    names = {"w{0}": np.ones(1), "w{n}": np.ones(2)}
    rules = rules_of({"w{0}": "params/a{0}", "w{n}": "params/{n}"}, list(names))
    assert both_ways(names, rules).keys() == {"params/a{0}", "params/{n}"}
    with pytest.raises(RestoreError, match=r"there is no 'v\{n\}'"):
        from_file(names, rules_of({"v{n}": "params/{n}"}, ()), where="a file", partial=True)
    with pytest.raises(ConfigError, match=r"the rule for 'w\{n\}' has load= but no save="):
        to_file(names, rules_of({"w{n}": ("params/{n}", np.transpose)}, ()), where="a file")


def test_saving_skips_an_optional_rule_without_save_that_matches_nothing():
    rules = [WeightRule("a", "params/a"), WeightRule("old", "params/old", np.transpose, optional=True)]
    assert to_file({"params/a": np.ones(1)}, rules, where="a file").keys() == {"a"}
    with pytest.raises(ConfigError, match="the rule for 'old' has load= but no save="):
        to_file({"params/a": np.ones(1), "params/old": np.ones(1)}, rules, where="a file")


def test_saving_requires_save_functions_and_a_rule_for_every_array():
    with pytest.raises(ConfigError, match="has load= but no save="):
        to_file({"params/a": np.ones(1)}, [WeightRule("a", "params/a", np.transpose)], where="a file")
    with pytest.raises(RestoreError, match=r"does not cover all arrays\. Add rules for params/b"):
        to_file({"params/a": np.ones(1), "params/b": np.ones(1)}, [WeightRule("a", "params/a")], where="a file")
