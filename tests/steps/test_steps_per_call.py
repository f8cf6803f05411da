"""`compile(steps_per_call=K)`: several steps in one call of the device. They equal single steps, and a call ends wherever a callback may read values."""

import io
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import Callback, CSVLogger, LambdaCallback, ModelCheckpoint, TerminateOnNaN
from fitflax.data.batch import in_one_piece
from fitflax.errors import ConfigError, FitflaxWarning
from fitflax.parallel import DataParallel
from fitflax.steps.compile import CompiledSteps
from fitflax.steps.program import Preparation, Program

RNG = np.random.default_rng(0)
X = RNG.standard_normal((44, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 44)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


def make_trainer(steps_per_call: int | str = 1, number: int = 1, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Network(), parallel=DataParallel(jax.devices()[:number]))
    trainer.compile(optax.adam(1e-2), "sparse_categorical_crossentropy", ["accuracy"], steps_per_call=steps_per_call, **options)
    return trainer


def leaves(trainer: fitflax.Trainer) -> list[np.ndarray]:
    state = trainer.state
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))]


def assert_close(trainer: fitflax.Trainer, other: fitflax.Trainer) -> None:
    for ours, theirs in zip(leaves(trainer), leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Calls(Callback):
    """Records where each call of the device starts and ends, and the loss of its last step."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        self.begins.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.ends.append(self.trainer.step)
        self.losses.append(logs.source.loss)


@pytest.mark.parametrize("counted", [False, True], ids=["one loop", "whole groups a loop of their own"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("size", [3, 4, 16])
@pytest.mark.mostly_slow
def test_groups_give_the_same_results_as_single_steps(number, size, counted, monkeypatch):
    monkeypatch.setattr(DataParallel, "prefers_counted_loops", counted)
    # 44 examples are 5 batches of 8 and a short one, which is padded.
    single, grouped = make_trainer(1, number), make_trainer(size, number)
    histories = [trainer.fit(X, Y, batch_size=8, epochs=3, verbose=0).history for trainer in (single, grouped)]
    assert_close(grouped, single)
    for key, values in histories[0].items():
        np.testing.assert_allclose(histories[1][key], values, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("counted", "size", "programs"), [(False, 4, 1), (True, 4, 2), (True, 3, 1)])
def test_an_accelerator_compiles_a_loop_for_whole_groups_and_another_for_shorter_ones(counted, size, programs, monkeypatch, compilations):
    """The compiler then knows the number of iterations; if only the device knew it, the host would be asked before each iteration."""
    monkeypatch.setattr(DataParallel, "prefers_counted_loops", counted)
    kinds: list[str] = []
    get = CompiledSteps.get
    monkeypatch.setattr(CompiledSteps, "get", lambda self, kind, *rest, **options: (kinds.append(kind), get(self, kind, *rest, **options))[1])
    trainer = make_trainer(size)
    trainer.build((X[:8], Y[:8]))
    with compilations.counted() as counted_here:
        trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    names = {"train group", "train whole group"} if programs == 2 else {"train whole group" if counted else "train group"}
    assert set(kinds) & {"train", "train group", "train whole group"} == names
    assert counted_here.names.count("jit(train_group)") == programs


def test_hooks_see_a_call_as_one_batch_with_the_loss_of_its_last_step():
    calls = [Calls(), Calls()]
    for callback, size in zip(calls, (1, 4), strict=True):
        make_trainer(size).fit(X, Y, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
    assert calls[0].ends == [*range(1, 13)] and calls[1].ends == [4, 6, 8, 12]
    assert calls[1].begins == [0, 4, 0, 2]
    np.testing.assert_allclose(calls[1].losses, [calls[0].losses[end - 1] for end in calls[1].ends], rtol=1e-5)


@pytest.mark.slow
def test_a_group_ends_where_a_trigger_fires_and_where_the_epoch_ends():
    calls = Calls()
    checkpoint_steps: list[int] = []
    look = LambdaCallback(every=fitflax.every(steps=5) | fitflax.at(2), on_checkpoint=lambda checkpoint: checkpoint_steps.append(checkpoint.step))
    make_trainer(4).fit(X, Y, batch_size=4, epochs=1, callbacks=[calls, look], verbose=0)
    assert calls.ends == [2, 4, 5, 8, 10, 11] and {2, 5, 10} <= set(checkpoint_steps)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"steps_per_epoch": 10}])
def test_the_arrays_of_each_group_are_read_in_one_piece(options, monkeypatch):
    found = []
    monkeypatch.setattr("fitflax.steps.program.in_one_piece", lambda group: found.append((len(group), in_one_piece(group))) or found[-1][1])
    # 22 batches per epoch. Otherwise, sixteen batches would be read at a time, which groups of three do not divide evenly.
    make_trainer(3).fit(X, Y, batch_size=2, steps=20, verbose=0, **options)
    assert sum(count for count, _ in found) == 20 and all(whole is not None and len(whole.x) == 2 * count for count, whole in found)


@pytest.mark.slow
def test_an_epoch_of_some_steps_over_an_iterator_takes_only_the_batches_that_it_needs():
    taken: list[int] = []

    def batches():
        for index in range(100):
            taken.append(index)
            yield X[:8], Y[:8]

    calls = Calls()
    make_trainer(4).fit(batches(), steps=7, steps_per_epoch=7, callbacks=[calls], verbose=0)
    assert calls.ends == [4, 7] and taken == [*range(7)]


@pytest.mark.slow
def test_a_batch_with_a_different_shape_starts_a_new_group():
    calls = Calls()
    trainer = make_trainer(4, pad=False)
    batches = [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[:4], Y[:4]), (X[4:8], Y[4:8])]
    trainer.fit(lambda: batches, epochs=1, callbacks=[calls], verbose=0)
    assert calls.ends == [2, 4]
    other = make_trainer(1, pad=False)
    other.fit(lambda: batches, epochs=1, verbose=0)
    assert_close(trainer, other)


@pytest.mark.mostly_slow
def test_an_error_in_the_data_is_raised_after_the_steps_before_it(tmp_path):
    def batches():
        for _ in range(6):
            yield X[:8], Y[:8]
        raise ValueError("torn")

    trainer = make_trainer(4)
    with pytest.raises(ValueError, match="torn"):
        trainer.fit(lambda: batches(), epochs=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    assert trainer.step == 6 and ModelCheckpoint(tmp_path).store.latest() == 6


@pytest.mark.slow
def test_a_run_interrupted_inside_a_group_resumes_bit_for_bit(tmp_path):
    whole = make_trainer(4)
    whole.fit(X, Y, batch_size=4, steps=22, verbose=0)

    def stop_at(step: int) -> LambdaCallback:
        return LambdaCallback(every=fitflax.at(step), on_checkpoint=lambda checkpoint: interrupted.stop() if checkpoint.step == step else None)

    interrupted = make_trainer(4)
    interrupted.fit(X, Y, batch_size=4, steps=22, callbacks=[ModelCheckpoint(tmp_path), stop_at(6)], verbose=0)
    assert interrupted.step == 6  # In the middle of a group.
    resumed = make_trainer(4)
    resumed.fit(X, Y, batch_size=4, steps=22, callbacks=[ModelCheckpoint(tmp_path)], resume=True, verbose=0)
    for ours, theirs in zip(leaves(resumed), leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_stepping_manually_runs_as_many_steps_as_requested():
    loop = make_trainer(4).train_loop(X, Y, batch_size=8, steps=10, every=fitflax.every(steps=5))
    assert loop.next_step().step == 1 and loop.run(2).step == 3
    assert [checkpoint.step for checkpoint in loop] == [5, 10]


@pytest.mark.slow
def test_ending_groups_early_compiles_nothing_else(compilations):
    trainer = make_trainer(4)
    look = LambdaCallback(every=fitflax.every(steps=3), on_checkpoint=lambda checkpoint: None)
    look.needs_gradients_norm = False
    trainer.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    with compilations.counted() as seen:
        trainer.fit(X, Y, batch_size=8, epochs=2, callbacks=[look], verbose=0)
    assert seen.count == 0


@pytest.mark.slow
def test_collected_rows_equal_those_of_single_steps():
    rows = []
    for size in (1, 4):
        trainer = fitflax.Trainer(nn.Dense(1))
        trainer.compile("sgd", "binary_crossentropy", [fitflax.metrics.AUC(name="auc")], steps_per_call=size)
        rows.append(trainer.fit(X, (Y > 0).astype(np.float32)[:, None], batch_size=8, epochs=2, verbose=0).history["auc"])
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-6)


@pytest.mark.slow
def test_a_callback_that_needs_gradients_gets_those_of_the_last_step():
    class Gradients(Callback):
        needs_grads = True
        every = fitflax.every(steps=5)

        def __init__(self) -> None:
            self.grads: list[Any] = []

        def on_checkpoint(self, checkpoint: Any) -> None:
            self.grads.append(jax.tree.map(np.asarray, checkpoint.grads))

    found = [Gradients(), Gradients()]
    for callback, size in zip(found, (1, 4), strict=True):
        make_trainer(size).fit(X, Y, batch_size=8, steps=5, callbacks=[callback], verbose=0)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6), found[1].grads[0], found[0].grads[0])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_found_even_if_no_call_ends_at_a_log_point():
    trainer = make_trainer(4)
    x = X.copy()
    x[20] = np.nan
    with pytest.warns(FitflaxWarning, match="x has NaN or infinity in 1 of 44 examples"):
        trainer.fit(x, Y, batch_size=4, epochs=1, shuffle=False, callbacks=[TerminateOnNaN()], log_every=3, verbose=0)
    assert trainer.stop_reason == "TerminateOnNaN: the loss is not finite at step 6" and trainer.step == 8


@pytest.mark.slow
def test_auto_chooses_the_faster_size_and_prints_it_and_a_resumed_run_reuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Program, "time_steps", lambda self, state, fed, size, keep: (1.0, 0.5))
    trainer = make_trainer("auto")
    trainer.fit(X, Y, batch_size=8, steps=4, callbacks=[ModelCheckpoint(tmp_path)], verbose=2)
    assert "steps_per_call='auto' chose 16: 16 steps per call took 500000 us per step, single steps 1000000 us." in capsys.readouterr().out
    monkeypatch.setattr(Program, "time_steps", lambda self, state, fed, size, keep: pytest.fail("measured again"))
    calls = Calls()
    make_trainer("auto").fit(X, Y, batch_size=8, steps=8, callbacks=[ModelCheckpoint(tmp_path), calls], resume=True, verbose=0)
    assert calls.ends == [6, 8]
    with pytest.warns(FitflaxWarning, match="The run used steps_per_call=16 and resumes with steps_per_call=2"):
        make_trainer(2).fit(X, Y, batch_size=8, steps=9, callbacks=[ModelCheckpoint(tmp_path)], resume=True, verbose=0)


@pytest.mark.slow
def test_a_later_fit_without_auto_does_not_print_what_auto_chose(monkeypatch, capsys):
    monkeypatch.setattr(Program, "time_steps", lambda *arguments: (1.0, 2.0))
    trainer = make_trainer("auto")
    trainer.fit(X, Y, batch_size=8, steps=2, verbose=1)
    assert "steps_per_call='auto' chose 1: " in capsys.readouterr().out
    trainer.compile(optax.adam(1e-2), "sparse_categorical_crossentropy", steps_per_call=2)
    trainer.fit(X, Y, batch_size=8, steps=2, verbose=1)
    assert "auto" not in capsys.readouterr().out


@pytest.mark.slow
def test_auto_really_measures_and_does_not_change_the_state():
    trainer, other = make_trainer("auto"), make_trainer(1)
    trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    other.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert_close(trainer, other)


LIMIT = "fitflax.steps.program._GROUP_BYTES"
BATCH_BYTES = X[:8].nbytes + 8 * 4


def test_auto_does_not_try_groups_of_large_batches(monkeypatch, capsys):
    monkeypatch.setattr(Program, "time_steps", lambda self, state, fed, size, keep: pytest.fail("measured"))
    monkeypatch.setattr(LIMIT, 2 * BATCH_BYTES - 1)
    make_trainer("auto").fit(X, Y, batch_size=8, steps=2, verbose=2)
    assert "steps_per_call='auto' chose 1: a batch has 0.0 MB, and the batches of a call at most 64 MB." in capsys.readouterr().out


@pytest.mark.parametrize(("most", "ends"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_large_batches_limit_a_call_also_after_a_resume_that_begins_with_a_small_one(most, ends, tmp_path, monkeypatch, capsys, recwarn):
    def fit(steps: int, **options: Any) -> tuple[list[int], list[np.ndarray]]:
        trainer, calls = make_trainer(4), Calls()
        trainer.fit(X, Y, batch_size=8, steps=steps, resume="auto", callbacks=[calls, ModelCheckpoint(tmp_path)], **options)
        return calls.ends, leaves(trainer)

    expected = make_trainer(most)
    expected.fit(X, Y, batch_size=8, steps=9, verbose=0)
    with monkeypatch.context() as patch:
        patch.setattr(LIMIT, (most + 1) * BATCH_BYTES - 1)
        assert fit(6, verbose=2)[0] == ends
    assert f"steps_per_call=4 is limited to {most}: a batch has 0.0 MB, and the batches of a call at most 64 MB." in capsys.readouterr().out
    calls, state = fit(9, verbose=0)
    assert calls == [step + 6 for step in ends if step <= 3] and not recwarn.list
    for ours, theirs in zip(state, leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_whose_calls_had_more_batches_than_the_limit_resumes_with_them(tmp_path, monkeypatch, recwarn):
    """Runs of 0.1.0 had no limit."""
    make_trainer(4).fit(X, Y, batch_size=8, steps=4, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    monkeypatch.setattr(LIMIT, 100)
    calls = Calls()
    make_trainer(4).fit(X, Y, batch_size=8, steps=9, callbacks=[ModelCheckpoint(tmp_path), calls], resume=True, verbose=0)
    assert calls.ends == [6, 8, 9] and not recwarn.list
    with pytest.warns(FitflaxWarning, match=r"The run used steps_per_call=4 and resumes with steps_per_call=1.*pass compile\(steps_per_call=4\)"):
        make_trainer(2).fit(X, Y, batch_size=8, steps=10, callbacks=[ModelCheckpoint(tmp_path)], resume=True, verbose=0)
    calls = Calls()
    make_trainer("auto").fit(X, Y, batch_size=8, steps=12, callbacks=[ModelCheckpoint(tmp_path), calls], resume=True, verbose=0)
    assert calls.ends == [11, 12] and not recwarn.list


def test_a_summary_compiles_a_call_with_the_limit_of_fit(monkeypatch):
    def train(self: Preparation, *arguments: Any, **options: Any) -> None:
        prepared.append(options["steps_per_call"])
        compile_step(self, *arguments, **options)

    prepared: list[int] = []
    compile_step = Preparation.train
    monkeypatch.setattr(Preparation, "train", train)
    monkeypatch.setattr(LIMIT, 3 * BATCH_BYTES - 1)
    make_trainer(4).summary((X[:8], Y[:8]), memory=True, file=io.StringIO())
    assert prepared == [2]


def test_without_jit_a_limit_is_saved_but_not_printed(tmp_path, monkeypatch, capsys, recwarn):
    with monkeypatch.context() as patch:
        patch.setattr(LIMIT, 100)
        make_trainer(4, run_eagerly=True).fit(X, Y, batch_size=8, steps=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=2)
    assert "is limited" not in capsys.readouterr().out
    calls = Calls()
    make_trainer(4).fit(X, Y, batch_size=8, steps=3, callbacks=[ModelCheckpoint(tmp_path), calls], resume=True, verbose=0)
    assert calls.ends == [2, 3] and not recwarn.list


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "fast"])
def test_invalid_values_are_errors(value):
    with pytest.raises(ConfigError, match="steps_per_call must be a positive integer"):
        make_trainer(value)


@pytest.mark.slow
def test_rows_of_a_csv_file_equal_those_of_single_steps(tmp_path):
    for size in (1, 4):
        make_trainer(size).fit(X, Y, batch_size=8, epochs=2, callbacks=[CSVLogger(tmp_path / f"{size}.csv")], verbose=0)
    steps = [[line.split(",")[:2] for line in (tmp_path / f"{size}.csv").read_text().splitlines()] for size in (1, 4)]
    assert steps[0] == steps[1]
