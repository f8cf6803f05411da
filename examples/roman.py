"""Trains a sequence-to-sequence network to write numbers as Roman numerals; sample weights exclude padding from a custom loss and the accuracy.

python examples/roman.py [--directory runs/roman] [--epochs 40]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint

LETTERS = ".IVXLCDM"  # Letters by code. A dot ends a numeral and pads it.
END, START = 0, len(LETTERS)
LENGTH = 16  # Length of the longest numeral, MMMDCCCLXXXVIII, plus its end.


class Writer(nn.Module):
    """Reads digits `[batch, 4]` and the letter before each position, `[batch, LENGTH]`; returns logits of the letters, `[batch, LENGTH, letters]`."""

    features: int = 128

    @nn.compact
    def __call__(self, digits, before):
        state, _ = nn.RNN(nn.GRUCell(self.features), return_carry=True)(nn.Embed(10, 32)(digits))
        x = nn.RNN(nn.GRUCell(self.features))(nn.Embed(len(LETTERS) + 1, 32)(before), initial_carry=state)
        return nn.Dense(len(LETTERS))(x)


def loss(logits, codes):
    """Returns the loss of each letter, `[batch, LENGTH]`: its crossentropy, plus a small penalty on logits that all grow or shrink, which softmax ignores."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes) + 1e-4 * jax.nn.logsumexp(logits, axis=-1) ** 2


def whole(logits, codes):
    """Returns whether each numeral is correct from its first letter to its end, `[batch]`."""
    is_padding = jnp.cumsum(codes == END, axis=-1) > 1
    return ((logits.argmax(axis=-1) == codes) | is_padding).all(axis=-1)


def roman(number: int) -> str:
    """Returns a number from 1 to 3999 as a Roman numeral. The network learns this rule."""
    numeral = ""
    for value, letters in {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}.items():
        numeral += letters * (number // value)
        number %= value
    return numeral


def shifted(codes: np.ndarray) -> np.ndarray:
    """Returns the letter before each letter."""
    return np.pad(codes[:, :-1], ((0, 0), (1, 0)), constant_values=START)


def encode(numbers: np.ndarray):
    """Returns `((digits, letters before), letters, weights)` of numbers. The weights are 0 after the end of a numeral."""
    digits = np.stack([numbers // 1000, numbers // 100 % 10, numbers // 10 % 10, numbers % 10], axis=1).astype(np.int32)
    codes = np.array([[LETTERS.index(letter) for letter in roman(number).ljust(LENGTH, LETTERS[END])] for number in numbers], np.int32)
    weights = (np.arange(LENGTH) <= (codes != END).sum(axis=1, keepdims=True)).astype(np.float32)
    return (digits, shifted(codes)), codes, weights


def write(trainer: fitflax.Trainer, digits: np.ndarray) -> list[str]:
    """Returns a numeral for each row of digits, decoded greedily: each letter is the most likely one after those already written."""
    codes = np.full((len(digits), LENGTH), END, np.int32)
    for place in range(LENGTH):
        # Letters do not depend on later letters, so all lengths use one shape and one compiled program.
        codes[:, place] = trainer.predict((digits, shifted(codes)))[:, place].argmax(axis=-1)
    return ["".join(LETTERS[code] for code in row).partition(LETTERS[END])[0] for row in codes]


def main(directory: str | pathlib.Path = "runs/roman", epochs: int = 40, features: int = 128, verbose: int | str = "auto") -> dict[str, float]:
    """Trains, and returns the test values, and as `written` the fraction of test numbers that are written without an error."""
    directory = pathlib.Path(directory)
    numbers = np.random.default_rng(0).permutation(np.arange(1, 4000))
    train, valid, test = numbers[:1000], numbers[1000:1500], numbers[1500:]
    trainer = fitflax.Trainer(Writer(features))
    # Weights are per letter. `whole` has one value per numeral, so it is a metric without weights.
    trainer.compile("adam", loss=loss, metrics=[whole], weighted_metrics=["accuracy"], learning_rate=3e-3)
    callbacks = [ModelCheckpoint(directory / "checkpoints", every=fitflax.every(epochs=10))]
    trainer.fit(*encode(train), batch_size=64, epochs=epochs, validation_data=encode(valid), callbacks=callbacks, resume="auto", verbose=verbose)

    (digits, before), codes, weights = encode(test)
    values = trainer.evaluate((digits, before), codes, weights, verbose=0)
    numerals = write(trainer, digits)
    values["written"] = float(np.mean([numeral == roman(number) for numeral, number in zip(numerals, test, strict=True)]))
    if verbose:
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(*(f"{number} {numeral}" for number, numeral in zip(test[:5], numerals, strict=False)), sep=", ")
        print("{} unseen numbers: accuracy of letters {accuracy:.4f}, of whole numerals {written:.4f}".format(len(test), **values))
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
