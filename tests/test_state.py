"""States, and the logical axis names of linen's metadata."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import partitioning
from jax.sharding import PartitionSpec

import fitflax
from fitflax import TrainState
from fitflax.errors import ConfigError, ModelError, OptimizerError, RestoreError
from fitflax.parallel import Sharded
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["params"].update(more={"bias": np.zeros(3)}), r"\['params'\]\['more'\]\['bias'\] is new"),
        (lambda saved: saved["params"]["dense"].update(bias=np.zeros(4, np.float32)), r"\['bias'\] is float32\[4\] instead of float32\[3\]"),
        (lambda saved: saved["params"]["dense"].update(bias=np.zeros(3, np.float16)), r"\['bias'\] is float16\[3\] instead of float32\[3\]"),
        (lambda saved: saved["params"]["dense"].update(bias={"a": np.zeros(3, np.float32)}), r"\['bias'\] is missing; .*\['a'\] is new"),
        (lambda saved: saved["params"].update(dense=np.zeros(3)), r"\['kernel'\] is missing"),
        (lambda saved: saved.update(ema_params=None), r"\['ema_params'\]\['dense'\]\['bias'\] is missing"),
        (lambda saved: saved.update(model_state=None), r"\['batch_stats'\]\['mean'\] is missing"),
        (lambda saved: saved["opt_state"].update({"1": None}), ""),
        (lambda saved: saved.update(key=np.zeros(2, np.uint32)), r"\['key'\] is uint32\[2\] instead of uint32\[4\]"),
    ],
)
def test_a_state_dict_of_another_state_is_an_error_that_names_the_arrays(change, message):
    state = dataclasses.replace(make(), ema_params=make().params)
    saved = jax.tree.map(np.asarray, state.state_dict())
    change(saved)
    with pytest.raises(RestoreError, match=f"The state_dict does not fit this state: .*{message}"):
        state.restore_state(saved)


def test_averages_of_a_state_dict_are_not_added_to_a_state_without_averages():
    saved = dataclasses.replace(make(), ema_params=make().params).state_dict()
    with pytest.raises(RestoreError, match=r"\['ema_params'\]\['dense'\]\['bias'\] is new"):
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


# --- `TrainState.logical_axes`: the names in linen's metadata, for parameters, collections and the optimizer state ---


X, Y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
NAMED = nn.with_logical_partitioning


class Network(nn.Module):
    with_stats: bool = False
    is_named: bool = True

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(6, kernel_init=NAMED(init, ("embed", "mlp")), bias_init=NAMED(nn.initializers.zeros, ("mlp",)))(x)
        if self.with_stats:
            stats = self.variable("stats", "mean", lambda: nn.LogicallyPartitioned(jnp.zeros(6), ("mlp",)))
            self.variable("stats", "count", lambda: jnp.zeros(()))
            x = x + 0 * stats.value
        return nn.Dense(3, kernel_init=NAMED(init, ("mlp", "vocab")) if self.is_named else init, use_bias=not self.is_named)(x)


def state_of(model, optimizer="adam", **options):
    trainer = fitflax.Trainer(model)
    trainer.compile(optimizer, "sparse_categorical_crossentropy", **options)
    trainer.build((X, Y))
    return trainer, trainer.state


def specs(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.slow
def test_every_parameter_and_collection_has_the_names_from_its_metadata():
    trainer, state = state_of(Network(with_stats=True))
    axes = state.logical_axes()
    assert specs(axes.params) == {
        "Dense_0/kernel": PartitionSpec("embed", "mlp"),
        "Dense_0/bias": PartitionSpec("mlp"),
        "Dense_1/kernel": PartitionSpec("mlp", "vocab"),
    }
    assert specs(axes.model_state) == {"stats/mean": PartitionSpec("mlp"), "stats/count": PartitionSpec()}
    assert (axes.step, axes.key) == (PartitionSpec(), PartitionSpec())
    assert jax.tree.structure(axes) == jax.tree.structure(state)
    boxed = Network(with_stats=True).init({"params": jax.random.key(0)}, X)
    assert axes.params == nn.get_partition_spec(boxed)["params"]
    assert trainer.state.logical_axes(strict=False) == axes


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
        optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    ],
)
@pytest.mark.mostly_slow
def test_moments_have_the_names_of_their_parameters_anywhere_in_the_optimizer_state(optimizer):
    _, state = state_of(Network(), optimizer)
    axes = state.logical_axes()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = specs(axes.opt_state)[name]
        owner = next((param for param in specs(axes.params) if name.endswith(param)), None)
        assert spec == (specs(axes.params)[owner] if owner else PartitionSpec(*[None] * leaf.ndim))


@pytest.mark.slow
def test_an_optimizer_array_that_is_not_shaped_like_its_parameter_has_no_names():
    _, state = state_of(Network(), optax.adafactor(1e-3, min_dim_size_to_factor=2))
    found = specs(state.logical_axes().opt_state)
    rows = {name: spec for name, spec in found.items() if "v_row" in name}
    assert rows
    assert all(set(spec) <= {None} for spec in rows.values())


def test_averaged_parameters_have_the_names_of_the_parameters():
    _, state = state_of(Network(), ema_decay=0.9)
    axes = state.logical_axes()
    assert axes.ema_params == axes.params


def test_every_missing_name_is_listed():
    _, state = state_of(Network(is_named=False))
    with pytest.raises(ModelError, match=r"name: params/Dense_1/bias \[3\] has no names; params/Dense_1/kernel \[6, 3\] has no names. Set") as caught:
        state.logical_axes()
    assert "Dense_0" not in str(caught.value)
    axes = state.logical_axes(strict=False)
    assert axes.params["Dense_1"]["kernel"] == PartitionSpec(None, None)
    assert axes.params["Dense_0"]["kernel"] == PartitionSpec("embed", "mlp")


def test_fewer_names_than_axes_apply_to_the_first_axes():
    _, state = state_of(nn.DenseGeneral((2, 3), use_bias=False, kernel_init=NAMED(nn.initializers.ones, ("embed", "heads"))))
    assert state.params["kernel"].ndim == 3
    assert state.logical_axes().params["kernel"] == PartitionSpec("embed", "heads", None)


def test_more_names_than_axes_are_an_error():
    _, state = state_of(nn.Dense(3, use_bias=False, kernel_init=NAMED(nn.initializers.ones, ("embed", "mlp"))))
    with pytest.raises(ModelError, match=r"params/kernel \[3\] has the names \['embed', 'mlp'\]"):
        state.replace(params={"kernel": jnp.ones(3)}).logical_axes()


@pytest.mark.slow
def test_names_survive_training_saving_and_restoring(tmp_path):
    trainer, state = state_of(Network())
    want = state.logical_axes()
    trainer.fit(X, Y, steps=3, verbose=0)
    assert trainer.state.logical_axes() == want
    path = trainer.save(tmp_path / "saved")
    for built in (True, False):
        other = fitflax.Trainer(Network())
        other.compile("adam", "sparse_categorical_crossentropy")
        if built:
            other.build((X, Y))
        other.restore(path)
        other.predict(X)
        assert other.state.logical_axes() == want
    (checkpoint,) = trainer.train_loop(X, Y, steps=1)
    assert checkpoint.state.logical_axes() == want


def test_names_are_not_part_of_the_tree_structure_or_the_state_dict():
    _, state = state_of(Network())
    bare = fitflax.TrainState(**{**vars(state), "axes": type(state.axes)()})
    assert jax.tree.structure(bare) == jax.tree.structure(state)
    assert jax.tree.map(lambda a, b: a is b, bare, state)
    assert sorted(state.state_dict()) == ["ema_params", "key", "model_state", "opt_state", "params", "step"]


class Older(nn.Module):
    """Names its axes as T5X's modules do, in a collection next to the parameters."""

    @nn.compact
    def __call__(self, x):
        kernel = partitioning.param_with_axes("kernel", nn.initializers.lecun_normal(), (4, 6), jnp.float32, axes=("embed", "mlp"))
        return nn.Dense(3, name="head")(partitioning.with_sharding_constraint(x @ kernel, ("batch", "mlp")))


@pytest.mark.slow
def test_names_in_a_separate_collection_are_found_and_kept_out_of_the_state():
    trainer, state = state_of(Older())
    assert state.model_state == {}
    assert state.logical_axes(strict=False).params["kernel"] == PartitionSpec("embed", "mlp")
    before = jax.tree.structure(state)
    trainer.fit(X, Y, epochs=2, verbose=0)
    assert jax.tree.structure(trainer.state) == before and trainer.state.model_state == {}
    sharded = fitflax.Trainer(Older(), parallel=Sharded({"data": 4, "model": 2}, rules=[("embed", None), ("mlp", "model")]))
    sharded.compile("adam", "sparse_categorical_crossentropy")
    sharded.fit(X, Y, epochs=2, verbose=0)
    assert sharded.state.params["kernel"].sharding.spec == PartitionSpec(None, "model")
    assert sharded.state.opt_state.inner_state[0].mu["kernel"].sharding.spec == PartitionSpec(None, "model")


def test_another_collection_with_a_name_that_ends_in_axes_stays_in_the_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("my_axes", "count", lambda: jnp.zeros(()))
            return nn.Dense(3)(x)

    _, state = state_of(Net())
    assert sorted(state.model_state) == ["my_axes"]
