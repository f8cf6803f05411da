"""Trains a character transformer whose state is sharded over a mesh of devices: FSDP along one axis, tensor parallelism along the other.

python examples/fsdp_transformer.py [--directory runs/fsdp_transformer] [--model 2] [--steps 200]

Without accelerators, it simulates eight devices on the CPU. Run it again with another --model, and it resumes from its checkpoint on another mesh.
"""

import argparse
import importlib.util
import os
import pathlib

os.environ.setdefault("PJRT_NPROC", "16")  # Gives XLA more threads than a machine with few cores would get; with too few, devices may wait for each other.

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.parallel import Sharded

TEXTS = ("ast", "calendar", "configparser", "difflib", "fractions", "ftplib", "heapq", "inspect", "ipaddress", "optparse", "shutil", "statistics")
CHARACTERS = 128

# Maps each logical axis to the mesh axes it is sharded over. Parameters are sharded along "embed" over the devices that split the batch, and gathered layer by
# layer when they are used: FSDP. Wide axes are sharded over "model": tensor parallelism. The rows of the embedding table are sharded over both.
RULES = [("batch", "data"), ("embed", "data"), ("mlp", "model"), ("heads", "model"), ("vocab", "model"), ("codes", ("data", "model"))]
RULES += [("length", None), ("kv", None)]
STREAM = ("batch", "length", None)  # The layout between blocks: sharded like the batch. Features are not sharded here, only in parameters ("embed").


def named(*axes: str):
    """Returns an initializer of matrices or biases that names their axes."""
    init = nn.initializers.normal(0.02) if len(axes) > 1 else nn.initializers.zeros
    return nn.with_logical_partitioning(init, axes)


class Block(nn.Module):
    """Causal attention and an MLP for each position, both added to the input `[batch, length, features]`."""

    features: int
    num_heads: int

    @nn.compact
    def __call__(self, x, train):
        size = self.features // self.num_heads
        y = nn.LayerNorm(scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), use_bias=False)(x)
        q, k, v = (nn.DenseGeneral((self.num_heads, size), use_bias=False, kernel_init=named("embed", "heads", "kv"), name=name)(y) for name in "qkv")
        q, k, v = (nn.with_logical_constraint(each, ("batch", "length", "heads", "kv")) for each in (q, k, v))
        y = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]), deterministic=not train)
        x = x + nn.DenseGeneral(self.features, axis=(-2, -1), use_bias=False, kernel_init=named("heads", "kv", "embed"), name="out")(y)
        x = nn.with_logical_constraint(x, STREAM)
        y = nn.LayerNorm(scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), use_bias=False)(x)
        y = nn.Dense(4 * self.features, kernel_init=named("embed", "mlp"), bias_init=named("mlp"))(y)
        y = nn.with_logical_constraint(nn.gelu(y), ("batch", "length", "mlp"))
        y = nn.Dense(self.features, kernel_init=named("mlp", "embed"), bias_init=named("embed"))(y)
        return nn.with_logical_constraint(x + nn.Dropout(0.1, deterministic=not train)(y), STREAM)


class Transformer(nn.Module):
    """Returns the logits of the next character, `[batch, length, CHARACTERS]`, for each position of `[batch, length]`."""

    features: int = 128
    num_heads: int = 4
    num_layers: int = 2

    @nn.compact
    def __call__(self, codes, *, train: bool):
        x = nn.Embed(CHARACTERS, self.features, embedding_init=named("codes", None))(codes)
        x = x + self.param("positions", named("length", "embed"), (codes.shape[1], self.features), jnp.float32)
        x = nn.with_logical_constraint(x, STREAM)
        for _ in range(self.num_layers):
            # Recompute a block's intermediate values in the backward pass instead of keeping them.
            x = nn.remat(Block, static_argnums=(2,))(self.features, self.num_heads)(x, train)
        return nn.Dense(CHARACTERS, use_bias=False, kernel_init=named("embed", "vocab"))(x)


def read(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of the sources of some modules, `[windows, length]`, and for each character the one that follows it."""
    texts = [importlib.util.find_spec(name).loader.get_source(name) for name in TEXTS]
    codes = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8).astype(np.int32)
    count = (len(codes) - 1) // length
    return codes[: count * length].reshape(count, length), codes[1 : count * length + 1].reshape(count, length)


def main(
    directory: str | pathlib.Path = "runs/fsdp_transformer",
    model: int = 2,
    steps: int = 200,
    *,
    features: int = 128,
    length: int = 64,
    verbose: int | str = "auto",
) -> dict[str, float]:
    """Trains, and returns the loss and accuracy on held-out windows.

    Args:
        directory: Where checkpoints are saved; a run in this directory is resumed, even if it used another mesh.
        model: The number of devices that wide axes are sharded over. The other mesh axis splits the batch, and the remaining axes of parameters.
        steps: Total steps of the run, including those before a resume.
        features: Width of the network.
        length: Characters per window.
        verbose: As in `fit`; 0 prints nothing.
    """
    x, y = read(length)
    held_out = len(x) // 10
    trainer = fitflax.Trainer(Transformer(features), parallel=Sharded({"data": -1, "model": model}, rules=RULES))
    trainer.compile("adamw", loss="sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=2e-3)
    trainer.build((x[:1], y[:1]))
    if verbose:
        trainer.summary(sharding=True)
    checkpoints = pathlib.Path(directory) / "checkpoints"
    trainer.fit(
        x[:-held_out],
        y[:-held_out],
        batch_size=64,
        steps=steps,
        callbacks=[ModelCheckpoint(checkpoints, every=fitflax.every(steps=50))],
        resume="auto",
        verbose=verbose,
    )
    result = trainer.evaluate(x[-held_out:], y[-held_out:], batch_size=64, verbose=0)
    if verbose:
        print(f"checkpoints: {checkpoints}")
        print(f"held-out text: loss {result['loss']:.3f}, accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--model", type=int)
    parser.add_argument("--steps", type=int)
    jax.config.update("jax_num_cpu_devices", 8)  # Affects only the CPU, not accelerators.
    main(**vars(parser.parse_args()))
