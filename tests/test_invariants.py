"""The invariants of the design that a complete run shows: compilations, reads from the device, steps in flight."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax._src import array as jax_array

import fitflax
from fitflax.callbacks import BestCheckpoint, EarlyStopping, LambdaCallback, ModelCheckpoint, TerminateOnNaN
from fitflax.logs import StepValues, Values
from fitflax.parallel import DataParallel
from fitflax.parallel.transfer import MAX_SHORT_STEPS, InFlight

Devices = Callable[[int], list[jax.Device]]
RNG = np.random.default_rng(2)
X = RNG.normal(size=(23, 4)).astype(np.float32)
Y = RNG.normal(size=(23, 2)).astype(np.float32)


class Net(nn.Module):
    """Has batch statistics, dropout and a counter, so that all kinds of state are covered."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        count = self.variable("counts", "n", lambda: jnp.zeros((), jnp.int32))
        if train:
            count.value += 1
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


class NNXNet(nnx.Module):
    """The same as an NNX module."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.first, self.norm, self.drop, self.last = (
            nnx.Linear(4, 3, rngs=rngs),
            nnx.BatchNorm(3, rngs=rngs),
            nnx.Dropout(0.1, rngs=rngs),
            nnx.Linear(3, 2, rngs=rngs),
        )

    def __call__(self, x: Any, train: bool) -> Any:
        if train:
            self.count[...] += 1
        return self.last(self.drop(self.norm(self.first(x))))


NETS: dict[str, Callable[[], Any]] = {"linen": Net, "nnx": NNXNet}
of_both_kinds = pytest.mark.parametrize("kind", NETS)


def trainer_of(devices: list[jax.Device], optimizer: Any = "adam", model: Any = None, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Net() if model is None else model, parallel=DataParallel(devices))
    trainer.compile(optimizer, "mse", ["mae"], **options)
    return trainer


# -- 1: compilations --


@of_both_kinds
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.mostly_slow
def test_train_evaluate_and_predict_compile_one_program_each(kind: str, num_devices: int, devices: Devices, compilations: Any):
    trainer = trainer_of(devices(num_devices), model=NETS[kind]())
    trainer.build((X, Y))
    with compilations.counted() as training:
        trainer.fit(X, Y, batch_size=5, epochs=3, verbose=0)
    assert training.count == 1, training.names
    with compilations.counted() as evaluating:
        trainer.evaluate(X, Y, batch_size=5, verbose=0)
    assert evaluating.count == 1, evaluating.names
    with compilations.counted() as predicting:
        trainer.predict(X, batch_size=5)
    assert predicting.count == 1, predicting.names
    with compilations.counted() as again:
        trainer.fit(X, Y, batch_size=5, epochs=2, validation_data=(X[:7], Y[:7]), verbose=0)
        trainer.evaluate(X[:11], Y[:11], batch_size=5, verbose=0)
        trainer.predict(X[:4], batch_size=5)
    assert again.count == 0, again.names


@pytest.mark.parametrize(("kind", "num_devices"), [("linen", 1), ("linen", 4), ("nnx", 4)])
@pytest.mark.mostly_slow
def test_a_run_with_validation_ragged_batches_and_callbacks_compiles_each_step_once(
    kind: str, num_devices: int, devices: Devices, compilations: Any, tmp_path: Any
):
    trainer = trainer_of(devices(num_devices), model=NETS[kind]())
    trainer.build((X, Y))
    callbacks = [
        ModelCheckpoint(tmp_path / "checkpoints"),
        BestCheckpoint(tmp_path / "best"),
        EarlyStopping(patience=5),
        LambdaCallback(on_train_batch_end=lambda batch, logs: dict(logs)),
    ]
    with compilations.counted() as counted:
        trainer.fit(X, Y, batch_size=5, epochs=3, validation_data=(X[:7], Y[:7]), callbacks=callbacks, verbose=0)
    programs = [name for name in counted.names if name in ("jit(_fun)", "jit(train_step)", "jit(eval_step)", "jit(eval_group)")]
    assert len(programs) == 2, counted.names
    # The other programs serve the callbacks, and are compiled once.
    with compilations.counted() as again:
        trainer.fit(X, Y, batch_size=5, epochs=2, validation_data=(X[:7], Y[:7]), callbacks=[EarlyStopping(patience=5)], verbose=0)
    assert again.count == 0, again.names


@pytest.mark.parametrize(("kind", "num_devices"), [("linen", 1), ("linen", 2), ("nnx", 4)])
@pytest.mark.mostly_slow
def test_streams_of_ragged_batches_compile_one_program(kind: str, num_devices: int, devices: Devices, compilations: Any):
    trainer = trainer_of(devices(num_devices), model=NETS[kind]())
    cuts = [0, 6, 7, 13, 15, 21, 23]
    trainer.build((X, Y))
    with compilations.counted() as counted:
        trainer.fit(lambda: ((X[a:b], Y[a:b]) for a, b in itertools.pairwise(cuts)), epochs=2, verbose=0)
    assert counted.count == 1, counted.names


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_streams_of_ragged_jax_arrays_compile_one_step(num_devices: int, placed: bool, devices: Devices, compilations: Any):
    put = (lambda array: jax.device_put(array, devices(1)[0])) if placed else jnp.asarray
    weights = np.arange(15)
    batches = [(put(X[begin:end]), put(Y[begin:end]), put(weights[begin:end])) for begin, end in ((0, 6), (6, 9), (9, 15))]
    trainer = trainer_of(devices(num_devices))
    trainer.build((X, Y))
    with compilations.counted() as counted:
        trainer.fit(lambda: iter(batches), epochs=2, verbose=0)
    steps = [name for name in counted.names if name in ("jit(_fun)", "jit(train_step)")]
    assert len(steps) == 1, counted.names


@pytest.mark.parametrize(("kind", "num_devices"), [("linen", 1), ("linen", 2), ("nnx", 4)])
@pytest.mark.mostly_slow
def test_setting_the_learning_rate_or_the_state_compiles_nothing(kind: str, num_devices: int, devices: Devices, compilations: Any):
    trainer = trainer_of(devices(num_devices), model=NETS[kind]())
    trainer.fit(X, Y, batch_size=5, verbose=0)
    state = jax.tree.map(lambda leaf: leaf, trainer.state)
    trainer.fit(X, Y, batch_size=5, verbose=0)
    with compilations.counted() as counted:
        trainer.learning_rate = 0.5
        trainer.fit(X, Y, batch_size=5, verbose=0)
        trainer.replace_state(state)
        trainer.fit(X, Y, batch_size=5, verbose=0)
    assert counted.count == 0, counted.names


def test_a_state_of_weakly_typed_or_numpy_values_recompiles_nothing(devices: Devices, compilations: Any):
    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            # As in careless user code: a parameter and a variable without an explicit dtype.
            moved = self.variable("moved", "n", lambda: jnp.asarray(1.0))
            moved.value = moved.value * 2
            return x[:, :2] * self.param("scale", lambda key: jnp.asarray(1.0))

    trainer = trainer_of(devices(2), "sgd", Scale())
    trainer.build((X, Y))
    with compilations.counted() as counted:
        trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    assert counted.count == 1, counted.names
    states = [dataclasses.replace(trainer.state, params={"scale": value}) for value in (jnp.asarray(2.0), np.float32(3), jnp.float32(4))]
    trainer.fit(X, Y, batch_size=5, verbose=0)
    with compilations.counted() as counted:
        for state in states:
            trainer.replace_state(state)
            trainer.fit(X, Y, batch_size=5, verbose=0)
    assert "jit(_fun)" not in counted.names


@pytest.mark.slow
@of_both_kinds
def test_single_batches_compile_one_program_each(kind: str, devices: Devices, compilations: Any):
    trainer = trainer_of(devices(2), model=NETS[kind]())
    trainer.build((X, Y))
    with compilations.counted() as counted:
        for rows in (8, 3, 8, 1):
            trainer.train_on_batch((X[:rows], Y[:rows]))
            trainer.test_on_batch((X[:rows], Y[:rows]))
            trainer.predict_on_batch(X[:rows])
    assert counted.count == 3, counted.names


# -- 2: reads from the device --


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shape of every array that was read on the host in any way: some reads are hidden behind the buffer protocol, so the callers are watched."""
    found: list[Any] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(value: Any, *args: Any, **kwargs: Any) -> Any:
            found.extend(leaf.shape for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer))
            return original(value, *args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("asarray", "array"):
        watch(np, name)
    watch(jax, "device_get")
    for name in ("__float__", "__int__", "__bool__", "__index__", "item", "tolist"):
        watch(jax_array.ArrayImpl, name)
    return found


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("kind", "num_devices"), [("linen", 1), ("linen", 2), ("nnx", 2)])
def test_a_hundred_steps_with_two_log_points_read_at_most_three_times(kind: str, num_devices: int, devices: Devices, reads: list[Any]):
    trainer = trainer_of(devices(num_devices), model=NETS[kind]())
    trainer.fit(X, Y, batch_size=5, verbose=0)
    reads.clear()
    trainer.fit(X, Y, batch_size=5, steps=100, steps_per_epoch=100, log_every=50, callbacks=[TerminateOnNaN()], verbose=0)
    assert trainer.step == 105
    assert 1 <= len(reads) <= 3, reads


def test_the_reads_that_happen_are_counted(devices: Devices, reads: list[Any]):
    """The control: a callback that reads every batch is detected."""
    trainer = trainer_of(devices(1))
    trainer.fit(X, Y, batch_size=5, verbose=0)
    reads.clear()
    trainer.fit(X, Y, batch_size=5, steps=20, callbacks=[LambdaCallback(on_train_batch_end=lambda batch, logs: logs["loss"])], verbose=0)
    assert 20 <= len(reads) <= 26


@pytest.mark.slow
def test_an_evaluation_reads_once(devices: Devices, reads: list[Any]):
    trainer = trainer_of(devices(2))
    trainer.build((X, Y))
    trainer.evaluate(X, Y, batch_size=5, verbose=0)
    reads.clear()
    trainer.evaluate(X, Y, batch_size=2, verbose=0)
    assert len(reads) == 1, reads


# -- 4: steps in flight --


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of programs that were dispatched and not waited for, right after each dispatch."""
    found: list[int] = []
    pending: list[Values] = []

    def seen(values: Values) -> None:
        # Programs run one after another, so waiting for one waits for all before it.
        for index, other in enumerate(pending):
            if other is values:
                del pending[: index + 1]
                return

    def recording_wait(method: Any) -> Any:
        def waiting(self: Values) -> Any:
            seen(self)
            return method(self)

        return waiting

    def recording_init(init: Any) -> Any:
        def initialize(self: Values, *arguments: Any, **keywords: Any) -> None:
            init(self, *arguments, **keywords)
            pending.append(self)
            found.append(len(pending))

        return initialize

    for kind in (Values, StepValues):  # Each dataclass has its own initialization.
        monkeypatch.setattr(kind, "__init__", recording_init(kind.__init__))
    monkeypatch.setattr(Values, "wait", recording_wait(Values.wait))
    monkeypatch.setattr(Values, "_read", recording_wait(Values._read))
    return found


@pytest.mark.parametrize(("kind", "num_devices"), [("linen", 1), ("linen", 2), ("nnx", 4)])
@pytest.mark.slow
def test_a_bounded_number_of_steps_is_in_flight_in_training_and_validation(kind: str, num_devices: int, devices: Devices, in_flight: list[int]):
    trainer = trainer_of(devices(num_devices), model=NETS[kind]())
    each = LambdaCallback(on_test_batch_end=lambda batch, logs: None)  # Otherwise, several batches are one call.
    trainer.fit(X, Y, batch_size=2, epochs=2, validation_data=(X, Y), validation_batch_size=3, callbacks=[each], verbose=0)
    bound = DataParallel(devices(num_devices)).max_in_flight
    assert len(in_flight) == 2 * (12 + 8)
    assert max(in_flight) <= (MAX_SHORT_STEPS if num_devices == 1 else bound)
    # Waiting for each step would be bounded, too, but that is not the case.
    assert bound == 1 or max(in_flight) > 1


@pytest.mark.slow
def test_the_bound_holds_for_evaluate_and_for_loops_too(devices: Devices, in_flight: list[int]):
    trainer = trainer_of(devices(2))
    for _ in trainer.train_loop(X, Y, steps=20, batch_size=2):
        pass
    trainer.evaluate(X, Y, batch_size=2, verbose=0)
    assert max(in_flight) <= DataParallel(devices(2)).max_in_flight


@pytest.mark.slow
def test_an_evaluation_of_functions_shares_the_bound_of_the_loop_that_it_follows(devices: Devices, in_flight: list[int], monkeypatch: pytest.MonkeyPatch):
    rooms: set[int] = set()
    make_room = InFlight.make_room
    monkeypatch.setattr(InFlight, "make_room", lambda self, *kind: (rooms.add(id(self)), make_room(self, *kind))[1])
    module, two = nn.Dense(2), DataParallel(devices(2))
    options = {"data": (X, Y), "batch_size": 2}
    loop = fitflax.TrainLoop(module.init, module.apply, optimizer="sgd", loss="mse", steps=8, every=fitflax.every(steps=3), parallel=two, **options)
    evaluate = fitflax.EvalLoop(module.apply, metrics=["mae"], **options)
    for checkpoint in loop:
        evaluate(checkpoint)
    assert len(in_flight) > 8 and max(in_flight) <= two.max_in_flight and len(rooms) == 1


@pytest.mark.slow
def test_long_runs_on_all_devices_finish(devices: Devices):
    trainer = trainer_of(devices(8))
    trainer.fit(X, Y, batch_size=8, steps=200, steps_per_epoch=200, verbose=0)
    assert trainer.step == 200


# -- 5: one formula --


class Pass(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.param("zero", nn.initializers.zeros, ())


class NNXPass(nnx.Module):
    def __init__(self) -> None:
        self.zero = nnx.Param(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return x + self.zero[...]


PASSES: dict[str, Callable[[], Any]] = {"linen": Pass, "nnx": NNXPass}


of_every_split = pytest.mark.parametrize(
    ("size", "num_devices", "accumulate_steps"), [(1, 2, 1), (4, 1, 1), (4, 4, 1), (7, 2, 1), (23, 8, 1), (50, 4, 1), (8, 1, 4), (8, 2, 2)]
)


@of_both_kinds
@of_every_split
@pytest.mark.mostly_slow
def test_values_match_numpy_for_every_batch_size_number_of_devices_and_accumulation(
    kind: str, size: int, num_devices: int, accumulate_steps: int, devices: Devices
):
    weights = RNG.uniform(0, 2, 23).astype(np.float32) * (np.arange(23) % 3 > 0)
    trainer = trainer_of(devices(num_devices), optax.sgd(0.0), PASSES[kind](), accumulate_steps=accumulate_steps)
    history = trainer.fit(Y, 0 * Y, weights, batch_size=size, verbose=0).history
    assert history["loss"] == [pytest.approx(np.average((Y.astype(np.float64) ** 2).mean(-1), weights=weights), rel=1e-6)]
    assert history["mae"] == [pytest.approx(np.abs(Y.astype(np.float64)).mean(), rel=1e-6)]


@of_both_kinds
@of_every_split
@pytest.mark.slow
def test_updates_match_numpy_for_every_batch_size_number_of_devices_and_accumulation(
    kind: str, size: int, num_devices: int, accumulate_steps: int, devices: Devices
):
    trainer = trainer_of(devices(num_devices), optax.sgd(0.1), PASSES[kind](), accumulate_steps=accumulate_steps)
    trainer.fit(Y, 0 * Y, batch_size=size, shuffle=False, verbose=0)
    zero = 0.0
    for start in range(0, 23, size):
        zero -= 0.1 * 2 * (Y[start : start + size].astype(np.float64) + zero).mean()
    assert float(trainer.state.params["zero"]) == pytest.approx(zero, rel=1e-5)


# -- 6: state --


@pytest.mark.slow
def test_integer_boolean_and_key_collections_keep_dtypes_and_are_equal_on_all_replicas(devices: Devices):
    class Kept(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            count = self.variable("kept", "count", lambda: jnp.zeros((), jnp.int16))
            flag = self.variable("kept", "flag", lambda: jnp.zeros(2, bool))
            key = self.variable("kept", "key", lambda: jax.random.key(0))
            count.value = (count.value + jax.lax.axis_index("replica").astype(jnp.int16) + 1).astype(jnp.int16)
            flag.value = flag.value | (x.mean() > 0)
            key.value = jax.random.fold_in(key.value, jax.lax.axis_index("replica"))
            self.sow("intermediates", "x", x)
            return nn.Dense(2)(x)

    trainer = trainer_of(devices(4), optax.adamw(0.01), Kept())
    trainer.build((X, Y))
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), trainer.state)
    trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), trainer.state) == before
    assert list(trainer.state.model_state) == ["kept"]
    for leaf in jax.tree.leaves(trainer.state):
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        first, *others = [np.asarray(shard.data) for shard in data.addressable_shards]
        assert len(others) == 3
        for other in others:
            np.testing.assert_array_equal(other, first)
