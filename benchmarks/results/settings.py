"""The settings of each task, shared by the hand-written scripts and `fit`: the model, the optimizer and the number of steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from benchmarks.results.data import LENGTH
from benchmarks.results.models import GPT, VAE, ResNet


@dataclasses.dataclass(frozen=True)
class CharLM:
    """nanoGPT's recipe for characters, with the sizes that its README gives for a laptop.

    Attributes:
        dropout: 0 as in that command; nanoGPT's configuration for a GPU has 0.2.
        length: Characters that a prediction can depend on.
        batch: Windows of text per step.
        steps: Number of steps.
        every: Steps between validations.
        warmup: Steps in which the learning rate increases.
        characters: Characters of the text.
    """

    dropout: float = 0.0
    layers: int = 4
    heads: int = 4
    width: int = 128
    length: int = 64
    batch: int = 12
    steps: int = 2000
    every: int = 250
    warmup: int = 100
    characters: int = LENGTH

    def model(self, vocabulary: int) -> GPT:
        return GPT(vocabulary, self.layers, self.heads, self.width, self.length, self.dropout)

    def optimizer(self) -> optax.GradientTransformation:
        rate = optax.warmup_cosine_decay_schedule(1e-3 / (self.warmup + 1), 1e-3, self.warmup, self.steps, 1e-4)
        adamw = optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params))
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@dataclasses.dataclass(frozen=True)
class Images:
    """The recipe of He et al. (2015) for CIFAR-10, with a cosine schedule instead of a stepwise learning rate.

    Attributes:
        blocks: Number of blocks in each of the three stages.
        features: Features of the first stage.
        batch: Images per step.
        epochs: Epochs over the training half.
        images: Images in each half; `None` for all.
    """

    blocks: int = 3
    features: int = 16
    batch: int = 64
    epochs: int = 30
    images: int | None = None

    def model(self) -> ResNet:
        return ResNet(self.blocks, self.features)

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9))


@dataclasses.dataclass(frozen=True)
class Autoencoder:
    """The recipe of Kingma and Welling (2013): tanh, one hidden layer of 100 in the encoder and in the decoder, batches of 100, Adagrad.

    Attributes:
        latents: Two, so that the exact likelihood can be computed by integration over a grid.
        hidden: Units of a hidden layer.
        batch: Images per step, and per batch of the evaluation.
        epochs: Epochs over the training images.
        every: Epochs between evaluations.
        images: Training images; `None` for all.
    """

    latents: int = 2
    hidden: int = 100
    batch: int = 100
    epochs: int = 1000
    every: int = 20
    images: int | None = None

    def model(self) -> VAE:
        return VAE(self.latents, self.hidden)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adagrad(0.1)


Settings = CharLM | Images | Autoencoder


class Task(NamedTuple):
    """A task.

    Args:
        settings: The settings at full size.
        quick: The settings for a few seconds, only to check that it runs.
        value: The key of the metric that is compared.
    """

    settings: Settings
    quick: Settings
    value: str


_QUICK_LM: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "length": 16, "batch": 4, "steps": 24, "every": 12, "warmup": 4, "characters": 20_000}

TASKS: dict[str, Task] = {
    "char_lm": Task(CharLM(), CharLM(**_QUICK_LM), "val_loss"),
    "char_lm_dropout": Task(CharLM(dropout=0.2, steps=400, every=50), CharLM(dropout=0.2, **_QUICK_LM), "val_loss"),
    "resnet": Task(Images(), Images(blocks=1, features=4, batch=16, epochs=2, images=64), "val_accuracy"),
    "vae": Task(Autoencoder(), Autoencoder(hidden=16, epochs=4, every=2, images=200), "val_loss"),
}


@dataclasses.dataclass
class Curves:
    """The logs of a run.

    Attributes:
        loss: The loss of each step.
        steps: The step of each evaluation.
        evaluations: By key, a value for each evaluation.
    """

    loss: list[float]
    steps: list[int]
    evaluations: dict[str, list[float]]
