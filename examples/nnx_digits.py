"""Trains an NNX module on scikit-learn's handwritten digits; if you interrupt it with Ctrl-C, it resumes when you run it again.

python examples/nnx_digits.py [--directory runs/nnx_digits] [--epochs 15]
"""

import argparse
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import fitflax
from fitflax.callbacks import BestCheckpoint, EarlyStopping, ModelCheckpoint, TensorBoard
from fitflax.checkpoints import load_inference_state


class CNN(nnx.Module):
    """Two convolutions with batch normalization and dropout, for images `[batch, 8, 8, 1]` and ten classes."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        widths = (1, features, 2 * features)
        self.convolutions = nnx.List([nnx.Conv(*pair, (3, 3), use_bias=False, rngs=rngs) for pair in itertools.pairwise(widths)])
        self.norms = nnx.List([nnx.BatchNorm(width, momentum=0.9, rngs=rngs) for width in widths[1:]])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(4 * widths[-1], 10, rngs=rngs)

    def __call__(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.max_pool(nnx.relu(norm(convolution(x))), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))


def load(seed: int = 0):
    """Returns `(images, labels)` for training, validation and test; images are in [0, 1]."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = digits.images[order, :, :, None].astype(np.float32) / 16
    labels = digits.target[order].astype(np.int32)
    return [(images[part], labels[part]) for part in (slice(0, 1200), slice(1200, 1500), slice(1500, None))]


def main(directory: str | pathlib.Path = "runs/nnx_digits", epochs: int = 15, features: int = 32, verbose: int | str = "auto") -> float:
    """Trains, and returns the test accuracy of the trained module, called without the trainer."""
    directory = pathlib.Path(directory)
    train, valid, (images, labels) = load()
    model = CNN(features, rngs=nnx.Rngs(0))
    trainer = fitflax.Trainer(model)
    trainer.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=2e-3)
    best = BestCheckpoint(directory / "best", monitor="val_accuracy", restore_best=True)
    callbacks = [ModelCheckpoint(directory / "checkpoints"), best, EarlyStopping("val_loss", patience=5), TensorBoard(directory / "tensorboard")]
    trainer.fit(*train, batch_size=64, epochs=epochs, validation_data=valid, callbacks=callbacks, resume="auto", verbose=verbose)

    # The module holds the trained variables. Load the best checkpoint into another module.
    fresh = CNN(features, rngs=nnx.Rngs(1))
    for tree in load_inference_state(directory / "best").variables.values():
        nnx.update(fresh, tree)
    outputs = [nnx.view(each, deterministic=True, use_running_average=True)(images) for each in (model, fresh)]
    accuracy = float((jnp.argmax(outputs[0], axis=1) == labels).mean())
    if verbose:
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(f"outputs of the best checkpoint: {'identical' if jnp.array_equal(*outputs) else 'different'}")
        print(f"test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
