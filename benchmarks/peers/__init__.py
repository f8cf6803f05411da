"""Who is compared. Each peer lives in a process of its own (`benchmarks.worker`), and nothing is imported here that only one of them needs."""

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
        module: The module of this package that makes it.
        options: What `make` of that module is told.
        about: For the table.
        is_exact: Whether it takes the same batches through the same mathematics as the hand-written loop, so that losses agree to 1e-5.
        evaluates: Whether its `evaluate` and `predict` are timed.
        has_process: Whether whole processes of it are timed.
        only: The workload that it is for; by default all but `digits`.
    """

    module: str
    options: dict[str, Any]
    about: str
    is_exact: bool = True
    evaluates: bool = False
    has_process: bool = False
    only: str | None = None


PEERS = {
    "jit": Peer("hand", {"way": "jit"}, "hand-written, jax.jit", evaluates=True, has_process=True),
    "control": Peer("hand", {"way": "jit"}, "the same again", evaluates=True),
    "pmap": Peer("hand", {"way": "pmap"}, "hand-written, jax.pmap"),
    "scan": Peer("hand", {"way": "scan"}, "hand-written, lax.scan over 16 steps a call"),
    "fit": Peer("fit", {}, "fit with metrics and progress bar", evaluates=True, has_process=True),
    "fit16": Peer("fit", {"steps_per_call": STEPS_PER_CALL}, "the same with compile(steps_per_call=16)"),
    "fit+callbacks": Peer("fit", {"callbacks": "all"}, "fit with checkpoints, TensorBoard, CSV, early stopping and a watch for NaN"),
    "keras": Peer("keras_jax", {}, "Keras 3 on JAX", is_exact=False, evaluates=True, has_process=True),
    "keras16": Peer("keras_jax", {"steps_per_execution": STEPS_PER_CALL}, "the same with steps_per_execution=16", is_exact=False),
    "lightning": Peer("lightning_torch", {}, "Lightning, PyTorch on the CPU", is_exact=False, has_process=True),
    "fit_again": Peer("fit", {}, "the same again", only="digits"),
    "fit+tensorboard": Peer("fit", {"callbacks": "tensorboard"}, "fit with TensorBoard every 50 steps", only="digits"),
    "fit+saving": Peer("fit", {"callbacks": "saving"}, "fit with ModelCheckpoint every 10 steps", only="digits"),
}

# Each compiles for half a minute, and has no limit to meet.
LEFT_OUT = {"many_leaves": ("pmap", "fit+callbacks")}


def peers_of(workload: str) -> tuple[str, ...]:
    """Returns who runs a workload: first the one that the others are measured against, then the one that is the same again."""
    if workload == "digits":
        return ("fit", *(name for name, peer in PEERS.items() if peer.only == workload))
    return tuple(name for name, peer in PEERS.items() if peer.only is None and name not in LEFT_OUT.get(workload, ()))


class Unavailable(Exception):
    """A peer that cannot run here; the message says why."""


class Setup(NamedTuple):
    """What a contender gets besides its workload: where its progress bar draws, a directory for its files, and whether it keeps its framework's own initial
    parameters instead of taking those that all share."""

    screen: TextIO
    directory: Path
    own_parameters: bool


class Stretch(NamedTuple):
    """What was timed: from the first epoch's begin until all is computed; what one call did before that; and what it measured or made, of the last pass."""

    seconds: float
    start_seconds: float
    values: dict[str, float]


class Contender(abc.ABC):
    """A peer that is ready to run; each call goes on from where the last one left the parameters."""

    @abc.abstractmethod
    def train(self, passes: int, on_first_step: Callable[[], None] | None = None) -> Stretch:
        """Trains for so many passes; `on_first_step` is called when the first step is computed, and costs time in later ones."""

    @abc.abstractmethod
    def evaluate(self) -> Stretch: ...

    @abc.abstractmethod
    def predict(self) -> Stretch: ...


class Watch:
    """The times that matter in a call: made before it, told when its first epoch begins, asked after its end."""

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

    Called with a framework's logs it reads their loss before, which waits until the step is computed.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._function is not None:
            if logs is not None:
                float(logs["loss"])
            function, self._function = self._function, None
            function()
