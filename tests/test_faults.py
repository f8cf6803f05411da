"""The faults of the systems that fitflax replaces, each reproduced by running the original: fitflax has none of them."""

import dataclasses
import functools
import io
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import EvalLoop, TrainLoop, every, first, serial
from fitflax.callbacks import BestCheckpoint, CSVLogger, LambdaCallback, ModelCheckpoint, ProgressBar, SummaryLogger, TensorBoard
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import CallbackError, CorruptCheckpointError, DataError, FitflaxWarning
from fitflax.loops.training_loop import Run
from fitflax.parallel import DataParallel, check_replicas
from fitflax.triggers import Moment, Schedule
from tests.run_script import leaves_of

RNG = np.random.default_rng(0)
X, Y = RNG.random((20, 4), np.float32), RNG.integers(0, 3, 20).astype(np.int32)  # 5 batches of 4
LOSS = "sparse_categorical_crossentropy"
DENSE = nn.Dense(3)


def trainer_of(model: nn.Module = DENSE, optimizer: Any = "sgd", loss: Any = LOSS, metrics: Any = None, devices: int = 1) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile(optimizer, loss, metrics)
    return trainer


def loop_of(**options: Any) -> TrainLoop:
    return TrainLoop(DENSE.init, DENSE.apply, **{"optimizer": "sgd", "loss": LOSS, "data": (X, Y), "batch_size": 4, "steps": 5, **options})


class Numbered(EvalLoop):
    """Returns the given values, one for each checkpoint."""

    def __init__(self, values: list[float]) -> None:
        self.values = iter(values)
        self.name = "eval"

    def __call__(self, checkpoint: Any) -> Any:
        return checkpoint.with_metrics("eval", {"score": next(self.values)}, {})


def best_of(directory: pathlib.Path, values: list[float], mode: str = "min", **options: Any) -> BestCheckpoint:
    best = BestCheckpoint(directory, monitor="eval_score", mode=mode, asynchronous=False, **options)
    with serial(Numbered(values), best) as process:
        for checkpoint in loop_of(steps=len(values)):
            process(checkpoint)
    return best


# -- best checkpoints --


def test_the_best_checkpoints_by_highest_and_by_lowest_value_are_independent(tmp_path):
    for mode, step in (("max", 2), ("min", 3)):
        assert best_of(tmp_path / mode, [5, 9, 1], mode).best_step == step
        assert CheckpointStore(tmp_path / mode).steps() == [step]


def test_a_stored_best_of_zero_is_not_forgotten(tmp_path):
    def run(values: list[float], steps: int) -> None:
        best = BestCheckpoint(tmp_path / "best", monitor="eval_score", mode="min", asynchronous=False)
        with serial(Numbered(values), best, ModelCheckpoint(tmp_path / "all", every=every(steps=1))) as process:
            for checkpoint in loop_of(steps=steps, restore_from=tmp_path / "all"):
                process(checkpoint)

    run([0.5, 0.0], 2)
    run([0.3, 0.1], 4)
    assert CheckpointStore(tmp_path / "best").steps() == [2]


def test_nan_is_never_the_best(tmp_path):
    assert best_of(tmp_path / "a", [float("nan"), 5, float("nan"), 7], "max").best == 7
    assert best_of(tmp_path / "b", [float("nan"), 8, 5, float("nan")], "min").best == 5


def test_equal_values_do_not_save_again(tmp_path):
    best = best_of(tmp_path, [3, 3, 3])
    assert best.best_step == 1
    assert CheckpointStore(tmp_path).steps() == [1]


# -- numbers --


@pytest.mark.slow
def test_a_loss_keeps_its_sign_and_size_on_any_number_of_devices():
    for devices in (1, 2, 4):
        trainer = trainer_of(loss=lambda outputs, targets: -3.0 + 0 * outputs.sum(axis=-1), devices=devices)
        assert trainer.fit(X, Y, batch_size=4, epochs=1, verbose=0).history["loss"] == [-3.0]
        assert trainer.train_on_batch((X[:4], Y[:4]))["loss"] == -3.0


def test_parameters_and_bytes_are_counted_once():
    for devices in (1, 4):
        trainer, text = trainer_of(devices=devices), io.StringIO()
        trainer.build((X[:4], Y[:4]))
        trainer.summary(file=text)
        assert "Total number of trainable weights: 15 = 60 B" in text.getvalue()


# -- state --


class Stateful(nn.Module):
    """Batch statistics, a counter, a flag and a key."""

    @nn.compact
    def __call__(self, x, *, train):
        count = self.variable("counts", "n", lambda: jnp.int32(0))
        flag = self.variable("counts", "flag", lambda: jnp.bool_(False))
        key = self.variable("counts", "key", lambda: jax.random.key(1))
        if train and not self.is_initializing():
            count.value, flag.value, key.value = count.value + 1, ~flag.value, jax.random.fold_in(key.value, 1)
        self.sow("intermediates", "mean", x.mean())
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


def test_an_optimizer_that_needs_the_parameters_gets_them():
    trainer_of(optimizer=optax.adamw(1e-3)).fit(X, Y, steps=2, verbose=0)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.mostly_slow
def test_collections_change_keep_their_dtypes_and_are_equal_on_all_replicas(devices):
    trainer = trainer_of(Stateful(), devices=devices)
    trainer.fit(X, Y, batch_size=6, steps=3, verbose=0)
    state = trainer.state.model_state
    counts = state["counts"]
    assert (int(counts["n"]), counts["n"].dtype, bool(counts["flag"]), counts["flag"].dtype) == (3, jnp.int32, True, jnp.bool_)
    assert jnp.issubdtype(counts["key"].dtype, jax.dtypes.prng_key)
    assert float(jnp.abs(state["batch_stats"]["BatchNorm_0"]["mean"]).min()) > 0.01
    check_replicas(trainer.state)


def test_the_state_is_donated_and_the_batch_is_not():
    loop = loop_of(steps=3)
    loop.next_step()
    before = loop._run._live.borrow().params["kernel"]
    batch = jnp.asarray(X)
    loop.next_step()
    assert before.is_deleted()
    trainer = trainer_of()
    trainer.train_on_batch((batch, jnp.asarray(Y)))
    assert not batch.is_deleted()


def test_a_state_that_the_user_holds_stays_readable():
    trainer = trainer_of()
    trainer.build((X[:4], Y[:4]))
    held, kernels = trainer.state, []
    for checkpoint in trainer.train_loop(X, Y, steps=3):
        kernels.append((checkpoint.state.params["kernel"], np.asarray(checkpoint.state.params["kernel"])))
    trainer.fit(X, Y, steps=2, verbose=0)
    assert np.isfinite(held.params["kernel"]).all()
    for kept, then in kernels:
        np.testing.assert_array_equal(kept, then)


@pytest.mark.slow
def test_the_second_step_compiles_nothing(compilations):
    init, apply = (functools.partial(fn, train=True) for fn in (Stateful().init, Stateful().apply))
    loop = TrainLoop(init, apply, **OPTIONS)
    loop.next_step()
    with compilations.counted() as counted:
        loop.run(4)
    assert counted.count == 0, counted.names


OPTIONS: dict[str, Any] = {"optimizer": "adam", "loss": LOSS, "data": (X, Y), "batch_size": 4, "steps": 5}


def test_sown_values_do_not_accumulate():
    trainer = trainer_of(Stateful())
    for checkpoint in trainer.train_loop(X, Y, steps=3, sown="intermediates"):
        assert len(checkpoint.sown["intermediates"]["mean"]) == 1
    assert set(trainer.state.model_state) == {"batch_stats", "counts"}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_only_the_collectives_of_steps_transfer_data_between_devices(devices):
    """A batch is not placed on device 0 first, and an evaluation does not replicate the parameters for each batch."""
    trainer = trainer_of(Stateful(), metrics=["accuracy"], devices=devices)
    trainer.fit(X, Y, batch_size=6, steps=2, validation_data=(X, Y), verbose=0)
    with jax.transfer_guard_device_to_device("disallow"):
        trainer.fit(X, Y, batch_size=6, steps=2, verbose=0)
        trainer.evaluate(X, Y, batch_size=6, verbose=0)


# -- data --


def test_the_batch_that_shapes_are_taken_from_is_trained_on():
    seen = []

    def batches():
        for begin in range(0, 20, 4):
            seen.append(begin)
            yield X[begin : begin + 4], Y[begin : begin + 4]

    assert [checkpoint.data_position.examples for checkpoint in loop_of(data=batches(), batch_size=None)] == [4, 8, 12, 16, 20]
    assert seen == [0, 4, 8, 12, 16]


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


@pytest.mark.slow
def test_a_resume_restarts_neither_the_keys_nor_the_data(tmp_path):
    def run(name: str, steps: int, restore: bool = True) -> Any:
        options = {**OPTIONS, "steps": steps, "rngs": ("dropout",), "restore_from": tmp_path / name if restore else None}
        loop = TrainLoop(Dropping().init, Dropping().apply, **options)
        with serial(ModelCheckpoint(tmp_path / name, every=every(steps=1), overwrite=not restore)) as save:
            return leaves_of([save(checkpoint).state for checkpoint in loop][-1])

    uninterrupted = run("whole", 8)
    run("parts", 3)
    assert run("parts", 8) == uninterrupted


def test_the_end_of_an_iterator_ends_the_run_normally_at_the_current_step():
    loop = loop_of(data=iter([(X[:4], Y[:4])] * 3), batch_size=None, steps=10)
    with pytest.warns(FitflaxWarning, match="data ended before"):
        assert [checkpoint.step for checkpoint in loop] == [1, 2, 3]
    assert loop.step == 3


# -- evaluation --


@pytest.mark.slow
def test_an_evaluation_averages_over_examples_and_not_over_batches():
    trainer = trainer_of(metrics=["accuracy"], devices=2)
    trainer.build((X[:4], Y[:4]))
    logits = trainer.predict(X)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, Y)
    for batch_size in (3, 8, 19):  # The last batch is short each time.
        found = trainer.evaluate(X, Y, batch_size=batch_size, verbose=0)
        assert found["loss"] == pytest.approx(float(loss.mean()), abs=1e-6)
        assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == Y).mean()), abs=1e-6)


def test_a_stream_is_evaluated_from_its_beginning_each_time_or_not_at_all():
    checkpoint = loop_of().next_step()
    again = EvalLoop(DENSE.apply, metrics=["accuracy"], data=lambda: iter([(X[:4], Y[:4]), (X[4:8], Y[4:8])]))
    assert again(checkpoint).metrics["eval"] == again(checkpoint).metrics["eval"]
    once = EvalLoop(DENSE.apply, metrics=["accuracy"], data=iter([(X[:4], Y[:4]), (X[4:8], Y[4:8])]))
    once(checkpoint)
    with pytest.raises(DataError, match="an iterator that has been used up"):
        once(checkpoint)


def test_a_second_evaluation_in_a_chain_works():
    loops = [EvalLoop(DENSE.apply, metrics=["accuracy"], data=(X, Y), name=name) for name in ("one", "two", "three")]
    metrics = serial(*loops)(loop_of().next_step()).metrics
    assert metrics["one"] == metrics["two"] == metrics["three"]


# -- time --


def test_all_ways_to_step_leave_the_total_unchanged():
    loop = loop_of(steps=5, every=every(steps=2))
    loop.next_step()
    loop.next_checkpoint()
    loop.run(1)
    assert loop.steps == 5
    assert [checkpoint.step for checkpoint in loop] == [4, 5]


def test_elapsed_time_waits_for_the_device_and_excludes_compilation(monkeypatch):
    now = [0.0]
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: now[0])

    def work(x):
        now[0] += 5.0
        return x

    class Slow(nn.Module):
        @nn.compact
        def __call__(self, x):
            now[0] += 100.0  # Tracing, a part of compiling.
            if not self.is_initializing():
                x = jax.pure_callback(work, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
            return nn.Dense(3)(x)

    loop = TrainLoop(Slow().init, Slow().apply, **{**OPTIONS, "every": every(steps=2)}, parallel=DataParallel(jax.devices()[:1]))
    assert loop.next_checkpoint().elapsed_time == pytest.approx(10.0, abs=0.1)
    assert loop.next_checkpoint().elapsed_time == pytest.approx(10.0, abs=0.1)


def test_triggers_receive_only_numbers_on_the_host():
    schedule = Schedule(every(steps=123) | first(10), 0.0)
    fired = [step for step in range(1, 250) if schedule.due(Moment(step))]
    assert fired == [*range(1, 11), 123, 246]
    # A trigger gets nothing else: there is no array that it could wait for.
    assert all(isinstance(value, int | float | bool) for value in dataclasses.astuple(Moment(1)))


def test_the_first_steps_of_a_process_are_as_many_as_requested():
    schedule = Schedule(first(3, of_process=True), 0.0)
    assert [step for step in range(101, 110) if schedule.due(Moment(step, start_step=100))] == [101, 102, 103]


def test_a_time_trigger_does_not_go_stale_when_another_fires():
    schedule = Schedule(every(seconds=7) | every(steps=2), 0.0)
    moments = [(1, 10.0), (2, 15.0), (3, 19.0), (4, 25.0), (5, 27.0)]
    # By time: 10, 19 and 27; by their number: steps 2 and 4.
    assert [seconds for step, seconds in moments if schedule.due(Moment(step, seconds=seconds))] == [10.0, 15.0, 19.0, 25.0, 27.0]
    alone = Schedule(every(seconds=7) | every(steps=1000), 0.0)
    assert [seconds for step, seconds in moments if alone.due(Moment(step, seconds=seconds))] == [10.0, 19.0, 27.0]


# -- files --


def test_a_corrupt_result_is_never_silently_ignored(tmp_path):
    best_of(tmp_path, [5, 1, 3])
    path = CheckpointStore(tmp_path).path(2) / "metadata.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps(text | {"metrics": {"eval": {"score": 0.0}}}))
    with pytest.raises(CorruptCheckpointError, match=re.escape("metadata.json")):
        CheckpointStore(tmp_path).restore(2)
    with pytest.warns(FitflaxWarning, match="metadata.json"):
        assert CheckpointStore(tmp_path).best("eval_score", "min") is None


def test_an_error_in_a_writer_thread_reaches_the_run(tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fitflax.callbacks.event_files.EventFiles._write", full)
    with pytest.raises(CallbackError, match="No space left on device"):
        trainer_of().fit(X, Y, steps=5, callbacks=[TensorBoard(tmp_path, every=every(steps=1))], verbose=0)


def test_only_the_first_process_writes_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda *arguments: 1)
    callbacks = [TensorBoard(tmp_path / "board", every=every(steps=1)), CSVLogger(tmp_path / "log.csv"), SummaryLogger(), ProgressBar()]
    history = trainer_of().fit(X, Y, epochs=2, callbacks=callbacks)
    assert len(history.history["loss"]) == 2
    with serial(TensorBoard(tmp_path / "plain"), SummaryLogger()) as process:
        process(loop_of().next_step())
    assert list(loop_of(steps=0)) == []
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_only_the_first_process_saves_and_all_know_the_best(tmp_path, monkeypatch):
    def run() -> BestCheckpoint:
        best = BestCheckpoint(tmp_path / "best", monitor="val_loss")
        trainer = trainer_of()
        trainer.fit(X, Y, epochs=3, validation_data=(X, Y), callbacks=[ModelCheckpoint(tmp_path / "all"), best], resume="auto", verbose=0)
        trainer.save(tmp_path / "saved")
        return best

    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda *arguments: 1)
        there = run()
        assert list(tmp_path.iterdir()) == []
    here = run()
    assert {path.name for path in tmp_path.iterdir()} == {"all", "best", "saved"}
    assert (there.best, there.best_step) == (here.best, here.best_step)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda *arguments: 1)
        again = run()  # It has nothing left to do, and leaves the files alone.
    assert (again.best, again.best_step) == (here.best, here.best_step)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_saving_one_step_twice_is_not_an_error(tmp_path):
    trainer = trainer_of()
    callbacks = [ModelCheckpoint(tmp_path / "all", every=every(steps=1)), LambdaCallback(lambda checkpoint: None, every=every(steps=1))]
    trainer.fit(X, Y, steps=2, callbacks=callbacks, verbose=0)
    assert trainer.save(tmp_path / "one") == trainer.save(tmp_path / "one")
    save = ModelCheckpoint(tmp_path / "again", every=every(steps=1))
    with serial(save, save) as process:
        process(loop_of().next_step())
    assert CheckpointStore(tmp_path / "again").steps() == [1]
