"""Contracts that every built-in callback fulfills."""

import copy
import inspect
import pickle

import flax.linen as nn
import jax
import numpy as np
import pytest

import fitflax
import fitflax.callbacks as callbacks
from fitflax.callbacks import Callback, Phase
from fitflax.callbacks.base import HOOKS, overrides
from fitflax.callbacks.callback_list import CallbackList
from fitflax.checkpoints.checkpoint_files import read_checkpoint, write_checkpoint
from fitflax.errors import CallbackError
from fitflax.parallel import DataParallel
from tests.run_script import TRAIN, differences, make_trainer

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)).astype(np.float32), RNG.integers(0, 3, 12).astype(np.int32)


def notice(checkpoint):
    """A module-level function, which can be pickled by its name."""


MAKE = {
    "BestCheckpoint": lambda path: callbacks.BestCheckpoint(path / "best", overwrite=True),
    "CSVLogger": lambda path: callbacks.CSVLogger(path / "log.csv"),
    "EarlyStopping": lambda path: callbacks.EarlyStopping(patience=9),
    "EarlyStopping(restore_best)": lambda path: callbacks.EarlyStopping(patience=9, restore_best=True),
    "History": lambda path: fitflax.History(),
    "JSONLogger": lambda path: callbacks.JSONLogger(path / "log.jsonl"),
    "LambdaCallback": lambda path: callbacks.LambdaCallback(notice, every=fitflax.every(steps=2)),
    "LearningRateScheduler": lambda path: callbacks.LearningRateScheduler(_rate),
    "ModelCheckpoint": lambda path: callbacks.ModelCheckpoint(path / "checkpoints", overwrite=True),
    "PreemptionNotice": lambda path: callbacks.PreemptionNotice(path / "stop"),
    "Profiler": lambda path: callbacks.Profiler(path / "profile", steps=(1, 1)),
    "ProgressBar": lambda path: callbacks.ProgressBar(),
    "ReduceLROnPlateau": lambda path: callbacks.ReduceLROnPlateau(patience=9),
    "SummaryLogger": lambda path: callbacks.SummaryLogger(),
    "TensorBoard": lambda path: callbacks.TensorBoard(path / "board", every=fitflax.every(steps=1)),
    "TerminateOnNaN": lambda path: callbacks.TerminateOnNaN(),
    "Watchdog": lambda path: callbacks.Watchdog(),
}


def _rate(epoch):
    return 0.1 / (1 + epoch)


def state_of(callback):
    """Returns the state of a callback as plain lists and numbers."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist() if hasattr(leaf, "dtype") else leaf, callback.state_dict())


def fit(callback, **options):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=0.1)
    trainer.fit(X, Y, **{"batch_size": 4, "epochs": 2, "validation_data": (X, Y), "callbacks": [callback], "verbose": 0, **options})
    return trainer


def test_every_built_in_callback_is_covered():
    shipped = {name for name in callbacks.__all__ if isinstance(getattr(callbacks, name), type) and issubclass(getattr(callbacks, name), Callback)}
    assert {name.split("(")[0] for name in MAKE} == shipped - {"Callback"} | {"History"}


@pytest.mark.parametrize("name", MAKE)
def test_its_hooks_have_the_arguments_of_the_base_class(name, tmp_path):
    callback = MAKE[name](tmp_path)
    for hook in HOOKS:
        if overrides(callback, hook) and hook not in vars(callback):
            own, base = (inspect.signature(getattr(cls, hook)) for cls in (type(callback), Callback))
            assert list(own.parameters) == list(base.parameters), hook
    assert isinstance(callback.phase, Phase)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", MAKE)
def test_a_second_run_with_the_same_instance_ends_with_the_same_state(name, tmp_path, capsys):
    callback = MAKE[name](tmp_path)
    states = []
    for _ in range(2):
        fit(callback)
        states.append(copy.deepcopy(state_of(callback)))
    assert not differences(*states)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", MAKE)
def test_it_can_be_pickled_before_and_after_a_run(name, tmp_path, capsys):
    callback = MAKE[name](tmp_path)
    before = pickle.loads(pickle.dumps(callback))
    assert type(before) is type(callback) and repr(before.every) == repr(callback.every)
    fit(before)
    after = pickle.loads(pickle.dumps(before))
    assert not hasattr(after, "trainer") and not differences(state_of(after), state_of(before))
    fit(after)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", MAKE)
def test_its_state_can_be_saved_to_a_file_and_loaded_into_another_instance(name, tmp_path, capsys):
    callback = MAKE[name](tmp_path)
    trainer = fit(callback)
    state = callback.state_dict()
    (tmp_path / "state").mkdir()
    write_checkpoint(tmp_path / "state", train={"step": np.int32(0)}, run={"state": state}, metadata={})
    saved = read_checkpoint(tmp_path / "state").run["state"] if state else {}
    other = MAKE[name](tmp_path)
    other.trainer, other.params = trainer, {}
    if state:
        other.load_state_dict(saved)
        assert not differences(state_of(other), state_of(callback))


def test_the_phases_of_callbacks_are_as_documented(tmp_path):
    phases = {name: make(tmp_path).phase for name, make in MAKE.items()}
    assert phases["LearningRateScheduler"] == Phase.CHANGE and phases["LambdaCallback"] == Phase.USER
    assert {name for name, phase in phases.items() if phase == Phase.DECIDE} == {
        *("EarlyStopping", "EarlyStopping(restore_best)", "PreemptionNotice", "ReduceLROnPlateau", "TerminateOnNaN"),
    }
    assert phases["BestCheckpoint"] == Phase.SAVE_BEST and phases["ModelCheckpoint"] == Phase.SAVE == max(phases.values())


def test_an_attribute_error_inside_a_property_is_not_hidden():
    class Broken(Callback):
        @property
        def monitor(self):
            return None.key

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'key'"):
        Broken().monitor  # noqa: B018 (reading it is what fails)
    assert not hasattr(Callback(), "anything") and copy.copy(Broken()).params == {}


def test_a_hook_that_does_not_accept_its_arguments_is_an_error_before_the_first_step():
    class Short(Callback):
        def on_epoch_end(self, epoch):
            """Takes too few arguments."""

    with pytest.raises(CallbackError, match=r"Short\.on_epoch_end must accept the arguments \(epoch, logs\): too many positional arguments"):
        CallbackList([Short()])


def test_a_hook_whose_signature_cannot_be_inspected_is_accepted():
    class Iterating(Callback):
        on_train_end = staticmethod(iter)  # Python cannot inspect its signature.

    assert CallbackList([Iterating()]).has_hook("on_train_end")


def test_callbacks_that_share_a_key_are_an_error_when_their_state_is_saved(tmp_path):
    class Counting(Callback):
        count = 0

        def on_epoch_end(self, epoch, logs):
            self.count += 1

        def state_dict(self):
            return {"count": self.count} if self.count else {}

    trainer = make_trainer(model=nn.Dense(10))
    saving = callbacks.ModelCheckpoint(tmp_path)
    with pytest.raises(CallbackError, match=r"Two callbacks have the same key in checkpoints: 'Counting"):
        trainer.fit(*TRAIN, callbacks=[Counting(), Counting(), saving], verbose=0)
