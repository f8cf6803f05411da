"""Sequences of batches, such as Keras's `PyDataset`: read by number, with their epoch hooks."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.data.sources import FunctionSource, SequenceSource
from fitflax.errors import ConfigError, DataError
from tests.data.same_training import BATCH, ROWS, X, Y, assert_resumes, assert_same, make_trainer, of_arrays, outcome, run, warned
from tests.run_script import rows_of, state_of


class Batches:
    """A sequence of batches that is also an endless iterator, as Keras's `ImageDataGenerator.flow` returns."""

    def __init__(self) -> None:
        self.order = np.arange(ROWS)
        self.taken: list[int] = []

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, number: int) -> Any:
        self.taken.append(number)
        rows = self.order[number * BATCH : (number + 1) * BATCH]
        return X[rows], Y[rows]

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self[0]


class Reshuffled(Batches):
    """Reshuffles at the end of each epoch, with a generator that is not saved, and records its hooks."""

    def __init__(self, calls: list[str] | None = None) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.calls = [] if calls is None else calls

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.rng.shuffle(self.order)


class Stateful(Reshuffled):
    """Also saves its order and generator."""

    def state_dict(self) -> Any:
        return {"order": self.order.copy(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Any) -> None:
        self.order, self.rng.bit_generator.state = state["order"], state["rng"]


def like_keras(data: Any, epochs: int) -> Any:
    """The batches that Keras trains on."""
    for _ in range(epochs):
        data.on_epoch_begin()
        yield from [data[number] for number in range(len(data))]
        data.on_epoch_end()


def trained(data: Any, **options: Any) -> dict[str, Any]:
    trainer = make_trainer()
    history = trainer.fit(data, verbose=0, **options)
    return {**state_of(trainer), "history": rows_of(history)}


# -- which batches --


def test_an_object_with_a_length_that_is_also_an_iterator_is_read_by_number():
    data = Batches()
    source = adapt(data)
    assert isinstance(source, SequenceSource) and source.num_batches == 3 and not source.is_endless
    assert [len(triple.x) for triple in source.open(Position())] == [4, 4, 2]
    assert data.taken == [0, 1, 2]


@pytest.mark.slow
def test_a_sequence_trains_like_arrays():
    assert_same(outcome(Batches()), of_arrays())


def test_a_function_may_return_a_sequence():
    source = adapt(lambda: Batches())
    assert isinstance(source, FunctionSource) and len(list(source.open(Position()))) == 3


def test_the_length_may_change_from_pass_to_pass():
    class Growing(Batches):
        length = 1

        def __len__(self) -> int:
            return self.length

        def on_epoch_end(self) -> None:
            self.length += 1

    source = adapt(Growing())
    assert [len(list(source.open(Position(number)))) for number in range(3)] == [1, 2, 3]


def test_an_empty_sequence_is_an_error():
    class Empty(Batches):
        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="`data` is an empty Empty"):
        adapt(Empty())


def test_a_length_that_counts_examples_is_an_error_that_says_what_it_must_be():
    class Wrong(Batches):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, number: int) -> Any:
            return [super(Wrong, self).__getitem__(each) for each in range(3)][number]

    with pytest.raises(DataError, match=r"`data` is a Wrong of 10 batches, but its batch 3 raised an IndexError.*\. Return the number of batches from __len__"):
        list(adapt(Wrong()).open(Position()))


def test_targets_cannot_be_passed_with_a_sequence():
    with pytest.raises(ConfigError, match=r"y can only be passed with in-memory arrays\. `data` is a Batches"):
        adapt(Batches(), Y)


# -- hooks --


def test_hooks_of_the_data_are_called_as_keras_calls_them():
    data = Reshuffled()
    expected = trained(like_keras(Reshuffled(), 3), epochs=3, steps_per_epoch=3)
    assert_same(trained(data, epochs=3), expected)
    assert data.calls == ["begin", "end"] * 3


def test_hooks_of_the_data_come_inside_those_of_callbacks_and_before_validation():
    calls: list[str] = []
    hooks = {name: (lambda *_, name=name: calls.append(name)) for name in ("on_epoch_begin", "on_test_begin", "on_epoch_end")}
    make_trainer().fit(Reshuffled(calls), epochs=2, validation_data=(X, Y), callbacks=[LambdaCallback(**hooks)], verbose=0)
    end = ["end", "on_test_begin", "on_epoch_end"]
    assert calls == ["begin", "on_epoch_begin", *end, "on_epoch_begin", "begin", *end]  # The model is built from the first batch.


def test_evaluate_and_predict_call_the_hooks():
    data = Reshuffled()
    trainer = make_trainer()
    trainer.build((X, Y))
    trainer.evaluate(data, verbose=0)
    assert data.calls == ["begin", "end"]
    trainer.evaluate(data, steps=1, verbose=0)
    trainer.predict(data)
    assert data.calls == ["begin", "end"] * 3  # A pass that was not read to its end is ended before the next one.


@pytest.mark.parametrize("given", [lambda data: data, lambda data: lambda: data], ids=["object", "function"])
def test_validation_does_not_call_the_hooks(given):
    data = Reshuffled()
    make_trainer().fit(X, Y, epochs=2, validation_data=given(data), verbose=0)
    assert not data.calls


def test_a_source_that_is_validation_data_still_calls_the_hooks_in_training():
    data = Reshuffled()
    source = adapt(data)
    make_trainer().fit(X, Y, validation_data=source, verbose=0)
    assert not data.calls
    make_trainer().fit(source, epochs=2, validation_data=source, verbose=0)
    assert data.calls == ["begin", "end"] * 2


def test_a_second_fit_requests_no_more_passes_with_a_callback_for_the_beginning_of_epochs():
    def outcome_of(**options: Any) -> Any:
        data, trainer = Reshuffled(), make_trainer()
        passes: list[int] = []

        def batches() -> Any:
            passes.append(1)
            return (data[number] for number in range(len(data)))

        for _ in range(2):
            trainer.fit(batches, epochs=1, verbose=0, **options)
            trainer.fit(data, epochs=1, verbose=0, **options)
        return {"calls": len(data.calls), "passes": len(passes), **state_of(trainer)}

    assert_same(outcome_of(callbacks=[LambdaCallback(on_epoch_begin=lambda epoch, logs: None)]), outcome_of())


def test_batches_that_are_drawn_while_they_are_read_cause_no_warning_without_a_resume(tmp_path):
    class Drawing(Reshuffled):
        total_batches_seen = 0

    nothing = LambdaCallback(on_epoch_begin=lambda epoch, logs: None)
    make_trainer().fit(Drawing(), epochs=3, callbacks=[ModelCheckpoint(tmp_path), nothing], verbose=0)


# -- resuming --


@pytest.mark.parametrize("make", [Reshuffled, Stateful, Batches])
@pytest.mark.parametrize("k", [2, 3, 4, 6, 7])
@pytest.mark.mostly_slow
def test_a_sequence_resumes_bit_for_bit_without_a_warning(k, make, tmp_path):
    assert_resumes(tmp_path, make, k)


class ShuffledFirst(Reshuffled):
    """Reshuffles at the beginning of each epoch instead."""

    on_epoch_begin, on_epoch_end = Reshuffled.on_epoch_end, Reshuffled.on_epoch_begin


@pytest.mark.parametrize("kind", [Reshuffled, ShuffledFirst])
@pytest.mark.parametrize("k", [3, 6])
def test_a_function_that_always_returns_one_sequence_resumes_with_its_hooks_called_as_often(k, kind, tmp_path):
    def make() -> Any:
        data = kind()
        return lambda: data

    assert_resumes(tmp_path, make, k, callbacks=[LambdaCallback(on_epoch_begin=lambda epoch, logs: None)])


def test_a_function_may_return_new_sequences_that_on_epoch_begin_prepares(tmp_path):
    class Prepared(Batches):
        def on_epoch_begin(self) -> None:
            self.order = np.random.default_rng(3).permutation(ROWS)

        def __init__(self) -> None:
            super().__init__()
            del self.order

    assert_resumes(tmp_path, lambda: Prepared, 3, callbacks=[LambdaCallback(on_epoch_begin=lambda epoch, logs: None)])


def feed_of(data: Any, position: Position = Position()) -> Feed:  # noqa: B008
    """Returns a feed that takes a state before each batch."""
    return Feed(adapt(data), Batcher(size=BATCH), position, is_saved=True, clock=lambda: 0.0)


def test_a_resume_reads_only_the_batches_that_are_left():
    feed, data = feed_of(Reshuffled()), Reshuffled()
    for _ in range(6):  # Three batches, the end of the pass, and two batches.
        feed.next()
    again = feed_of(data, feed.position)
    again.load_state_dict(feed.state_dict(feed.position))
    with warned():
        np.testing.assert_array_equal(again.next().batch.x, feed.next().batch.x)
    assert (data.calls, data.taken) == (["begin", "end", "begin"], [2])


@pytest.mark.slow
@pytest.mark.parametrize("make", [Reshuffled, Stateful])
@pytest.mark.parametrize("k", [3, 4])
def test_a_resume_of_a_second_fit_with_new_data_calls_the_hooks_of_that_fit_only(k, make, tmp_path):
    def run_both(root: Any, steps: int) -> dict[str, Any]:
        trainer = make_trainer()
        trainer.fit(make(), epochs=2, verbose=0)
        history = trainer.fit(make(), steps=steps, verbose=0, resume="auto", callbacks=[ModelCheckpoint(root)])
        return {**state_of(trainer), "history": rows_of(history)}

    uninterrupted = run_both(tmp_path / "never", 8)
    run_both(tmp_path / "stopped", k)
    assert_same(run_both(tmp_path / "stopped", 8), uninterrupted)


def test_the_same_object_continues_in_the_same_process():
    data = Reshuffled()
    feed = feed_of(data)
    for _ in range(6):
        feed.next()
    again = feed_of(data, feed.position)
    again.load_state_dict(feed.state_dict(feed.position))
    with warned():
        again.next()
    assert data.calls == ["begin", "end", "begin"] and data.taken[-1] == 2


def test_an_object_that_is_ahead_of_the_checkpoint_warns_that_the_order_cannot_be_repeated(tmp_path):
    data = Reshuffled()
    run(tmp_path, data, 4)
    list(adapt(data).open(Position()))
    with warned("The Reshuffled has been iterated over before, so its order of examples cannot be repeated"):
        run(tmp_path, data, 8)


def test_a_callback_can_change_a_sequence_before_the_first_batch_of_an_epoch(tmp_path):
    def run_with(root: Any, steps: int) -> dict[str, Any]:
        data = Batches()
        choose = LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(data, "order", np.random.default_rng(epoch).permutation(ROWS)))
        return run(root, data, steps, callbacks=[choose])

    uninterrupted = run_with(tmp_path / "never", 9)
    run_with(tmp_path / "stopped", 3)
    assert_same(run_with(tmp_path / "stopped", 9), uninterrupted)


# -- Keras --

_SCRIPT = """
import numpy as np
from keras.src.legacy.preprocessing.image import ImageDataGenerator
from keras.utils import PyDataset
from fitflax.data import Position, adapt

flow = ImageDataGenerator().flow(np.zeros((16, 8, 8, 3), np.float32), np.arange(16), batch_size=4, seed=0)
source = adapt(flow)
orders = [[label for triple in source.open(Position(number)) for label in triple.y.tolist()] for number in range(2)]
assert [sorted(order) for order in orders] == [list(range(16))] * 2 and orders[0] != orders[1], orders

class Endless(PyDataset):
    num_batches = None

    def __getitem__(self, number):
        return np.full((2, 1), number, np.float32)

class Short(Endless):
    num_batches = 3

assert adapt(Endless(), inputs_only=True).is_endless
assert [triple.x[0, 0] for triple in adapt(Short(), inputs_only=True).open(Position())] == [0, 1, 2]
"""


@pytest.mark.slow
def test_sequences_of_keras_are_read_by_number(process_env):
    pytest.importorskip("keras")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env={**os.environ, **process_env, "KERAS_BACKEND": "jax"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
