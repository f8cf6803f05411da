"""BERT with a classification head in linen and NNX, with a mapping for the weights in Hugging Face files."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from fitflax.checkpoints import WeightRule
from fitflax.integrations import torch_layers


def gelu(x):
    return nn.gelu(x, approximate=False)


class Layer(nn.Module):
    """A transformer layer with the norms after attention and MLP."""

    heads: int
    hidden: int
    dropout: float

    @nn.compact
    def __call__(self, x, mask, *, train: bool):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        y = nn.MultiHeadDotProductAttention(self.heads, dropout_rate=self.dropout, deterministic=not train, name="attention")(x, mask=mask)
        x = nn.LayerNorm(1e-12, name="norm_1")(x + drop(y))
        y = nn.Dense(x.shape[-1], name="down")(gelu(nn.Dense(self.hidden, name="up")(x)))
        return nn.LayerNorm(1e-12, name="norm_2")(x + drop(y))


class Bert(nn.Module):
    """Returns logits `[batch, classes]` from tokens, a mask of real tokens, and segments, each `[batch, length]`."""

    classes: int
    vocabulary: int = 30522
    positions: int = 512
    width: int = 768
    heads: int = 12
    layers: int = 12
    hidden: int = 3072
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens, mask, segments, *, train: bool):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        x = nn.Embed(self.vocabulary, self.width, name="words")(tokens) + nn.Embed(2, self.width, name="segments")(segments)
        x += nn.Embed(self.positions, self.width, name="positions")(jnp.arange(tokens.shape[1]))
        x = drop(nn.LayerNorm(1e-12, name="norm")(x))
        mask = nn.make_attention_mask(jnp.ones_like(mask), mask)
        for index in range(self.layers):
            x = Layer(self.heads, self.hidden, self.dropout, name=f"layer_{index}")(x, mask, train=train)
        x = nn.tanh(nn.Dense(self.width, name="pooler")(x[:, 0]))
        return nn.Dense(self.classes, name="head")(drop(x))


class NNXLayer(nnx.Module):
    """`Layer` in NNX."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, *, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, dropout_rate=dropout, decode=False, rngs=rngs)
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs) for _ in range(2))
        self.up, self.down = nnx.Linear(width, hidden, rngs=rngs), nnx.Linear(hidden, width, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm_1(x + self.drop(self.attention(x, mask=mask)))
        return self.norm_2(x + self.drop(self.down(gelu(self.up(x)))))


class NNXBert(nnx.Module):
    """`Bert` in NNX."""

    def __init__(self, classes, vocabulary=30522, positions=512, width=768, heads=12, layers=12, hidden=3072, dropout=0.1, *, rngs: nnx.Rngs):
        self.words, self.positions, self.segments = (nnx.Embed(count, width, rngs=rngs) for count in (vocabulary, positions, 2))
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([NNXLayer(width, heads, hidden, dropout, rngs=rngs) for _ in range(layers)])
        self.pooler, self.head = nnx.Linear(width, width, rngs=rngs), nnx.Linear(width, classes, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array, mask: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.words(tokens) + self.segments(segments) + self.positions(jnp.arange(tokens.shape[1]))
        x, mask = self.drop(self.norm(x)), nnx.make_attention_mask(jnp.ones_like(mask), mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.drop(nnx.tanh(self.pooler(x[:, 0]))))


def mapping(heads: int, *, layer: str = "layer_{layer}") -> list[WeightRule]:
    """Returns the rules for files of `BertForSequenceClassification`.

    Args:
        heads: The model's number of heads.
        layer: The path of a layer: `layers/{layer}` in NNX.
    """
    theirs, embeddings = "bert.encoder.layer.{layer}", "bert.embeddings"
    names = {name: f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")} | {"out": f"{theirs}.attention.output.dense"}
    return [
        *torch_layers.embedding(f"{embeddings}.word_embeddings", "words"),
        *torch_layers.embedding(f"{embeddings}.position_embeddings", "positions"),
        *torch_layers.embedding(f"{embeddings}.token_type_embeddings", "segments"),
        *torch_layers.norm(f"{embeddings}.LayerNorm", "norm"),
        *torch_layers.attention(names, f"{layer}/attention", num_heads=heads),
        *torch_layers.norm(f"{theirs}.attention.output.LayerNorm", f"{layer}/norm_1"),
        *torch_layers.dense(f"{theirs}.intermediate.dense", f"{layer}/up"),
        *torch_layers.dense(f"{theirs}.output.dense", f"{layer}/down"),
        *torch_layers.norm(f"{theirs}.output.LayerNorm", f"{layer}/norm_2"),
        *torch_layers.dense("bert.pooler.dense", "pooler"),
        *torch_layers.dense("classifier", "head"),
        WeightRule(f"{embeddings}.position_ids", None, optional=True),  # 0, 1, 2, ..., only in old files.
    ]
