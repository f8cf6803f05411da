"""Sample states for tests of the file format, and helpers to read and compare them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fitflax.checkpoints.checkpoint_files import read_metadata, read_state
from fitflax.checkpoints.weight_rules import from_file, to_file
from fitflax.state import TrainState


def train_state():
    params = {"Dense_0": {"kernel": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), "bias": jnp.ones(4)}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    model_state = {"cache": {"on": jnp.array([True, False]), "empty": jnp.zeros((0, 3)), "none": None, "nothing": {}}}
    return TrainState(step=jnp.int32(7), params=params, model_state=model_state, opt_state=optimizer.init(params), key=jax.random.key(3))


RUN = {
    "sums": [np.float32(1.5), np.arange(3), (1, 2)],
    "callbacks": {"EarlyStopping": {"best": -math.inf, "wait": 2, "on": True, "note": "NaN", "none": None, "big": 2**63, "empty": [], "map": {}}},
    "position": b"\x00\xff",
    "key": jax.random.key(5, impl="rbg"),
}


METADATA = {"run_id": "a", "step": 7, "metrics": {"train": {"loss": 0.5}}, "history": [{"epoch": 0, "loss": 0.75}]}


def read(directory, **kwargs):
    metadata = read_metadata(directory)
    return read_state(directory, metadata, **kwargs), metadata


def kept_bytes(memory):
    """Returns the size of all blocks that a `ReusedMemory` keeps."""
    return sum(map(len, memory._blocks))


def assert_same(left, right):
    """Compares trees leaf by leaf: types, dtypes, shapes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if not hasattr(a, "dtype"):
            assert type(a) is type(b) and (a == b or (a != a and b != b))
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def both_ways(arrays, rules):
    """Returns the arrays of a file under the names of a model, and checks that saving them restores the file."""
    ours, left = from_file(arrays, rules, where="a file")
    assert left == []
    theirs = to_file(ours, rules, where="a file")
    assert theirs.keys() == arrays.keys() and all(np.array_equal(theirs[name], arrays[name]) for name in arrays)
    return ours
