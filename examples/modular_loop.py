"""A recurrent language model trained without a Trainer, by loops that are put together: kill it and start it again, and it goes on to the same bits.

python examples/modular_loop.py [--directory runs/modular_loop] [--steps 400]

Each row of a batch goes on where the row of the batch before it ended, and so does the network's state, which is a collection that training changes.
"""

import argparse
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax import EvalLoop, TrainLoop, first, serial
from fitflax.callbacks import BestCheckpoint, ModelCheckpoint, SummaryLogger, TensorBoard
from fitflax.parallel import DataParallel

# Sources of Python's standard library; the last module is held out.
MODULES = ("ast", "calendar", "configparser", "difflib", "heapq", "inspect", "optparse", "statistics", "subprocess", "textwrap")
CHARACTERS = 128  # ASCII; the few others become "?".


class Network(nn.Module):
    """Logits of the next character, `[batch, time, CHARACTERS]`, at each of `[batch, time]`.

    Attributes:
        features: Size of the recurrent state.
        dropout: The share of it that is dropped.
        typos: The share of characters that are replaced by others.
        goes_on: Whether it begins with the state that the batch before left, and leaves its own.
    """

    features: int
    dropout: float = 0.0
    typos: float = 0.0
    goes_on: bool = False

    @nn.compact
    def __call__(self, x):
        if self.typos:
            rng = self.make_rng("typos")
            x = jnp.where(jax.random.bernoulli(rng, self.typos, x.shape), jax.random.randint(rng, x.shape, 0, CHARACTERS), x)
        carry = self.variable("carry", "state", lambda: 0.1 * jax.random.normal(self.make_rng("carry"), (len(x), self.features)))
        begin = carry.value if self.goes_on else jnp.zeros((len(x), self.features))
        end, x = nn.RNN(nn.GRUCell(self.features), return_carry=True)(nn.Embed(CHARACTERS, 64)(x), initial_carry=begin)
        if self.goes_on and not self.is_initializing():
            carry.value = jax.lax.stop_gradient(end)
        self.sow("summaries", "state", end)
        return nn.Dense(CHARACTERS)(nn.Dropout(self.dropout, deterministic=not self.dropout)(x))


def read() -> tuple[np.ndarray, np.ndarray]:
    """Returns the text to train on and the text that is held out, as codes `[characters]`. No module is run."""
    texts = [importlib.util.find_spec(name).loader.get_source(name) for name in MODULES]
    codes = [np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) for text in texts]
    return np.concatenate(codes[:-1]), codes[-1]


def windows(text: np.ndarray, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pieces of `text`, `[windows, length]`, and what follows each of their characters; a row of a batch of `rows` goes on in the next batch."""
    steps = (len(text) - 1) // (rows * length)
    order = np.arange(rows * steps).reshape(rows, steps).T.ravel()
    return tuple(text[begin : begin + rows * steps * length].reshape(-1, length)[order] for begin in (0, 1))


def main(
    directory: str | pathlib.Path = "runs/modular_loop", steps: int = 400, *, every: int = 50, features: int = 128, length: int = 64, verbose: bool = True
) -> dict[str, float]:
    """Trains, and returns the last step and the lowest log-perplexity on the held-out text.

    Args:
        directory: Where files go; a run in it is gone on with.
        steps: The run's total.
        every: Steps between checkpoints, the first of which is that of step 1.
        features: Size of the recurrent state.
        length: Characters of a window.
        verbose: Whether to print.
    """
    directory, rows = pathlib.Path(directory), 32
    train, valid = read()
    model = Network(features, dropout=0.1, goes_on=True)
    loop = TrainLoop(
        model.init,
        model.apply,
        optimizer=optax.adam(4e-3),
        loss="sparse_categorical_crossentropy",
        data=windows(train, rows, length),
        batch_size=rows,
        shuffle=False,
        steps=steps,
        every=first(1) | fitflax.every(steps=every, offset=1),
        rngs={"init": ("carry",), "train": ("dropout",)},
        restore_from=directory / "checkpoints",
        parallel=DataParallel(jax.devices()[:1]),  # One device has all rows' states.
        sown="summaries",
    )
    lnpp = {"lnpp": optax.softmax_cross_entropy_with_integer_labels}
    held_out = windows(valid, 1, length)
    lowest = BestCheckpoint(directory / "lowest", monitor="eval_lnpp", mode="min")
    process = serial(
        EvalLoop(Network(features).apply, metrics=lnpp, data=held_out),
        EvalLoop(Network(features, typos=0.05).apply, metrics=lnpp, data=held_out, rngs=("typos",), name="typos"),
        *([SummaryLogger()] if verbose else []),
        TensorBoard(directory / "tensorboard", every=fitflax.every(steps=1)),
        lowest,
        ModelCheckpoint(directory / "checkpoints", every=fitflax.every(steps=1)),
    )
    with loop, process:
        for checkpoint in loop:
            process(checkpoint)
    best_step = lowest.store.latest()
    best = lowest.store.metric(best_step, "eval_lnpp")
    if verbose:
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(f"TensorBoard: {directory / 'tensorboard'}")
        print(f"lowest log-perplexity on held-out text: {best:.3f}, in {lowest.store.path(best_step)}")
    return {"step": loop.step, "lnpp": best}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--steps", type=int)
    main(**vars(parser.parse_args()))
