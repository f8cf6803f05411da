import collections
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax import metrics
from fitflax.errors import ConfigError, DataError, LossError, MetricError
from fitflax.parallel import DataParallel
from fitflax.steps import program
from fitflax.steps.loss import Objective
from fitflax.steps.outputs import named_outputs

ONES, ZEROS = jnp.ones((4, 3)), jnp.zeros((4, 3))
Pair = collections.namedtuple("Pair", ["mean", "scale"])


def values(objective: Objective, outputs: Any = ONES, targets: Any = ZEROS) -> dict[str, list[float]]:
    return {name: np.asarray(part).tolist() for name, part in objective.losses(outputs, targets)[0].items()}


def keys(objective: Objective, outputs: Any = ONES, taken: tuple[str, ...] = ("loss",)) -> list[str]:
    return [entry.key for entry in objective.entries(outputs, taken)]


def absolute(outputs: Any, targets: Any) -> Any:
    return jnp.abs(outputs - targets).mean(-1)


# -- losses of one output --


@pytest.mark.parametrize("loss", ["mse", "mean_squared_error", fitflax.losses.mean_squared_error, absolute, ["mse"], ("mse",)])
@pytest.mark.mostly_slow
def test_one_output_has_one_loss(loss: Any):
    assert values(Objective(loss)) == {"loss": [1.0] * 4}


def test_a_loss_weight_multiplies_the_loss():
    assert values(Objective("mse", loss_weights=0.2)) == {"loss": [pytest.approx(0.2)] * 4}
    assert values(Objective("mse", loss_weights=[2])) == {"loss": [2.0] * 4}


def test_one_function_of_all_outputs_may_have_a_list_of_one_loss_weight():
    outputs = {"head": ONES, "tail": ONES}
    assert values(Objective(lambda outputs, targets: absolute(outputs["head"], targets), loss_weights=[2]), outputs) == {"loss": [2.0] * 4}


def test_loss_weights_by_output_are_an_error_that_says_that_a_single_output_has_no_name():
    with pytest.raises(ConfigError, match=r"compile\(loss_weights=...\) names the outputs \['head'\], but the module has one output without a name"):
        values(Objective(absolute, loss_weights={"head": 0.5}))


def test_without_a_loss_there_are_no_parts():
    assert Objective(None).losses(ONES, ZEROS) == ({}, {})


def test_without_targets_a_function_gets_only_outputs():
    assert values(Objective(lambda outputs: outputs.sum(-1)), ONES, ()) == {"loss": [3.0] * 4}


def test_a_named_loss_without_targets_is_an_error():
    with pytest.raises(LossError, match=r"'mse' needs targets, but the batches have none"):
        Objective("mse").losses(ONES, ())


@pytest.mark.parametrize("loss", ["mze", "MSE_", 3, object, 1.5, {"a": 3}, ["mse", "no"]])
def test_an_invalid_loss_raises_an_error_immediately(loss: Any):
    with pytest.raises(LossError):
        Objective(loss)


def test_the_error_for_a_misspelled_loss_suggests_the_right_one():
    with pytest.raises(LossError, match="Did you mean 'mse'"):
        Objective("msee")


def test_the_error_of_a_failing_loss_describes_its_arguments():
    def broken(outputs: Any, targets: Any) -> Any:
        return outputs @ targets

    with pytest.raises(LossError, match=r"The loss broken fails on outputs float32\[4,3\] and targets float32\[4,3\]: TypeError"):
        Objective(broken).losses(ONES, ZEROS)


def test_a_loss_that_does_not_return_an_array_is_an_error():
    with pytest.raises(LossError, match="returned a tuple"):
        Objective(lambda outputs, targets: (outputs, targets)).losses(ONES, ZEROS)


def test_losses_by_name_for_an_output_without_a_name_are_an_error():
    with pytest.raises((ConfigError, LossError), match=r"names the outputs .*, but the module has one output"):
        Objective({"a": "mse"}).losses(ONES, ZEROS)
    with pytest.raises((ConfigError, LossError), match="has 2 entries, but the module has one output"):
        Objective(["mse", "mae"]).losses(ONES, ZEROS)


# -- losses of several outputs --

TWO = {
    "tuple": ((ONES, 2 * ONES), ("output_1", "output_2")),
    "list": ([ONES, 2 * ONES], ("output_1", "output_2")),
    "dict": ({"mean": ONES, "scale": 2 * ONES}, ("mean", "scale")),
    "namedtuple": (Pair(ONES, 2 * ONES), ("mean", "scale")),
}
TARGETS = {"tuple": (ZEROS, ZEROS), "list": [ZEROS, ZEROS], "dict": {"scale": ZEROS, "mean": ZEROS}, "namedtuple": Pair(ZEROS, ZEROS)}


@pytest.mark.parametrize("kind", TWO)
def test_several_outputs_have_names(kind: str):
    outputs, names = TWO[kind]
    assert tuple(named_outputs(outputs) or ()) == names
    assert named_outputs(ONES) is None


@pytest.mark.parametrize("kind", TWO)
def test_one_named_loss_is_used_for_every_output(kind: str):
    outputs, names = TWO[kind]
    parts, logged = Objective("mse").losses(outputs, TARGETS[kind])
    assert {name: part.tolist() for name, part in parts.items()} == {names[0]: [1.0] * 4, names[1]: [4.0] * 4}
    assert list(logged) == [f"{name}_loss" for name in names]


@pytest.mark.parametrize("kind", TWO)
@pytest.mark.parametrize("form", [list, tuple, dict])
def test_losses_and_their_weights_can_be_given_by_output(kind: str, form: type):
    outputs, names = TWO[kind]
    spec, weights = ("mae", "mse"), (10, 0.5)
    if form is dict:
        spec, weights = dict(zip(names, spec, strict=True)), {names[1]: 0.5, names[0]: 10}
    parts, logged = Objective(spec, loss_weights=weights).losses(outputs, TARGETS[kind])
    assert [part.tolist() for part in parts.values()] == [[10.0] * 4, [2.0] * 4]
    # The log has the loss of each output before it is multiplied by its loss weight.
    assert [part.tolist() for part in logged.values()] == [[1.0] * 4, [4.0] * 4]


@pytest.mark.parametrize("loss", [["mse", None], {"output_1": "mse"}, {"output_1": "mse", "output_2": None}])
def test_an_output_whose_loss_is_none_is_skipped(loss: Any):
    parts, logged = Objective(loss).losses((ONES, ONES), (ZEROS, ZEROS))
    assert list(parts) == ["output_1"] and list(logged) == ["output_1_loss"]


def test_a_skipped_output_needs_no_targets_if_targets_are_given_by_name():
    assert list(values(Objective({"mean": "mse"}), TWO["dict"][0], {"mean": ZEROS})) == ["mean"]


def test_a_function_gets_all_outputs_together():
    objective = Objective(lambda outputs, targets: (outputs[0] + outputs[1] - targets).sum(-1))
    assert values(objective, (ONES, ONES), ZEROS) == {"loss": [6.0] * 4}


def test_functions_by_output_get_only_their_output():
    assert values(Objective([absolute, "mse"]), (ONES, 3 * ONES), (ZEROS, ONES)) == {"output_1": [1.0] * 4, "output_2": [4.0] * 4}


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "match"),
    [
        ({"meen": "mse"}, TWO["dict"][0], TARGETS["dict"], r"names the outputs \['meen'\].*\['mean', 'scale'\]. Did you mean 'mean'"),
        (["mse"] * 3, (ONES, ONES), (ZEROS, ZEROS), "has 3 entries, but the module has 2 outputs"),
        ("mse", (ONES, ONES), ZEROS, r"targets must be 2 arrays or a dict. Received: float32\[4,3\]"),
        ("mse", (ONES, ONES), (ZEROS,), "targets must be 2 arrays or a dict"),
        ("mse", TWO["dict"][0], {"mean": ZEROS}, r"The output 'scale' has no targets\. Received: targets for \['mean'\]"),
    ],
)
def test_losses_outputs_and_targets_that_do_not_match_are_errors(loss: Any, outputs: Any, targets: Any, match: str):
    with pytest.raises(LossError, match=match):
        Objective(loss).losses(outputs, targets)


@pytest.mark.parametrize("weights", ["much", True, [None, "a"], {"a": object()}])
def test_loss_weights_must_be_numbers(weights: Any):
    with pytest.raises(ConfigError, match="loss_weights must be numbers"):
        Objective("mse", loss_weights=weights)


def test_loss_weights_may_be_numpy_numbers():
    assert values(Objective("mse", loss_weights=np.float32(0.5))) == {"loss": [0.5] * 4}


# -- metrics --


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, []),
        ([], []),
        ("mae", ["mae"]),
        (["mae", "mean_absolute_error"], ["mae", "mean_absolute_error"]),
        ([metrics.Accuracy(name="right")], ["right"]),
        ([absolute], ["absolute"]),
        ({"error": "mae", "other": absolute}, ["error", "other"]),
        (["mae", {"error": "mae"}], ["mae", "error"]),
        ([metrics.R2], ["r2"]),
    ],
    ids=["none", "empty", "name", "names", "object", "function", "dict", "dict in a list", "class"],
)
def test_a_metric_is_logged_under_the_name_that_the_user_gave_it(spec: Any, expected: list[str]):
    assert keys(Objective("mse", spec)) == expected


def test_clashing_keys_are_made_unique():
    assert keys(Objective("mse", ["mae", "mae", "mae"])) == ["mae", "mae_1", "mae_2"]
    assert keys(Objective("mse", ["mae"], ["mae", "mse"])) == ["mae", "weighted_mae", "mse"]
    assert keys(Objective("mse", ["mae"], ["mae", "mae"])) == ["mae", "weighted_mae", "weighted_mae_1"]
    assert keys(Objective("mse", {"loss": "mse"})) == ["loss_1"]


def test_weighted_metrics_are_marked_as_weighted():
    assert [entry.weighted for entry in Objective("mse", ["mae"], ["mse"]).entries(ONES, ())] == [False, True]


@pytest.mark.parametrize("kind", TWO)
@pytest.mark.parametrize("spec", ["mae", ["mae"], ["mae", "mae"], [["mae"], ["mae"]]])
def test_metrics_are_computed_for_every_output_and_logged_under_its_name(kind: str, spec: Any):
    outputs, names = TWO[kind]
    entries = Objective("mse", spec).entries(outputs, ("loss",))
    assert [(entry.output and entry.output.name, entry.key) for entry in entries] == [(name, f"{name}_mae") for name in names]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"mean": "mae", "scale": ["mse", "mae"]}, ["mean_mae", "scale_mse", "scale_mae"]),
        ({"scale": {"error": "mse"}}, ["scale_error"]),
        ([["mae", "mse"], None], ["mean_mae", "mean_mse"]),
        (["mae", "mse"], ["mean_mae", "scale_mse"]),
        (["mae", "mse", "huber"], [f"{name}_{key}" for name in ("mean", "scale") for key in ("mae", "mse", "huber")]),
    ],
)
def test_metrics_can_be_given_by_output(spec: Any, expected: list[str]):
    assert keys(Objective("mse", spec), TWO["dict"][0]) == expected


def test_metrics_in_a_dict_by_log_keys_get_all_outputs():
    objective = Objective("mse", {"ratio": lambda outputs, targets: (outputs["mean"] / outputs["scale"]).mean(-1)})
    (entry,) = objective.entries(TWO["dict"][0], ("loss",))
    assert entry.key == "ratio" and entry.output is None
    assert float(objective.update(entry, TWO["dict"][0], TARGETS["dict"], jnp.ones(4)).compute()) == 0.5


@pytest.mark.parametrize("kind", TWO)
def test_each_metric_gets_the_targets_of_its_output(kind: str):
    outputs, _ = TWO[kind]
    targets = {"tuple": (ONES, ZEROS), "list": [ONES, ZEROS], "dict": {"scale": ZEROS, "mean": ONES}, "namedtuple": Pair(ONES, ZEROS)}[kind]
    objective = Objective("mse", "mae")
    result = [float(objective.update(entry, outputs, targets, jnp.ones(4)).compute()) for entry in objective.entries(outputs, ())]
    assert result == [0.0, 2.0]


@pytest.mark.parametrize("spec", ["maee", 3, object, ["mae", 1.5], {"a": "no"}])
def test_an_invalid_metric_raises_an_error_immediately(spec: Any):
    with pytest.raises(MetricError):
        Objective("mse", spec)


@pytest.mark.parametrize("spec", [{"a": ["mae", "mse"]}, {"a": ["mae"]}, {"a": {"b": "mae"}}])
def test_metrics_by_output_for_an_output_without_a_name_are_an_error(spec: Any):
    with pytest.raises(MetricError, match="'a'"):
        Objective("mse", spec).entries(ONES, ("loss",))


def test_metrics_for_too_many_outputs_are_an_error():
    with pytest.raises(MetricError, match="has 3 entries, but the module has 2 outputs"):
        Objective("mse", [["mae"]] * 3).entries((ONES, ONES), ("loss",))


def test_a_misspelled_output_next_to_a_correct_one_is_an_error():
    with pytest.raises(MetricError, match=r"names the outputs \['scal'\]"):
        Objective("mse", {"mean": "mae", "scal": "mae"}).entries(TWO["dict"][0], ("loss",))


def test_the_error_of_a_failing_metric_describes_its_arguments():
    objective = Objective("mse", ["sparse_categorical_accuracy"])
    (entry,) = objective.entries(ONES, ())
    with pytest.raises(MetricError, match=r"sparse_categorical_accuracy.*outputs \[4, 3\].*targets \[4, 3\]"):
        objective.update(entry, ONES, ZEROS, jnp.ones(4))


# -- labels --


@pytest.mark.parametrize(("labels", "fits"), [([0, 2, 1, 2], True), ([0, 3, 1, 2], False), ([0, -1, 1, 2], False)])
def test_labels_are_checked_against_the_classes(labels: list[int], fits: bool):
    objective = Objective("sparse_categorical_crossentropy")
    shapes = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    if fits:
        objective.check_labels(shapes, np.array(labels))
    else:
        with pytest.raises(DataError, match=r"y holds labels from .* but the module has 3 outputs, for labels 0 to 2"):
            objective.check_labels(shapes, np.array(labels))


def test_labels_are_checked_for_each_output():
    objective = Objective({"a": "sparse_categorical_crossentropy", "b": "mse"})
    shapes = {name: jax.ShapeDtypeStruct((2, 3), jnp.float32) for name in "ab"}
    objective.check_labels(shapes, {"a": np.array([0, 2]), "b": np.full((2, 3), 9.0)})
    with pytest.raises(DataError, match=r"y\['a'\] holds labels from 0 to 3"):
        objective.check_labels(shapes, {"a": np.array([0, 3]), "b": np.zeros((2, 3))})


@pytest.mark.parametrize("weights", [np.array([[1], [0]]), np.array([[1, 1, 1], [0, 0, 0]]), np.array([1, 0])])
def test_labels_of_weight_zero_are_not_checked(weights: Any):
    objective = Objective("sparse_categorical_crossentropy")
    shapes = jax.ShapeDtypeStruct((2, 3, 3), jnp.float32)
    objective.check_labels(shapes, np.array([[0, 1, 2], [-1, 7, 0]]), weights)
    with pytest.raises(DataError, match="y holds labels from -1 to 7"):
        objective.check_labels(shapes, np.array([[-1, 7, 0], [0, 1, 2]]), weights)


def test_labels_of_weight_zero_are_not_checked_if_only_the_first_labels_are_given():
    shapes = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    Objective("sparse_categorical_crossentropy").check_labels(shapes, np.array([0, 7]), np.array([1, 0, 1]))


# -- through fit --

X = np.arange(12, dtype=np.float32).reshape(6, 2)


class Constants(nn.Module):
    """Returns a constant for each output, in an order that is not alphabetical."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        zero = self.param("zero", nn.initializers.zeros, ())
        return {"second": 0 * x[:, :1] + 2 + zero, "first": 0 * x[:, :1] + 1 + zero}


def fitted(model: nn.Module, y: Any, **options: Any) -> dict[str, float]:
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:2]))
    trainer.compile("sgd", learning_rate=0.0, **options)
    history = trainer.fit(X, y, verbose=0).history
    return {key: row[0] for key, row in history.items()}


@pytest.mark.slow
def test_logs_have_the_loss_then_losses_of_outputs_then_metrics_in_the_users_order():
    targets = {"first": np.zeros((6, 1)), "second": np.zeros((6, 1))}
    logs = fitted(Constants(), targets, loss="mse", metrics={"second": ["mse", "mae"], "first": ["mae"]}, weighted_metrics=["huber"])
    assert list(logs) == ["loss", "second_loss", "first_loss", "second_mse", "second_mae", "first_mae", "second_huber", "first_huber"]
    assert list(logs.values()) == pytest.approx([5, 4, 1, 4, 2, 1, 1.5, 0.5])


def test_losses_and_metrics_match_a_tuple_of_targets_to_outputs_in_the_modules_order():
    # The module's own order, in which `second` comes first; JAX sorts the keys of all dicts that pass through it.
    logs = fitted(Constants(), (np.full((6, 1), 2.0), np.full((6, 1), 1.0)), loss="mse", metrics=["mae"])
    assert logs == {"loss": 0, "second_loss": 0, "first_loss": 0, "second_mae": 0, "first_mae": 0}


@pytest.mark.slow
def test_labels_in_a_tuple_are_checked_against_their_own_output():
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return {"wide": nn.Dense(5)(x), "narrow": nn.Dense(2)(x)}

    logs = fitted(Heads(), (np.array([0, 1, 2, 3, 4, 0]), np.array([0, 1, 0, 1, 0, 1])), loss="sparse_categorical_crossentropy")
    assert np.isfinite(logs["loss"])


@pytest.mark.slow
def test_labels_outside_the_classes_are_ignored_if_their_weight_is_zero():
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    history = trainer.fit(X, np.array([0, 1, -1, 2, -1, 0]), np.array([1, 1, 0, 1, 0, 1.0]), verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state.params))


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_labels_outside_the_classes_are_an_error_before_the_first_step(method: str):
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    trainer.build(X)
    with pytest.raises(DataError, match="y holds labels from 0 to 3, but the module has 3 outputs"):
        getattr(trainer, method)(X, np.array([0, 1, 3, 2, 0, 0]), verbose=0)
    assert trainer.step == 0


def test_labels_and_weights_in_equal_arrays_are_checked_once(monkeypatch: pytest.MonkeyPatch):
    checks, check = [], Objective.check_labels

    def counted(*args: Any) -> None:
        checks.append(check(*args))

    monkeypatch.setattr(Objective, "check_labels", counted)
    trainer = fitflax.Trainer(nn.Dense(3))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    trainer.build(X)
    y, weights = np.array([0, 1, 3, 2, 0, 0], np.int32), np.array([1, 1, 0, 1, 1, 1], np.float32)
    for number in (1, 1, 2):
        trainer.evaluate(X, y, sample_weight=weights if number == 1 else weights.copy(), verbose=0)
        assert len(checks) == number
    with pytest.raises(DataError, match="y holds labels from 0 to 3"):
        trainer.evaluate(X, y, verbose=0)


@pytest.mark.parametrize("validation_split", [0.0, 1 / 3])
def test_labels_in_a_file_are_not_read_for_the_check(validation_split: float, tmp_path: pathlib.Path):
    np.save(tmp_path / "y.npy", np.array([0, 1, 0, 3, 1, 2], np.int32))
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    y = np.load(tmp_path / "y.npy", mmap_mode="r")
    for weights in (None, np.ones(6, np.float32)):
        history = trainer.fit(X, y, weights, batch_size=2, steps_per_epoch=1, shuffle=False, validation_split=validation_split, verbose=0).history
        assert np.isfinite(history["loss"][0])
    with pytest.raises(DataError, match="y holds labels from 0 to 3"):
        trainer.fit(X, y.astype(np.int32), verbose=0)  # A copy in memory, whose type is np.memmap.


def test_labels_of_an_output_are_checked_even_if_those_of_another_output_are_large(monkeypatch: pytest.MonkeyPatch):
    class Outputs(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return {"large": nn.Dense(3)(x), "small": nn.Dense(3)(x)}

    monkeypatch.setattr(program, "_CHECKED_BYTES", 4 * 6)
    trainer = fitflax.Trainer(Outputs(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", {"large": "mse", "small": "sparse_categorical_crossentropy"})
    y = {"large": np.zeros((6, 3), np.float32), "small": np.array([0, 1, 0, 2, 3, 2], np.int32)}
    trainer.fit(X, y, np.array([1, 1, 1, 1, 0, 1], np.float32), batch_size=2, steps=1, shuffle=False, verbose=0)
    for weights in (None, np.ones(6, np.float32)):
        with pytest.raises(DataError, match=r"y\['small'\] holds labels from 0 to 3"):
            trainer.fit(X, y, weights, batch_size=2, steps=1, shuffle=False, verbose=0)


@pytest.mark.parametrize("weights", [None, np.ones(6, np.float32)])
def test_only_the_first_gigabyte_of_labels_is_checked(weights: Any, monkeypatch: pytest.MonkeyPatch):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    y = np.array([0, 1, 0, 3, 1, 2], np.int32)
    monkeypatch.setattr(program, "_CHECKED_BYTES", 3 * y.itemsize)
    trainer.fit(X, y, weights, batch_size=2, steps=1, shuffle=False, verbose=0)
    monkeypatch.setattr(program, "_CHECKED_BYTES", 4 * y.itemsize)
    with pytest.raises(DataError, match="y holds labels from 0 to 3"):
        trainer.fit(X, y.copy(), weights, batch_size=2, steps=1, shuffle=False, verbose=0)


@pytest.mark.slow
def test_changing_a_metric_changes_log_keys_and_nothing_else():
    trainer = fitflax.Trainer(nn.Dense(1))
    optimizer = fitflax.optimizers.get("adam", 0.1)
    y = X.sum(1, keepdims=True)
    trainer.compile(optimizer, "mse", ["mean_squared_error"])
    assert list(trainer.fit(X, y, verbose=0).history) == ["loss", "mean_squared_error"]
    before = jax.tree.map(np.asarray, (trainer.state.params, trainer.state.opt_state))
    trainer.compile(optimizer, "mse", ["mean_absolute_error"])
    jax.tree.map(np.testing.assert_array_equal, (trainer.state.params, trainer.state.opt_state), before)
    assert trainer.step == 1
    assert list(trainer.evaluate(X, y, verbose=0)) == ["loss", "mean_absolute_error"]


def test_a_loss_that_is_none_for_the_only_output_is_an_error():
    with pytest.raises(LossError, match=r"The loss of the only output is None\."):
        values(Objective([None]))


def test_an_empty_batch_of_labels_is_within_any_range():
    Objective("sparse_categorical_crossentropy").check_labels(jax.ShapeDtypeStruct((0, 3), np.float32), np.zeros(0, np.int32), None)
