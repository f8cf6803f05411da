"""Hooks: which ones are called, in which order, and with which arguments."""

import contextlib
import itertools
import os
import signal
import threading

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import Callback, EarlyStopping, LambdaCallback, LearningRateScheduler, ModelCheckpoint, Phase
from fitflax.callbacks.base import HOOKS
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import CallbackError, FitflaxWarning
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
Y = RNG.normal(size=(6, 3)).astype(np.float32)


def make(metrics=None, rate=0.1):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(rate), loss="mse", metrics=metrics)
    return trainer


class Recorder(Callback):
    """Records every call of every hook as `(who, hook, number)` in one list."""

    def __init__(self, name, calls, logs=None):
        self.name, self.calls, self.logs = name, calls, logs

    def note(self, hook, *arguments):
        *numbers, last = arguments
        shown = last.step if hook == "on_checkpoint" else numbers[0] if numbers else None
        self.calls.append((self.name, hook.removeprefix("on_"), shown))
        if self.logs is not None and hook != "on_checkpoint":
            self.logs.append((hook.removeprefix("on_"), sorted(last)))


for _hook in HOOKS:
    setattr(Recorder, _hook, lambda self, *arguments, _hook=_hook: self.note(_hook, *arguments))


def hooks_of(calls):
    return [hook if number is None else f"{hook} {number}" for _, hook, number in calls]


def record(fit):
    calls = []
    fit(Recorder("a", calls))
    return hooks_of(calls)


VALIDATION = ["test_begin", "test_batch_begin 0", "test_batch_end 0", "test_batch_begin 1", "test_batch_end 1", "test_end"]


def batch(number):
    return [f"train_batch_begin {number}", f"train_batch_end {number}"]


# --- The order of calls ---


def test_a_fit_with_validation_calls_exactly_these_hooks_each_on_all_callbacks_in_turn():
    calls = []
    make().fit(X, Y, batch_size=3, epochs=2, validation_data=(X, Y), validation_batch_size=4, callbacks=[Recorder(name, calls) for name in "abc"], verbose=0)
    expected = ["train_begin"]
    for epoch in (0, 1):
        expected += [f"epoch_begin {epoch}", *batch(0), *batch(1), *VALIDATION, f"epoch_end {epoch}", f"checkpoint {2 * epoch + 2}"]
    expected += ["train_end"]
    assert hooks_of(calls[::3]) == expected
    assert [name for name, _, _ in calls] == ["a", "b", "c"] * len(expected)
    assert hooks_of(calls) == [call for call in expected for _ in "abc"]


def test_checkpoints_within_an_epoch_come_between_two_batches():
    calls = []
    recorder = Recorder("a", calls)
    recorder.every = fitflax.every(steps=2) | fitflax.every(epochs=1)
    make().fit(X, Y, batch_size=2, epochs=2, callbacks=[recorder], verbose=0)
    assert hooks_of(calls) == [
        "train_begin",
        *("epoch_begin 0", *batch(0), *batch(1), "checkpoint 2", *batch(2), "epoch_end 0", "checkpoint 3"),
        *("epoch_begin 1", *batch(0), "checkpoint 4", *batch(1), *batch(2), "epoch_end 1", "checkpoint 6"),
        "train_end",
    ]


def test_a_stop_within_an_epoch_makes_a_checkpoint_then_validates_and_ends_the_epoch():
    trainer = make()

    def fit(recorder):
        stop = LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.stop() if trainer.step == 5 else None)
        trainer.fit(X, Y, batch_size=2, epochs=4, validation_data=(X, Y), validation_batch_size=3, callbacks=[recorder, stop], verbose=0)

    assert record(fit) == [
        "train_begin",
        *("epoch_begin 0", *batch(0), *batch(1), *batch(2), *VALIDATION, "epoch_end 0", "checkpoint 3"),
        *("epoch_begin 1", *batch(0), *batch(1), "checkpoint 5", *VALIDATION, "epoch_end 1"),
        "train_end",
    ]


def test_steps_that_end_within_an_epoch_close_it_like_a_stop():
    calls = record(lambda recorder: make().fit(X, Y, batch_size=2, steps=2, callbacks=[recorder], verbose=0))
    assert calls == ["train_begin", "epoch_begin 0", *batch(0), *batch(1), "checkpoint 2", "epoch_end 0", "train_end"]


def test_data_that_ends_within_an_epoch_closes_it_like_a_stop():
    def fit(recorder):
        with pytest.warns(FitflaxWarning, match="ended before"):
            make().fit(iter([(X, Y)] * 2), steps_per_epoch=5, callbacks=[recorder], verbose=0)

    assert record(fit) == ["train_begin", "epoch_begin 0", *batch(0), *batch(1), "checkpoint 2", "epoch_end 0", "train_end"]


def test_a_stop_in_the_last_batch_of_an_epoch_is_an_ordinary_end_of_the_epoch():
    trainer = make()
    stop = LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.stop() if trainer.step == 2 else None)
    calls = record(lambda recorder: trainer.fit(X, Y, batch_size=3, epochs=3, callbacks=[recorder, stop], verbose=0))
    assert calls == ["train_begin", "epoch_begin 0", *batch(0), *batch(1), "epoch_end 0", "checkpoint 2", "train_end"]


def test_a_stop_in_on_epoch_begin_of_a_later_epoch_is_obeyed_before_its_first_batch():
    trainer = make()
    stop = LambdaCallback(on_epoch_begin=lambda epoch, logs: trainer.stop() if epoch == 1 else None)
    trainer.fit(X, Y, batch_size=3, epochs=3, callbacks=[stop], verbose=0)
    assert trainer.step == 2


def test_a_stop_in_on_train_begin_runs_no_step():
    trainer = make()
    trainer.build((X, Y))
    stop = LambdaCallback(on_train_begin=lambda logs: trainer.stop("not today"))
    calls = record(lambda recorder: trainer.fit(X, Y, callbacks=[stop, recorder], verbose=0))
    assert (calls, trainer.step, trainer.stop_reason) == (["train_begin", "train_end"], 0, "not today")


def test_epochs_are_counted_from_the_initial_epoch():
    calls = record(lambda recorder: make().fit(X, Y, epochs=4, initial_epoch=2, callbacks=[recorder], verbose=0))
    assert [call for call in calls if call.startswith("epoch")] == ["epoch_begin 2", "epoch_end 2", "epoch_begin 3", "epoch_end 3"]


def test_a_run_with_nothing_to_do_begins_and_ends():
    assert record(lambda recorder: make().fit(X, Y, epochs=2, initial_epoch=2, callbacks=[recorder], verbose=0)) == ["train_begin", "train_end"]


def test_evaluate_and_predict_call_only_their_own_hooks():
    trainer = make()
    trainer.build((X, Y))
    assert record(lambda recorder: trainer.evaluate(X, Y, batch_size=3, callbacks=[recorder], verbose=0)) == VALIDATION
    calls = record(lambda recorder: trainer.predict(X, batch_size=3, callbacks=[recorder]))
    assert sorted(calls) == sorted(call.replace("test", "predict") for call in VALIDATION)
    assert (calls[0], calls[-1]) == ("predict_begin", "predict_end")
    ends = [call for call in calls if call.startswith("predict_batch_end")]
    assert ends == ["predict_batch_end 0", "predict_batch_end 1"]


def test_each_named_validation_set_is_a_separate_evaluation():
    calls = record(lambda recorder: make().fit(X, Y, validation_data={"a": (X, Y), "b": (X, Y)}, callbacks=[recorder], verbose=0))
    assert calls.count("test_begin") == calls.count("test_end") == 2


# --- The order of hooks and data requests, as docs/callbacks.md lists it ---


class Levels:
    """Yields two batches per pass that show its level, and records each request."""

    def __init__(self, events):
        self.events, self.level = events, 0

    def __iter__(self):
        for number in range(2):
            self.events.append(f"request {self.level}.{number}")
            yield np.full((2, 4), self.level + number / 10, np.float32), np.zeros((2, 3), np.float32)


class LevelOfEpoch(Callback):
    """Sets the level of the data to the index of the epoch."""

    def __init__(self, data):
        self.data = data

    def on_train_begin(self, logs):
        self.data.events.append("train_begin")

    def on_epoch_begin(self, epoch, logs):
        self.data.events.append(f"epoch_begin {epoch}")
        self.data.level = epoch

    def on_train_batch_begin(self, batch, logs):
        self.data.events.append(f"train_batch_begin {batch}")

    def on_train_batch_end(self, batch, logs):
        self.data.events.append(f"train_batch_end {batch}")

    def on_epoch_end(self, epoch, logs):
        self.data.events.append(f"epoch_end {epoch}")

    def on_checkpoint(self, checkpoint):
        self.data.events.append("checkpoint")


def fit_levels(directory=None, *, epochs, trainer=None, callback=LevelOfEpoch, as_iterator=False):
    data = Levels([])
    trainer = trainer or make()
    saving = [] if directory is None else [ModelCheckpoint(directory)]
    options = {"steps_per_epoch": 2} if as_iterator else {"resume": "auto" if directory else None}
    given = itertools.chain.from_iterable(data for _ in range(epochs)) if as_iterator else data
    trainer.fit(given, epochs=epochs, callbacks=[callback(data), *saving], verbose=0, **options)
    return data.events, trainer


def in_order(first, last, begins_new=False):
    """The events from epoch `first` to epoch `last`; the first batch of a new training is requested earlier."""
    events = []
    for epoch in range(first, last):
        events += [f"epoch_begin {epoch}", *([] if begins_new and epoch == first else [f"request {epoch}.0"])]
        events += [*batch(0), f"request {epoch}.1", *batch(1), f"epoch_end {epoch}", "checkpoint"]
    return events


def test_the_first_batch_of_an_epoch_is_requested_after_on_epoch_begin():
    events, _ = fit_levels(epochs=3)
    assert events == ["request 0.0", "train_begin", *in_order(0, 3, begins_new=True)]


def test_an_iterator_is_asked_for_a_batch_before_an_epoch_begins():
    events, _ = fit_levels(epochs=2, as_iterator=True)
    assert events.index("request 0.0", 1) < events.index("epoch_end 0") < events.index("epoch_begin 1")


def test_a_resume_at_the_end_of_an_epoch_requests_its_first_batch_after_on_epoch_begin(tmp_path):
    _, uninterrupted = fit_levels(tmp_path / "never", epochs=3)
    fit_levels(tmp_path / "stopped", epochs=1)
    events, resumed = fit_levels(tmp_path / "stopped", epochs=3)
    assert events == ["request 0.0", "train_begin", *in_order(1, 3)]
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, uninterrupted.state.params)


class LevelOfNextEpoch(LevelOfEpoch):
    """Sets the level already at the end of the epoch before."""

    may_prefetch = True

    def on_epoch_end(self, epoch, logs):
        super().on_epoch_end(epoch, logs)
        self.data.level = epoch + 1


@pytest.mark.parametrize("callback", [LevelOfEpoch, LevelOfNextEpoch])
@pytest.mark.parametrize("is_known_to_be_over", [True, False])
def test_a_run_interrupted_at_the_end_of_an_epoch_requests_the_next_batch_after_the_hooks(is_known_to_be_over, callback, tmp_path):
    _, uninterrupted = fit_levels(tmp_path / "never", epochs=3, callback=callback)

    class Fails(callback):
        def on_epoch_end(self, epoch, logs):
            if is_known_to_be_over:
                raise ArithmeticError

        def on_train_batch_end(self, batch, logs):
            if batch == 1 and not is_known_to_be_over:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit_levels(tmp_path / "stopped", epochs=3, callback=Fails)
    with contextlib.nullcontext() if is_known_to_be_over else pytest.warns(FitflaxWarning, match="cannot seek, so 4 examples"):
        events, resumed = fit_levels(tmp_path / "stopped", epochs=3, callback=callback)
    if callback is LevelOfEpoch:
        reread = [] if is_known_to_be_over else ["request 0.0", "request 0.1"]
        assert events == [*reread, "request 0.0", "train_begin", "epoch_end 0", "checkpoint", *in_order(1, 3)]
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, uninterrupted.state.params)


def test_a_second_fit_requests_as_many_batches_as_the_first():
    first, trainer = fit_levels(epochs=1)
    second, _ = fit_levels(epochs=1, trainer=trainer)
    assert second == first


@pytest.mark.parametrize("is_declared", [False, True])
def test_the_first_batch_of_an_epoch_is_prefetched_unless_a_callback_needs_on_epoch_begin_before(is_declared):
    class Declared(LevelOfEpoch):
        may_prefetch = True

    def without_hook(data):
        recorder = LevelOfEpoch(data)
        return LambdaCallback(on_train_batch_begin=recorder.on_train_batch_begin, on_epoch_end=recorder.on_epoch_end)

    data = Levels([])
    callback = Declared(data) if is_declared else without_hook(data)
    trainer = make()
    trainer.compile("sgd", "mse")
    trainer.fit(data, epochs=2, callbacks=[callback, LearningRateScheduler(lambda epoch: 0.1)], verbose=2)
    hooks = [event for event in data.events if event.startswith(("request", "epoch_begin 1", "epoch_end"))]
    begin = ["epoch_begin 1"] if is_declared else []
    level = 1 if is_declared else 0
    assert hooks == ["request 0.0", "request 0.1", "epoch_end 0", "request 0.0", *begin, f"request {level}.1", "epoch_end 1"]


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_run_interrupted_before_the_first_batch_of_an_epoch_resumes_with_that_epoch(error, tmp_path):
    _, uninterrupted = fit_levels(tmp_path / "never", epochs=3)

    class Fails(LevelOfEpoch):
        def on_epoch_begin(self, epoch, logs):
            super().on_epoch_begin(epoch, logs)
            if epoch == 2:
                raise error

    with pytest.raises(error):
        fit_levels(tmp_path / "stopped", epochs=3, callback=Fails)
    events, resumed = fit_levels(tmp_path / "stopped", epochs=3)
    assert events == ["request 0.0", "train_begin", *in_order(2, 3)]
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, uninterrupted.state.params)


# --- Interrupted runs ---


@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end", "on_checkpoint"]
)
@pytest.mark.mostly_slow
def test_on_train_end_is_called_after_an_error_in_any_hook(hook):
    calls = []

    def fail(*arguments):
        raise ArithmeticError(hook)

    callbacks = [Recorder("a", calls), LambdaCallback(**{hook: fail}), Recorder("b", calls)]
    with pytest.raises(ArithmeticError, match=hook):
        make().fit(X, Y, batch_size=3, validation_data=(X, Y), callbacks=callbacks, verbose=0)
    assert calls[-2:] == [("a", "train_end", None), ("b", "train_end", None)]
    assert [call[1] for call in calls].count("train_end") == 2


def test_an_error_in_a_hook_leaves_a_checkpoint_of_the_last_finished_step():
    def fail(batch, logs):
        if batch == 1:
            raise ArithmeticError

    def fit(recorder):
        with pytest.raises(ArithmeticError):
            make().fit(X, Y, batch_size=2, callbacks=[recorder, LambdaCallback(on_train_batch_end=fail)], verbose=0)

    assert record(fit) == ["train_begin", "epoch_begin 0", *batch(0), *batch(1), "checkpoint 2", "train_end"]


def test_an_error_in_the_data_ends_the_run_and_the_trainer_can_train_afterwards():
    def batches():
        yield X, Y
        yield X, Y
        raise OSError("disk on fire")

    trainer = make()

    def fit(recorder):
        with pytest.raises(OSError, match="disk on fire"):
            trainer.fit(batches, callbacks=[recorder], verbose=0)

    calls = record(fit)
    assert calls[-1] == "train_end" and "epoch_end 0" not in calls
    assert trainer.step in (1, 2)
    before = trainer.step
    trainer.fit(X, Y, verbose=0)
    assert trainer.step == before + 1


def test_on_train_end_of_one_callback_is_called_even_if_that_of_another_fails():
    calls = []

    def fail(logs):
        raise ArithmeticError("at the end")

    with pytest.raises(ArithmeticError, match="at the end"):
        make().fit(X, Y, callbacks=[Recorder("a", calls), LambdaCallback(on_train_end=fail), Recorder("b", calls)], verbose=0)
    assert calls[-2:] == [("a", "train_end", None), ("b", "train_end", None)]


@pytest.mark.filterwarnings("ignore:SIGTERM ended the run")  # There is no ModelCheckpoint.
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_after_the_current_step_with_a_checkpoint_and_on_train_end(number, expected):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trainer = make()

    def kill(batch, logs):
        if batch == 1:
            os.kill(os.getpid(), number)

    def fit(recorder):
        with pytest.raises(expected) as raised:
            trainer.fit(X, Y, batch_size=2, epochs=3, callbacks=[recorder, LambdaCallback(on_train_batch_begin=kill)], verbose=0)
        if expected is SystemExit:
            assert raised.value.code == 128 + signal.SIGTERM

    assert record(fit) == ["train_begin", "epoch_begin 0", *batch(0), *batch(1), "checkpoint 2", "train_end"]
    assert trainer.step == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_signal_during_a_validation_ends_it_before_its_next_batch():
    def fit(recorder):
        kill = LambdaCallback(on_test_batch_begin=lambda batch, logs: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            make().fit(X, Y, batch_size=3, validation_data=(X, Y), validation_batch_size=2, callbacks=[recorder, kill], verbose=0)

    calls = record(fit)
    assert calls[-2:] == ["checkpoint 2", "train_end"]
    assert calls.count("test_batch_end 0") == 1 and "test_batch_begin 1" not in calls and "epoch_end 0" not in calls


def test_a_signal_saves_a_checkpoint_even_if_no_trigger_fires(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "run", every=fitflax.every(steps=100), save_last=False)
    kill = LambdaCallback(on_train_batch_begin=lambda batch, logs: os.kill(os.getpid(), signal.SIGINT) if batch == 1 else None)
    with pytest.raises(KeyboardInterrupt):
        make().fit(X, Y, batch_size=2, epochs=3, callbacks=[checkpoint, kill], verbose=0)
    assert checkpoint.store.steps() == [2]


def test_a_fit_off_the_main_thread_leaves_signals_alone_and_works():
    results = []
    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: results.append((make().fit(X, Y, verbose=0).epoch, signal.getsignal(signal.SIGINT))))
    thread.start()
    thread.join()
    assert results == [([0], handler)]


# --- Logs ---


@pytest.mark.slow
def test_case_9_begin_hooks_get_nothing_and_end_hooks_get_what_was_measured():
    logs = []
    trainer = make(metrics=["mae"])
    trainer.fit(X, Y, batch_size=3, validation_data=(X, Y), callbacks=[Recorder("a", [], logs)], verbose=0)
    trainer.evaluate(X, Y, callbacks=[Recorder("a", [], logs)], verbose=0)
    trainer.predict(X, callbacks=[Recorder("a", [], logs)])
    train, validation = ["loss", "mae"], ["loss", "mae", "val_loss", "val_mae"]
    expected = {
        "train_batch_end": train,
        "epoch_end": validation,
        "train_end": validation,
        "test_batch_end": train,
        "test_end": train,
        "predict_batch_end": ["outputs"],
        "predict_end": [],
    }
    assert {hook for hook, _ in logs} == {hook.removeprefix("on_") for hook in HOOKS} - {"checkpoint"}
    for hook, keys in logs:
        assert keys == ([] if hook.endswith("begin") else expected[hook]), hook


def test_the_logs_of_a_predicted_batch_hold_its_outputs():
    trainer, outputs = make(), []
    trainer.build((X, Y))
    watch = LambdaCallback(on_predict_batch_end=lambda batch, logs: outputs.append(logs["outputs"]))
    whole = trainer.predict(X, batch_size=4, callbacks=[watch])
    assert [part.shape for part in outputs] == [(4, 3), (2, 3)] and all(type(part) is np.ndarray for part in outputs)
    np.testing.assert_array_equal(np.concatenate(outputs), whole)


def test_logs_are_running_values_of_the_epoch():
    seen = []
    watch = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]), on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    make(rate=0.0).fit(X, Y, batch_size=3, epochs=2, shuffle=False, callbacks=[watch], verbose=0)
    assert seen[:3] == seen[3:] and seen[1] == seen[2] != seen[0]


def test_logs_kept_from_earlier_batches_can_be_read_later():
    kept = []
    keep = LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(logs))
    make().fit(X, Y, batch_size=2, epochs=2, callbacks=[keep], verbose=0)
    seen = []
    read = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    make().fit(X, Y, batch_size=2, epochs=2, callbacks=[read], verbose=0)
    assert [logs["loss"] for logs in kept] == seen


def test_values_that_a_callback_adds_to_epoch_logs_reach_later_callbacks_and_the_history():
    seen = []
    first = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append("added" in logs))
    adds = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.__setitem__("added", epoch + 0.5))
    later = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["added"]), on_train_end=lambda logs: seen.append(logs["added"]))
    checkpoints = LambdaCallback(lambda checkpoint: seen.append(checkpoint.metrics["train"]["added"]))
    history = make().fit(X, Y, epochs=2, callbacks=[first, adds, later, checkpoints], verbose=0)
    assert seen == [False, 0.5, 0.5, False, 1.5, 1.5, 1.5]
    assert history.history["added"] == [0.5, 1.5]


def test_values_that_a_callback_adds_to_batch_logs_reach_later_callbacks():
    seen = []
    adds = LambdaCallback(on_train_batch_end=lambda batch, logs: logs.__setitem__("added", batch))
    later = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((logs["added"], "loss" in logs)))
    make().fit(X, Y, batch_size=3, callbacks=[adds, later], verbose=0)
    assert seen == [(0, True), (1, True)]


def test_a_monitor_may_be_a_value_that_another_callback_adds():
    values = iter([1.0, 2.0, 3.0])
    adds = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.__setitem__("score", next(values)))
    stops = EarlyStopping("score", mode="min")
    # EarlyStopping is listed first, but callbacks that decide always run after those of the user.
    history = make().fit(X, Y, epochs=5, callbacks=[stops, adds], verbose=0)
    assert history.history["score"] == [1.0, 2.0]


def test_reading_no_logs_reads_nothing_from_the_device(monkeypatch):
    from fitflax import logs

    reads = []
    original = logs.Values._read
    monkeypatch.setattr(logs.Values, "_read", lambda self: (reads.append(self._host is None), original(self))[1])
    watch = LambdaCallback(on_train_batch_end=lambda batch, logs: len(logs), on_epoch_end=lambda epoch, logs: None)
    make().fit(X, Y, batch_size=2, epochs=1, callbacks=[watch], verbose=0)
    assert sum(reads) == 1  # The history's row.


def test_all_values_of_a_log_point_are_read_in_one_transfer(monkeypatch):
    from fitflax import logs

    reads = []
    original = logs.Values._read
    monkeypatch.setattr(logs.Values, "_read", lambda self: (reads.append(self._host is None), original(self))[1])
    first = LambdaCallback(on_epoch_end=lambda epoch, logs: (logs["loss"], logs["mae"]))
    second = LambdaCallback(lambda checkpoint: (checkpoint.loss, checkpoint.gradients_norm, checkpoint.metrics), on_epoch_end=lambda epoch, logs: dict(logs))
    make(metrics=["mae"]).fit(X, Y, batch_size=2, epochs=1, callbacks=[first, second], verbose=0)
    assert sum(reads) == 1


# --- Which callbacks are called ---


def test_callbacks_are_called_in_the_order_of_their_phases_and_then_as_listed():
    calls = []

    def of(name, phase):
        kind = type(name, (Recorder,), {"phase": phase})
        return kind(name, calls)

    phases = {"best": Phase.SAVE_BEST, "save": Phase.SAVE, "record": Phase.RECORD, "user 1": Phase.USER, "decide": Phase.DECIDE, "change": Phase.CHANGE}
    callbacks = [*(of(name, phase) for name, phase in phases.items()), of("user 2", Phase.USER)]
    make().fit(X, Y, callbacks=callbacks, verbose=0)
    names = ["change", "user 1", "user 2", "decide", "record", "best", "save"]
    assert [name for name, _, _ in calls] == names * (len(calls) // len(names))


def test_everything_is_on_disk_before_a_checkpoint_is_saved():
    calls = []

    class Writer(Callback):
        phase = Phase.RECORD

        def on_epoch_end(self, epoch, logs):
            calls.append("write")

        def on_checkpoint(self, checkpoint):
            calls.append("record")

        def sync(self):
            calls.append("sync")

    class Saver(Callback):
        phase = Phase.SAVE

        def on_checkpoint(self, checkpoint):
            calls.append("save")

    make().fit(X, Y, callbacks=[Saver(), Writer()], verbose=0)
    assert calls[:4] == ["write", "record", "sync", "save"]


def test_a_hook_that_is_not_overridden_is_not_called(monkeypatch):
    def fail(self, *arguments):
        raise AssertionError("called although nobody overrides it")

    for hook in ("on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_test_batch_end", "on_checkpoint"):
        monkeypatch.setattr(Callback, hook, fail)

    class Silent(Callback):
        pass

    make().fit(X, Y, validation_data=(X, Y), callbacks=[Silent()], verbose=0)


def test_a_subclass_need_not_call_the_initializer_of_its_base():
    class Careless(Callback):
        def __init__(self):
            self.epochs = []

        def on_epoch_end(self, epoch, logs):
            self.epochs.append((epoch, self.trainer.step, self.params["epochs"], self.params["steps"]))

    careless = Careless()
    make().fit(X, Y, batch_size=3, epochs=2, callbacks=[careless], verbose=0)
    assert careless.epochs == [(0, 2, 2, 2), (1, 4, 2, 2)]


@pytest.mark.slow
def test_a_callback_can_be_used_in_two_fits_of_two_trainers():
    calls = []
    recorder = Recorder("a", calls)
    one, other = make(), make()
    one.fit(X, Y, callbacks=[recorder], verbose=0)
    first, calls[:] = list(calls), []
    assert recorder.trainer is one
    other.fit(X, Y, callbacks=[recorder], verbose=0)
    assert calls == first and recorder.trainer is other


def test_callbacks_can_access_the_trainer():
    seen = {}

    def look(epoch, logs):
        view = watch.trainer
        seen.update(step=view.step, model=view.model, params=view.state.params, reason=view.stop_reason)
        view.stop("seen enough")

    watch = LambdaCallback(on_epoch_end=look)
    trainer = make()
    trainer.fit(X, Y, epochs=3, callbacks=[watch], verbose=0)
    assert (seen["step"], seen["model"], seen["reason"], trainer.stop_reason) == (1, trainer.model, None, "seen enough")
    np.testing.assert_array_equal(seen["params"]["kernel"], trainer.state.params["kernel"])


def test_callbacks_may_be_any_iterable():
    calls = []
    make().fit(X, Y, callbacks=(Recorder(name, calls) for name in "ab"), verbose=0)
    assert {name for name, _, _ in calls} == {"a", "b"}


def test_a_fit_within_a_hook_of_another_trainer_works():
    inner = make()

    def fit(epoch, logs):
        logs["inner"] = inner.fit(X, Y, verbose=0).history["loss"][0]

    history = make().fit(X, Y, epochs=2, callbacks=[LambdaCallback(on_epoch_end=fit)], verbose=0)
    assert history.history["inner"][1] < history.history["inner"][0]


# --- Invalid callbacks ---


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([EarlyStopping], r"callbacks must be instances. Received: the class EarlyStopping. Pass EarlyStopping\(...\)"),
        ([print], r"Received: a builtin_function_or_method. Wrap a function in LambdaCallback"),
        ([None], r"instances of fitflax.callbacks.Callback. Received: a NoneType"),
    ],
)
def test_an_object_that_is_not_a_callback_is_an_error(callbacks, message):
    with pytest.raises(CallbackError, match=message):
        make().fit(X, Y, callbacks=callbacks, verbose=0)


def test_a_single_callback_without_a_list_is_an_error_that_names_the_argument():
    with pytest.raises((CallbackError, TypeError), match=r"callbacks"):
        make().fit(X, Y, callbacks=EarlyStopping("loss"), verbose=0)


def test_a_callback_given_twice_is_an_error():
    callback = EarlyStopping("loss")
    with pytest.raises(CallbackError, match="contains the same EarlyStopping object twice"):
        make().fit(X, Y, callbacks=[callback, callback], verbose=0)


def test_two_callbacks_with_the_same_state_key_are_an_error_before_the_first_step():
    class Counting(Callback):
        def state_dict(self):
            return {"count": 0}

    trainer = make()
    with pytest.raises(CallbackError, match=r"'Counting'. Pass different arguments"):
        trainer.fit(X, Y, callbacks=[Counting(), Counting()], verbose=0)
    assert trainer.step == 0


def test_a_callback_can_evaluate_and_predict_within_a_run_without_affecting_it():
    class Ask(Callback):
        def on_epoch_end(self, epoch, logs):
            logs["own"] = self.trainer.evaluate(x, y, verbose=0)["loss"]
            logs["largest"] = float(self.trainer.predict(x).max())

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), rng.normal(size=(12, 3)).astype(np.float32)
    states = []
    for callbacks in ([], [Ask()]):
        trainer = fitflax.Trainer(nn.Dense(3))
        trainer.compile("adam", "mse")
        history = trainer.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), callbacks=callbacks, verbose=0).history
        states.append([np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.params)])
    np.testing.assert_allclose(history["own"], history["val_loss"], rtol=1e-6)
    assert all(np.array_equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("steps", [1, 2], ids=["inside an epoch", "at its end"])
def test_a_callback_that_trains_at_the_end_of_an_epoch_and_fails_loses_no_state(steps, tmp_path):
    class Trains(Callback):
        def on_epoch_end(self, epoch, logs):
            self.trainer.train_on_batch((np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)))
            raise ArithmeticError("broken")

    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    with pytest.raises(ArithmeticError):
        callbacks = [Trains(), ModelCheckpoint(tmp_path)]
        trainer.fit(np.ones((16, 4), np.float32), np.ones((16, 3), np.float32), steps=steps, batch_size=8, callbacks=callbacks, verbose=0)
    assert int(trainer.state.step) == trainer.step == steps + 1
    # No state is saved as another step.
    assert [int(load_checkpoint(path).train["step"]) for path in sorted(tmp_path.glob("step_*"))] == ([1] if steps == 1 else [])


def test_a_state_that_a_callback_holds_stays_valid_after_an_interrupted_end_of_an_epoch():
    held = []

    class Holds(Callback):
        def on_epoch_end(self, epoch, logs):
            held.append(self.trainer.state)
            self.trainer.train_on_batch(data)  # Copies the state, because it is lent.
            raise ArithmeticError("broken")

    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    data = np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)
    with pytest.raises(ArithmeticError):
        trainer.fit(*data, batch_size=8, callbacks=[Holds()], verbose=0)
    before = np.array(held[0].params["kernel"])
    trainer.train_on_batch(data)
    np.testing.assert_array_equal(held[0].params["kernel"], before)
    assert before.any()
