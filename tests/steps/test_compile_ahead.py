"""Ahead-of-time compilation: each program is compiled once, in a thread, and used by the first call, which still raises all errors."""

import collections
import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.errors import ModelError
from fitflax.parallel import DataParallel, Sharded
from fitflax.steps.compile import Compilation


class Counting(nn.Module):
    note: Callable[[bool], None]

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        self.note(train)
        return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))


X, Y = np.ones((64, 4), np.float32), np.zeros(64, np.int32)


@pytest.mark.parametrize(("num_devices", "steps_per_call"), [(1, 1), (1, 4), (4, 1), (4, 4)])
@pytest.mark.slow
def test_each_program_is_compiled_once_and_the_step_is_traced_once(num_devices, steps_per_call, devices, compilations):
    traced: list[bool] = []
    trainer = fitflax.Trainer(Counting(traced.append), parallel=DataParallel(devices(num_devices)))
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], steps_per_call=steps_per_call)
    with compilations.counted() as counted:
        trainer.fit(X, Y, batch_size=16, epochs=2, validation_data=(X, Y), verbose=0)
    named = [name for name in counted.names if any(part in name for part in ("_fun", "init_state", "train_", "eval_"))]
    assert len(named) == 3, counted.names
    # Shapes of the state, the dry run, and the step; a group is traced once more, for the shapes of its values.
    assert sum(traced) <= (3 if steps_per_call == 1 else 4)


def test_an_evaluation_of_averages_that_are_wider_than_the_parameters_is_compiled_once(devices, compilations):
    trainer = fitflax.Trainer(nn.Dense(3, param_dtype=jnp.bfloat16), parallel=DataParallel(devices(1)))
    trainer.compile("adam", "sparse_categorical_crossentropy", ema_decay=0.5)
    trainer.build((X, Y))
    with compilations.counted() as counted:
        trainer.evaluate(X, Y, batch_size=16, verbose=0)
    assert len([name for name in counted.names if "eval_" in name]) == 1, counted.names


@pytest.mark.slow
def test_lowering_the_step_does_not_wait_until_initialization_is_compiled(devices, monkeypatch):
    events: list[str] = []
    compile_it, lower_it = jax.stages.Lowered.compile, fitflax.steps.compile.CompiledSteps.lower
    may_compile = threading.Event()

    def late(lowered: Any, *arguments: Any, **options: Any) -> Any:
        assert may_compile.wait(60)
        return compile_it(lowered, *arguments, **options)

    def recording(steps: Any, kind: str, *arguments: Any, **options: Any) -> Any:
        result = lower_it(steps, kind, *arguments, **options)
        events.append(kind)
        if kind == "train":
            may_compile.set()  # If anything had waited for "init" before, this line would never run.
        return result

    monkeypatch.setattr(jax.stages.Lowered, "compile", late)
    monkeypatch.setattr(fitflax.steps.compile.CompiledSteps, "lower", recording)
    for strategy in (DataParallel(devices(1)), DataParallel(devices(2)), Sharded({"data": 4}, fsdp=True, fsdp_min_size=0, devices=devices(4))):
        may_compile.clear()
        trainer = fitflax.Trainer(nn.Dense(4), parallel=strategy)
        trainer.compile("adam", "sparse_categorical_crossentropy")
        trainer.fit(X, Y, batch_size=16, verbose=0)
    assert events == ["init", "train"] * 3


def test_compilation_runs_in_another_thread(devices, monkeypatch):
    threads: list[str] = []
    compile_it = jax.stages.Lowered.compile

    def recording(lowered: Any, *arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_it(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", recording)
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(devices(1)))
    trainer.compile("adam", "sparse_categorical_crossentropy")
    trainer.fit(X, Y, batch_size=16, validation_data=(X, Y), verbose=0)
    assert threads == ["fitflax-compile"] * 3


def test_waiting_for_a_failed_compilation_raises_nothing():
    class Lowered:
        def compile(self) -> None:
            raise ValueError("never seen")

    compilation = Compilation(Lowered())  # type: ignore[arg-type]
    compilation.wait()
    assert compilation.memory() is None


def test_a_module_that_fails_is_an_error_before_anything_is_compiled(devices, compilations):
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3)(x) @ np.ones((5, 5))

    trainer = fitflax.Trainer(Wrong(), parallel=DataParallel(devices(1)))
    trainer.compile("adam", "sparse_categorical_crossentropy")
    with compilations.counted() as counted, pytest.raises(ModelError):
        trainer.fit(X, Y, batch_size=16, verbose=0)
    assert not [name for name in counted.names if "init_state" in name]


@pytest.mark.slow
def test_another_batch_size_is_compiled_ahead_as_well(devices, compilations):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(devices(1)))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    for size in (16, 32, 16):
        trainer.fit(X, Y, batch_size=size, verbose=0)
    assert len([name for name in compilations.names if "train_step" in name]) == 2


@pytest.mark.slow
def test_a_second_evaluation_or_fit_traces_nothing(devices):
    traced: list[bool] = []
    trainer = fitflax.Trainer(Counting(traced.append), parallel=DataParallel(devices(1)))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    data = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
    for _ in range(2):
        before = len(traced)
        trainer.fit(*data, batch_size=4, validation_data=data, verbose=0)
        trainer.evaluate(*data, batch_size=4, verbose=0)
        trainer.predict(data[0], batch_size=4)
    assert len(traced) == before


def test_a_call_waits_for_its_program_instead_of_compiling_it_again(devices, monkeypatch):
    """Here, each program is compiled when a call waits for it, and not before."""
    asked_for: dict[Any, threading.Event] = collections.defaultdict(threading.Event)
    done: list[threading.Thread] = []
    compile_it, wait = Compilation._compile, Compilation.wait

    def when_asked_for(one: Compilation, lowered: Any) -> None:
        asked_for[threading.current_thread()].wait(30)
        compile_it(one, lowered)
        done.append(threading.current_thread())

    def asking(compilation: Compilation) -> None:
        asked_for[compilation._thread].set()
        wait(compilation)

    monkeypatch.setattr(Compilation, "_compile", when_asked_for)
    monkeypatch.setattr(Compilation, "wait", asking)
    at_first_step: list[int] = []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: at_first_step.append(len(done)) if batch == 0 else None)
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(devices(1)))
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    try:
        for size in (16, 32):  # The shapes of the second size are new to a function that was already called.
            trainer.fit(X, Y, batch_size=size, verbose=0, callbacks=[look])
    finally:
        for event in asked_for.values():
            event.set()
    assert at_first_step == [2, 3]  # The state at step 0, a step of 16, a step of 32.
