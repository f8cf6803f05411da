"""Random keys of streams in a custom step: JAX and Flax treat them as a dict, and a missing name raises an error that says what to do."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.errors import ConfigError


class Noisy(fitflax.Trainer):
    def train_step(self, state, batch):
        noise = jax.random.normal(self.step_rngs(state)["noise"], batch.mask.shape)
        return state.replace_step(state.step + 1), {"loss": (noise.sum(), batch.mask.sum())}


def make(**options) -> fitflax.Trainer:
    trainer = Noisy(nn.Dense(1), **options)
    trainer.compile("adam")
    return trainer


def test_a_stream_that_is_not_named_is_an_error_that_says_where_to_name_it():
    x = np.ones((8, 2), np.float32)
    with pytest.raises(ConfigError, match=r"no random stream 'noise'\. It has: \['dropout'\]\. Name it: Trainer\(rngs=\('dropout', 'noise'\)\)\."):
        make().fit(x, x, verbose=0)
    assert make(rngs=("dropout", "noise")).fit(x, x, verbose=0).epoch == [0]


@pytest.mark.slow
def test_jax_and_flax_treat_the_keys_of_a_step_as_a_dict():
    trainer = make(rngs=("noise", "dropout"), parallel=fitflax.parallel.Sharded({"data": -1}, devices=jax.devices()[:1]))
    trainer.build((np.ones((8, 2), np.float32),))
    keys = trainer.step_rngs(trainer.state)
    assert [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(keys)] == ["dropout", "noise"]
    assert jax.jit(lambda keys: keys["noise"])(keys) == keys["noise"] == jax.tree.map(lambda key: key, keys)["noise"]
    assert nn.Dropout(0.5, deterministic=False).apply({}, np.ones(100), rngs=keys).min() == 0
    assert keys.get("params") is None and "params" not in keys
