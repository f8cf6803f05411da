"""A character language model on the sources of Python's standard library; stop it with Ctrl-C and start it again, and it goes on where it was.

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

# Modules that are files of their own in Python 3.11 to 3.13. Those to validate on are whole modules, so that nothing of them has been seen.
TRAIN = ("ast", "calendar", "configparser", "difflib", "fractions", "ftplib", "heapq", "inspect", "ipaddress", "optparse", "shutil", "statistics", "subprocess")
VALID = ("argparse", "textwrap")
CHARACTERS = 128  # ASCII; the few others become "?".


class Network(nn.Module):
    """A recurrent network that gives the logits of the next character, `[batch, time, CHARACTERS]`, at each of `[batch, time]`."""

    features: int = 256

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Embed(CHARACTERS, 64)(x)
        x = nn.RNN(nn.GRUCell(self.features))(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(CHARACTERS)(x)


def read(modules: tuple[str, ...]) -> np.ndarray:
    """Returns the sources of modules, one after the other, as codes `[characters]`. No module is run."""
    texts = [importlib.util.find_spec(name).loader.get_source(name) for name in modules]
    return np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8).astype(np.int32)


def windows(text: np.ndarray, length: int, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns pieces of `text`, `[windows, length]`, and for each of their characters the one that follows it."""
    count = min((len(text) - 1) // length, limit or len(text))
    return text[: count * length].reshape(count, length), text[1 : count * length + 1].reshape(count, length)


def frequency_perplexity(train: np.ndarray, text: np.ndarray) -> float:
    """Returns the perplexity of `text` for who knows nothing but how frequent each character is in `train`: what to beat."""
    counts = np.bincount(train, minlength=CHARACTERS) + 1
    return math.exp(-np.log(counts / counts.sum())[text].mean())


def sample(trainer: fitflax.Trainer, length: int, prompt: str = "    def ", limit: int = 80, temperature: float = 0.6, seed: int = 0) -> str:
    """Returns a line that begins with `prompt`, its other characters drawn one by one."""
    rng, line = np.random.default_rng(seed), prompt
    while len(line) < limit:
        # What stands to the right of a character does not reach it, so one shape, and one program, serves for all lengths.
        codes = np.frombuffer(f"\n{line}".encode(), np.uint8)[-length:]
        logits = trainer.predict_on_batch(np.pad(codes, (0, length - len(codes))).astype(np.int32)[None])[0, len(codes) - 1]
        # Largest value of logits plus Gumbel noise: a draw from their softmax.
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
    """Trains, and returns the perplexity on text that was held out, that of guessing by frequency, the validation's history, and a sampled line.

    Args:
        directory: Where checkpoints go; a run in it is gone on with.
        steps: Updates, counted from the beginning of the run.
        features: Size of the recurrent state.
        length: Characters of a window.
        steps_per_epoch: Updates between two validations.
        limit: The most windows to train and to validate on, each.
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
        print("perplexity on held-out text: {perplexity:.2f} (by the frequency of characters alone: {frequency_perplexity:.2f})".format(**result))
        print(f"a sampled line: {result['line']}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--steps", type=int)
    main(**vars(parser.parse_args()))
