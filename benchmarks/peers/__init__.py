"""The peers to compare. Each runs in a separate process (`benchmarks.worker`), and this module imports nothing that only one of them needs."""

import abc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

LOG_EVERY = 50
STEPS_PER_CALL = 16


class Peer(NamedTuple):
    """A way to train.

    Args:
        module: The module of this package that creates it.
        options: The options for `make` of that module.
        about: The description in the table.
        is_exact: Whether it takes the same batches through the same math as the hand-written loop, so that losses agree to 1e-5.
        evaluates: Whether its `evaluate` and `predict` are timed.
        has_process: Whether whole processes of it are timed.
        only: The workloads that it runs; by default all but `digits`.
    """

    module: str
    options: dict[str, Any]
    about: str
    is_exact: bool = True
    evaluates: bool = False
    has_process: bool = False
    only: tuple[str, ...] | None = None


WITH_NNX = ("tiny", "mlp", "lm")
WITH_ITERATOR = ("tiny", "mlp")

PEERS = {
    "jit": Peer("hand", {"way": "jit"}, "hand-written, jax.jit", evaluates=True, has_process=True),
    "control": Peer("hand", {"way": "jit"}, "the same again", evaluates=True),
    "pmap": Peer("hand", {"way": "pmap"}, "hand-written, jax.pmap"),
    "scan": Peer("hand", {"way": "scan"}, "hand-written, lax.scan over 16 steps a call"),
    "fit": Peer("fit", {}, "fit with metrics and progress bar", evaluates=True, has_process=True),
    "fit16": Peer("fit", {"steps_per_call": STEPS_PER_CALL}, "the same with compile(steps_per_call=16)"),
    "fit_iterator": Peer("fit", {"iterator": True}, "fit on an iterator over the batches of jit", evaluates=True, only=WITH_ITERATOR),
    "fit+callbacks": Peer("fit", {"callbacks": "all"}, "fit with checkpoints, TensorBoard, CSV, early stopping and a watch for NaN"),
    "keras": Peer("keras_jax", {}, "Keras 3 on JAX", is_exact=False, evaluates=True, has_process=True),
    "keras16": Peer("keras_jax", {"steps_per_execution": STEPS_PER_CALL}, "the same with steps_per_execution=16", is_exact=False),
    "lightning": Peer("lightning_torch", {}, "Lightning, PyTorch on the CPU", is_exact=False, has_process=True),
    "fit_nnx": Peer("fit", {"nnx": True}, "fit of the same network as an NNX module", evaluates=True, only=WITH_NNX),
    "nnx": Peer("hand", {"way": "nnx"}, "hand-written, nnx.jit and nnx.Optimizer", evaluates=True, only=WITH_NNX),
    "nnx_split": Peer("hand", {"way": "split"}, "hand-written, jax.jit around an NNX module that is split once", evaluates=True, only=WITH_NNX),
    "fit_again": Peer("fit", {}, "the same again", only=("digits",)),
    "fit+tensorboard": Peer("fit", {"callbacks": "tensorboard"}, "fit with TensorBoard every 50 steps", only=("digits",)),
    "fit+saving": Peer("fit", {"callbacks": "saving"}, "fit with ModelCheckpoint every 10 steps", only=("digits",)),
}

# Each takes half a minute to compile, and has no limit.
LEFT_OUT = {"many_leaves": ("pmap", "fit+callbacks")}


def peers_of(workload: str) -> tuple[str, ...]:
    """Returns the peers that run a workload: first the base, then its control, then the others."""
    ours = {name: workload in peer.only if peer.only else workload != "digits" for name, peer in PEERS.items()}
    chosen = tuple(name for name, is_ours in ours.items() if is_ours and name not in LEFT_OUT.get(workload, ()))
    return ("fit", *chosen) if workload == "digits" else chosen


class Unavailable(Exception):
    """Raised when a peer cannot run here. The message says why."""


class Setup(NamedTuple):
    """The inputs of a contender besides its workload.

    They are the stream for its progress bar, a directory for its files, and whether it keeps its framework's initial parameters instead of the shared ones.
    """

    screen: TextIO
    directory: Path
    own_parameters: bool


class Stretch(NamedTuple):
    """A timed stretch: seconds from the first epoch until all is computed, seconds of the call before that, and the values of the last pass."""

    seconds: float
    start_seconds: float
    values: dict[str, float]


class Contender(abc.ABC):
    """A peer that is ready to run. Each call continues with the parameters of the last one."""

    @abc.abstractmethod
    def train(self, passes: int, on_first_step: Callable[[], None] | None = None) -> Stretch:
        """Trains for a number of passes. `on_first_step` is called when the first step is computed, and makes later steps slower."""

    @abc.abstractmethod
    def evaluate(self) -> Stretch: ...

    @abc.abstractmethod
    def predict(self) -> Stretch: ...


class Watch:
    """The times of a call: create it before the call, call `begin` when the first epoch begins, and `stretch` after the end."""

    def __init__(self) -> None:
        self.called = time.perf_counter()
        self.began: float | None = None

    def begin(self, *args: Any) -> None:
        if self.began is None:
            self.began = time.perf_counter()

    def stretch(self, values: dict[str, float]) -> Stretch:
        assert self.began is not None, "the first epoch never began"
        return Stretch(time.perf_counter() - self.began, self.began - self.called, values)


class Once:
    """Calls a function after the first step, and never again.

    When called with a framework's logs, it first reads their loss, which waits until the step is computed.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._function is not None:
            if logs is not None:
                float(logs["loss"])
            function, self._function = self._function, None
            function()
