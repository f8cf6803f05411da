"""The contenders: a hand-written loop, `fit` alone, `fit` with typical callbacks and, for some models, Keras and Lightning."""

import abc
import dataclasses
import functools
import importlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from typing_extensions import override

import fitflax
from benchmarks.real.workloads import SEED, RealWorkload, diffuse, make_data, make_optimizer
from fitflax.callbacks import (
    BestCheckpoint,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ProgressBar,
    TensorBoard,
    TerminateOnNaN,
)
from fitflax.callbacks.model_checkpoint import StoreCallback
from fitflax.parallel import DataParallel

BATCHES = 8  # Batches of data, which are repeated, because input is not measured.
LOG_EVERY = 50
AXIS = "replica"


class Compilations(logging.Handler):
    """Counts what JAX compiles, and the seconds, from its log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count, self.seconds = 0, 0.0
        logger = logging.getLogger("jax._src.dispatch")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(self)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Finished XLA compilation"):
            self.count += 1
            self.seconds += float(text.rsplit(" in ", 1)[1].split()[0])


@dataclasses.dataclass
class Stretch:
    """The measurements of some steps.

    Attributes:
        seconds: Until the device was done.
        host_seconds: In which the training thread was computing and not waiting.
        loss: The mean loss.
        pauses: The time in the training thread for all saves of a step, for each such step.
        end: The time (of `time.time`) at which the last step was done.
    """

    seconds: float
    host_seconds: float
    loss: float
    pauses: list[float] = dataclasses.field(default_factory=list)
    end: float = dataclasses.field(default_factory=time.time)


class Contender(abc.ABC):
    """A contender that trains one model.

    Args:
        workload: The model.
        size: The size of the model.
        every: Steps between validations and saves, for contenders that have them.
        screen: The stream for a progress bar.
        directory: A directory for checkpoints and event files.
    """

    def __init__(self, workload: RealWorkload, size: str, *, every: int, screen: Any, directory: pathlib.Path) -> None:
        self.workload, self.size, self.every, self.screen, self.directory = workload, size, every, screen, directory
        self.x, self.y = make_data(workload, size, BATCHES)
        self.batch = workload.sizes[size].batch

    @abc.abstractmethod
    def train(self, steps: int, *, validates: bool = False) -> Stretch:
        """Runs the given number of steps. If it `validates`, it evaluates all batches every `every` steps."""

    @abc.abstractmethod
    def evaluate(self) -> float:
        """Returns the seconds of an evaluation of all batches."""

    @abc.abstractmethod
    def predict(self) -> float:
        """Returns the seconds of a prediction of all batches, including the copy of outputs to the host."""

    def flops(self) -> float | None:
        """Returns the model's floating-point operations per step, as counted by XLA; `None` if it does not count them."""
        return None


def batches_of(x: Any, y: np.ndarray, size: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields the batches, repeatedly."""
    while True:
        for begin in range(0, len(y), size):
            yield jax.tree.map(lambda array, begin=begin: array[begin : begin + size], x), y[begin : begin + size]


def _model_of(contender: "Contender") -> Any:
    """Returns the model; the batch statistics of ResNet-50 are those of all replicas."""
    model = contender.workload.model(contender.size)
    return model.clone(axis_name=AXIS) if contender.workload.name == "resnet50" else model


def _values(loss_of: Callable[..., Any], logits: Any, y: Any) -> Any:
    return loss_of(logits, y).mean()


class Hand(Contender):
    """A jitted step with donated state and sums, mapped over the replicas if batch statistics are computed over all of them. Values are read every 50 steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._optimizer = make_optimizer(self.workload)
        self._graph: Any = None
        self._is_mapped = self.workload.name == "resnet50"
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), (AXIS,))
        model = _model_of(self)
        first = next(batches_of(self.x, self.y, self.batch))[0]
        if isinstance(model, nnx.Module):
            self._graph, params, rest = nnx.split(model, nnx.Param, ...)
            self._state: Any = (params, rest)
        else:
            self._model = model
            variables = jax.jit(functools.partial(self._init, model))(jax.random.key(SEED), first)
            self._state = (variables.pop("params"), variables)
        self._state = (*self._state, jax.jit(self._optimizer.init)(self._state[0]), self._average(), jnp.uint32(0))
        self._state, self._sums = self._placed((self._state, jnp.zeros(2)))
        self._step = jax.jit(self._mapped_step if self._is_mapped else self._train_step, donate_argnums=(0, 1))
        self._batches = batches_of(self.x, self.y, self.batch)
        self._add = jax.jit(self._add_losses, donate_argnums=1)
        self._apply = jax.jit(lambda params, rest, x: self._outputs(params, rest, x, train=False)[0])

    def _average(self) -> Any:
        return jax.tree.map(jnp.copy, self._state[0]) if self.workload.ema_decay else ()

    def _inputs(self, x: Any) -> tuple[Any, ...]:
        return x if isinstance(x, tuple) else (x,)

    def _init(self, model: nn.Module, key: jax.Array, x: Any) -> Any:
        return model.init(key, *self._inputs(x), **({"train": True} if self.workload.name == "resnet50" else {}))

    def _outputs(self, params: Any, rest: Any, x: Any, *, train: bool) -> tuple[Any, Any]:
        if self._graph is not None:
            return nnx.merge(self._graph, params, rest)(x), rest
        mode = {"train": train} if self.workload.name == "resnet50" else {}
        return self._model.apply({"params": params, **rest}, *self._inputs(x), **mode, mutable=list(rest) if train else [])

    def _loss(self, params: Any, rest: Any, x: Any, y: Any, key: jax.Array, *, train: bool) -> tuple[jax.Array, Any]:
        if self.workload.kind == "diffusion":
            noisy, times, noise = diffuse(x[0], key)
            outputs, rest = self._outputs(params, rest, (noisy, times), train=train)
            return jnp.square(outputs - noise).mean(), rest
        logits, rest = self._outputs(params, rest, x, train=train)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), rest

    def _placed(self, tree: Any) -> Any:
        return jax.device_put(tree, jax.sharding.NamedSharding(self._mesh, P())) if self._is_mapped else tree

    def _mapped_step(self, *arguments: Any) -> Any:
        return jax.shard_map(self._train_step, mesh=self._mesh, in_specs=(P(), P(), P(AXIS), P(AXIS)), out_specs=P(), check_vma=False)(*arguments)

    def _train_step(self, state: Any, sums: jax.Array, x: Any, y: Any) -> Any:
        params, rest, opt_state, average, step = state
        key = jax.random.fold_in(jax.random.key(SEED), step)
        (loss, rest), grads = jax.value_and_grad(functools.partial(self._loss, train=True), has_aux=True)(params, rest, x, y, key)
        if self._is_mapped:
            loss, grads = jax.lax.pmean((loss, grads), AXIS)
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if self.workload.ema_decay:
            average = optax.incremental_update(params, average, 1 - self.workload.ema_decay)
        return (params, rest, opt_state, average, step + 1), sums + jnp.stack([loss, jnp.float32(1)])

    def _add_losses(self, params: Any, sums: jax.Array, rest: Any, x: Any, y: Any) -> jax.Array:
        loss, _ = self._loss(params, rest, x, y, jax.random.key(SEED), train=False)
        return sums + jnp.stack([loss, jnp.float32(1)])

    @property
    def _evaluated(self) -> Any:
        return self._state[3] if self.workload.ema_decay else self._state[0]

    @override
    def train(self, steps: int, *, validates: bool = False) -> Stretch:
        self._sums = self._placed(jnp.zeros(2))
        begin, host = time.perf_counter(), time.thread_time()
        for step in range(1, steps + 1):
            self._state, self._sums = self._step(self._state, self._sums, *next(self._batches))
            if step % LOG_EVERY == 0:
                self._sums.tolist()
            if validates and step % self.every == 0:
                self.evaluate()
        total, count = self._sums.tolist()
        jax.block_until_ready(self._state)
        return Stretch(time.perf_counter() - begin, time.thread_time() - host, total / count)

    @override
    def evaluate(self) -> float:
        begin, sums = time.perf_counter(), jnp.zeros(2)
        for (x, y), _ in zip(batches_of(self.x, self.y, self.batch), range(BATCHES), strict=False):
            sums = self._add(self._evaluated, sums, self._state[1], x, y)
        sums.tolist()
        return time.perf_counter() - begin

    @override
    def predict(self) -> float:
        begin, outputs = time.perf_counter(), []
        for (x, _), _ in zip(batches_of(self.x, self.y, self.batch), range(BATCHES), strict=False):
            outputs.append(self._apply(self._evaluated, self._state[1], x))
            if len(outputs) > 1:
                outputs[-2] = np.asarray(outputs[-2])
        np.concatenate([np.asarray(each) for each in outputs])
        return time.perf_counter() - begin

    @override
    def flops(self) -> float | None:
        lowered = self._step.lower(self._state, self._sums, *next(self._batches))
        found = lowered.cost_analysis() or {}
        return found.get("flops")


class _Diffusion(fitflax.Trainer):
    """Draws noise and times in the step."""

    @override
    def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
        noisy, times, noise = diffuse(batch.x[0], rngs["noise"] if train else jax.random.key(SEED))
        outputs = self.model.apply({"params": params}, noisy, times)
        return jnp.square(outputs - noise).mean((1, 2, 3)), model_state, {}


class _Timed(StoreCallback):
    """Adds the time of each save in the training thread, when the device is idle, to the `pauses` by step, which the callbacks of a run share.

    The first callback that saves a step copies the state, and the others share its copy. So only their sum is the pause of a save.
    """

    pauses: dict[int, float]

    @override
    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
        jax.block_until_ready(checkpoint.run.borrow())
        begin = time.perf_counter()
        super().on_checkpoint(checkpoint)
        if checkpoint.run.num_saves:
            self.pauses[checkpoint.step] = self.pauses.get(checkpoint.step, 0.0) + time.perf_counter() - begin


class _Saves(_Timed, ModelCheckpoint):
    pass


class _Best(_Timed, BestCheckpoint):
    pass


class Fit(Contender):
    """`Trainer.fit`.

    With `everything`, it has a progress bar, checkpoints every `every` steps, the best checkpoint, and TensorBoard. With `steps_per_call` above 1,
    its batches always come from an iterator.
    """

    def __init__(self, *arguments: Any, everything: bool = False, steps_per_call: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._everything, self._steps_per_call = everything, steps_per_call
        kind = self.workload.kind
        model = _model_of(self)
        make = _Diffusion if kind == "diffusion" else fitflax.Trainer
        streams = {"init": (), "train": ("noise",)} if kind == "diffusion" else ()
        self._trainer = make(model, seed=SEED, rngs=streams, parallel=DataParallel(jax.devices()[:1]))
        loss = "mse" if kind == "diffusion" else "sparse_categorical_crossentropy"
        self._trainer.compile(make_optimizer(self.workload), loss, ema_decay=self.workload.ema_decay, steps_per_call=steps_per_call)
        self._calls = 0

    def _loggers(self) -> list[Callback]:
        directory = self.directory
        files = [TensorBoard(directory / "board-of-epochs"), CSVLogger(directory / "log.csv")]
        return [*files, EarlyStopping("loss", patience=10**9), TerminateOnNaN(), ProgressBar(file=self.screen)]

    def _callbacks(self, monitor: str, pauses: dict[int, float]) -> list[Callback]:
        if not self._everything:
            return []
        directory, every = self.directory, fitflax.every(steps=self.every)
        self._calls += 1
        saves = _Saves(directory / f"checkpoints-{self._calls}", every=every, keep=1, save_last=False)
        best = _Best(directory / f"best-{self._calls}", monitor=monitor)
        saves.pauses = best.pauses = pauses
        return [saves, best, TensorBoard(directory / "board", every=every), ProgressBar(file=self.screen)]

    @override
    def train(self, steps: int, *, validates: bool = False, epoch: int | None = None, iterates: bool = False) -> Stretch:
        """Runs the given number of steps, and at least one call.

        With `epoch`, an epoch has this number of steps, and the callbacks are loggers, those that watch the loss, and a progress bar. With `iterates`, batches
        come from an iterator.
        """
        steps = max(steps, self._steps_per_call)
        if iterates or self._steps_per_call > 1:
            data: tuple[Any, ...] = (batches_of(self.x, self.y, self.batch),)
            of_arrays = {}
        else:
            data, of_arrays = (self.x, self.y), {"batch_size": self.batch, "shuffle": False}
        pauses, marks, ends = dict[int, float](), list[tuple[float, float]](), list[float]()
        callbacks = self._callbacks("val_loss" if validates else "loss", pauses) if epoch is None else self._loggers()

        def begin(epoch: int, logs: Any) -> None:
            marks.append((time.perf_counter(), time.thread_time()))

        def end(epoch: int, logs: Any) -> None:
            float(logs["loss"])  # Waits for the last step.
            ends.append(time.time())

        validation = {"validation_data": (self.x, self.y), "validation_steps": BATCHES, "validation_freq": fitflax.every(steps=self.every)}
        history = self._trainer.fit(
            *data,
            **of_arrays,
            steps=steps,
            steps_per_epoch=epoch or steps,
            verbose=0,
            log_every=LOG_EVERY,
            callbacks=[LambdaCallback(on_epoch_begin=begin, on_epoch_end=end), *callbacks],
            **(validation if validates else {}),
        )
        seconds, host = time.perf_counter() - marks[0][0], time.thread_time() - marks[0][1]
        return Stretch(seconds, host, float(history.history["loss"][-1]), list(pauses.values()), ends[-1])

    @override
    def evaluate(self) -> float:
        marks: list[float] = []
        watch = LambdaCallback(on_test_begin=lambda logs: marks.append(time.perf_counter()))
        self._trainer.evaluate(self.x, self.y, batch_size=self.batch, verbose=0, callbacks=[watch])
        return time.perf_counter() - marks[0]

    @override
    def predict(self) -> float:
        marks: list[float] = []
        watch = LambdaCallback(on_predict_begin=lambda logs: marks.append(time.perf_counter()))
        self._trainer.predict(self.x, batch_size=self.batch, verbose=0, callbacks=[watch])
        return time.perf_counter() - marks[0]


def _other(module: str, name: str) -> Callable[..., Contender]:
    """Returns a function that creates a contender. It imports the framework when called, so the framework does not have to be installed."""
    return lambda *arguments, **options: getattr(importlib.import_module(f"benchmarks.real.{module}"), name)(*arguments, **options)


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "hand": Hand,
    "fit": Fit,
    "fit+everything": functools.partial(Fit, everything=True),
    "fit8": functools.partial(Fit, steps_per_call=8),
    "keras": _other("keras_jax", "Keras"),
    "lightning": _other("lightning_torch", "Lightning"),
}
# Other frameworks, for models that they have an equivalent of.
OTHERS = {"gpt2": ("keras", "lightning"), "vit_b16": ("keras", "lightning")}
