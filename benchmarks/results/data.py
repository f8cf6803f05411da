"""The data: text for character prediction, and scikit-learn's handwritten digits. Nothing is downloaded."""

import os
import pathlib
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

# The plays in the file "tiny Shakespeare", in its order.
PLAYS = (
    "coriolanus",
    "richard_iii",
    "richard_ii",
    "romeo_and_juliet",
    "henry_vi_part_3",
    "winters_tale",
    "measure_for_measure",
    "taming_of_the_shrew",
    "tempest",
)
LENGTH = 1_115_394  # Its length in characters.


class Text(NamedTuple):
    """A text for training and validation.

    Args:
        label: A description of the text.
        vocabulary: Its characters, in order.
        train: The codes of the first nine tenths.
        valid: The codes of the rest.
    """

    label: str
    vocabulary: str
    train: np.ndarray
    valid: np.ndarray


def read_text(path: pathlib.Path | None = None, length: int = LENGTH) -> Text:
    """Returns a text, cut to a length.

    Args:
        path: A text file, or the source archive of the package `shakespeare` 0.6, from which nine plays are taken without headings and stage directions. The
            default is the sources of Python's standard library.
        length: The maximum number of characters.
    """
    if path is None:
        label, text = "Python's standard library", _library(length)
    elif path.name.endswith(".tar.gz"):
        label, text = "Shakespeare, nine plays", _plays(path)
    else:
        label, text = path.name, path.read_text(encoding="utf-8")
    text = text[:length]
    vocabulary = "".join(sorted(set(text)))
    table = np.zeros(128, np.int32)
    table[[ord(character) for character in vocabulary]] = np.arange(len(vocabulary))
    codes = table[np.frombuffer(text.encode("ascii"), np.uint8)]
    cut = int(0.9 * len(codes))
    return Text(label, vocabulary, codes[:cut], codes[cut:])


def _library(length: int) -> str:
    """Returns modules of the standard library, sorted by name, until there are enough characters. Characters that are not ASCII become question marks."""
    parts: list[str] = []
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace").decode())
        if sum(map(len, parts)) >= length:
            break
    return "".join(parts)


def _plays(path: pathlib.Path) -> str:
    with tarfile.open(path) as archive:
        files = {pathlib.PurePosixPath(member.name).name: member for member in archive if "/texts/" in member.name}
        texts = []
        for play in PLAYS:
            file = archive.extractfile(files[f"{play}_gut.txt"])
            assert file is not None
            texts.append(_dialogue(file.read().decode("ascii").replace("\r\n", "\n")))
    return "\n\n".join(texts) + "\n"


def _dialogue(text: str) -> str:
    """Returns what is spoken in a play, and by whom."""
    text = text[re.search(r"^(ACT 1|ACT I|INDUCTION)\b", text, re.MULTILINE).start() :]  # type: ignore[union-attr]  # Every play has a first act.
    text = re.sub(r"\[[^\]]*\]", "", text)
    text = re.sub(r"^ *(ACT|SCENE|INDUCTION)\b.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def windows(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of a text, `[windows, length]`, and for each character the one that follows it."""
    count = (len(codes) - 1) // length
    return codes[: count * length].reshape(count, length), codes[1 : count * length + 1].reshape(count, length)


def random_batches(codes: np.ndarray, length: int, size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches `[size, length]` of windows that begin at random positions, and the characters that follow, forever."""
    rng = np.random.default_rng(seed)
    places = np.arange(length)
    while True:
        begins = rng.integers(len(codes) - length, size=(size, 1))
        yield codes[begins + places], codes[begins + places + 1]


class Digits(NamedTuple):
    """Images for training and test, and their labels."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def gray_digits() -> Digits:
    """Returns images `[examples, 8, 8, 1]` in [-1, 1]. The first half is for training and the second half for test, as in scikit-learn's example."""
    digits = load_digits()
    x, y = (digits.images[..., None] / 8 - 1).astype(np.float32), digits.target.astype(np.int32)
    half = len(x) // 2
    return Digits(x[:half], y[:half], x[half:], y[half:])


def binary_digits(num_test: int = 400) -> Digits:
    """Returns images `[examples, 64]` of zeros and ones, where a one is a pixel with at least half of the full intensity, in a fixed random order."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    x, y = (digits.data >= 8).astype(np.float32)[order], digits.target.astype(np.int32)[order]
    cut = len(x) - num_test
    return Digits(x[:cut], y[:cut], x[cut:], y[cut:])
