"""A memory-mapped file of tokens for language models, read in windows."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from typing_extensions import override

from fitflax.data.arrays import IndexedSource
from fitflax.data.batch import Position, Triple, check_fits
from fitflax.data.sources import DataOptions
from fitflax.errors import ConfigError, DataError, integer_of

_ROUNDS = 4
# The constants of xxHash's 32-bit avalanche (Yann Collet, 2012).
_MIX = (0x85EBCA77, 0xC2B2AE3D)


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Reads a file of tokens as data for `fit`, `evaluate` and `predict`: inputs are windows of the file, targets the next tokens.

    The file is memory-mapped: tokens are read when they are needed, and the file may be larger than memory. In training, each pass uses every window once.
    The order, and the offset of the first window (one of the first `length` tokens), depend on the seed and the number of the pass. Without shuffling, and in
    evaluation and prediction, windows follow one another from the first token. A run resumes at any position immediately, with any number of processes.

    Args:
        path: A `.npy` file with one axis, or a raw binary file of integers.
        length: Tokens of a window.
        dtype: The dtype of a raw binary file, such as `"uint16"`; a `.npy` file has its own.

    Attributes:
        begin: The first token that is used.
        end: The end of the tokens that are used, exclusive; by default the end of the file.

    Raises:
        ConfigError: `length`, `begin` or `end` is not an integer or out of range, `dtype` is not a dtype, a raw binary file has none, or a `.npy` file has
            another one.
        DataError: The file cannot be read, does not hold integers, or has too few tokens for one window.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".bin") as file:
    ...     _ = file.write(np.arange(11, dtype=np.uint16).tobytes())
    ...     file.flush()
    ...     tokens = TokenFile(file.name, length=4, dtype="uint16")
    ...     len(tokens), [array.tolist() for array in tokens.windows(np.array([0, 5]))]
    (2, [[[0, 1, 2, 3], [5, 6, 7, 8]], [[1, 2, 3, 4], [6, 7, 8, 9]]])
    """

    path: str | os.PathLike[str]
    length: int
    dtype: Any = None
    _: dataclasses.KW_ONLY
    begin: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        integer_of("TokenFile(length=...)", self.length, at_least=1)
        integer_of("TokenFile(begin=...)", self.begin)
        if self.end is not None:
            integer_of("TokenFile(end=...)", self.end)
        try:
            np.dtype(self.dtype)
        except TypeError as error:
            raise ConfigError(f"TokenFile(dtype=...) must be a dtype of NumPy, such as 'uint16'. Received: {self.dtype!r}.") from error
        if self.dtype is None and not self._is_npy:
            raise ConfigError(f"{self.path} is not a .npy file, so TokenFile needs a dtype. Pass it: TokenFile(path, length, dtype='uint16').")
        total = len(self._tokens)
        if not 0 <= self.begin <= (total if self.end is None else self.end) <= total:
            raise ConfigError(f"TokenFile(begin=..., end=...) must be within the {total} tokens of {self.path}. Received: begin={self.begin}, end={self.end}.")
        if not len(self):
            raise DataError(
                f"{self.path} has {self.num_tokens} tokens, but a window of length={self.length} needs {self.length + 1}, including the token after it. "
                "Pass a smaller length, or more tokens."
            )

    def __len__(self) -> int:
        """Returns the number of windows that follow one another from the first token."""
        return max(self.num_tokens - 1, 0) // self.length

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are used."""
        return (len(self._tokens) if self.end is None else self.end) - self.begin

    @property
    def _is_npy(self) -> bool:
        return Path(self.path).suffix == ".npy"

    @functools.cached_property
    def _tokens(self) -> "np.ndarray[Any, Any]":
        tokens: np.ndarray[Any, Any]
        try:
            if self._is_npy:
                tokens = np.load(self.path, mmap_mode="r", allow_pickle=False)
            else:
                tokens = np.memmap(self.path, np.dtype(self.dtype), mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"The tokens in {self.path} cannot be read: {error}.") from error
        if self.dtype is not None and tokens.dtype != np.dtype(self.dtype):
            raise ConfigError(f"{self.path} is a .npy file of dtype {tokens.dtype.str}. Leave out dtype. Received: {self.dtype!r}.")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(f"{self.path} must hold a one-dimensional array of integers. Received: {tokens.dtype.name}{list(tokens.shape)}.")
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields to pickle; another process maps the file itself."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def windows(self, begins: "np.ndarray[Any, Any]") -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
        """Returns inputs and targets, int32 `[windows, length]`, of the windows that start at the tokens `begins`, counted from `begin`."""
        tokens = self._tokens[(self.begin + begins)[:, None] + np.arange(self.length + 1)]
        if tokens.dtype.itemsize >= 4:
            check_fits(tokens, np.dtype(np.int32), name=str(self.path), advice="Number the tokens from 0 to less than 2**31.")
        rows = tokens.astype(np.int32)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


class Permutation:
    """A permutation of the numbers below `size`. It computes only the requested slices, so billions of numbers need no memory.

    A Feistel network over the next power of four, applied until the result is below `size`: Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
    (2002).
    """

    def __init__(self, size: int, seed: Any) -> None:
        self._size = size
        self._bits = max(1, math.ceil((size - 1).bit_length() / 2))
        self._keys = np.random.default_rng(seed).integers(0, 2**32, _ROUNDS, dtype=np.uint64)

    def __getitem__(self, rows: slice) -> "np.ndarray[Any, Any]":
        numbers = self._encrypt(np.arange(*rows.indices(self._size), dtype=np.uint64))
        while (outside := numbers >= self._size).any():
            numbers[outside] = self._encrypt(numbers[outside])
        permuted: np.ndarray[Any, Any] = numbers.astype(np.int64)
        return permuted

    def _encrypt(self, numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        bits, mask = np.uint64(self._bits), np.uint64(2**self._bits - 1)
        left, right = numbers >> bits, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        joined: np.ndarray[Any, Any] = (left << bits) | right
        return joined


def _mixed(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    low = np.uint64(2**32 - 1)
    for constant in _MIX:
        values = ((values ^ (values >> np.uint64(15))) * np.uint64(constant)) & low
    mixed: np.ndarray[Any, Any] = values ^ (values >> np.uint64(16))
    return mixed


class TokenSource(IndexedSource):
    """Batches of windows of a `TokenFile`. With shuffling, each pass has its own order and its own offset of the first window."""

    kinds = (f"{__name__}.TokenFile",)
    is_checked = True

    def __init__(self, data: TokenFile, options: DataOptions) -> None:
        self._tokens = data
        # With an offset of up to `length` tokens, one window less may fit.
        super().__init__(max(1, data.num_tokens // data.length - 1) if options.shuffle else len(data), options)

    @override
    def open(self, position: Position) -> Iterator[Triple]:
        if not self.shuffles:
            return self.make_pass(position, self.read, None)
        key = [self.options.seed, position.passes]
        room = min(self._tokens.length, self._tokens.num_tokens - self._rows * self._tokens.length)
        begin = int(np.random.default_rng([*key, 0]).integers(room))
        return self.make_pass(position, functools.partial(self._read, begin), Permutation(self._rows, [*key, 1]).__getitem__)

    @override
    def read(self, rows: Any) -> Triple:
        return self._read(0, np.arange(*rows.indices(self._rows)) if isinstance(rows, slice) else rows)

    def _read(self, begin: int, rows: "np.ndarray[Any, Any]") -> Triple:
        x, y = self._tokens.windows(begin + rows * self._tokens.length)
        return Triple(x, () if self.options.inputs_only else y, None)

    @override
    def part(self, begin: int, end: int, options: DataOptions) -> Self:
        tokens = self._tokens
        # The last target of one part is the first input of the next.
        last = end * tokens.length + 1 if end < self._rows else tokens.num_tokens
        return type(self)(dataclasses.replace(tokens, begin=tokens.begin + begin * tokens.length, end=tokens.begin + last), options)
