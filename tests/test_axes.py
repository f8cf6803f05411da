"""`TrainState.logical_axes`: the names in linen's metadata, for parameters, collections and the optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import partitioning
from jax.sharding import PartitionSpec

import fitflax
from fitflax.errors import ModelError
from fitflax.parallel import Sharded

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
