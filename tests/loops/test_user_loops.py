"""`TrainLoop` and `EvalLoop` made from functions, without a trainer: the same objects that a trainer makes, stepped manually, resumed and chained."""

import contextlib
import functools
import gc
import pathlib
import shutil
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import EvalLoop, TrainLoop, every, first, serial
from fitflax.callbacks import BestCheckpoint, Callback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.checkpoints.saver import Saver
from fitflax.errors import ConfigError, DirectoryInUseError, FitflaxWarning, LossError, ModelError, NotReadyError, OptimizerError
from fitflax.parallel import DataParallel
from fitflax.storage.lock import LOCK_FILE, holder_of
from tests.run_script import leaves_of

RNG = np.random.default_rng(0)
X, Y = RNG.random((24, 4), np.float32), RNG.integers(0, 3, 24).astype(np.int32)  # 6 batches of 4


class Network(nn.Module):
    """With dropout, batch statistics and a mode keyword."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


NETWORK = Network()
TRAINED = functools.partial(NETWORK.apply, train=True)
EVALUATED = functools.partial(NETWORK.apply, train=False)
INIT = functools.partial(NETWORK.init, train=True)
DENSE = nn.Dense(3)
LOSS = "sparse_categorical_crossentropy"
ADAM = optax.adam(1e-2)
ONE = DataParallel(jax.devices()[:1])


def loop_of(**options: Any) -> TrainLoop:
    given: dict[str, Any] = {"optimizer": ADAM, "loss": LOSS, "data": (X, Y), "batch_size": 4, "rngs": ("dropout",)}
    return TrainLoop(INIT, TRAINED, **{**given, **options})


def plain_loop(**options: Any) -> TrainLoop:
    given: dict[str, Any] = {"optimizer": "sgd", "loss": LOSS, "data": (X, Y), "batch_size": 4}
    return TrainLoop(DENSE.init, DENSE.apply, **{**given, **options})


def last_state(loop: TrainLoop) -> dict[str, Any]:
    return leaves_of([checkpoint.state for checkpoint in loop][-1])


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one == other  # dtypes, shapes and bytes, by path


def test_a_loop_made_from_functions_trains_like_the_loop_of_a_trainer():
    trainer = fitflax.Trainer(NETWORK)
    trainer.compile(ADAM, LOSS)
    theirs = trainer.train_loop((X, Y), batch_size=4, steps=8)
    assert isinstance(theirs, TrainLoop)
    assert isinstance(trainer.eval_loop((X, Y)), EvalLoop)
    assert_same(last_state(loop_of(steps=8)), last_state(theirs))


@pytest.mark.parametrize(("steps", "n", "expected"), [(8, 3, [1, 4, 7, 8]), (7, 3, [1, 4, 7]), (10, 5, [1, 6, 10])])
@pytest.mark.mostly_slow
def test_the_yield_rule_of_flax_extra_is_a_trigger(steps, n, expected):
    rule = first(1) | every(steps=n, offset=1)
    checkpoints = [(checkpoint.step, checkpoint.n_completed_steps) for checkpoint in plain_loop(steps=steps, every=rule)]
    assert [step for step, _ in checkpoints] == expected
    assert [count for _, count in checkpoints] == np.diff([0, *expected]).tolist()


def test_a_run_resumed_at_step_1_yields_steps_4_and_5(tmp_path):
    save = ModelCheckpoint(tmp_path, every=every(steps=1))
    with save:
        save(plain_loop(steps=5).next_step())
    loop = plain_loop(steps=5, every=first(1) | every(steps=3, offset=1), restore_from=tmp_path)
    assert loop.step == 1
    assert [checkpoint.step for checkpoint in loop] == [4, 5]


def test_how_a_loop_is_stepped_never_changes_the_total():
    loop = plain_loop(steps=7, every=every(steps=3))
    assert loop.next_step().step == 1
    assert loop.next_checkpoint().step == 3
    assert loop.run(2).step == 5
    assert (loop.step, loop.steps) == (5, 7)
    assert loop.run(10).step == 7
    assert loop.next_step() is None
    assert loop.next_checkpoint() is None
    assert list(loop) == []
    assert loop.steps == 7


def test_a_loop_without_a_total_is_stepped_manually(capsys):
    loop = plain_loop()
    assert [loop.next_step().step, loop.run(9).step, loop.next_checkpoint().step] == [1, 10, 11]
    assert list(plain_loop()) == []
    assert capsys.readouterr().out == "There is nothing to train: the run has finished 0 steps, and steps=0 is its total. To train longer, pass more steps.\n"


@pytest.mark.parametrize("steps", [4, 6, 8])  # Inside the first pass, at its end, and inside the second.
@pytest.mark.slow
def test_raising_the_total_after_the_end_equals_having_that_total_from_the_start(steps):
    loop = loop_of(steps=steps, every=every(steps=100))
    assert [checkpoint.step for checkpoint in loop] == [steps]
    loop.steps = 10
    checkpoint = loop.next_checkpoint()
    whole = loop_of(steps=10, every=every(steps=100)).next_checkpoint()
    assert (checkpoint.step, checkpoint.epoch, checkpoint.step_in_epoch) == (10, whole.epoch, whole.step_in_epoch)
    assert checkpoint.metrics == whole.metrics
    assert_same(leaves_of(checkpoint.state), leaves_of(whole.state))


def test_a_new_total_does_not_reset_a_time_trigger_but_a_new_trigger_starts_over(monkeypatch):
    now = [0.0]
    loop = plain_loop(steps=3, every=every(seconds=10))
    monkeypatch.setattr(loop._run, "_clock", lambda: now[0])
    loop.every = every(seconds=10)
    now[0] = 6.0
    loop.steps = 1000
    now[0] = 11.0
    assert loop.next_checkpoint().step == 1
    loop.every = every(seconds=10)
    now[0] = 20.0
    loop.steps = 4
    assert loop.next_checkpoint().step == 4  # The last one: only nine seconds have passed.


def test_a_total_that_is_raised_at_the_last_checkpoint_is_not_missed():
    loop, seen = plain_loop(steps=2), []
    for checkpoint in loop:
        seen.append(checkpoint.step)
        if checkpoint.step == 2:
            loop.steps = 4
    assert seen == [1, 2, 3, 4]
    loop.steps = 3
    assert loop.next_step() is None


@pytest.mark.slow
def test_a_raised_total_keeps_what_the_run_has_saved_and_its_best(tmp_path):
    def make(name: str) -> tuple[BestCheckpoint, Any]:
        best = BestCheckpoint(tmp_path / name / "best", monitor="eval_accuracy", asynchronous=False)
        save = ModelCheckpoint(tmp_path / name / "all", every=every(steps=1), keep=3)
        return best, serial(EvalLoop(EVALUATED, metrics=["accuracy"], data=(X, Y)), best, save)

    kept = {}
    for name, totals in (("whole", (10,)), ("parts", (4, 6, 10))):
        (best, process), loop = make(name), loop_of(steps=totals[0])
        with process:
            for total in totals:
                loop.steps = total
                for checkpoint in loop:
                    process(checkpoint)
                if total == 4:
                    assert CheckpointStore(tmp_path / name / "all").steps() == [2, 3, 4]
        kept[name] = best.best, best.best_step, CheckpointStore(tmp_path / name / "all").steps(), CheckpointStore(tmp_path / name / "best").steps()
    assert kept["whole"] == kept["parts"]
    assert kept["whole"][2] == [8, 9, 10]


def test_a_run_that_resumes_from_an_older_checkpoint_deletes_the_later_checkpoints(tmp_path):
    save = ModelCheckpoint(tmp_path, every=every(steps=1), keep=None)
    with serial(save) as process:
        for checkpoint in loop_of(steps=6):
            process(checkpoint)
        again = loop_of(steps=4, restore_from=CheckpointStore(tmp_path).path(2))
        for checkpoint in again:
            process(checkpoint)
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3, 4]


def test_is_last_is_true_only_for_checkpoints_that_are_the_last_when_they_are_made():
    loop, last = plain_loop(steps=6), []
    for checkpoint in loop:
        last.append(checkpoint.is_last)
        if checkpoint.step == 6:  # Also the end of a pass.
            loop.steps = 9
    assert last == [False] * 5 + [True] + [False] * 2 + [True]


class Loader:
    """Yields batches in an order that continues from pass to pass, and can report its position."""

    def __init__(self) -> None:
        self.rng, self.begin = np.random.default_rng(0), 0
        self.order = np.arange(24)

    def __iter__(self):
        if not self.begin:
            self.order = self.rng.permutation(24)
        while self.begin < 24:
            rows = self.order[self.begin : self.begin + 4]
            self.begin += 4
            yield X[rows], Y[rows]
        self.begin = 0

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "begin": self.begin, "order": self.order}

    def load_state_dict(self, state):
        self.rng.bit_generator.state, self.begin, self.order = state["rng"], state["begin"], state["order"]


@pytest.mark.parametrize("steps", [3, 6])  # Inside a pass, and at its end.
@pytest.mark.mostly_slow
def test_raising_the_total_with_a_stateful_loader_equals_that_total_from_the_start(steps):
    whole = [checkpoint.loss for checkpoint in plain_loop(data=Loader(), batch_size=None, steps=20)]
    loop = plain_loop(data=Loader(), batch_size=None, steps=steps)
    parts = [checkpoint.loss for checkpoint in loop]
    loop.steps = 20
    parts += [checkpoint.loss for checkpoint in loop]
    assert parts == whole


@pytest.mark.slow
def test_a_directory_that_another_run_uses_is_left_alone(tmp_path):
    save, running = ModelCheckpoint(tmp_path, every=every(steps=1)), loop_of(steps=5)
    save(running.next_step())
    assert loop_of(steps=5, restore_from=tmp_path).step == 1  # In the same process, as in a notebook: the save is waited for.
    running.close()
    litter = tmp_path / ".step_00000002.tmp-1-1"
    litter.mkdir()
    script = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / LOCK_FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(DirectoryInUseError, match="in use"):
            loop_of(steps=5, restore_from=tmp_path)
        other.communicate(timeout=60)
    assert litter.exists()
    assert loop_of(steps=5, restore_from=tmp_path).step == 1


def test_the_trigger_can_be_changed():
    loop = plain_loop(steps=12, every=every(steps=2))
    assert [loop.next_checkpoint().step, loop.next_checkpoint().step] == [2, 4]
    loop.every = every(steps=5)
    assert [checkpoint.step for checkpoint in loop] == [5, 10, 12]


def test_raising_the_total_continues_iterators_and_generator_functions_where_they_were():
    def batches():
        for start in range(0, 24, 4):
            yield X[start : start + 4], Y[start : start + 4]

    for data in (batches, batches()):
        loop = plain_loop(data=data, steps=3, batch_size=None)
        assert [checkpoint.data_position.examples for checkpoint in loop] == [4, 8, 12]
        loop.steps = 5
        with pytest.warns(fitflax.errors.FitflaxWarning) if callable(data) else contextlib.nullcontext():  # A pass is read again, up to its position.
            assert [checkpoint.data_position.examples for checkpoint in loop] == [16, 20]


class Streams(nn.Module):
    """Requests a different random stream on each occasion, and carries a state from batch to batch."""

    occasion: str = "train"

    @nn.compact
    def __call__(self, x):
        carry = self.variable("carry", "sum", jnp.zeros, (4,))
        if self.is_initializing():
            self.make_rng("first")
        else:
            self.make_rng(self.occasion)
        if self.is_mutable_collection("carry") and not self.is_initializing() and self.occasion == "train":
            carry.value = carry.value + x.sum(axis=0)
        return nn.Dense(3)(x + 0 * carry.value)


@pytest.mark.slow
def test_random_streams_can_differ_between_initialization_training_and_evaluation():
    rngs = {"init": ("first",), "train": ("second",)}
    loop = TrainLoop(Streams().init, Streams("second").apply, optimizer="sgd", loss=LOSS, data=(X, Y), batch_size=4, steps=2, rngs=rngs)
    evaluate = EvalLoop(Streams("third").apply, metrics=["accuracy"], data=(X, Y), rngs=("third",), batch_size=4)
    assert [list(evaluate(checkpoint).metrics["eval"]) for checkpoint in loop] == [["accuracy"], ["accuracy"]]
    with pytest.raises(ModelError, match="Name every random stream"):
        TrainLoop(Streams().init, Streams("second").apply, optimizer="sgd", loss=LOSS, data=(X, Y), rngs=("first",))


@pytest.mark.slow
def test_a_carried_collection_continues_across_steps_and_evaluation_does_not_change_it():
    rngs = {"init": ("first",), "train": ("train",)}
    loop = TrainLoop(Streams().init, Streams().apply, optimizer="sgd", loss=LOSS, data=(X, Y), batch_size=4, steps=6, shuffle=False, rngs=rngs, parallel=ONE)
    evaluate = EvalLoop(Streams().apply, metrics=["accuracy"], data=(X, Y), rngs=("train",))
    for checkpoint in loop:
        summary = evaluate(checkpoint)
        np.testing.assert_allclose(summary.model_state["carry"]["sum"], X[: 4 * checkpoint.step].sum(axis=0), rtol=1e-5)


def test_a_collection_that_is_not_mutable_stays_unchanged(tmp_path):
    rngs = {"init": ("first",), "train": ("train",)}
    loop = TrainLoop(Streams().init, Streams().apply, optimizer="sgd", loss=LOSS, data=(X, Y), steps=1, rngs=rngs, mutable=["other"])
    assert loop.next_step().model_state["carry"]["sum"].tolist() == [0, 0, 0, 0]


class Two(nn.Module):
    @nn.compact
    def __call__(self, a, b):
        return nn.Dense(3)(jnp.concatenate([a, b], axis=-1))


@pytest.mark.slow
def test_a_sample_that_is_a_tuple_is_several_inputs():
    data = ((X, X[:, :2]), Y)
    loop = TrainLoop(Two().init, Two().apply, optimizer="sgd", loss=LOSS, data=data, sample=(X[:1], X[:1, :2]))
    assert loop.next_step().model_params["Dense_0"]["kernel"].shape == (6, 3)


@pytest.mark.slow
def test_random_streams_of_an_evaluation_are_names():
    options: dict[str, Any] = {"metrics": ["accuracy"], "data": (X, Y)}
    evaluate = EvalLoop(Streams("third").apply, rngs="third", **options)
    rngs = {"init": ("first",), "train": ("train",)}
    loop = TrainLoop(Streams().init, Streams().apply, optimizer="sgd", loss=LOSS, data=(X, Y), rngs=rngs)
    assert "accuracy" in evaluate(loop.next_step()).metrics["eval"]
    with pytest.raises(ConfigError, match=r"EvalLoop\(rngs=...\) must be names"):
        EvalLoop(DENSE.apply, rngs={"eval": ("third",)}, **options)


def test_two_evaluations_with_the_same_name_are_an_error():
    evaluate = EvalLoop(DENSE.apply, metrics=["accuracy"], data=(X, Y))
    with pytest.raises(ConfigError, match="Two evaluations of one checkpoint are named 'eval'"):
        serial(evaluate, evaluate)(plain_loop().next_step())


def test_nested_callbacks_that_write_are_synced_before_a_later_callback_saves(tmp_path):
    order = []

    class Writer(Callback):
        def on_checkpoint(self, checkpoint):
            order.append("write")

        def sync(self):
            order.append("sync")

        def run_was_saved(self):
            order.append("told")

    class Saving(ModelCheckpoint):
        def on_checkpoint(self, checkpoint):
            super().on_checkpoint(checkpoint)
            order.append("save")

    save = Saving(tmp_path, every=every(steps=2), asynchronous=False)
    with serial(serial(Writer(), lambda checkpoint: checkpoint), serial(save)) as process:
        for checkpoint in plain_loop(steps=2):
            process(checkpoint)
    assert order == ["write", "write", "sync", "save", "told"]


def test_a_sample_initializes_the_state_and_no_batch_is_lost():
    seen = []

    def batches():
        for start in range(0, 24, 4):
            seen.append(start)
            yield X[start : start + 4], Y[start : start + 4]

    loop = TrainLoop(DENSE.init, DENSE.apply, optimizer="sgd", loss=LOSS, data=batches(), steps=6, sample=jax.ShapeDtypeStruct((1, 4), np.float32))
    assert loop.step == 0
    assert len(list(loop)) == 6
    assert seen == list(range(0, 24, 4))
    kernels = [first_of.next_step().model_params["kernel"] for first_of in (plain_loop(sample=X[:1], shuffle=False), plain_loop(shuffle=False))]
    np.testing.assert_array_equal(*kernels)


@pytest.mark.parametrize("stop", [4, 6, 7])
@pytest.mark.slow
def test_a_resumed_loop_ends_like_an_uninterrupted_one(tmp_path, stop):
    def make(directory: pathlib.Path, **options: Any) -> tuple[TrainLoop, Any]:
        loop = loop_of(steps=10, every=every(steps=1), restore_from=directory / "all", **options)
        evaluate = EvalLoop(EVALUATED, metrics=["accuracy"], data=(X, Y))
        best = BestCheckpoint(directory / "best", monitor="eval_accuracy")
        return loop, serial(evaluate, best, ModelCheckpoint(directory / "all", every=every(steps=1)))

    rows: dict[str, list[Any]] = {}
    for name in ("whole", "parts"):
        loop, process = make(tmp_path / name)
        rows[name] = []
        with loop, process:
            for checkpoint in loop:
                rows[name].append(process(checkpoint).metrics)
                if name == "parts" and checkpoint.step == stop:
                    break
    loop, process = make(tmp_path / "parts")
    assert (loop.step, loop.steps) == (stop, 10)
    with loop, process:
        rows["parts"] += [process(checkpoint).metrics for checkpoint in loop]
    assert rows["parts"] == rows["whole"]
    for kind in ("all", "best"):
        stores = [CheckpointStore(tmp_path / name / kind) for name in ("whole", "parts")]
        assert stores[0].steps() == stores[1].steps()
        assert_same(*(leaves_of(store.restore().train) for store in stores))


def test_a_run_that_has_ended_prints_a_message_and_yields_nothing(tmp_path, capsys):
    with serial(ModelCheckpoint(tmp_path)) as save:
        for checkpoint in plain_loop(steps=3):
            save(checkpoint)
    loop = plain_loop(steps=3, restore_from=tmp_path)
    assert list(loop) == []
    assert list(loop) == []
    assert capsys.readouterr().out == "There is nothing to train: the run has finished 3 steps, and steps=3 is its total. To train longer, pass more steps.\n"
    assert [checkpoint.step for checkpoint in plain_loop(steps=5, restore_from=tmp_path)] == [4, 5]


def test_a_loop_can_resume_from_the_best_checkpoint(tmp_path):
    losses = []
    with serial(EvalLoop(DENSE.apply, metrics={"cost": LOSS_OF}, data=(X, Y)), BestCheckpoint(tmp_path, monitor="eval_cost", mode="min")) as process:
        for checkpoint in plain_loop(steps=6):
            losses.append(process(checkpoint).metrics["eval"]["cost"])
    store = CheckpointStore(tmp_path)
    best = store.best("eval_cost", "min")
    assert best == 1 + int(np.argmin(losses))
    assert plain_loop(steps=9, restore_from=store.path(best)).next_step().step == best + 1


def LOSS_OF(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_evaluation_loops_can_be_chained_and_agree_with_numpy(devices):
    evaluate = EvalLoop(DENSE.apply, metrics={"lnpp": LOSS_OF}, data=(X[:10], Y[:10]), batch_size=4)
    again = EvalLoop(DENSE.apply, metrics=["accuracy"], data=lambda: iter([(X[:7], Y[:7]), (X[7:10], Y[7:10])]), name="test")
    loop = plain_loop(steps=2, parallel=DataParallel(jax.devices()[:devices]))
    for checkpoint in loop:
        metrics = serial(evaluate, again)(checkpoint).metrics
        logits = X[:10] @ np.asarray(checkpoint.model_params["kernel"]) + np.asarray(checkpoint.model_params["bias"])
        assert metrics["eval"]["lnpp"] == pytest.approx(float(LOSS_OF(logits, Y[:10]).mean()), abs=1e-6)
        assert metrics["test"]["accuracy"] == pytest.approx((logits.argmax(-1) == Y[:10]).mean(), abs=1e-6)
    assert (evaluate.name, again.name) == ("eval", "test")


@pytest.mark.slow
def test_one_evaluation_can_be_used_for_runs_on_different_devices():
    evaluate = EvalLoop(DENSE.apply, metrics=["accuracy"], data=(X, Y))
    found = [evaluate(plain_loop(parallel=DataParallel(jax.devices()[:count])).next_step()).metrics["eval"]["accuracy"] for count in (1, 2, 1)]
    assert found[0] == found[1] == found[2]


def test_an_iterator_can_be_used_for_several_evaluations_some_batches_at_a_time():
    evaluate = EvalLoop(DENSE.apply, metrics=["accuracy"], data=iter([(X[:4], Y[:4]), (X[4:8], Y[4:8])]), steps=1)
    loop = plain_loop(steps=2)
    assert len([evaluate(checkpoint) for checkpoint in loop]) == 2
    with pytest.raises(fitflax.errors.DataError, match="yields no batch"):
        evaluate(plain_loop().next_step())


@pytest.mark.slow
def test_gradients_are_available_on_request():
    checkpoint = plain_loop(grads=True, shuffle=False).next_step()
    before = DENSE.init({"params": jax.random.key(0)}, X[:4])["params"]
    assert checkpoint.grads["kernel"].shape == before["kernel"].shape
    assert checkpoint.gradients_norm == pytest.approx(float(optax.tree.norm(checkpoint.grads)), rel=1e-6)
    assert checkpoint.params_norm == pytest.approx(float(optax.tree.norm(checkpoint.model_params)), rel=1e-6)
    with pytest.raises(NotReadyError, match=r"train_loop\(grads=True\)"):
        _ = plain_loop().next_step().grads


def test_exiting_the_context_of_a_loop_ends_it():
    with plain_loop(steps=5) as loop:
        loop.next_step()
    assert loop.next_step() is None
    assert list(loop) == []
    assert repr(loop) == "TrainLoop(step=1, steps=5)"


def test_a_loop_that_was_not_closed_can_be_garbage_collected_by_its_saver_thread(tmp_path):
    """The garbage collector runs in the thread that creates the most objects, which is often the one that writes; it must not wait for itself."""
    collected, closed = threading.Event(), threading.Event()

    def batches():
        try:
            for begin in range(0, 24, 4):
                yield X[begin : begin + 4], Y[begin : begin + 4]
        finally:
            closed.set()

    gc.disable()
    try:
        loop = plain_loop(steps=5, data=batches, batch_size=None)
        loop.next_step()
        saver, run = loop._run._saver, weakref.ref(loop._run)
        saver.lock(tmp_path)
        del loop
        assert run() is not None and not closed.is_set()  # In a reference cycle.
        saver.submit(lambda: (gc.collect(), collected.set()))
        assert collected.wait(60)
        assert run() is None and closed.is_set()
        Saver().lock(tmp_path)  # Waits only for what was submitted.
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_loop_that_ends_normally_waits_for_its_saves_regardless_of_its_caller(tmp_path):
    """Even while a generator of the caller is being closed, because its exception looks like that of an abandoned loop."""
    waited = []

    def caller():
        try:
            yield
        finally:
            loop = plain_loop(steps=2)
            for _ in loop:
                pass
            waited.append(not loop._run._saver.is_orphaned)

    generator = caller()
    next(generator)
    generator.close()
    assert waited == [True]


def test_a_loop_resumes_from_the_directory_of_an_abandoned_loop_and_holds_its_lock(tmp_path):
    loop = plain_loop(steps=4)
    save = ModelCheckpoint(tmp_path, every=every(steps=1))
    save(loop.next_step())
    saver = loop._run._saver
    saver.detach()
    again = plain_loop(steps=4, restore_from=tmp_path)
    assert again.step == 1 and holder_of(tmp_path) is again._run._saver
    again.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": -1}, ConfigError, "steps, the total of the run, must be an integer of at least 0"),
        ({"every": 5}, ConfigError, r"TrainLoop\(every=...\) takes a trigger"),
        ({"seed": -1}, ConfigError, r"TrainLoop\(seed=...\) must be an integer"),
        ({"parallel": 3}, ConfigError, r"TrainLoop\(parallel=...\) must be a strategy"),
        ({"optimizer": optax.adam}, OptimizerError, "Call it"),
        ({"loss": 3}, LossError, "A loss must be a name or a function"),
        ({"steps_per_epoch": 0}, ConfigError, "steps_per_epoch must be a positive integer"),
    ],
)
def test_invalid_arguments_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        plain_loop(**options)


@pytest.mark.parametrize("steps", [None, -1, 1.5])
def test_an_invalid_total_of_train_loop_is_an_error(steps):
    trainer = fitflax.Trainer(DENSE)
    trainer.compile("sgd", LOSS)
    with pytest.raises(ConfigError, match="must be"):
        trainer.train_loop((X, Y), steps=steps)


def test_an_argument_that_is_not_the_right_kind_of_function_is_an_error():
    options: dict[str, Any] = {"optimizer": "sgd", "loss": LOSS, "data": (X, Y)}
    with pytest.raises(ConfigError, match=r"TrainLoop\(init=...\) takes a function. Received: a module. Pass its method: model.init."):
        TrainLoop(DENSE, DENSE.apply, **options)
    with pytest.raises(ConfigError, match=r"takes a function, such as model.apply. Received: 3"):
        TrainLoop(DENSE.init, 3, **options)
    with pytest.raises(ConfigError, match=r"EvalLoop\(apply=...\)"):
        EvalLoop(DENSE, metrics=["accuracy"], data=(X, Y))
    with pytest.raises(ConfigError, match="other than 'train'"):
        EvalLoop(DENSE.apply, metrics=["accuracy"], data=(X, Y), name="train")
    with pytest.raises(ModelError, match="must return a dict of collections"):
        TrainLoop(lambda rngs, x: x, DENSE.apply, **options)
    with pytest.raises(ModelError, match=r"must return \(outputs, changed collections\)"):
        TrainLoop(DENSE.init, lambda variables, x, *, rngs, mutable: x, **options)
    with pytest.raises(ModelError, match=r"Dense cannot be initialized.*The functions are called as init"):
        TrainLoop(functools.partial(DENSE.init, nothing=1), DENSE.apply, **options)


def test_two_runs_of_one_trainer_cannot_be_interleaved():
    trainer = fitflax.Trainer(DENSE)
    trainer.compile("sgd", LOSS)
    one, other = (trainer.train_loop((X, Y), steps=5) for _ in range(2))
    one.next_step()
    with pytest.raises(ConfigError, match="Do not interleave two runs of one trainer"):
        other.next_step()


def test_a_run_that_died_before_its_first_checkpoint_starts_over_with_the_same_run_id(tmp_path):
    CheckpointStore(tmp_path).claim("0123456789abcdef", overwrite=False)
    assert next(plain_loop(steps=1, restore_from=tmp_path)).run_id == "0123456789abcdef"


def test_a_run_whose_checkpoints_were_removed_starts_over_with_another_run_id(tmp_path):
    """Otherwise, it would replace its files in other directories, such as its best checkpoints."""
    with plain_loop(steps=2) as loop:
        ModelCheckpoint(tmp_path)(loop.run(2))
    run_id = CheckpointStore(tmp_path).run_id()
    shutil.rmtree(CheckpointStore(tmp_path).path(2))
    assert CheckpointStore(tmp_path).run_id() == run_id != next(plain_loop(steps=1, restore_from=tmp_path)).run_id


def test_a_run_whose_checkpoints_are_all_damaged_starts_over_but_does_not_replace_those_in_other_directories(tmp_path):
    def save_steps(steps: int, *names: str) -> None:
        with plain_loop(steps=steps, restore_from=tmp_path / "all") as loop, serial(*(ModelCheckpoint(tmp_path / name) for name in names)) as save:
            assert loop.step == 0
            save(loop.run(steps))

    save_steps(2, "all", "other")
    (CheckpointStore(tmp_path / "all").path(2) / "state.msgpack").write_bytes(b"")
    for names, expected in ((["other", "all"], pytest.raises(DirectoryInUseError)), (["all"], contextlib.nullcontext())):
        with pytest.warns(FitflaxWarning, match="skipped a damaged checkpoint|so a new run begins"), expected:
            save_steps(1, *names)
        assert CheckpointStore(tmp_path / "other").steps() == [2]
    assert CheckpointStore(tmp_path / "all").steps() == [1]


def test_the_state_is_initialized_from_the_sample():
    seen = []

    def init(rngs: Any, x: Any) -> Any:
        seen.append(x.shape)
        return DENSE.init(rngs, x)

    options: dict[str, Any] = {"optimizer": "sgd", "loss": LOSS, "data": (X, Y), "batch_size": 4, "parallel": ONE, "steps": 1}
    TrainLoop(init, DENSE.apply, sample=X[:2], **options)
    assert set(seen) == {(2, 4)}
    seen.clear()
    TrainLoop(init, DENSE.apply, **options)
    assert set(seen) == {(4, 4)}


def test_a_closed_loop_can_be_read_and_changed_but_runs_no_step():
    loop = plain_loop(steps=5)
    loop.next_step()
    loop.close()
    loop.every, loop.steps = every(steps=2), 9
    assert (loop.step, loop.next_step()) == (1, None)
