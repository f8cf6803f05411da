"""fitflax as users run it: `Trainer`, metrics, `ProgressBar` on a simulated terminal, the default `History`, and callbacks if requested."""

import dataclasses
import inspect
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from typing_extensions import override

import fitflax
from benchmarks.peers import LOG_EVERY, Contender, Once, Setup, Stretch, Unavailable, Watch
from benchmarks.peers.models import make_module, make_optimizer, shared_parameters
from benchmarks.peers.nnx_models import make_nnx_module
from benchmarks.workloads import SEED, Workload, batches, make_data, order
from fitflax.callbacks import BestCheckpoint, Callback, CSVLogger, EarlyStopping, LambdaCallback, ModelCheckpoint, ProgressBar, TensorBoard, TerminateOnNaN
from fitflax.parallel import DataParallel


def no_callbacks(directory: Path) -> list[Callback]:
    return []


def all_callbacks(directory: Path) -> list[Callback]:
    """Returns the callbacks that monitor or save a run, with default options. Learning rate schedules would need a different optimizer from the peers'."""
    checkpoints = [ModelCheckpoint(directory / "checkpoints"), BestCheckpoint(directory / "best", monitor="loss")]
    return [*checkpoints, TensorBoard(directory / "board"), CSVLogger(directory / "log.csv"), EarlyStopping("loss", patience=10**9), TerminateOnNaN()]


CALLBACKS: dict[str | None, Callable[[Path], list[Callback]]] = {
    None: no_callbacks,
    "all": all_callbacks,
    "tensorboard": lambda directory: [TensorBoard(directory, every=fitflax.every(steps=LOG_EVERY))],
    "saving": lambda directory: [ModelCheckpoint(directory, every=fitflax.every(steps=10))],
}


class Fit(Contender):
    def __init__(self, workload: Workload, setup: Setup, callbacks: str | None, nnx: bool, iterator: bool, compile_options: dict[str, Any]) -> None:
        self._workload, self._setup, self._iterator = workload, setup, iterator
        self._passes = 0
        self._x, self._y = make_data(workload)
        self._make_callbacks = CALLBACKS[callbacks]
        module = make_nnx_module(workload, own_parameters=setup.own_parameters) if nnx else make_module(workload)
        self._trainer = fitflax.Trainer(module, seed=SEED, parallel=DataParallel(jax.devices()[:1]))
        self._trainer.compile(make_optimizer(workload), "sparse_categorical_crossentropy", metrics=["accuracy"], **compile_options)
        if not setup.own_parameters and not nnx and workload.kind != "digits":
            self._trainer.build((self._x[: workload.batch_size], self._y[: workload.batch_size]))
            state = self._trainer.state
            self._trainer.replace_state(dataclasses.replace(state, params=shared_parameters(state.params)))

    def _data(self, numbers: Iterable[int] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments for the data: arrays, or an iterator over the passes `numbers` (by default, over one unshuffled pass)."""
        x, y, size = self._x, self._y, self._workload.batch_size
        if not self._iterator:
            return (x, y), {"batch_size": size}
        orders = [None] if numbers is None else (order(number, len(x)) for number in numbers)
        return (itertools.chain.from_iterable(batches(x, y, size, each) for each in orders),), {}

    @override
    def train(self, passes: int, on_first_step: Callable[[], None] | None = None) -> Stretch:
        directory = Path(tempfile.mkdtemp(dir=self._setup.directory))
        watch = Watch()
        callbacks = [LambdaCallback(on_epoch_begin=watch.begin), ProgressBar(file=self._setup.screen), *self._make_callbacks(directory)]
        if on_first_step is not None:
            once = Once(on_first_step)
            callbacks.append(LambdaCallback(on_train_batch_end=lambda batch, logs: once(logs)))
        data, options = self._data(range(self._passes, self._passes + passes))
        if self._iterator:
            options = {"steps_per_epoch": self._workload.steps}
        self._passes += passes
        history = self._trainer.fit(*data, steps=passes * self._workload.steps, callbacks=callbacks, log_every=LOG_EVERY, **options)
        # History has read values of the last step, so the device is done. Reading `trainer.state` would make the next stretch begin with a copy of it.
        stretch = watch.stretch({name: history.history[name][-1] for name in ("loss", "accuracy")})
        shutil.rmtree(directory)
        return stretch

    @override
    def evaluate(self) -> Stretch:
        watch = Watch()
        callbacks = [LambdaCallback(on_test_begin=watch.begin), ProgressBar(file=self._setup.screen)]
        data, options = self._data()
        found = self._trainer.evaluate(*data, callbacks=callbacks, **options)
        return watch.stretch({name: found[name] for name in ("loss", "accuracy")})

    @override
    def predict(self) -> Stretch:
        watch = Watch()
        data, options = self._data()
        outputs = self._trainer.predict(data[0], callbacks=[LambdaCallback(on_predict_begin=watch.begin)], **options)
        stretch = watch.stretch({})
        return stretch._replace(values={"outputs": float(np.abs(outputs).mean())})


def make(workload: Workload, setup: Setup, *, callbacks: str | None = None, nnx: bool = False, iterator: bool = False, **compile_options: Any) -> Contender:
    """Returns `fit`; with `nnx`, for an NNX module, and with `iterator`, on an iterator over the batches of the hand-written loop.

    Raises:
        Unavailable: `compile` does not know an option, or there is no NNX module for this workload.
    """
    for name in compile_options:
        if name not in inspect.signature(fitflax.Trainer.compile).parameters:
            raise Unavailable(f"not built: compile() takes no {name}")
    return Fit(workload, setup, callbacks, nnx, iterator, compile_options)
