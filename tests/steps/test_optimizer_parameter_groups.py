"""Groups of parameters: they are found in any optimizer and shown separately by `summary`; their learning rates are read, set and logged."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import optimizers
from fitflax.callbacks import TensorBoard
from fitflax.errors import OptimizerError
from fitflax.steps.optimizer import Group, _labels, parameter_groups
from tests.callbacks.test_tensorboard import shown

X, Y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
PARAMS = {"backbone": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}, "head": {"kernel": jnp.ones((6, 3))}}


def by_name(params):
    return {name: name if name == "head" else "backbone" for name in params}


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(6, name="backbone")(x)))


def partition(backbone, head, labels=by_name):
    return optax.multi_transform({"backbone": backbone, "head": head}, labels)


BACKBONE = ["backbone/bias", "backbone/kernel"]


WRAPPERS = [
    lambda tx: tx,
    lambda tx: optax.chain(optax.clip(1.0), tx),
    lambda tx: optax.chain(optax.chain(tx), optax.scale(0.5)),
    optax.with_extra_args_support,
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("labels", [by_name, {"backbone": "backbone", "head": "head"}])
def test_labels_and_frozen_parameters_are_found(wrap, labels):
    found = parameter_groups(wrap(partition(optax.set_to_zero(), optax.sgd(0.1), labels)), PARAMS)
    assert found == [Group("backbone", BACKBONE, is_frozen=True), Group("head", ["head/kernel"], is_frozen=False)]
    found = parameter_groups(wrap(partition(optax.adam(0.1), optax.sgd(0.1), labels)), PARAMS)
    assert found == [Group("backbone", BACKBONE, is_frozen=False), Group("head", ["head/kernel"], is_frozen=False)]


def test_frozen_parameters_without_labels_are_found():
    mask = {"backbone": True, "head": False}
    for freezing in (optax.masked(optax.set_to_zero(), mask), optax.transforms.freeze(mask)):
        found = parameter_groups(optax.chain(optax.adam(0.1), freezing), PARAMS)
        assert found == [Group("frozen", BACKBONE, is_frozen=True), Group("others", ["head/kernel"], is_frozen=False)]


def test_parameters_with_weight_decay_are_not_frozen():
    decaying = optax.chain(partition(optax.set_to_zero(), optax.identity()), optax.add_decayed_weights(1e-4), optax.scale(-0.1))
    assert [group.is_frozen for group in parameter_groups(decaying, PARAMS)] == [False, False]


def test_an_optimizer_that_needs_the_value_of_the_loss_has_no_groups():
    assert parameter_groups(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), PARAMS) == []
    trainer = fitflax.Trainer(Network())
    trainer.compile(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "sparse_categorical_crossentropy")
    trainer.build((X, Y))
    trainer.summary(file=io.StringIO())


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.adamw(0.1), optimizers.get("lamb"), optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1))])
def test_there_are_no_groups_if_all_parameters_are_treated_the_same(optimizer):
    assert parameter_groups(optimizer, PARAMS) == []
    assert parameter_groups(optimizer, {}) == []


def trainer_of(optimizer):
    trainer = fitflax.Trainer(Network())
    trainer.compile(optimizer, "sparse_categorical_crossentropy")
    trainer.build((X, Y))
    return trainer


def test_a_summary_shows_groups_separately():
    trainer = trainer_of(partition(optax.set_to_zero(), optimizers.get("adam", 0.25)))
    text = io.StringIO()
    trainer.summary(file=text)
    lines = text.getvalue().splitlines()
    begin = lines.index("Total number of trainable weights: 21 = 84 B")
    assert lines[begin + 1 : begin + 3] == ["  backbone: 30 = 120 B in 2 arrays, frozen", "  head: 21 = 84 B in 2 arrays, learning rate 0.25"]


@pytest.mark.slow
def test_parameters_that_a_summary_calls_frozen_do_not_change():
    trainer = trainer_of(partition(optax.set_to_zero(), optimizers.get("adam", 0.25)))
    before = trainer.state.params
    trainer.fit(X, Y, steps=3, verbose=0)
    after = trainer.state.params
    np.testing.assert_array_equal(before["backbone"]["kernel"], after["backbone"]["kernel"])
    assert not np.array_equal(before["head"]["bias"], after["head"]["bias"])


def test_two_learning_rates_with_one_label_are_named_by_their_paths():
    twice = optax.chain(optimizers.get("sgd", 0.5), optimizers.get("sgd", 0.25))
    rates = trainer_of(partition(optax.set_to_zero(), twice)).learning_rates
    assert sorted(rates.values()) == [0.25, 0.5]
    assert all("'head'" in name for name in rates)


def test_the_learning_rate_of_each_group_can_be_read_and_set():
    trainer = trainer_of(partition(optimizers.get("sgd", 0.5), optimizers.get("adam", 0.25)))
    assert trainer.learning_rates == {"backbone": 0.5, "head": 0.25}
    trainer.learning_rates = {"head": 0.125}
    assert trainer.learning_rates == {"backbone": 0.5, "head": 0.125}
    with pytest.raises(OptimizerError, match=r"several learning rates: \['backbone', 'head'\].*trainer.learning_rates"):
        _ = trainer.learning_rate
    with pytest.raises(OptimizerError, match=r"no learning rate 'heed' that can be set. Available: \['backbone', 'head'\]. Did you mean 'head'"):
        trainer.learning_rates = {"heed": 1.0}


@pytest.mark.slow
def test_the_only_rate_of_a_group_is_the_learning_rate():
    trainer = trainer_of(partition(optax.set_to_zero(), optimizers.get("adam", 0.25)))
    assert trainer.learning_rates == {"head": 0.25}
    assert list(next(trainer.train_loop(X, Y, steps=1)).learning_rates) == ["head"]
    trainer.learning_rate = 0.5
    assert trainer.learning_rate == 0.5
    assert trainer_of("adam").learning_rates == {"learning_rate": pytest.approx(0.001)}
    assert trainer_of(optax.adam(0.1)).learning_rates == {}


@pytest.mark.slow
def test_a_learning_rate_that_a_schedule_computes_can_be_read_but_not_set():
    trainer = trainer_of(partition(optimizers.get("sgd", optax.linear_schedule(1.0, 0.0, 10)), optimizers.get("adam", 0.25)))
    trainer.fit(X, Y, steps=3, verbose=0)
    assert trainer.learning_rates["backbone"] == pytest.approx(0.8)
    with pytest.raises(OptimizerError, match="a schedule computes it"):
        trainer.learning_rates = {"backbone": 1.0}


@pytest.mark.slow
def test_tensorboard_shows_the_learning_rate_of_each_group(tmp_path):
    trainer = trainer_of(partition(optimizers.get("sgd", 0.5), optimizers.get("adam", 0.25)))
    trainer.fit(X, Y, steps=2, callbacks=[TensorBoard(tmp_path, every=fitflax.every(steps=1))], verbose=0)
    values = shown(tmp_path)["train"]
    assert {tag: set(events.values()) for tag, events in values.items() if tag.startswith("learning_rate")} == {
        "learning_rate/backbone": {0.5},
        "learning_rate/head": {0.25},
    }


def test_a_frozen_parameter_is_found_inside_a_jitted_update():
    inner = optax.multi_transform({"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {"w": "a", "v": "b"})
    jitted = optax.GradientTransformation(inner.init, jax.jit(inner.update))
    params = {"w": jnp.ones(2), "v": jnp.ones(2)}
    assert {(path, group.is_frozen) for group in parameter_groups(jitted, params) for path in group.paths} == {("w", False), ("v", True)}


def test_labels_for_trees_other_than_the_parameters_are_ignored():
    def labels(params):
        return {"other": "a"}[next(iter(params))]

    assert _labels(optax.multi_transform({"a": optax.sgd(0.1)}, labels), {"params": np.ones(2)}) is None


def test_labels_are_found_inside_a_partial_function():
    inner = optax.multi_transform({"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {"w": "a", "v": "b"})
    wrapped = optax.GradientTransformation(functools.partial(inner.init), inner.update)
    assert _labels(wrapped, {"w": np.ones(2), "v": np.ones(2)}) == ["b", "a"]
