"""Windows of tokens from a memory-mapped file: each once per pass, in an order determined by seed and pass. Seeking is immediate."""

import pickle
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.data import Batcher, Feed, Position, TokenFile, adapt
from fitflax.data.adapt import takes_batch_size
from fitflax.data.token_file import Permutation
from fitflax.errors import ConfigError, DataError
from fitflax.parallel import DataParallel
from tests.data.same_training import assert_same
from tests.run_script import rows_of, state_of

TOKENS = np.arange(1003) % 300


@pytest.fixture
def path(tmp_path):
    (tmp_path / "train.bin").write_bytes(TOKENS.astype(np.uint16).tobytes())
    np.save(tmp_path / "train.npy", TOKENS.astype(np.int64))
    return tmp_path / "train.bin"


def read(source, passes=0, examples=0):
    triples = list(source.open(Position(passes, examples)))
    return [np.concatenate([getattr(triple, name) for triple in triples]) for name in ("x", "y")]


def first_tokens(x):
    """Returns the first token of each window, which is also its position if the tokens are consecutive numbers."""
    return x[:, 0].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64, 65, 1000])
@pytest.mark.parametrize("seed", [0, [3, 7]])
def test_a_permutation_has_each_number_once_and_can_be_sliced(size, seed):
    order = Permutation(size, seed)
    whole = order[0:size]
    assert sorted(whole.tolist()) == list(range(size)) and order[size // 2 : size].tolist() == whole[size // 2 :].tolist()
    if size > 64:
        assert whole.tolist() != list(range(size)) and Permutation(size, 9)[0:size].tolist() != whole.tolist()
        distances = np.abs(np.diff(whole))
        assert distances.mean() == pytest.approx(size / 3, rel=0.2)  # As for random numbers.


def test_a_huge_permutation_computes_only_the_requested_part():
    part = Permutation(10**13, 1)[10**12 : 10**12 + 1000]
    assert len(set(part.tolist())) == 1000 and part.max() < 10**13 and part.mean() == pytest.approx(5e12, rel=0.1)


def test_windows_are_consecutive_without_shuffling(path):
    for file in (TokenFile(path, 10, "uint16"), TokenFile(path.with_suffix(".npy"), 10), TokenFile(path.with_suffix(".npy"), 10, np.int64)):
        source = adapt(file, batch_size=16, shuffle=False)
        x, y = read(source)
        assert len(file) == source.num_examples == len(x) == 100 and x.dtype == y.dtype == np.int32
        assert x.reshape(-1).tolist() == TOKENS[:1000].tolist() and y.reshape(-1).tolist() == TOKENS[1:1001].tolist()
        assert first_tokens(read(source, examples=96)[0]) == TOKENS[960:1000:10].tolist()


def test_a_shuffled_pass_has_each_window_once_and_starts_at_a_different_token(tmp_path):
    np.save(tmp_path / "numbers.npy", np.arange(1003))
    source = adapt(TokenFile(tmp_path / "numbers.npy", 10), batch_size=16, seed=3)
    passes = [first_tokens(read(source, number)[0]) for number in range(8)]
    for found in passes:
        first = min(found)
        assert sorted(found) == list(range(first, first + 990, 10)) and first < 10 and found != sorted(found)
    assert len({min(found) for found in passes}) > 3
    assert first_tokens(read(source, 2)[0]) == passes[2] and first_tokens(read(source, 2, 37)[0]) == passes[2][37:]
    assert first_tokens(read(adapt(TokenFile(tmp_path / "numbers.npy", 10), batch_size=16, seed=4))[0]) != passes[0]
    x, y = read(source, 1)
    assert np.array_equal(x[:, 1:], y[:, :-1]) and np.array_equal(y, x + 1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_each_process_feeds_its_own_windows_and_together_they_are_those_of_one_process(count, shuffle, path):
    def feed(index, count, position=Position()):  # noqa: B008 (frozen)
        source = adapt(TokenFile(path, 10, "uint16"), batch_size=16, shuffle=shuffle, seed=5)
        return Feed(source, Batcher(num_shards=4, size=16, part=(index, count)), position)

    for begin in (Position(), Position(passes=1, examples=48)):
        alone, several = feed(0, 1, begin), [feed(index, count, begin) for index in range(count)]
        for ahead in (1, 3, 1, 2):  # Single batches, and several in one read.
            whole, *parts = (each.next(ahead) for each in (alone, *several))
            for name in ("x", "y", "mask"):
                pieces = [getattr(part.batch, name) for part in parts]
                assert [len(piece) for piece in pieces] == [16 // count] * count
                np.testing.assert_array_equal(np.concatenate(pieces), getattr(whole.batch, name))
            assert {part.position for part in parts} == {whole.position} and {part.num_real for part in parts} == {whole.num_real}
    while (last := alone.next()) is not None:
        parts = [each.next() for each in several]
    assert last is None and [each.next() for each in several] == [None] * count
    assert np.concatenate([part.batch.mask for part in parts]).tolist() == [row < parts[0].num_real for row in range(16)]  # The last batch is padded.


def test_the_held_out_part_begins_where_the_training_part_ends(path):
    train, valid = adapt(TokenFile(path, 10, "uint16"), batch_size=8, shuffle=False).divide(0.25)
    assert read(train)[0].reshape(-1).tolist() == TOKENS[:750].tolist() and read(valid)[0].reshape(-1).tolist() == TOKENS[750:1000].tolist()
    assert read(train)[1][-1, -1] == read(valid)[0][0, 0]


@pytest.mark.slow
def test_validation_uses_its_own_batch_size_while_training_on_a_loader(path):
    file, seen = TokenFile(path, 10, "uint16"), []
    batches = lambda: ((x, x) for x in [np.zeros((4, 10), np.int32)] * 3)  # noqa: E731
    count = LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(batch))
    make().fit(batches, epochs=1, validation_data=file, validation_batch_size=25, callbacks=[count], verbose=0)
    assert seen == [0, 1, 2, 3] and takes_batch_size(file)


@pytest.mark.parametrize("tokens", [11, 12, 20, 21, 25])
def test_a_file_with_one_or_two_windows_is_enough(tokens, tmp_path):
    np.save(tmp_path / "few.npy", np.arange(tokens))
    for number in range(4):
        x, y = read(adapt(TokenFile(tmp_path / "few.npy", 10), batch_size=4), number)
        assert len(x) == 1 and np.array_equal(y, x + 1) and y.max() < tokens


def test_bad_files_and_arguments_are_errors(path, tmp_path):
    np.save(tmp_path / "floats.npy", np.ones(9))
    np.save(tmp_path / "square.npy", np.ones((3, 3), int))
    (tmp_path / "odd.bin").write_bytes(b"123")
    cases = [
        (lambda: TokenFile(path, 0, "uint16"), ConfigError, r"length=\.\.\.\) must be a positive integer. Received: 0"),
        (lambda: TokenFile(path, 4), ConfigError, r"train\.bin is not a \.npy file, so TokenFile needs a dtype\. .* TokenFile\(path, length, dtype='uint16'\)"),
        (lambda: TokenFile(path.with_suffix(".npy"), 4, "uint16"), ConfigError, r"npy file of dtype <i8\. Leave out dtype\. Received: 'uint16'"),
        (lambda: TokenFile(tmp_path / "none.npy", 4), DataError, r"none\.npy cannot be read: .*No such file"),
        (lambda: TokenFile(tmp_path / "odd.bin", 4, "uint16"), DataError, r"odd\.bin cannot be read"),
        (lambda: TokenFile(tmp_path / "floats.npy", 4), DataError, r"must hold a one-dimensional array of integers. Received: float64\[9\]"),
        (lambda: TokenFile(tmp_path / "square.npy", 4), DataError, r"Received: int64\[3, 3\]"),
        (lambda: TokenFile(path, 1003, "uint16"), DataError, "1003 tokens, but a window of length=1003 needs 1004"),
        (lambda: TokenFile(path, 4, "uint16", begin=5, end=2000), ConfigError, r"must be within the 1003 tokens of .* Received: begin=5, end=2000"),
        (lambda: TokenFile(path, 4, "uint16", begin=0.5), ConfigError, r"TokenFile\(begin=...\) must be an integer of at least 0. Received: 0.5"),
        (lambda: TokenFile(path, 4, "uint16", end=1e3), ConfigError, r"TokenFile\(end=...\) must be an integer of at least 0. Received: 1000.0"),
        (lambda: TokenFile(path, 4, "unit16"), ConfigError, r"TokenFile\(dtype=...\) must be a dtype of NumPy, such as 'uint16'. Received: 'unit16'"),
        (lambda: adapt(TokenFile(path, 4, "uint16"), np.ones(3)), ConfigError, "y can only be passed with in-memory arrays"),
    ]
    for make, error, match in cases:
        with pytest.raises(error, match=match):
            make()


@pytest.mark.parametrize(("dtype", "token"), [(np.int64, 2**31), (np.uint32, 2**32 - 1), (np.int64, -(2**40))])
def test_a_token_beyond_int32_is_an_error(dtype, token, tmp_path):
    np.save(tmp_path / "wide.npy", np.array([0, 1, token, 2, 3], dtype))
    with pytest.raises(DataError, match=rf"wide\.npy holds the integer {token}, which does not fit int32\. Number the tokens from 0"):
        TokenFile(tmp_path / "wide.npy", 2).windows(np.array([0]))


def test_another_process_maps_the_file_itself(path):
    file = TokenFile(path, 10, "uint16")
    data = pickle.dumps(file)
    assert len(data) < 1000 and pickle.loads(data).windows(np.array([3]))[0].tolist() == [TOKENS[3:13].tolist()]


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(300)(nn.Embed(300, 8)(tokens))


def make(devices=1):
    trainer = fitflax.Trainer(Model(), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile("adam", "sparse_categorical_crossentropy")
    return trainer


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_inside_a_pass_and_evaluates_and_predicts(path, tmp_path):
    file = TokenFile(path, 10, "uint16")
    whole = make()
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "validation_split": 0.25}
    history = whole.fit(file, **options)
    for k in (3, 7):  # Inside the first and the second pass, each of five batches.
        first, second = make(), make()
        first.fit(file, steps=k, callbacks=[ModelCheckpoint(tmp_path / f"{k}")], **{**options, "epochs": None})
        resumed = second.fit(file, callbacks=[ModelCheckpoint(tmp_path / f"{k}")], resume="auto", **options)
        assert_same({**state_of(second), "history": rows_of(resumed)}, {**state_of(whole), "history": rows_of(history)})
    held_out = second.evaluate(TokenFile(path, 10, "uint16", begin=740), batch_size=16, verbose=0)
    assert held_out["loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-6)
    assert second.predict(file, batch_size=16, verbose=0).shape == (100, 10, 300)
    several = make(4)
    assert several.fit(file, **options).history["loss"] == pytest.approx(history.history["loss"], rel=1e-4)


def test_a_batch_without_shuffling_takes_no_memory_for_other_windows(tmp_path):
    with (tmp_path / "sparse.bin").open("wb") as file:
        file.truncate(2 * 10**8)
    source = adapt(TokenFile(tmp_path / "sparse.bin", 1, "uint16"), batch_size=2, shuffle=False)
    tracemalloc.start()
    next(source.open(Position()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.slow
def test_a_file_larger_than_memory_is_read_only_in_part(tmp_path):
    code = """
import pathlib, resource, sys
import numpy as np
from fitflax.data import Position, TokenFile, adapt
file = TokenFile(sys.argv[1], 1024, "uint16")
source = adapt(file, batch_size=32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for examples in range(0, source.num_examples - 32, source.num_examples // 50):
    triple = next(source.open(Position(3, examples)))
    assert triple.x.shape == (32, 1024), triple.x.shape
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
assert grown < 300, grown
"""
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(2**34)  # 16 GB of zeros, which take up no disk space.
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "large.bin")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
