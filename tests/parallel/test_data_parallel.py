import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.data.batch import full_mask
from fitflax.errors import ConfigError
from fitflax.parallel import DataParallel, Strategy
from fitflax.state import Batch

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(11)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = RNG.normal(size=(24, 2)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.Dense(33)(x))


class WithStats(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


class Double(nn.Module):
    """Its outputs show which rows they belong to."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return {"twice": 2 * x + self.param("zero", nn.initializers.zeros, ()), "sum": (x.sum(-1), x[:, None])}


def trainer_of(model: nn.Module, devices: list[jax.Device], reduce: Any = None, optimizer: Any = None) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model, parallel=DataParallel(devices, reduce=reduce))
    trainer.compile(optax.adam(0.01) if optimizer is None else optimizer, "mse")
    return trainer


def shards(leaf: jax.Array) -> list[np.ndarray]:
    leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return [np.asarray(shard.data) for shard in leaf.addressable_shards]


def assert_replicated(tree: Any, num_devices: int) -> None:
    """Asserts that every device holds a whole copy of every array, and that the copies are bit-for-bit identical."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found = shards(leaf)
        assert len(found) == num_devices
        for other in found:
            np.testing.assert_array_equal(other, found[0], err_msg=jax.tree_util.keystr(path))
            assert other.shape[: leaf.ndim] == leaf.shape


def pointers(leaf: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}


# -- the state --


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.slow
def test_the_state_has_no_device_axis_and_is_whole_and_equal_on_every_device(num_devices: int, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices))
    trainer.build(X)
    expected = jax.tree.map(jnp.shape, Net().init(jax.random.key(0), X)["params"])
    for _ in range(2):
        assert jax.tree.map(jnp.shape, trainer.state.params) == expected
        assert_replicated(trainer.state, num_devices)
        assert trainer.state.params["Dense_0"]["kernel"].sharding.device_set == set(devices(num_devices))
        trainer.fit(X, Y, batch_size=10, verbose=0)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.mostly_slow
def test_a_step_reuses_the_buffers_of_the_previous_state(num_devices: int, devices: Devices):
    trainer = trainer_of(Net(), devices(num_devices))
    seen = []
    for checkpoint in trainer.train_loop(X, Y, steps=4, batch_size=8):
        state = checkpoint.run.borrow()
        # Leaves with the same shape may swap buffers, but the set of all buffers stays the same.
        seen.append(set().union(*(pointers(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state)))))
    assert seen[1] == seen[2] == seen[3]
    assert len(seen[1]) >= num_devices * 4


@pytest.mark.slow
def test_a_state_read_from_the_trainer_is_not_changed_by_training(devices: Devices):
    trainer = trainer_of(Net(), devices(2))
    trainer.build(X)
    state = trainer.state
    before = jax.tree.map(np.array, state.params)
    trainer.fit(X, Y, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    assert int(state.step) == 0


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.slow
def test_the_users_arrays_are_neither_donated_nor_changed(num_devices: int, devices: Devices):
    x, y, w = jnp.asarray(X), jnp.asarray(Y), jnp.ones(24)
    trainer = trainer_of(Net(), devices(num_devices))
    trainer.fit(x, y, w, batch_size=8, verbose=0)
    trainer.fit(lambda: iter([(x, y, w), (x, y, w)]), verbose=0)
    given = jax.tree.map(jnp.array, trainer.state)
    before = jax.tree.map(np.array, given.params)
    trainer.replace_state(given)
    trainer.fit(x, y, batch_size=8, verbose=0)
    trainer.evaluate(x, y, verbose=0)
    trainer.predict(x)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_array_equal(w, np.ones(24))
    jax.tree.map(np.testing.assert_array_equal, given.params, before)


def test_numpy_arrays_passed_as_data_and_state_are_not_changed(devices: Devices):
    x, y = X.copy(), Y.copy()
    trainer = trainer_of(Net(), devices(1))
    trainer.build(x)
    given = dataclasses.replace(trainer.state, params=jax.tree.map(np.array, trainer.state.params))
    before = jax.tree.map(np.copy, given.params)
    trainer.replace_state(given)
    trainer.fit(x, y, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    jax.tree.map(np.testing.assert_array_equal, given.params, before)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("where", [0, 5])
@pytest.mark.slow
def test_batches_of_jax_arrays_may_be_on_any_device(num_devices: int, where: int, devices: Devices):
    def placed():
        for rows in (slice(0, 8), slice(8, 13)):
            yield jax.device_put((X[rows], Y[rows]), devices(8)[where])

    trainer, other = trainer_of(Net(), devices(num_devices)), trainer_of(Net(), devices(num_devices))
    history = trainer.fit(placed, verbose=0).history
    assert history == other.fit(lambda: iter([(X[:8], Y[:8]), (X[8:13], Y[8:13])]), verbose=0).history
    assert trainer.evaluate(placed, verbose=0) == other.evaluate(X[:13], Y[:13], batch_size=8, verbose=0)


# -- collections --


class Kinds(nn.Module):
    """A collection with every kind of value, which differs between replicas."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        number = jax.lax.axis_index("replica") + 1
        old = self.variable("kinds", "float", lambda: jnp.zeros(3))
        old.value = jnp.full(3, number, jnp.float32)
        self.variable("kinds", "half", lambda: jnp.zeros((), jnp.bfloat16)).value = number.astype(jnp.bfloat16)
        self.variable("kinds", "int", lambda: jnp.zeros((), jnp.int32)).value = number * 10
        self.variable("kinds", "byte", lambda: jnp.zeros(2, jnp.uint8)).value = jnp.full(2, 100 + number, jnp.uint8)
        self.variable("kinds", "bool", lambda: jnp.zeros((), bool)).value = number == 1
        self.variable("kinds", "key", lambda: jax.random.key(0)).value = jax.random.key(number)
        return nn.Dense(2)(x)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
@pytest.mark.mostly_slow
def test_floats_are_averaged_and_other_values_are_copied_from_the_first_replica(num_devices: int, devices: Devices):
    trainer = trainer_of(Kinds(), devices(num_devices))
    trainer.build(X)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, trainer.state.model_state)
    trainer.fit(X, Y, steps=2, batch_size=8, verbose=0)
    state = trainer.state.model_state
    assert_replicated(state, num_devices)
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    kinds = state["kinds"]
    mean = np.arange(1, num_devices + 1).mean()
    assert kinds["float"].tolist() == [pytest.approx(mean)] * 3
    assert float(kinds["half"]) == pytest.approx(mean, rel=1e-2)
    assert int(kinds["int"]) == 10
    assert kinds["byte"].tolist() == [101, 101]
    assert bool(kinds["bool"])
    np.testing.assert_array_equal(jax.random.key_data(kinds["key"]), jax.random.key_data(jax.random.key(1)))


class One(nn.Module):
    """A collection `one` with the replica's number, from 1."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        value = self.variable("one", "n", lambda: jnp.zeros((), self.dtype))
        value.value = (jax.lax.axis_index("replica") + 1).astype(self.dtype)
        return nn.Dense(2)(x)


@pytest.mark.parametrize(
    ("reducer", "dtype", "expected"),
    [
        ("mean", jnp.float32, 2.5),
        ("mean", jnp.int32, 2),
        ("sum", jnp.float32, 10),
        ("sum", jnp.int32, 10),
        ("max", jnp.float32, 4),
        ("max", jnp.int32, 4),
        (lambda array, axis: -jax.lax.pmin(array, axis), jnp.float32, -1),
    ],
    ids=["mean", "mean of integers", "sum", "sum of integers", "max", "max of integers", "function"],
)
@pytest.mark.mostly_slow
def test_reduce_determines_how_a_collection_is_combined(reducer: Any, dtype: Any, expected: float, devices: Devices):
    trainer = trainer_of(One(dtype), devices(4), {"one": reducer})
    trainer.train_on_batch((X, Y))
    found = trainer.state.model_state["one"]["n"]
    assert found.dtype == dtype and float(found) == expected
    assert_replicated(trainer.state, 4)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.mostly_slow
def test_a_reduce_function_is_called_for_any_number_of_devices(num_devices: int, devices: Devices):
    # A function that does more than combine values, such as a decay, must have the same effect on a single device.
    trainer = trainer_of(One(jnp.float32), devices(num_devices), {"one": lambda array, axis: 0.5 * jax.lax.pmin(array, axis)})
    trainer.train_on_batch((X, Y))
    assert float(trainer.state.model_state["one"]["n"]) == 0.5


@pytest.mark.parametrize("reducer", ["sum", "max"])
@pytest.mark.mostly_slow
def test_flags_can_be_combined_too(reducer: str, devices: Devices):
    class Flag(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.variable("flags", "any", lambda: jnp.zeros((), bool)).value = jax.lax.axis_index("replica") == 2
            return nn.Dense(2)(x)

    trainer = trainer_of(Flag(), devices(4), {"flags": reducer})
    trainer.train_on_batch((X, Y))
    assert trainer.state.model_state["flags"]["any"].dtype == bool
    assert bool(trainer.state.model_state["flags"]["any"])


def test_a_collection_that_differs_by_replica_at_initialization_is_made_equal_too(devices: Devices):
    trainer = trainer_of(One(jnp.int32), devices(4))
    trainer.build(X)
    assert_replicated(trainer.state, 4)


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, axis_name=self.axis_name, name="norm")(nn.Dense(3)(x))
        return nn.Dense(2)(x)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.slow
def test_batch_norm_over_the_replica_axis_equals_batch_norm_of_the_whole_batch(num_devices: int, devices: Devices):
    # Not Adam: the gradient of a bias before batch norm is only rounding error, which Adam would turn into full-size steps.
    alone, spread = (
        trainer_of(Normed(name), devices(number), optimizer=optax.sgd(0.1, momentum=0.9)) for name, number in ((None, 1), ("replica", num_devices))
    )
    results = []
    for trainer in (alone, spread):
        history = trainer.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append((history["loss"], trainer.state.model_state, trainer.state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)
    assert_replicated(spread.state, num_devices)


@pytest.mark.slow
def test_batch_norm_without_the_axis_averages_the_replicas_statistics(devices: Devices):
    trainer = trainer_of(Normed(), devices(2))
    trainer.build(X)
    dense = jax.tree.map(np.array, trainer.state.params["Dense_0"])
    trainer.train_on_batch((X, Y))
    hidden = (X @ dense["kernel"] + dense["bias"]).reshape(2, 12, 3)
    stats = trainer.state.model_state["batch_stats"]["norm"]
    np.testing.assert_allclose(stats["mean"], 0.5 * hidden.mean(1).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.5 + 0.5 * hidden.var(1).mean(0), rtol=1e-4)


# -- batches of any size --


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("rows", "size", "num_devices"), [*((10, 4, number) for number in (1, 2, 4, 8)), (3, 32, 8), (1, 1, 4), (17, 5, 2)])
def test_there_is_one_prediction_per_row_in_the_order_of_the_rows(rows: int, size: int, num_devices: int, devices: Devices):
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    trainer = trainer_of(Double(), devices(num_devices))
    trainer.build(x)
    outputs = trainer.predict(x, batch_size=size)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(outputs))
    np.testing.assert_array_equal(outputs["twice"], 2 * x)
    np.testing.assert_array_equal(outputs["sum"][0], x.sum(-1))
    np.testing.assert_array_equal(outputs["sum"][1], x[:, None])


@pytest.mark.parametrize("num_devices", [1, 4])
def test_predictions_for_batches_of_varying_sizes_keep_their_order(num_devices: int, devices: Devices):
    x = np.arange(18, dtype=np.float32)[:, None]
    cuts = np.cumsum([0, 4, 2, 3, 4, 2, 3])
    trainer = trainer_of(Double(), devices(num_devices))
    trainer.build(x)
    outputs = trainer.predict(lambda: (x[a:b] for a, b in itertools.pairwise(cuts)))
    np.testing.assert_array_equal(outputs["twice"], 2 * x)
    np.testing.assert_array_equal(trainer.predict_on_batch(x[:3])["twice"], 2 * x[:3])


@pytest.mark.parametrize(("inputs", "params", "collections"), [(3, 0, 0), (2, 1, 0), (2, 0, 1), (1, 2, 0), (1, 1, 1), (2, 2, 1)])
@pytest.mark.mostly_slow
def test_inputs_are_split_and_parameters_are_not_for_any_number_of_either(inputs: int, params: int, collections: int, devices: Devices):
    # pmap of JAX 0.10.2 mistakes in_axes for the axes of the leaves if there are as many leaves as arguments and one argument is empty.
    class Many(nn.Module):
        @nn.compact
        def __call__(self, *x: Any) -> Any:
            zeros = [self.param(f"p{number}", nn.initializers.zeros, ()) for number in range(params)]
            zeros += [self.variable(f"c{number}", "v", lambda: jnp.zeros(())).value for number in range(collections)]
            return sum(x) + sum(zeros)

    x = tuple(X * 10**number for number in range(inputs))
    trainer = fitflax.Trainer(Many(), parallel=DataParallel(devices(2)))
    trainer.compile("sgd", None if params == 0 else "mse")
    trainer.build((x, Y))
    np.testing.assert_allclose(trainer.predict(x, batch_size=5), sum(x), rtol=1e-6)


@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.slow
def test_a_batch_with_fewer_examples_than_devices_can_be_trained_on(num_devices: int, devices: Devices):
    trainer, alone = trainer_of(Net(), devices(num_devices)), trainer_of(Net(), devices(1))
    for one in (trainer, alone):
        one.fit(X[:1], Y[:1], epochs=2, verbose=0)
    np.testing.assert_allclose(trainer.history.history["loss"], alone.history.history["loss"], rtol=1e-5)
    assert_replicated(trainer.state, num_devices)


# -- the parts --


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_split_values_are_joined_in_the_order_of_the_batch(num_devices: int, devices: Devices):
    strategy = DataParallel(devices(num_devices))
    batch = Batch(np.arange(8.0, dtype=np.float32), (), full_mask(8), None)
    double = strategy.compile(lambda scale, batch: (scale * batch.x, scale), inputs=("replicated", "split"), outputs=("split", "replicated"))
    outputs, scale = double(strategy.put(np.float32(2)), strategy.feed(batch))
    np.testing.assert_array_equal(strategy.join(outputs), 2 * batch.x)
    assert scale.shape == ()
    assert jax.tree.map(jnp.shape, strategy.abstract_feed(batch)) == jax.tree.map(jnp.shape, strategy.feed(batch))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_replicas_know_their_index_and_can_communicate(num_devices: int, devices: Devices):
    strategy = DataParallel(devices(num_devices))

    def share(batch: Batch) -> Any:
        number = strategy.replica_index()
        return strategy.sum(number + 1), [jnp.asarray(other) for other in strategy.gather(number * 10)]

    total, gathered = strategy.compile(share, inputs=("split",), outputs=("replicated", "replicated"))(
        strategy.feed(Batch(np.zeros(8, np.float32), (), full_mask(8)))
    )
    assert int(total) == sum(range(1, num_devices + 1))
    assert [int(value) for value in gathered] == [10 * number for number in range(num_devices)]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_put_never_shares_the_callers_buffers(num_devices: int, devices: Devices):
    strategy = DataParallel(devices(num_devices))
    # Aligned for XLA, so that device_put would keep the array itself, regardless of may_alias.
    raw = np.zeros(4096 + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    numpy, array, large = raw[begin : begin + 4096].view(np.float32), jnp.arange(4.0), jnp.arange(2.0**18)
    placed = strategy.put((numpy, array, large))  # The last one is copied on its device.
    numpy[:] = -1
    assert not np.asarray(placed[0]).any()
    assert not pointers(placed[1]) & pointers(array) and not pointers(placed[2]) & pointers(large)
    np.testing.assert_array_equal(placed[2], large)


def test_the_mask_of_full_batches_stays_on_the_device(devices: Devices):
    strategy = DataParallel(devices(2))
    batch = Batch(X, Y, full_mask(24))
    assert strategy.feed(batch).mask is strategy.feed(batch).mask


def test_the_default_is_all_devices_of_the_host():
    strategy = DataParallel()
    assert strategy.num_replicas == jax.local_device_count() and isinstance(strategy, Strategy)
    assert repr(strategy) == f"DataParallel({jax.local_device_count()} {jax.default_backend()} devices, axis_name='replica')"


def test_the_axis_has_the_name_it_was_given(devices: Devices):
    trainer = fitflax.Trainer(Normed("data"), parallel=DataParallel(devices(2), axis_name="data"))
    trainer.compile("sgd", "mse")
    trainer.fit(X, Y, verbose=0)
    assert_replicated(trainer.state, 2)


def test_devices_must_be_a_nonempty_list_without_duplicates(devices: Devices):
    device = devices(1)[0]
    for given in ([device, device], []):
        with pytest.raises(ConfigError, match=r"DataParallel\(devices=...\) must be a nonempty list of distinct devices"):
            DataParallel(given)


@pytest.mark.parametrize("reducer", ["median", None, 3])
def test_an_unknown_reducer_is_an_error(reducer: Any, devices: Devices):
    with pytest.raises(ConfigError, match=f"must map collections to 'mean', 'sum', 'max' or a function. Received: 'counts': {reducer!r}"):
        DataParallel(devices(2), reduce={"counts": reducer})


@pytest.mark.parametrize("number", [1, 2])
def test_a_single_copy_is_on_one_device_and_outlives_the_donated_original(number, devices):
    strategy = DataParallel(devices(number))
    state = strategy.put({"w": np.arange(6.0, dtype=np.float32), "key": jax.random.key(7)})
    copy = strategy.copy_once(state)
    step = strategy.compile(lambda tree: {**tree, "w": tree["w"] + 1}, inputs=("replicated",), outputs="replicated", donate=(0,))
    step(state)
    assert strategy.is_on_host == (jax.default_backend() == "cpu")
    key, w = copy.leaves()
    assert w.tolist() == [0, 1, 2, 3, 4, 5] and key.tolist() == [0, 7] and [leaf.impl for leaf in copy.form.leaves] == ["threefry2x32", None]


def test_the_error_inside_a_mesh_context_of_the_user_suggests_a_solution(devices: Devices):
    trainer = trainer_of(Net(), devices(1))
    with jax.set_mesh(jax.make_mesh((1,), ("batch",))), pytest.raises(ConfigError, match=r"Leave that context, or use parallel\.Sharded\(mesh\)"):
        trainer.fit(X, Y, verbose=0)
    assert trainer.fit(X, Y, verbose=0).epoch == [0]


def test_compile_inside_a_mesh_context_traces_nothing(devices: Devices):
    trainer = fitflax.Trainer(Net(), parallel=DataParallel(devices(1)))
    with jax.set_mesh(jax.make_mesh((1,), ("batch",))):
        trainer.compile("sgd", "mse")
    assert trainer.fit(X, Y, verbose=0).epoch == [0]


def test_a_rule_for_a_collection_that_the_module_does_not_have_is_an_error(devices):
    trainer = trainer_of(WithStats(), devices(2), reduce={"batch_statistics": "mean"})
    with pytest.raises(
        ConfigError, match=r"DataParallel\(reduce=\.\.\.\) names unknown collections: \['batch_statistics'\]\. The module has \['batch_stats'\]\."
    ):
        trainer.fit(X, Y, verbose=0)
