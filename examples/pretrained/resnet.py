"""A ResNet with bottlenecks (ResNet-50 and larger) in linen and NNX, with a mapping for the weights in Hugging Face files."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from fitflax.checkpoints import WeightRule
from fitflax.integrations import torch_layers

# PyTorch pads both sides equally. "SAME" does not if there is a stride.
PADDING = {1: 0, 3: 1, 7: 3}


class ConvNorm(nn.Module):
    """A convolution and a batch norm."""

    features: int
    window: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Conv(self.features, (self.window, self.window), self.stride, padding=PADDING[self.window], use_bias=False, name="conv")(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name="norm")(x)


class Bottleneck(nn.Module):
    features: int
    stride: int
    has_shortcut: bool

    @nn.compact
    def __call__(self, x, *, train: bool):
        y = nn.relu(ConvNorm(self.features // 4, 1, name="conv_0")(x, train=train))
        y = nn.relu(ConvNorm(self.features // 4, 3, self.stride, name="conv_1")(y, train=train))
        y = ConvNorm(self.features, 1, name="conv_2")(y, train=train)
        if self.has_shortcut:
            x = ConvNorm(self.features, 1, self.stride, name="shortcut")(x, train=train)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Returns logits `[batch, classes]` from images `[batch, height, width, channels]`."""

    classes: int = 1000
    stages: Sequence[int] = (3, 4, 6, 3)
    features: Sequence[int] = (256, 512, 1024, 2048)
    stem: int = 64

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(ConvNorm(self.stem, 7, 2, name="stem")(x, train=train))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, (blocks, features) in enumerate(zip(self.stages, self.features, strict=True)):
            for index in range(blocks):
                x = Bottleneck(features, 2 if stage and not index else 1, index == 0, name=f"stage_{stage}_block_{index}")(x, train=train)
        return nn.Dense(self.classes, name="head")(jnp.mean(x, (1, 2)))


class NNXConvNorm(nnx.Module):
    """`ConvNorm` in NNX."""

    def __init__(self, channels: int, features: int, window: int, stride: int = 1, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(channels, features, (window, window), stride, padding=PADDING[window], use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class NNXBottleneck(nnx.Module):
    """`Bottleneck` in NNX."""

    def __init__(self, channels: int, features: int, stride: int, has_shortcut: bool, *, rngs: nnx.Rngs):
        self.conv_0 = NNXConvNorm(channels, features // 4, 1, rngs=rngs)
        self.conv_1 = NNXConvNorm(features // 4, features // 4, 3, stride, rngs=rngs)
        self.conv_2 = NNXConvNorm(features // 4, features, 1, rngs=rngs)
        self.shortcut = NNXConvNorm(channels, features, 1, stride, rngs=rngs) if has_shortcut else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv_2(nnx.relu(self.conv_1(nnx.relu(self.conv_0(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class NNXResNet(nnx.Module):
    """`ResNet` in NNX."""

    def __init__(self, classes=1000, stages=(3, 4, 6, 3), features=(256, 512, 1024, 2048), stem=64, channels=3, *, rngs: nnx.Rngs):
        self.stem = NNXConvNorm(channels, stem, 7, 2, rngs=rngs)
        widths = (stem, *features)
        self.stages = nnx.List()
        for stage, blocks in enumerate(stages):
            first = NNXBottleneck(widths[stage], widths[stage + 1], 2 if stage else 1, True, rngs=rngs)
            rest = [NNXBottleneck(widths[stage + 1], widths[stage + 1], 1, False, rngs=rngs) for _ in range(blocks - 1)]
            self.stages.append(nnx.List([first, *rest]))
        self.head = nnx.Linear(features[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(jnp.mean(x, (1, 2)))


def mapping(*, block: str = "stage_{stage}_block_{block}") -> list[WeightRule]:
    """Returns the rules for files of `ResNetForImageClassification`.

    Args:
        block: The path of a block: `stages/{stage}/{block}` in NNX.
    """
    theirs = "resnet.encoder.stages.{stage}.layers.{block}"
    rules = [*_conv_norm("resnet.embedder.embedder", "stem"), *torch_layers.dense("classifier.1", "head")]
    for name in ("layer.0", "layer.1", "layer.2", "shortcut"):
        rules += _conv_norm(f"{theirs}.{name}", f"{block}/{name.replace('layer.', 'conv_')}")
    return rules


def _conv_norm(theirs: str, ours: str) -> list[WeightRule]:
    return [
        *torch_layers.conv(f"{theirs}.convolution", f"{ours}/conv", bias=False),
        *torch_layers.batch_norm(f"{theirs}.normalization", f"{ours}/norm"),
    ]
