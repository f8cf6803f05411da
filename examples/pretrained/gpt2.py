"""GPT-2 in linen and NNX, with a mapping for the weights in Hugging Face files."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from fitflax.checkpoints import WeightRule
from fitflax.integrations import torch_layers


class Block(nn.Module):
    """A transformer block with the norms before attention and MLP."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, *, train: bool):
        width, mask = x.shape[-1], nn.make_causal_mask(jnp.ones(x.shape[:2], bool))
        y = nn.LayerNorm(1e-5, name="norm_1")(x)
        y = nn.MultiHeadDotProductAttention(self.heads, dropout_rate=self.dropout, deterministic=not train, name="attention")(y, mask=mask)
        x += nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm(1e-5, name="norm_2")(x)))
        return x + nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(width, name="down")(y))


class GPT2(nn.Module):
    """Returns logits of the next token, `[batch, length, vocabulary]`, from tokens `[batch, length]`. The output layer is tied to the embedding."""

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    heads: int = 12
    blocks: int = 12
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens, *, train: bool):
        embed = nn.Embed(self.vocabulary, self.width, name="wte")
        x = embed(tokens) + nn.Embed(self.positions, self.width, name="wpe")(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for index in range(self.blocks):
            x = Block(self.heads, self.dropout, name=f"block_{index}")(x, train=train)
        return embed.attend(nn.LayerNorm(1e-5, name="norm")(x))

    @classmethod
    def of(cls, config: dict) -> "GPT2":
        """Returns the model that a `config.json` describes."""
        return cls(config["vocab_size"], config["n_positions"], config["n_embd"], config["n_head"], config["n_layer"], config["resid_pdrop"])


class NNXBlock(nnx.Module):
    """`Block` in NNX."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, dropout_rate=dropout, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2], bool))
        x += self.drop(self.attention(self.norm_1(x), mask=mask))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class NNXGPT2(nnx.Module):
    """`GPT2` in NNX."""

    def __init__(self, vocabulary=50257, positions=1024, width=768, heads=12, blocks=12, dropout=0.1, *, rngs: nnx.Rngs):
        self.wte = nnx.Embed(vocabulary, width, rngs=rngs)
        self.wpe = nnx.Embed(positions, width, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(width, heads, dropout, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.drop(self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.wte.attend(self.norm(x))


def mapping(heads: int, *, prefix: str = "transformer.", block: str = "block_{layer}") -> list[WeightRule]:
    """Returns the rules for files of `GPT2LMHeadModel`.

    Args:
        heads: The model's number of heads.
        prefix: The prefix of all names; `""` for files of `GPT2Model`, such as the first ones on the Hub.
        block: The path of a block: `blocks/{layer}` in NNX.
    """
    theirs = prefix + "h.{layer}"
    return [
        *torch_layers.embedding(f"{prefix}wte", "wte"),
        *torch_layers.embedding(f"{prefix}wpe", "wpe"),
        *torch_layers.norm(f"{theirs}.ln_1", f"{block}/norm_1"),
        *torch_layers.fused_attention(f"{theirs}.attn.c_attn", f"{theirs}.attn.c_proj", f"{block}/attention", num_heads=heads, transposed=False),
        *torch_layers.norm(f"{theirs}.ln_2", f"{block}/norm_2"),
        *torch_layers.dense(f"{theirs}.mlp.c_fc", f"{block}/up", transposed=False),
        *torch_layers.dense(f"{theirs}.mlp.c_proj", f"{block}/down", transposed=False),
        *torch_layers.norm(f"{prefix}ln_f", "norm"),
        WeightRule(f"{theirs}.attn.bias", None, optional=True),  # The causal mask, only in old files.
        WeightRule("lm_head.weight", None, optional=True),  # A copy of the embedding.
    ]
