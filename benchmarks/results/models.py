"""The networks: a GPT like nanoGPT's, the CIFAR ResNet of He et al. (2015), and the variational autoencoder of Kingma and Welling (2013)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

small = nn.initializers.normal(0.02)


class CausalAttention(nn.Module):
    """Causal self-attention, with dropout on the attention weights and on the output.

    Attributes:
        heads: Number of attention heads.
        layers: Layers of the whole network; with more layers, the output projection is initialized to smaller values.
        dropout: Dropout rate.
    """

    heads: int
    layers: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        batch, time, width = x.shape
        query, key, value = jnp.split(nn.Dense(3 * width, use_bias=False, kernel_init=small, name="qkv")(x).reshape(batch, time, 3 * self.heads, -1), 3, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
        weights = jax.nn.softmax(jnp.where(jnp.tri(time, dtype=bool), scores, -jnp.inf))
        weights = nn.Dropout(self.dropout, deterministic=not train)(weights)
        x = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, time, width)
        x = nn.Dense(width, use_bias=False, kernel_init=nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5), name="out")(x)
        return nn.Dropout(self.dropout, deterministic=not train)(x)


class GPT(nn.Module):
    """Returns the logits of the next character, `[batch, time, vocabulary]`. There are no biases, and the output layer is tied to the embedding.

    Attributes:
        vocabulary: Number of characters.
        layers: Number of transformer blocks.
        heads: Number of attention heads.
        width: Width of the residual stream.
        length: The longest sequence.
        dropout: Dropout rate.
    """

    vocabulary: int
    layers: int
    heads: int
    width: int
    length: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        drop = functools.partial(nn.Dropout, self.dropout, deterministic=not train)
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5, use_bias=False, use_fast_variance=False)
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=small, name="tokens")
        place = nn.Embed(self.length, self.width, embedding_init=small, name="positions")
        x = drop()(embed(tokens) + place(jnp.arange(tokens.shape[1])))
        for index in range(self.layers):
            x += CausalAttention(self.heads, self.layers, self.dropout, name=f"attention_{index}")(norm()(x), train=train)
            y = nn.gelu(nn.Dense(4 * self.width, use_bias=False, kernel_init=small, name=f"up_{index}")(norm()(x)))
            down = nn.Dense(self.width, use_bias=False, kernel_init=nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5), name=f"down_{index}")
            x += drop()(down(y))
        return embed.attend(norm()(x))


def shifted(key: jax.Array, images: jax.Array) -> jax.Array:
    """Returns images `[batch, height, width, 1]`, each shifted by up to one pixel in both directions. Edges are padded with repeated pixels."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    corners = jax.random.randint(key, (len(images), 2), 0, 3)
    return jax.vmap(lambda image, corner: jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), images.shape[1:]))(padded, corners)


class ResNet(nn.Module):
    """Three stages of residual blocks of two convolutions, with shortcuts without parameters: 20 layers if each stage has three blocks.

    In training, it shifts its images by up to a pixel, with keys of the stream `augment`.

    Attributes:
        blocks: Number of blocks per stage.
        features: Features of the first stage. Each stage has twice as many as the one before, and half the height and width.
    """

    blocks: int = 3
    features: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), use_bias=False, kernel_init=nn.initializers.he_normal())
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, use_fast_variance=False)
        if train:
            x = shifted(self.make_rng("augment"), x)
        x = nn.relu(norm()(conv(self.features)(x)))
        for stage in range(3):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                features = self.features * 2**stage
                y = nn.relu(norm()(conv(features, strides=stride)(x)))
                y = norm()(conv(features)(y))
                shortcut = x[:, ::stride, ::stride]
                x = nn.relu(y + jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, features - x.shape[-1]))))
        return nn.Dense(10, kernel_init=nn.initializers.he_normal())(x.mean((1, 2)))


class VAE(nn.Module):
    """Encodes binary images `[batch, pixels]` as normal distributions, and decodes a sample from them, with the stream `latent`.

    Attributes:
        latents: Dimensions of the code.
        hidden: Units of the hidden layer, one in the encoder and one in the decoder.
        pixels: Pixels per image.
    """

    latents: int = 2
    hidden: int = 100
    pixels: int = 64

    def setup(self) -> None:
        self.encoder = nn.Sequential([nn.Dense(self.hidden), nn.tanh, nn.Dense(2 * self.latents)])
        self.decoder = nn.Sequential([nn.Dense(self.hidden), nn.tanh, nn.Dense(self.pixels)])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean, log_variance = self.encode(x)
        z = mean + jnp.exp(log_variance / 2) * jax.random.normal(self.make_rng("latent"), mean.shape)
        return self.decode(z), mean, log_variance

    def encode(self, x: jax.Array) -> Any:
        """Returns the mean and the log variance, `[batch, latents]` each."""
        return jnp.split(self.encoder(x), 2, axis=-1)

    def decode(self, z: jax.Array) -> jax.Array:
        """Returns the logits of the pixels, `[batch, pixels]`."""
        return self.decoder(z)
