"""Trains a recurrent language model without a Trainer, with modular loops; if you kill it, it resumes bit for bit when you run it again.

python examples/modular_loop.py [--directory runs/modular_loop] [--steps 400]

Each row of a batch continues the same row of the previous batch. The network's recurrent state, a collection that training changes, carries over, too.
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

# Sources from Python's standard library. The last module is held out.
MODULES = ("ast", "calendar", "configparser", "difflib", "heapq", "inspect", "optparse", "statistics", "subprocess", "textwrap")
CHARACTERS = 128  # ASCII; other characters become "?".


class Network(nn.Module):
    """Returns the logits of the next character, `[batch, time, CHARACTERS]`, for each position of `[batch, time]`.

    Attributes:
        features: Size of the recurrent state.
        dropout: Dropout rate of the recurrent network's outputs.
        typos: The fraction of characters that are replaced by random ones.
        carries_state: Whether to begin with the final state of the previous batch, and to keep the final state for the next batch.
    """

    features: int
    dropout: float = 0.0
    typos: float = 0.0
    carries_state: bool = False

    @nn.compact
    def __call__(self, x):
        if self.typos:
            rng = self.make_rng("typos")
            x = jnp.where(jax.random.bernoulli(rng, self.typos, x.shape), jax.random.randint(rng, x.shape, 0, CHARACTERS), x)
        carry = self.variable("carry", "state", lambda: 0.1 * jax.random.normal(self.make_rng("carry"), (len(x), self.features)))
        begin = carry.value if self.carries_state else jnp.zeros((len(x), self.features))
        end, x = nn.RNN(nn.GRUCell(self.features), return_carry=True)(nn.Embed(CHARACTERS, 64)(x), initial_carry=begin)
        if self.carries_state and not self.is_initializing():
            carry.value = jax.lax.stop_gradient(end)
        self.sow("summaries", "state", end)
        return nn.Dense(CHARACTERS)(nn.Dropout(self.dropout, deterministic=not self.dropout)(x))


def read() -> tuple[np.ndarray, np.ndarray]:
    """Returns the text for training and the held-out text, as codes `[characters]`. The modules are not run."""
    texts = [importlib.util.find_spec(name).loader.get_source(name) for name in MODULES]
    codes = [np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) for text in texts]
    return np.concatenate(codes[:-1]), codes[-1]


def windows(text: np.ndarray, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of `text`, `[windows, length]`, and the same windows one character later; each row of a batch of `rows` continues in the next batch."""
    steps = (len(text) - 1) // (rows * length)
    order = np.arange(rows * steps).reshape(rows, steps).T.ravel()
    return tuple(text[begin : begin + rows * steps * length].reshape(-1, length)[order] for begin in (0, 1))


def main(
    directory: str | pathlib.Path = "runs/modular_loop", steps: int = 400, *, every: int = 50, features: int = 128, length: int = 64, verbose: bool = True
) -> dict[str, float]:
    """Trains, and returns the last step and the lowest log-perplexity on the held-out text.

    Args:
        directory: Where files are written; a run in this directory is resumed.
        steps: Total steps of the run, including those before a resume.
        every: Steps between checkpoints; the first one is at step 1.
        features: Size of the recurrent state.
        length: Characters per window.
        verbose: Whether to print.
    """
    directory, rows = pathlib.Path(directory), 32
    train, valid = read()
    model = Network(features, dropout=0.1, carries_state=True)
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
        parallel=DataParallel(jax.devices()[:1]),  # A single device, which holds the recurrent states of all rows.
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
