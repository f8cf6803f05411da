"""The models in linen, for the hand-written loops and for fitflax."""

import functools
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.workloads import DIGITS, Workload, initial


class Dense(nn.Module):
    inputs: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for index, width in enumerate(self.hidden):
            x = nn.relu(nn.Dense(width, name=f"hidden_{index}")(x))
        return nn.Dense(10, name="head")(x)


class CNN(nn.Module):
    side: int
    features: int

    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = nn.relu(nn.Conv(self.features * (index + 1), (3, 3), name=f"conv_{index}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(4 * self.features, name="hidden")(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class Positions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("table", nn.initializers.normal(0.02), x.shape[1:])


class Transformer(nn.Module):
    vocabulary: int
    length: int
    width: int
    heads: int
    blocks: int

    @nn.compact
    def __call__(self, tokens):
        x = Positions(name="positions")(nn.Embed(self.vocabulary, self.width, name="embed")(tokens))
        mask = nn.make_causal_mask(tokens)
        for index in range(self.blocks):
            attention = nn.MultiHeadDotProductAttention(num_heads=self.heads, name=f"attention_{index}")
            x += attention(nn.LayerNorm(name=f"before_attention_{index}")(x), mask=mask)
            up = nn.Dense(4 * self.width, name=f"up_{index}")(nn.LayerNorm(name=f"before_up_{index}")(x))
            x += nn.Dense(self.width, name=f"down_{index}")(nn.gelu(up))
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm(name="before_head")(x))


class Leaves(nn.Module):
    """Scales and shifts its inputs with each of many pairs of small parameters.

    Unless parameters are shared, they are initialized to ones in all frameworks, because random initial values would take longer to compile than everything
    else.
    """

    pairs: int

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        weights = jnp.stack([self.param(f"weight_{index}", init, x.shape[1:]) for index in range(self.pairs)])
        shifts = jnp.stack([self.param(f"shift_{index}", init, x.shape[1:]) for index in range(self.pairs)])
        return jnp.tanh(x[:, None, :] * weights + shifts).reshape(len(x), -1)


class ManyLeaves(nn.Module):
    inputs: int
    pairs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="head")(Leaves(self.pairs, name="leaves")(x))


MODULES = {"dense": Dense, "cnn": CNN, "lm": Transformer, "leaves": ManyLeaves}


def make_module(workload: Workload) -> nn.Module:
    module = runpy.run_path(str(DIGITS))["CNN"] if workload.kind == "digits" else MODULES[workload.kind]
    return module(**workload.sizes)


def make_optimizer(workload: Workload) -> optax.GradientTransformation:
    make = functools.partial(getattr(optax, workload.optimizer), workload.learning_rate)
    return make()


def shared_parameters(params: Any) -> Any:
    """Returns the initial parameters that all peers share, in the structure of `params`."""
    flat = flatten_dict(params, sep="/")
    return jax.device_put(unflatten_dict({path: initial(path, leaf.shape) for path, leaf in flat.items()}, sep="/"), jax.devices()[0])
