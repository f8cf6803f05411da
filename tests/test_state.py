"""The states as users of T5X know them: names, protocol, and what an InferenceState does not have."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fitflax import TrainState
from fitflax.errors import ConfigError, OptimizerError, RestoreError
from fitflax.state import InferenceState

OPTIMIZER = optax.adamw(0.1)


def make(value: float = 1.0) -> TrainState:
    params = {"dense": {"kernel": jnp.full((2, 3), value), "bias": jnp.zeros(3)}}
    collections = {"batch_stats": {"mean": jnp.full(3, value)}, "cache": {"index": jnp.int32(7)}}
    return TrainState(step=jnp.int32(4), params=params, model_state=collections, opt_state=OPTIMIZER.init(params), key=jax.random.key(3, impl="rbg"))


def same(one: TrainState, other: TrainState) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    data = [[jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in pair] for pair in pairs]
    return jax.tree.structure(one) == jax.tree.structure(other) and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in data)


def test_t5x_names_are_aliases_of_the_same_objects():
    state = make()
    assert state.param_states is state.opt_state and state.flax_mutables is state.model_state


def test_a_state_dict_restores_the_state_that_it_was_made_from():
    state = make()
    saved = state.state_dict()
    assert sorted(saved) == ["ema_params", "key", "model_state", "opt_state", "params", "step"]
    assert saved["params"]["dense"]["kernel"].shape == (2, 3) and saved["opt_state"]["0"]["mu"]["dense"]["bias"].shape == (3,)
    assert same(make(2.0).restore_state(saved), state) and not same(make(2.0), state)
    assert same(make(2.0).restore_state(jax.tree.map(np.asarray, saved)), state)


def test_a_state_dict_with_a_different_structure_is_an_error():
    saved = make().state_dict()
    del saved["params"]["dense"]["bias"]
    with pytest.raises(RestoreError, match="The state_dict does not fit this state"):
        make().restore_state(saved)


def test_parameters_and_step_are_replaced_and_nothing_else():
    state = make()
    replaced = state.replace_params(jax.tree.map(lambda leaf: leaf + 1, state.params)).replace_step(np.int64(9))
    assert replaced.step.dtype == jnp.int32 and int(replaced.step) == 9 and float(replaced.params["dense"]["bias"][0]) == 1
    assert replaced.opt_state is state.opt_state and replaced.model_state is state.model_state and replaced.key is state.key
    with pytest.raises(ConfigError, match="replace_params: the structure must not change"):
        state.replace_params({})
    with pytest.raises(ConfigError, match=r"\['dense'\]\['bias'\] must be float32\[3\]\. Received: float32\[4\]"):
        state.replace_params({"dense": {"kernel": state.params["dense"]["kernel"], "bias": jnp.zeros(4)}})


def test_replaced_parameters_restart_the_averages():
    state = dataclasses.replace(make(), ema_params=make(9.0).params)
    params = jax.tree.map(lambda leaf: leaf + 1, state.params)
    replaced = jax.jit(lambda state, params: state.replace_params(params))(state, flax.core.freeze(params))
    assert same(replaced, dataclasses.replace(state, params=params, ema_params=params)) and type(replaced.params) is dict
    assert same(state.replace_params(jax.tree.map(np.asarray, params)), replaced)


def test_an_update_equals_that_of_optax_and_keeps_collections_that_did_not_change():
    state = make()
    grads = jax.tree.map(jnp.ones_like, state.params)
    new = jax.jit(lambda state: state.apply_gradient(grads, OPTIMIZER, {"batch_stats": {"mean": jnp.zeros(3)}}))(state)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    expected = TrainState(
        step=jnp.int32(5),
        params=optax.apply_updates(state.params, updates),
        model_state={"batch_stats": {"mean": jnp.zeros(3)}, "cache": {"index": jnp.int32(7)}},
        opt_state=opt_state,
        key=state.key,
    )
    assert jax.tree.structure(new) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (new.params, new.model_state), (expected.params, expected.model_state))
    assert int(new.step) == 5


def test_an_inference_state_has_no_optimizer_and_the_error_says_so():
    state = InferenceState(step=jnp.int32(4), params={"w": jnp.ones(2)}, model_state={"cache": {"index": jnp.int32(7)}})
    assert state.variables == {"params": state.params, "cache": state.model_state["cache"]} and state.flax_mutables is state.model_state
    for name in ("opt_state", "param_states"):
        with pytest.raises(OptimizerError, match="An InferenceState has no optimizer"):
            getattr(state, name)
    assert len(jax.tree.leaves(state)) == 3


def test_an_attribute_error_in_a_property_is_raised_unchanged():
    class Custom(TrainState):
        @property
        def norm(self):
            return None.missing

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
        Custom(step=0, params={}, model_state={}, opt_state=(), key=()).norm  # noqa: B018 (reading it is what fails)


def test_gradients_for_only_some_parameters_are_an_error_that_names_the_missing_ones():
    state = make()
    with pytest.raises(ConfigError, match=r"with the structure of params\. Missing: dense/bias\. For gradients of only a part, add zeros: .*train_only"):
        state.apply_gradient({"dense": {"kernel": state.params["dense"]["kernel"]}}, OPTIMIZER)
    with pytest.raises(ConfigError, match=r"Missing: dense/bias, dense/kernel\. Not in params: bias, kernel\."):
        state.apply_gradient(state.params["dense"], OPTIMIZER)
    with pytest.raises(ConfigError, match=r"Received: PyTreeDef\(CustomNode.* Expected: PyTreeDef\(\{'dense'"):
        state.apply_gradient(flax.core.freeze(state.params), OPTIMIZER)
