"""A vision transformer in linen and NNX, with a mapping for the weights in Hugging Face files."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from fitflax.checkpoints import WeightRule
from fitflax.integrations import torch_layers


def gelu(x):
    return nn.gelu(x, approximate=False)


class Block(nn.Module):
    """A transformer block with the norms before attention and MLP."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        x += nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm(1e-12, name="norm_1")(x))
        y = gelu(nn.Dense(self.hidden, name="up")(nn.LayerNorm(1e-12, name="norm_2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(y)


class ViT(nn.Module):
    """Returns logits `[batch, classes]` from images `[batch, height, width, channels]`."""

    classes: int = 1000
    patch: int = 16
    width: int = 768
    heads: int = 12
    blocks: int = 12
    hidden: int = 3072

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (self.patch, self.patch), self.patch, padding="VALID", name="patches")(x).reshape(len(x), -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, self.width)), x], 1)
        x += self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for index in range(self.blocks):
            x = Block(self.heads, self.hidden, name=f"block_{index}")(x)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(1e-12, name="norm")(x)[:, 0])


class NNXBlock(nnx.Module):
    """`Block` in NNX."""

    def __init__(self, width: int, heads: int, hidden: int, *, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, hidden, rngs=rngs), nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.norm_1(x))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class NNXViT(nnx.Module):
    """`ViT` in NNX, for images of `size` by `size`."""

    def __init__(self, classes=1000, size=224, channels=3, patch=16, width=768, heads=12, blocks=12, hidden=3072, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(channels, width, (patch, patch), patch, padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 1 + (size // patch) ** 2, width)))
        self.blocks = nnx.List([NNXBlock(width, heads, hidden, rngs=rngs) for _ in range(blocks)])
        self.norm, self.head = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs), nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x).reshape(len(x), -1, self.token.shape[-1])
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, x.shape[-1])), x], 1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def mapping(heads: int, *, block: str = "block_{layer}") -> list[WeightRule]:
    """Returns the rules for files of `ViTForImageClassification`.

    Args:
        heads: The model's number of heads.
        block: The path of a block: `blocks/{layer}` in NNX.
    """
    theirs = "vit.encoder.layer.{layer}"
    names = {name: f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value")} | {"out": f"{theirs}.attention.output.dense"}
    return [
        WeightRule("vit.embeddings.cls_token", "params/token"),
        WeightRule("vit.embeddings.position_embeddings", "params/positions"),
        *torch_layers.conv("vit.embeddings.patch_embeddings.projection", "patches"),
        *torch_layers.norm(f"{theirs}.layernorm_before", f"{block}/norm_1"),
        *torch_layers.attention(names, f"{block}/attention", num_heads=heads),
        *torch_layers.norm(f"{theirs}.layernorm_after", f"{block}/norm_2"),
        *torch_layers.dense(f"{theirs}.intermediate.dense", f"{block}/up"),
        *torch_layers.dense(f"{theirs}.output.dense", f"{block}/down"),
        *torch_layers.norm("vit.layernorm", "norm"),
        *torch_layers.dense("classifier", "head"),
    ]
