"""The workloads: a model, its batches, loss and optimizer, at full size and at sizes for two CPU cores and for tests."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.real import models

SEED = 0


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a model and its batches.

    Attributes:
        model: The model's arguments.
        batch: Examples per batch.
        length: Tokens of a sequence, or the side of an image.
    """

    model: Mapping[str, Any]
    batch: int
    length: int


@dataclasses.dataclass(frozen=True)
class RealWorkload:
    """A model and how it is trained.

    Attributes:
        name: The name on the command line.
        about: The description in the table.
        make: Creates the model from a size's arguments.
        kind: The kind of batches: `tokens`, `pairs` of sequences, `images`, or images for `diffusion`.
        sizes: The sizes by name: `full`, `cpu` (the full model with batches for two cores), `small`.
        unit: The unit of throughput.
        learning_rate: The maximum learning rate.
        ema_decay: The decay of averaged parameters, if they are averaged.
    """

    name: str
    about: str
    make: Callable[..., Any]
    kind: str
    sizes: Mapping[str, Size]
    unit: str
    learning_rate: float = 3e-4
    ema_decay: float | None = None

    def model(self, size: str) -> Any:
        """Returns the model, a linen module or an NNX module."""
        return self.make(**self.sizes[size].model)

    def units_of_batch(self, size: str) -> int:
        """Returns the number of tokens or images in a batch."""
        return self.sizes[size].batch * (self.sizes[size].length if self.unit == "tokens" else 1)


def _nnx_gpt2(**sizes: Any) -> nnx.Module:
    return models.NNXGPT2(**sizes, rngs=nnx.Rngs(SEED))


_SMALL_TEXT = {"vocabulary": 61, "positions": 16, "width": 24, "heads": 2, "blocks": 2}
_GPT2 = {"full": Size({}, 16, 1024), "cpu": Size({}, 2, 128), "small": Size(_SMALL_TEXT, 2, 8)}
_SCANNED = {name: dataclasses.replace(size, model={**size.model, "scan": True}) for name, size in _GPT2.items()}

ALL = (
    RealWorkload("gpt2", "GPT-2, 124M", models.GPT2, "tokens", _GPT2, "tokens"),
    RealWorkload("gpt2_scan", "GPT-2, 124M, scanned and rematerialized blocks", models.GPT2, "tokens", _SCANNED, "tokens"),
    RealWorkload("gpt2_nnx", "GPT-2, 124M, as an NNX module", _nnx_gpt2, "tokens", _GPT2, "tokens"),
    RealWorkload(
        "resnet50",
        "ResNet-50, batch statistics of all replicas",
        models.ResNet,
        "images",
        {"full": Size({}, 128, 224), "cpu": Size({}, 4, 224), "small": Size({"classes": 5, "stages": (1, 1), "features": 4}, 4, 32)},
        "images",
        1e-3,
    ),
    RealWorkload(
        "vit_b16",
        "ViT-B/16",
        models.ViT,
        "images",
        {"full": Size({}, 128, 224), "cpu": Size({}, 4, 224), "small": Size({"classes": 5, "patch": 8, "width": 24, "heads": 2, "blocks": 2}, 4, 32)},
        "images",
    ),
    RealWorkload(
        "encoder_decoder",
        "an encoder-decoder, 125M",
        models.EncoderDecoder,
        "pairs",
        {"full": Size({}, 32, 512), "cpu": Size({}, 2, 128), "small": Size(_SMALL_TEXT, 2, 8)},
        "tokens",
    ),
    RealWorkload(
        "unet",
        "the U-Net of DDPM, 36M, averaged parameters",
        models.UNet,
        "diffusion",
        {"full": Size({}, 128, 32), "cpu": Size({}, 4, 32), "small": Size({"features": 8, "multipliers": (1, 2), "blocks": 1, "attends_at": 4}, 4, 8)},
        "images",
        2e-4,
        0.999,
    ),
)
NAMES = tuple(workload.name for workload in ALL)


def workload_of(name: str) -> RealWorkload:
    """Returns the workload with a name."""
    return next(each for each in ALL if each.name == name)


def make_data(workload: RealWorkload, size: str, batches: int) -> tuple[Any, np.ndarray]:
    """Returns inputs and targets for a number of batches. They are the same every time."""
    rng, sizes = np.random.default_rng(SEED), workload.sizes[size]
    rows, length = batches * sizes.batch, sizes.length
    vocabulary = sizes.model.get("vocabulary", 50257 if workload.kind == "tokens" else 32128)
    if workload.kind in ("tokens", "pairs"):
        tokens = rng.integers(0, vocabulary, (rows, length + 1), dtype=np.int32)
        shifted = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        if workload.kind == "tokens":
            return shifted
        return (rng.integers(0, vocabulary, (rows, length), dtype=np.int32), shifted[0]), shifted[1]
    images = rng.standard_normal((rows, length, length, 3), np.float32)
    if workload.kind == "diffusion":
        return (images, np.zeros(rows, np.float32)), np.zeros(rows, np.float32)  # The times are drawn in the step.
    return images, rng.integers(0, sizes.model.get("classes", 1000), rows, dtype=np.int32)


def make_optimizer(workload: RealWorkload) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping, warm-up and cosine decay, without weight decay of biases and scales."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, workload.learning_rate, 100, 10_000)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params))
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def diffuse(images: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns noisy images, the times, and the noise, as in DDPM training with its linear schedule of 1000 steps."""
    time_key, noise_key = jax.random.split(key)
    alphas = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))
    times = jax.random.randint(time_key, (len(images),), 0, 1000)
    noise = jax.random.normal(noise_key, images.shape)
    alpha = alphas[times][:, None, None, None]
    return jnp.sqrt(alpha) * images + jnp.sqrt(1 - alpha) * noise, times.astype(jnp.float32), noise
