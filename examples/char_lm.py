"""Trains a character language model on the sources of Python's standard library; if you interrupt it with Ctrl-C, it resumes when you run it again.

python examples/char_lm.py [--directory runs/char_lm] [--steps 800]
"""

import argparse
import importlib.util
import math
import pathlib

import numpy as np
from flax import linen as nn

import fitflax
from fitflax.callbacks import LearningRateScheduler, ModelCheckpoint

# Modules that are a single file in Python 3.11 to 3.13. Validation uses whole modules, so that training has seen no part of them.
TRAIN = ("ast", "calendar", "configparser", "difflib", "fractions", "ftplib", "heapq", "inspect", "ipaddress", "optparse", "shutil", "statistics", "subprocess")
VALID = ("argparse", "textwrap")
CHARACTERS = 128  # ASCII; other characters become "?".


class Network(nn.Module):
    """A recurrent network. It returns the logits of the next character, `[batch, time, CHARACTERS]`, for each position of `[batch, time]`."""

    features: int = 256

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Embed(CHARACTERS, 64)(x)
        x = nn.RNN(nn.GRUCell(self.features))(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(CHARACTERS)(x)


def read(modules: tuple[str, ...]) -> np.ndarray:
    """Returns the concatenated sources of modules, as codes `[characters]`. The modules are not run."""
    texts = [importlib.util.find_spec(name).loader.get_source(name) for name in modules]
    return np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8).astype(np.int32)


def windows(text: np.ndarray, length: int, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of `text`, `[windows, length]`, and for each character the one that follows it."""
    count = min((len(text) - 1) // length, limit or len(text))
    return text[: count * length].reshape(count, length), text[1 : count * length + 1].reshape(count, length)


def frequency_perplexity(train: np.ndarray, text: np.ndarray) -> float:
    """Returns the perplexity of `text` when each character is guessed by its frequency in `train`: a baseline."""
    counts = np.bincount(train, minlength=CHARACTERS) + 1
    return math.exp(-np.log(counts / counts.sum())[text].mean())


def sample(trainer: fitflax.Trainer, length: int, prompt: str = "    def ", limit: int = 80, temperature: float = 0.6, seed: int = 0) -> str:
    """Returns a line that begins with `prompt` and continues with sampled characters."""
    rng, line = np.random.default_rng(seed), prompt
    while len(line) < limit:
        # Logits do not depend on later characters, so padding on the right is harmless, and all lengths use one shape and one compiled program.
        codes = np.frombuffer(f"\n{line}".encode(), np.uint8)[-length:]
        logits = trainer.predict_on_batch(np.pad(codes, (0, length - len(codes))).astype(np.int32)[None])[0, len(codes) - 1]
        # The argmax of logits plus Gumbel noise is a sample from their softmax.
        character = chr(np.argmax(logits / temperature + rng.gumbel(size=CHARACTERS)))
        if character == "\n":
            break
        line += character
    return line


def main(
    directory: str | pathlib.Path = "runs/char_lm",
    steps: int = 800,
    *,
    features: int = 256,
    length: int = 64,
    steps_per_epoch: int = 100,
    limit: int | None = None,
    verbose: int | str = "auto",
) -> dict[str, object]:
    """Trains, and returns perplexities on held-out text, the validation history, and a sampled line.

    Args:
        directory: Where checkpoints are saved; a run in this directory is resumed.
        steps: Total steps of the run, including those before a resume.
        features: Size of the recurrent state.
        length: Characters per window.
        steps_per_epoch: Steps between validations.
        limit: Maximum number of windows, for training and for validation.
        verbose: As in `fit`; 0 prints nothing.
    """
    train, valid = read(TRAIN), read(VALID)
    held_out = windows(valid, length, limit)
    trainer = fitflax.Trainer(Network(features))
    trainer.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy", "perplexity"], learning_rate=4e-3)
    history = trainer.fit(
        *windows(train, length, limit),
        batch_size=64,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        validation_data=held_out,
        callbacks=[LearningRateScheduler(lambda epoch: 4e-3 * 0.75**epoch), ModelCheckpoint(pathlib.Path(directory) / "checkpoints")],
        resume="auto",
        verbose=verbose,
    )
    result = {
        "perplexity": trainer.evaluate(*held_out, verbose=0)["perplexity"],
        "frequency_perplexity": frequency_perplexity(train, held_out[1]),
        "history": history.history["val_perplexity"],
        "line": sample(trainer, length),
    }
    if verbose:
        print(f"checkpoints: {pathlib.Path(directory) / 'checkpoints'}")
        print("perplexity on held-out text: {perplexity:.2f} (from character frequencies alone: {frequency_perplexity:.2f})".format(**result))
        print(f"sampled line: {result['line']}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--steps", type=int)
    main(**vars(parser.parse_args()))
