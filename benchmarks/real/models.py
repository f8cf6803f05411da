"""The models in linen, and GPT-2 also in NNX: bfloat16 compute, float32 parameters.

Layers are those of the papers: GPT-2 (Radford et al., 2019), ResNet v1.5 (He et al., 2015, with the stride in the 3 x 3 convolution), ViT (Dosovitskiy et al.,
2020), an encoder-decoder like T5 v1.1 (Raffel et al., 2019, with learned positions), and the U-Net of DDPM (Ho et al., 2020).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

COMPUTE = jnp.bfloat16


class Block(nn.Module):
    """A transformer block with the norms before attention and MLP.

    Attributes:
        heads: Number of attention heads.
        hidden: Width of the MLP.
        causal: Whether a token attends only to earlier tokens and itself.
        crosses: Whether it also attends to another sequence.
    """

    heads: int
    hidden: int
    causal: bool = False
    crosses: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, other: jax.Array | None = None) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=COMPUTE, use_fast_variance=True)
        attend = functools.partial(nn.MultiHeadDotProductAttention, self.heads, dtype=COMPUTE)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool)) if self.causal else None
        x += attend(name="attention")(norm(name="norm_1")(x), mask=mask)
        if self.crosses:
            x += attend(name="cross")(norm(name="norm_cross")(x), other)
        y = nn.gelu(nn.Dense(self.hidden, dtype=COMPUTE, name="up")(norm(name="norm_2")(x)))
        return x + nn.Dense(x.shape[-1], dtype=COMPUTE, name="down")(y)


class _ScannedBlock(nn.Module):
    """A block with the signature that `nn.scan` needs."""

    heads: int
    hidden: int
    causal: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(self.heads, self.hidden, self.causal, name="block")(x), None


class GPT2(nn.Module):
    """A decoder of tokens. The output layer is tied to the embedding.

    Attributes:
        vocabulary: Number of tokens.
        positions: The longest sequence.
        width: Width of the residual stream.
        heads: Number of attention heads.
        blocks: Number of blocks.
        scan: Whether the blocks are scanned, with their activations recomputed in the backward pass.
    """

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    heads: int = 12
    blocks: int = 12
    scan: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=COMPUTE, embedding_init=nn.initializers.normal(0.02), name="wte")
        place = nn.Embed(self.positions, self.width, dtype=COMPUTE, embedding_init=nn.initializers.normal(0.02), name="wpe")
        x = embed(tokens) + place(jnp.arange(tokens.shape[1]))
        if self.scan:
            scanned = nn.scan(nn.remat(_ScannedBlock, prevent_cse=False), {"params": 0}, split_rngs={"params": True}, length=self.blocks)
            x, _ = scanned(self.heads, 4 * self.width, True, name="blocks")(x, None)
        else:
            for index in range(self.blocks):
                x = Block(self.heads, 4 * self.width, causal=True, name=f"block_{index}")(x)
        return embed.attend(nn.LayerNorm(dtype=COMPUTE, name="norm")(x)).astype(jnp.float32)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50.

    Attributes:
        features: Features of the inner convolutions.
        stride: Stride of the middle convolution.
        axis_name: The axis of the replicas, if there are several.
    """

    features: int
    stride: int
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=COMPUTE, axis_name=self.axis_name)
        conv = functools.partial(nn.Conv, use_bias=False, dtype=COMPUTE)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A ResNet with bottleneck blocks. Its batch statistics are those of all replicas.

    Attributes:
        classes: Number of classes.
        stages: Number of blocks in each stage.
        features: Features of the first stage.
        axis_name: The axis of the replicas, if there are several.
    """

    classes: int = 1000
    stages: Sequence[int] = (3, 4, 6, 3)
    features: int = 64
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.features, (7, 7), 2, use_bias=False, dtype=COMPUTE)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=COMPUTE, axis_name=self.axis_name)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                x = Bottleneck(self.features * 2**stage, 2 if stage and not index else 1, self.axis_name)(x, train)
        return nn.Dense(self.classes, dtype=jnp.float32)(jnp.mean(x, (1, 2)))


class ViT(nn.Module):
    """A vision transformer with a class token.

    Attributes:
        classes: Number of classes.
        patch: Side of a patch.
        width: Width of the residual stream.
        heads: Number of attention heads.
        blocks: Number of blocks.
    """

    classes: int = 1000
    patch: int = 16
    width: int = 768
    heads: int = 12
    blocks: int = 12

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (self.patch, self.patch), self.patch, dtype=COMPUTE)(x).reshape(len(x), -1, self.width)
        token = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token.astype(COMPUTE), (len(x), 1, self.width)), x], 1)
        x += self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], self.width)).astype(COMPUTE)
        for index in range(self.blocks):
            x = Block(self.heads, 4 * self.width, name=f"block_{index}")(x)
        return nn.Dense(self.classes, dtype=jnp.float32)(nn.LayerNorm(dtype=COMPUTE)(x)[:, 0])


class EncoderDecoder(nn.Module):
    """An encoder-decoder of tokens. Its inputs are two sequences.

    Attributes:
        vocabulary: Number of tokens.
        positions: The longest sequence.
        width: Width of the residual stream.
        heads: Number of attention heads.
        blocks: Number of blocks in the encoder, and in the decoder.
    """

    vocabulary: int = 32128
    positions: int = 512
    width: int = 640
    heads: int = 10
    blocks: int = 9

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=COMPUTE, embedding_init=nn.initializers.normal(0.02), name="embedding")
        place = nn.Embed(self.positions, self.width, dtype=COMPUTE, embedding_init=nn.initializers.normal(0.02), name="position")
        x, y = (embed(tokens) + place(jnp.arange(tokens.shape[1])) for tokens in (source, target))
        for index in range(self.blocks):
            x = Block(self.heads, 4 * self.width, name=f"encoder_{index}")(x)
        x = nn.LayerNorm(dtype=COMPUTE, name="encoder_norm")(x)
        for index in range(self.blocks):
            y = Block(self.heads, 4 * self.width, causal=True, crosses=True, name=f"decoder_{index}")(y, x)
        return embed.attend(nn.LayerNorm(dtype=COMPUTE, name="decoder_norm")(y)).astype(jnp.float32)


class UNetBlock(nn.Module):
    """A residual block of the U-Net that depends on the time.

    Attributes:
        features: Features of its output.
        attends: Whether self-attention follows.
    """

    features: int
    attends: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        norm = functools.partial(nn.GroupNorm, 8, dtype=COMPUTE)
        y = nn.Conv(self.features, (3, 3), dtype=COMPUTE)(nn.swish(norm()(x)))
        y += nn.Dense(self.features, dtype=COMPUTE)(nn.swish(time))[:, None, None]
        y = nn.Conv(self.features, (3, 3), kernel_init=nn.initializers.zeros, dtype=COMPUTE)(nn.swish(norm()(y)))
        x = y + (x if x.shape == y.shape else nn.Dense(self.features, dtype=COMPUTE)(x))
        if self.attends:
            flat = norm()(x).reshape(len(x), -1, self.features)
            x += nn.MultiHeadDotProductAttention(1, dtype=COMPUTE)(flat).reshape(x.shape)
        return x


class UNet(nn.Module):
    """Predicts the noise in an image, given the time.

    Attributes:
        features: Features of the first level.
        multipliers: The factor for the features of each level.
        blocks: Number of residual blocks per level.
        attends_at: The side of images at which blocks have attention.
    """

    features: int = 128
    multipliers: Sequence[int] = (1, 2, 2, 2)
    blocks: int = 2
    attends_at: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        channels, half = x.shape[-1], self.features // 2
        angles = time[:, None] * jnp.exp(-math.log(10_000) * jnp.arange(half) / max(half - 1, 1))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.Dense(4 * self.features, dtype=COMPUTE)(nn.swish(nn.Dense(4 * self.features, dtype=COMPUTE)(time)))
        x = nn.Conv(self.features, (3, 3), dtype=COMPUTE)(x)
        kept = [x]
        for level, multiplier in enumerate(self.multipliers):
            for _ in range(self.blocks):
                x = UNetBlock(self.features * multiplier, x.shape[1] == self.attends_at)(x, time)
                kept.append(x)
            if level < len(self.multipliers) - 1:
                x = nn.Conv(x.shape[-1], (3, 3), 2, dtype=COMPUTE)(x)
                kept.append(x)
        x = UNetBlock(x.shape[-1])(UNetBlock(x.shape[-1], True)(x, time), time)
        for level, multiplier in reversed(list(enumerate(self.multipliers))):
            for _ in range(self.blocks + 1):
                x = UNetBlock(self.features * multiplier, x.shape[1] == self.attends_at)(jnp.concatenate([x, kept.pop()], -1), time)
            if level:
                x = jax.image.resize(x, (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
                x = nn.Conv(x.shape[-1], (3, 3), dtype=COMPUTE)(x)
        return nn.Conv(channels, (3, 3), dtype=jnp.float32)(nn.swish(nn.GroupNorm(8, dtype=COMPUTE)(x)))


class NNXBlock(nnx.Module):
    """`Block` in NNX, causal."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, dtype=COMPUTE, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, dtype=COMPUTE, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=COMPUTE, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=COMPUTE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.norm_1(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2], bool)))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NNXGPT2(nnx.Module):
    """`GPT2` in NNX."""

    def __init__(self, vocabulary: int = 50257, positions: int = 1024, width: int = 768, heads: int = 12, blocks: int = 12, *, rngs: nnx.Rngs) -> None:
        init: Any = nnx.initializers.normal(0.02)
        self.wte = nnx.Embed(vocabulary, width, dtype=COMPUTE, embedding_init=init, rngs=rngs)
        self.wpe = nnx.Embed(positions, width, dtype=COMPUTE, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(width, heads, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, dtype=COMPUTE, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.wte.attend(self.norm(x)).astype(jnp.float32)
