"""`predict_iter`: what `predict` joins, batch by batch, in constant memory; and how the outputs of both are copied to the host."""

import itertools
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax._src import array as jax_array

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.errors import ConfigError, DataError, FitflaxWarning, ModelError, NotReadyError
from fitflax.loops.evaluation_loop import _IsolatedRandomState
from fitflax.parallel import DataParallel

X = np.linspace(-1, 1, 42, dtype=np.float32).reshape(14, 3)


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return {"a": nn.Dense(2)(x), "b": nn.Dense(1)(x)[:, 0]}


class Summed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(x).sum(axis=0)


def trainer_of(model: nn.Module | None = None, num_devices: int = 1) -> fitflax.Trainer:
    trainer = fitflax.Trainer(nn.Dense(2) if model is None else model, parallel=DataParallel(jax.devices()[:num_devices]))
    trainer.compile("sgd", "mse", learning_rate=0.1)
    trainer.build((X[:4], X[:4, :2]))
    return trainer


class Counted:
    """Yields batches, and counts how many were asked for and whether the iterator was closed."""

    def __init__(self, num_batches: int | None = None) -> None:
        self.taken, self.is_closed, self._num_batches = 0, False, num_batches

    def __call__(self) -> Iterator[Any]:
        try:
            for index in itertools.count() if self._num_batches is None else range(self._num_batches):
                self.taken += 1
                yield np.full((4, 3), index, np.float32)
        finally:
            self.is_closed = True


@pytest.mark.mostly_slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_predict_iter_yields_the_rows_that_predict_joins_as_numpy_arrays(num_devices: int):
    trainer = trainer_of(TwoHeads(), num_devices)
    joined = trainer.predict(X, batch_size=4)
    parts = list(trainer.predict_iter(X, batch_size=4))
    assert [jax.tree.map(lambda leaf: (type(leaf), len(leaf)), part) for part in parts] == [{"a": (np.ndarray, n), "b": (np.ndarray, n)} for n in (4, 4, 4, 2)]
    jax.tree.map(lambda whole, *leaves: np.testing.assert_array_equal(whole, np.concatenate(leaves), strict=True), joined, *parts)
    assert len(list(trainer.predict_iter(X, batch_size=4, steps=2))) == 2


def test_nothing_is_read_before_the_first_output_is_requested_and_then_one_batch_ahead():
    trainer, data = trainer_of(), Counted()
    outputs = trainer.predict_iter(data)
    assert data.taken == 0
    for number in range(1, 5):
        next(outputs)
        assert data.taken == number + 1
    outputs.close()
    data = Counted()
    assert len(list(trainer.predict_iter(data, steps=3))) == 3
    assert data.taken == 3


def test_outputs_are_not_kept_after_they_are_yielded():
    trainer = trainer_of(num_devices=2)
    kept: list[weakref.ref[Any]] = []
    counts = []
    for part in trainer.predict_iter(Counted(8)):
        kept.append(weakref.ref(part))
        del part
        assert kept[-1]() is None
        counts.append(len(jax.live_arrays()))
    assert len(kept) == 8 and max(counts[1:]) == counts[1]


def test_a_call_that_cannot_work_raises_immediately():
    fresh = fitflax.Trainer(nn.Dense(2))
    with pytest.raises(NotReadyError, match="predict_iter: there is no state yet"):
        fresh.predict_iter(X)
    trainer = trainer_of()
    with pytest.raises(ConfigError, match="steps"):
        trainer.predict_iter(X, steps=0)
    with pytest.raises(DataError, match="numbers"):
        trainer.predict_iter(np.array(["a", "b"]))


@pytest.mark.parametrize("how", ["predict", "predict_iter"])
def test_an_error_that_the_first_batch_reveals_is_raised_before_anything_is_yielded(how: str):
    def run(trainer: fitflax.Trainer, data: Any) -> Any:
        outputs = getattr(trainer, how)(data)
        return next(iter(outputs))

    with pytest.raises(DataError, match="The data yields no batch"):
        run(trainer_of(), Counted(0))
    with pytest.raises(ModelError):
        run(trainer_of(), np.ones((4, 5), np.float32))
    with pytest.raises(ModelError, match="predict concatenates outputs along their first axis"):
        run(trainer_of(Summed()), X)


def test_the_check_of_a_restored_state_by_another_call_does_not_change_the_outputs(tmp_path: pathlib.Path):
    saved, restored = trainer_of(), fitflax.Trainer(nn.Dense(2, param_dtype=np.float16), parallel=DataParallel(jax.devices()[:1]))
    path = saved.save(tmp_path / "saved")
    restored.compile("sgd", "mse", learning_rate=0.1)
    restored.restore(path, cast=True)
    one, other = restored.predict_iter(X, batch_size=7), restored.predict_iter(X, batch_size=7)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(leaf.dtype == np.float16 for leaf in jax.tree.leaves(restored.state.params))


class Loader:
    """Keeps the iterators that it returns, like a loader with worker processes, so that they end only when they are closed."""

    def __init__(self) -> None:
        self.batches = Counted()
        self.handed_out: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.handed_out.append(self.batches())
        return self.handed_out[-1]


def test_closing_the_iterator_closes_the_data():
    trainer, data = trainer_of(), Loader()
    outputs = trainer.predict_iter(data)
    next(outputs)
    assert not data.batches.is_closed
    outputs.close()
    assert data.batches.is_closed and len(data.handed_out) == 1
    with pytest.raises(StopIteration):
        next(outputs)


def test_a_batch_that_was_read_ahead_from_an_iterator_is_the_first_of_the_next_call():
    trainer, data = trainer_of(), Counted(5)()
    expected = trainer.predict(Counted(5))
    parts = []
    for part in trainer.predict_iter(data):
        parts.append(part)
        if len(parts) == 2:
            break
    parts += list(trainer.predict_iter(data))
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_the_outputs_use_the_state_at_the_call_even_if_the_trainer_trains_meanwhile():
    trainer = trainer_of()
    expected = trainer.predict(X, batch_size=4)
    outputs = trainer.predict_iter(X, batch_size=4)
    parts = []
    for _ in range(4):
        trainer.fit(X, X[:, :2], batch_size=4, verbose=0)
        parts.append(next(outputs))
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert not np.array_equal(trainer.predict(X, batch_size=4), expected)


@pytest.mark.parametrize("change", ["replace_params", "replace_state", "restore"])
def test_the_outputs_use_the_state_at_the_call_even_if_another_state_of_the_same_step_replaces_it(change: str, tmp_path: pathlib.Path):
    trainer, other = trainer_of(), trainer_of().with_seed(1)
    other.build((X, X[:, :2]))
    expected = trainer.predict(X, batch_size=4)
    outputs = trainer.predict_iter(X, batch_size=4)
    if change == "replace_params":
        trainer.replace_params(other.state.params)
    elif change == "replace_state":
        trainer.replace_state(other.state)
    else:
        trainer.restore(other.save(tmp_path / "saved"))
    np.testing.assert_array_equal(np.concatenate(list(outputs)), expected)
    assert not np.array_equal(trainer.predict(X, batch_size=4), expected)


def test_random_draws_of_the_data_and_of_the_caller_do_not_affect_each_other():
    trainer = trainer_of()

    def noisy() -> Iterator[Any]:
        for _ in range(4):
            yield np.random.rand(4, 3).astype(np.float32)

    np.random.seed(0)
    drawn = [np.random.rand() for _ in range(5)]
    np.random.seed(0)
    expected = trainer.predict(noisy)
    parts, between = [], []
    for part in trainer.predict_iter(noisy):
        parts.append(part)
        between.append(np.random.rand())
    assert [*between, np.random.rand()] == drawn
    np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("how", ["predict", "predict_iter"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_accelerator_outputs_are_sent_before_those_of_the_previous_batch_are_waited_for(how: str, num_devices: int, monkeypatch: pytest.MonkeyPatch):
    trainer, events = trainer_of(num_devices=num_devices), []
    expected = trainer.predict(X, batch_size=4)
    send, join = jax_array.ArrayImpl.copy_to_host_async, DataParallel.join
    monkeypatch.setattr(jax_array.ArrayImpl, "copy_to_host_async", lambda self: (events.append("sent"), send(self))[1])
    monkeypatch.setattr(DataParallel, "join", lambda self, outputs, *rest: (events.append("joined"), join(self, outputs, *rest))[1])
    # Otherwise several batches are one call.
    options = {"callbacks": [LambdaCallback(on_predict_batch_end=lambda batch, logs: None)]} if how == "predict" else {}
    monkeypatch.setattr(DataParallel, "is_on_host", True)
    list(getattr(trainer, how)(X, batch_size=4, **options))
    assert events == ["joined"] * 4  # Outputs of a CPU are on the host.
    events.clear()
    monkeypatch.setattr(DataParallel, "is_on_host", False)
    np.testing.assert_array_equal(np.concatenate(list(getattr(trainer, how)(X, batch_size=4, **options))).reshape(-1, 2), expected)
    assert events == ["sent", "sent", "joined", "sent", "joined", "sent", "joined", "joined"]


def test_reading_data_uses_a_separate_random_generator_of_pytorch():
    torch = pytest.importorskip("torch")
    isolated = _IsolatedRandomState()
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(4)]
    torch.manual_seed(3)
    with isolated.entered():
        inside = [torch.rand(1).item()]
    outside = [torch.rand(1).item()]
    with isolated.entered():
        inside.append(torch.rand(1).item())
    outside.append(torch.rand(1).item())
    assert inside == expected[:2] == outside


def test_data_in_memory_is_checked_once_for_all_validations_of_a_run(monkeypatch: pytest.MonkeyPatch):
    checked: list[Any] = []
    monkeypatch.setattr("fitflax.loops.evaluation_loop.check_in_memory", lambda program, source, *arguments, **options: checked.append(source))
    trainer_of().fit(X, X[:, :2], batch_size=4, epochs=3, validation_data={"a": (X, X[:, :2]), "b": (X[:5], X[:5, :2])}, verbose=0)
    assert len(checked) == len(set(map(id, checked))) == 2


class OfAnyLength(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return {"steps": nn.Dense(2)(x[..., None]), "total": x.sum(axis=1)}


def test_predicting_batches_of_different_lengths_is_an_error_that_names_predict_iter():
    trainer = trainer_of(OfAnyLength())
    batches = lambda: (np.ones((4, length), np.float32) for length in (3, 5, 3))  # noqa: E731
    fault = r"examples must have equal shapes\. Received: \[\(3, 2\), \(\)\] and \[\(5, 2\), \(\)\]\. Use predict_iter, which yields the outputs of each batch"
    with pytest.raises(DataError, match=fault), pytest.warns(FitflaxWarning, match="compiled again"):
        trainer.predict(batches)
    assert [outputs["steps"].shape for outputs in trainer.predict_iter(batches)] == [(4, 3, 2), (4, 5, 2), (4, 3, 2)]
