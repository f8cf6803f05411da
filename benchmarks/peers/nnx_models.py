"""The models as NNX modules, with the names and shapes of the linen models, so that they can share initial parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.peers import Unavailable
from benchmarks.peers.models import shared_parameters
from benchmarks.workloads import SEED, Workload


class Dense(nnx.Module):
    def __init__(self, inputs: int, hidden: tuple[int, ...], *, rngs: nnx.Rngs):
        self.names = tuple(f"hidden_{index}" for index in range(len(hidden)))
        for name, *sizes in zip(self.names, (inputs, *hidden[:-1]), hidden, strict=True):
            setattr(self, name, nnx.Linear(*sizes, rngs=rngs))
        self.head = nnx.Linear(hidden[-1], 10, rngs=rngs)

    def __call__(self, x):
        for name in self.names:
            x = nnx.relu(getattr(self, name)(x))
        return self.head(x)


class Positions(nnx.Module):
    def __init__(self, length: int, width: int, *, rngs: nnx.Rngs):
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))

    def __call__(self, x):
        return x + self.table[...]


class Transformer(nnx.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int, *, rngs: nnx.Rngs):
        self.blocks = blocks
        self.embed, self.positions = nnx.Embed(vocabulary, width, rngs=rngs), Positions(length, width, rngs=rngs)
        for index in range(blocks):
            setattr(self, f"attention_{index}", nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs))
            setattr(self, f"before_attention_{index}", nnx.LayerNorm(width, rngs=rngs))
            setattr(self, f"before_up_{index}", nnx.LayerNorm(width, rngs=rngs))
            setattr(self, f"up_{index}", nnx.Linear(width, 4 * width, rngs=rngs))
            setattr(self, f"down_{index}", nnx.Linear(4 * width, width, rngs=rngs))
        self.before_head, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.positions(self.embed(tokens))
        mask = nnx.make_causal_mask(tokens)
        for index in range(self.blocks):
            x += getattr(self, f"attention_{index}")(getattr(self, f"before_attention_{index}")(x), mask=mask)
            up = getattr(self, f"up_{index}")(getattr(self, f"before_up_{index}")(x))
            x += getattr(self, f"down_{index}")(nnx.gelu(up))
        return self.head(self.before_head(x))


MODULES: dict[str, Any] = {"dense": Dense, "lm": Transformer}


def make_nnx_module(workload: Workload, *, own_parameters: bool) -> nnx.Module:
    """Returns the model with its own initial parameters, or with those that all peers share.

    Raises:
        Unavailable: There is no model for this workload.
    """
    if workload.kind not in MODULES:
        raise Unavailable(f"no NNX module for {workload.name}")
    module = jax.tree.map(jnp.asarray, MODULES[workload.kind](**workload.sizes, rngs=nnx.Rngs(SEED)))
    if not own_parameters:
        nnx.update(module, shared_parameters(nnx.to_pure_dict(nnx.state(module, nnx.Param))))
    return module
