"""`check_replicas`: which copy of which array differs, and by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fitflax
from fitflax.errors import ReplicaError
from fitflax.parallel import DataParallel, check_replicas

DEVICES = jax.devices()[:3]
if len(DEVICES) < 3:
    pytest.skip("needs 3 devices", allow_module_level=True)
MESH = Mesh(np.array(DEVICES), ("replica",))


def replicated(*copies):
    """Returns an array that has these copies on the devices."""
    pieces = [jax.device_put(copy, device) for copy, device in zip(copies, DEVICES, strict=True)]
    shape = copies[0].shape
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(MESH, PartitionSpec()), pieces)


def test_equal_copies_of_any_kind_pass():
    nan = np.array([np.nan, 1.0], np.float32)
    tree = {
        "nan": replicated(nan, nan, nan),
        "count": replicated(*[np.int32(3)] * 3),
        "half": replicated(*[jnp.ones(2, jnp.bfloat16)] * 3),
        "key": jax.device_put(jax.random.key(0), NamedSharding(MESH, PartitionSpec())),
        "host": np.ones(3),
        "number": 5,
        "split": jax.device_put(np.arange(6.0), NamedSharding(MESH, PartitionSpec("replica"))),
    }
    check_replicas(tree)


def test_the_copy_that_differs_is_named_with_path_shape_and_device():
    one = np.ones((2, 3), np.float32)
    other = one.copy()
    other[1, 2] = 1.5
    tree = {"dense": {"kernel": replicated(one, one, other), "bias": replicated(one, one, one)}, "count": replicated(np.int32(3), np.int32(4), np.int32(3))}
    with pytest.raises(ReplicaError) as caught:
        check_replicas(tree)
    assert str(caught.value) == (
        f"Replicas that should be equal differ: count int32[] on {DEVICES[1]} and {DEVICES[0]} in 1 of 1 numbers; "
        f"dense/kernel float32[2, 3] on {DEVICES[2]} and {DEVICES[0]} in 1 of 6 numbers, by up to 0.5."
    )


def test_tolerances_apply_only_to_floating_point_numbers():
    near = replicated(*(np.full(4, 1 + 1e-6 * number, np.float32) for number in range(3)))
    with pytest.raises(ReplicaError, match="the array"):
        check_replicas(near)
    check_replicas(near, rtol=1e-5)
    check_replicas(near, atol=1e-5)
    with pytest.raises(ReplicaError):
        check_replicas(replicated(np.int32(100), np.int32(101), np.int32(100)), atol=5)


def test_a_long_message_is_shortened():
    tree = [replicated(np.int32(0), np.int32(1), np.int32(0)) for _ in range(25)]
    with pytest.raises(ReplicaError, match="and 15 more"):
        check_replicas(tree)


@pytest.mark.slow
def test_the_state_of_a_run_is_equal_on_all_replicas():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.BatchNorm(use_running_average=not train)(x)))

    trainer = fitflax.Trainer(Network(), parallel=DataParallel(DEVICES))
    trainer.compile("adam", "sparse_categorical_crossentropy")
    trainer.fit(np.random.default_rng(0).random((20, 4), np.float32), np.arange(20) % 3, epochs=2, batch_size=6, verbose=0)
    check_replicas(trainer.state)
    assert len(trainer.state.params["Dense_0"]["kernel"].addressable_shards) == 3


def test_nan_in_all_copies_does_not_hide_by_how_much_other_numbers_differ():
    first, second = np.array([np.nan, 1.0], np.float32), np.array([np.nan, 1.5], np.float32)
    with pytest.raises(ReplicaError, match=r"in 1 of 2 numbers, by up to 0\.5\.$"):
        check_replicas({"w": replicated(first, second, first)})
