"""Bit-for-bit comparisons for the tests of data sources: training, evaluation and prediction with a source, and a run that is interrupted and resumed."""

import contextlib
import itertools
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.data.batch import Selection
from fitflax.errors import FitflaxWarning
from fitflax.parallel import DataParallel
from tests.run_script import differences, leaves_of, rows_of, state_of

ROWS, BATCH = 10, 4  # Batches of 4, 4 and 2.
X = np.random.default_rng(5).normal(size=(ROWS, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32)).astype(np.float32)

CANNOT_SEEK = "This data source cannot seek, so {} examples are read and dropped"
NO_ORDER = "so its order of examples cannot be repeated. This run will differ from an uninterrupted one."


def make_trainer(**options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]), **options)
    trainer.compile(optax.sgd(0.1, momentum=0.9), "mse", ["mae"])
    return trainer


def outcome(data: Any, predicted: Any = None, *, keys: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Returns all results of training for two epochs on `data`, evaluating on it, and predicting."""
    trainer = make_trainer(**(keys or {}))
    history = trainer.fit(data, epochs=2, verbose=0, **options)
    size = {"batch_size": options["batch_size"]} if "batch_size" in options else {}
    evaluated = trainer.evaluate(data, verbose=0, **size)
    outputs = trainer.predict(data if predicted is None else predicted, **size)
    return {**state_of(trainer), "history": rows_of(history), "evaluated": leaves_of(evaluated), "predicted": leaves_of(outputs)}


def of_arrays(**options: Any) -> dict[str, Any]:
    return outcome((X, Y), X, batch_size=BATCH, **{"shuffle": False, **options})


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    unequal = differences(one, other)
    assert not unequal, "\n".join(unequal)


@contextlib.contextmanager
def warned(*prefixes: str) -> Iterator[None]:
    """Checks that the block emits exactly these warnings, in this order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Deprecations in third-party packages are not checked here; each test module declares which ones it ignores.
        yield
    emitted = [str(warning.message) for warning in caught if issubclass(warning.category, FitflaxWarning)]
    assert [message[: len(prefix)] for message, prefix in zip(emitted, prefixes, strict=False)] == list(prefixes), emitted
    assert len(emitted) == len(prefixes), emitted


def run(root: pathlib.Path, data: Any, steps: int, *, keys: dict[str, Any] | None = None, callbacks: Sequence[Any] = (), **options: Any) -> dict[str, Any]:
    """Trains up to a step, from the newest checkpoint in `root` if there is one."""
    trainer = make_trainer(**(keys or {}))
    history = trainer.fit(data, steps=steps, verbose=0, resume="auto", callbacks=[*callbacks, ModelCheckpoint(root)], **options)
    return {**state_of(trainer), "history": rows_of(history)}


def assert_resumes(
    root: pathlib.Path, make: Callable[[], Any], k: int, *messages: str, steps: int = 8, between: Sequence[int] = (0, 1, 2), **options: Any
) -> None:
    """Checks that a run stopped at step `k` and resumed on newly created data is identical to an uninterrupted run, and emits exactly these warnings.

    A second stop, `between` steps later, changes no batch either.
    """
    uninterrupted = run(root / "never", make(), steps, **options)
    run(root / "stopped", make(), k, **options)
    with warned(*messages):
        resumed = run(root / "stopped", make(), steps, **options)
    assert_same(resumed, uninterrupted)
    assert_resumes_twice(make, k, steps, between, batch_size=options.get("batch_size"), **options.get("keys", {}))


def assert_resumes_twice(
    make: Callable[[], Any], k: int, steps: int, between: Sequence[int] = (0, 1, 2), *, batch_size: int | None = None, inputs: Any = None, targets: Any = None
) -> None:
    """Checks that a first stop at step `k` and a second one, `between` steps later, change no batch."""
    selection = Selection(inputs, targets)

    def opened(position: Position = Position(), *saved: Any) -> Feed:  # noqa: B008
        """Returns a feed that takes a state before each batch."""
        source = adapt(make(), batch_size=batch_size, shuffle=False, selection=selection)
        feed = Feed(source, Batcher(size=BATCH), position, is_saved=True, clock=lambda: 0.0)
        if saved:
            feed.load_state_dict(*saved)
        return stack.enter_context(contextlib.closing(feed))

    def read(feed: Feed, count: int) -> list[Any]:
        batches = (fed.batch for fed in iter(feed.next, "never") if fed is not None)
        return [leaves_of([batch.x, batch.y, batch.mask]) for batch in itertools.islice(batches, count)]

    def saved_by(feed: Feed) -> Any:
        return feed.position, feed.state_dict(feed.position), feed.source.num_started

    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", FitflaxWarning)
        whole, first = read(opened(), steps), opened()
        read(first, k)
        for later in [number for number in between if k + number < steps]:
            second = opened(*saved_by(first))
            read(second, 1)  # A run reads a batch for the shapes.
            second.push_back()
            read(second, later)
            assert read(opened(*saved_by(second)), steps - k - later) == whole[k + later :], f"after {later} steps"
