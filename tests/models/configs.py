"""The configuration of a model whose mode is one of its fields, for several test files."""

from typing import Any

import flax
from flax import linen as nn


@flax.struct.dataclass
class Config:
    """One class for training, evaluation and decoding, as in Flax's examples."""

    width: int = 8
    heads: int = 2
    dropout_rate: float = 0.3
    tied: bool = True
    deterministic: bool = False
    decode: bool = False
    kernel_init: Any = nn.initializers.xavier_uniform()
    axes: tuple[str, str] = ("embed", "mlp")
    attention_axes: tuple[str, ...] = ("embed", "kv")
