"""Evaluations and predictions whose batches take less time to compute than to dispatch: several in one call, with the same values and hooks as one by one."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback, ProgressBar
from fitflax.metrics import AUC
from fitflax.parallel import DataParallel


class Small(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        noise = jax.random.normal(self.make_rng("noise"), x.shape) if self.has_rng("noise") else 0.0
        return nn.Dense(3)(nn.tanh(nn.Dense(8)(x + noise)))


class Expensive(nn.Module):
    """Takes more than two milliseconds."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.Dense(4096)(nn.Dense(1024)(x)))


def data_of(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    return rng.normal(size=(rows, 4)).astype(np.float32), rng.integers(0, 3, rows)


def make(devices: Any, module: nn.Module | None = None) -> fitflax.Trainer:
    trainer = fitflax.Trainer(module or Small(), parallel=DataParallel(devices))
    trainer.compile("sgd", "sparse_categorical_crossentropy", ["accuracy"])
    trainer.build(data_of(16))
    return trainer


def calls_of(trainer: fitflax.Trainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Returns a list that records how many batches each call to the device gets."""
    calls: list[tuple[str, int]] = []
    program = trainer._session.task.any_program()
    for kind in ("evaluate", "predict"):
        method = getattr(program, kind)

        def recording(used: Any, given: Any, third: Any, *rest: Any, kind: str = kind, method: Any = method) -> Any:
            calls.append((kind, len(third if kind == "evaluate" else given)))
            return method(used, given, third, *rest)

        monkeypatch.setattr(program, kind, recording)
    return calls


EACH = {"on_test_batch_end": lambda batch, logs: None, "on_predict_batch_end": lambda batch, logs: None}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("num_devices", "rows"), [(1, 16 * 8 + 3), (1, 8), (1, 40 * 8), (3, 16 * 9 + 4)])
def test_groups_of_batches_give_the_same_results_as_batches_one_by_one(num_devices, rows, devices, monkeypatch):
    trainer, (x, y) = make(devices(num_devices)), data_of(rows)
    calls = calls_of(trainer, monkeypatch)
    together = trainer.evaluate(x, y, batch_size=8, verbose=0), trainer.predict(x, batch_size=8, verbose=0)
    batches = -(-rows // 8)
    assert sum(count for kind, count in calls if kind == "evaluate") == batches and len(calls) == 2 * -(-batches // 16)
    calls.clear()
    each = LambdaCallback(**EACH)
    alone = trainer.evaluate(x, y, batch_size=8, verbose=0, callbacks=[each]), trainer.predict(x, batch_size=8, verbose=0, callbacks=[each])
    assert {count for _, count in calls} == {1}
    np.testing.assert_allclose(list(together[0].values()), list(alone[0].values()), rtol=1e-6)
    np.testing.assert_allclose(together[1], alone[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(together[1], np.concatenate(list(trainer.predict_iter(x, batch_size=8))), rtol=1e-5, atol=1e-6)
    assert together[1].shape == (rows, 3)


def test_steps_count_batches_not_calls(devices, monkeypatch):
    trainer, (x, y) = make(devices(1)), data_of(800)
    calls = calls_of(trainer, monkeypatch)
    assert trainer.evaluate(x, y, batch_size=8, steps=20, verbose=0) == pytest.approx(trainer.evaluate(x[:160], y[:160], batch_size=8, verbose=0))
    assert trainer.predict(x, batch_size=8, steps=20, verbose=0).shape == (160, 3)
    assert calls == [("evaluate", 16), ("evaluate", 4)] * 2 + [("predict", 16), ("predict", 4)]


@pytest.mark.slow
def test_each_batch_keeps_its_own_random_keys_and_rows_are_collected_in_order(devices):
    trainer = fitflax.Trainer(Small(), parallel=DataParallel(devices(2)), rngs={"init": [], "train": [], "eval": ["noise"]})
    trainer.compile("sgd", "sparse_categorical_crossentropy", [AUC(num_thresholds=None)])
    trainer.build(data_of(16))
    x, y = data_of(8 * 20 + 2)
    together = trainer.evaluate(x, y, batch_size=8, verbose=0), trainer.predict(x, batch_size=8, verbose=0)
    each = LambdaCallback(**EACH)
    alone = trainer.evaluate(x, y, batch_size=8, verbose=0, callbacks=[each]), trainer.predict(x, batch_size=8, verbose=0, callbacks=[each])
    np.testing.assert_allclose(list(together[0].values()), list(alone[0].values()), rtol=1e-6)
    np.testing.assert_allclose(together[1], alone[1], rtol=1e-5, atol=1e-6)
    assert np.abs(together[1] - make(devices(2)).predict(x, batch_size=8, verbose=0)).max() > 0.01  # There is noise.


def test_a_callback_sees_every_batch_and_the_progress_bar_reaches_its_end(devices, tmp_path):
    trainer, (x, y) = make(devices(1)), data_of(8 * 20)
    seen: list[int] = []
    trainer.evaluate(x, y, batch_size=8, verbose=0, callbacks=[LambdaCallback(on_test_batch_begin=lambda batch, logs: seen.append(batch))])
    assert seen == list(range(20))

    class Bar(ProgressBar):
        def on_test_batch_end(self, batch: int, logs: Any) -> None:
            seen.append(batch)
            super().on_test_batch_end(batch, logs)

    seen.clear()
    with (tmp_path / "bar").open("w") as file:
        trainer.evaluate(x, y, batch_size=8, callbacks=[Bar(file=file)])
    assert seen == [15, 19]


@pytest.mark.slow
def test_expensive_batches_are_computed_one_by_one(devices, monkeypatch):
    trainer, (x, y) = make(devices(1), Expensive()), data_of(64)
    calls = calls_of(trainer, monkeypatch)
    trainer.evaluate(x, y, batch_size=16, verbose=0)
    trainer.predict(x, batch_size=16, verbose=0)
    assert calls == [("evaluate", 1)] * 4 + [("predict", 1)] * 4


class Convolved(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.Conv(2, (3,))(x[..., None]).reshape(len(x), -1))


@pytest.mark.parametrize(("on_host", "module", "together"), [(True, Convolved(), 1), (False, Convolved(), 4), (False, Expensive(), 4)])
@pytest.mark.mostly_slow
def test_a_cpu_computes_convolutions_batch_by_batch_and_an_accelerator_groups_batches(on_host, module, together, devices, monkeypatch):
    """XLA computes convolutions inside a loop on one core. A GPU computes in one millisecond what takes a core a hundred."""
    monkeypatch.setattr(DataParallel, "is_on_host", on_host)
    trainer, (x, y) = make(devices(1), module), data_of(64)
    calls = calls_of(trainer, monkeypatch)
    trainer.evaluate(x, y, batch_size=16, verbose=0)
    trainer.predict(x, batch_size=16, verbose=0)
    assert calls == [("evaluate", together)] * (4 // together) + [("predict", together)] * (4 // together)


def test_evaluation_does_not_wait_for_several_batches_of_a_stream(devices, monkeypatch):
    trainer, (x, y) = make(devices(1)), data_of(64)
    calls = calls_of(trainer, monkeypatch)
    trainer.evaluate(lambda: ((x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)), verbose=0)
    assert calls == [("evaluate", 1)] * 8
