"""Restoring a saved state: before and after build and compile, weights only, and into models that it does not fit."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FitflaxWarning, NotReadyError, RestoreError
from fitflax.loops import session_state
from fitflax.parallel import DataParallel
from tests.run_script import TRAIN, VALID, Network, differences, make_trainer, state_of


def bare(model: nn.Module | None = None) -> fitflax.Trainer:
    return fitflax.Trainer(Network() if model is None else model, parallel=DataParallel(jax.devices()[:1]))


def compiled(trainer: fitflax.Trainer, optimizer: Any = "adam") -> fitflax.Trainer:
    trainer.compile(optimizer, "sparse_categorical_crossentropy", ["accuracy"], **({"learning_rate": 0.05} if isinstance(optimizer, str) else {}))
    return trainer


def train(trainer: fitflax.Trainer, steps: int) -> None:
    trainer.fit(TRAIN, batch_size=4, steps=steps, verbose=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Any, dict[str, Any], dict[str, float], dict[str, Any]]:
    """`(path, state, evaluation, state two steps later)` of a trainer at step 7."""
    trainer = make_trainer()
    train(trainer, 7)
    path = trainer.save(tmp_path_factory.mktemp("saved") / "final")
    state, values = state_of(trainer), trainer.evaluate(VALID, verbose=0)
    other = compiled(bare())
    other.restore(path)
    train(other, 2)
    return path, state, values, state_of(other)


def build(trainer: fitflax.Trainer) -> fitflax.Trainer:
    trainer.build((TRAIN[0][:4], TRAIN[1][:4]))
    return trainer


ORDERS = {
    "compile, restore": lambda trainer, path: (compiled(trainer), trainer.restore(path)),
    "compile, build, restore": lambda trainer, path: (build(compiled(trainer)), trainer.restore(path)),
    "restore, compile": lambda trainer, path: (trainer.restore(path), compiled(trainer)),
    "restore twice, compile": lambda trainer, path: (trainer.restore(path), trainer.restore(path), compiled(trainer)),
    "compile, train, restore": lambda trainer, path: (compiled(trainer), train(trainer, 2), trainer.restore(path)),
    "restore, compile, restore": lambda trainer, path: (trainer.restore(path), compiled(trainer), trainer.restore(path)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.slow
def test_a_restored_state_equals_the_saved_one_for_any_order_of_calls(order, saved):
    path, state, values, later = saved
    trainer = bare()
    ORDERS[order](trainer, path)
    assert trainer.step == 7
    assert not differences(state_of(trainer), state)
    assert trainer.evaluate(VALID, verbose=0) == values
    train(trainer, 2)
    # A trainer that has been trained continues with another pass over the data: the order of examples is not part of a state.
    assert bool(differences(state_of(trainer), later)) == ("train" in order)


@pytest.mark.slow
def test_a_restored_trainer_predicts_without_compile(saved):
    path, *_ = saved
    expected = compiled(bare())
    expected.restore(path)
    trainer = bare()
    trainer.restore(path)
    assert np.array_equal(trainer.predict(VALID[0]), expected.predict(VALID[0]))


@pytest.mark.slow
def test_weights_only_restores_parameters_and_collections_and_starts_at_step_0(saved):
    path, state, values, _ = saved
    for prepare in (bare, lambda: compiled(bare()), lambda: build(compiled(bare()))):
        trainer = prepare()
        trainer.restore(path, weights_only=True)
        compiled(trainer, optax.sgd(0.1))
        restored = state_of(trainer)
        assert trainer.step == 0 and restored[".step"] == state_of(build(compiled(bare())))[".step"]
        names = [name for name in state if name.startswith((".params", ".model_state"))]
        assert {name: restored[name] for name in names} == {name: state[name] for name in names}
        assert trainer.evaluate(VALID, verbose=0) == values
        train(trainer, 1)


def test_a_state_of_step_0_is_restored(tmp_path):
    """Case 28."""
    trainer = build(make_trainer())
    trainer.save(tmp_path / "state")
    other = make_trainer(seed=5)
    other.restore(tmp_path / "state")
    assert other.step == 0 and not differences(state_of(other), state_of(trainer))


class Other(nn.Module):
    """Lacks a layer of `Network`, has an extra one, and one of another width."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(6)(x))
        return nn.Dense(3, name="head")(x)


def test_restoring_another_model_is_one_error_with_all_kinds_of_differences(saved):
    """Case 28."""
    path, *_ = saved
    trainer = build(compiled(bare(Other())))
    before = state_of(trainer)
    with pytest.raises(RestoreError) as caught:
        trainer.restore(path, weights_only=True)
    message = str(caught.value)
    assert str(path) in message
    assert "Missing: batch_stats/norm/mean, batch_stats/norm/var, params/head/bias, and 3 more." in message
    assert "Unexpected: batch_stats/BatchNorm_0/mean, batch_stats/BatchNorm_0/var, params/BatchNorm_0/bias, and 3 more." in message
    assert "params/Dense_0/kernel has shape (4, 8), expected (4, 6)" in message
    assert not differences(state_of(trainer), before)


def test_another_optimizer_is_an_error_that_names_the_optimizer_state(saved):
    path, *_ = saved
    trainer = compiled(bare(), optax.sgd(0.1, momentum=0.9))
    with pytest.raises(RestoreError, match="opt_state"):
        trainer.restore(path)
    late = bare()
    late.restore(path)
    with pytest.raises(RestoreError, match="opt_state"):
        compiled(late, optax.sgd(0.1, momentum=0.9))
    compiled(late)
    assert not differences(state_of(late), saved[1])


def test_the_optimizer_state_of_a_restore_before_compile_is_kept_if_compile_fails(saved, monkeypatch):
    def fails_to_start(params: Any) -> Any:
        raise MemoryError

    path, state, *_ = saved
    trainer = bare()
    trainer.restore(path)
    with monkeypatch.context() as patch:
        patch.setattr(session_state, "start_average", fails_to_start)
        with pytest.raises(MemoryError):
            trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], learning_rate=0.05, ema_decay=0.9)
    assert trainer._session.state.live.borrow().opt_state == ()  # The devices have no room for a second one.
    compiled(trainer)
    assert not differences(state_of(trainer), state)


def test_a_model_that_does_not_fit_a_restore_before_compile_is_an_error_before_training(saved):
    path, *_ = saved
    trainer = bare(Other())
    trainer.restore(path)
    with pytest.raises((RestoreError, fitflax.errors.ModelError, CheckpointError)):
        compiled(trainer, "adam")
        train(trainer, 1)
    assert trainer.step == 7


def test_restoring_a_directory_of_checkpoints_uses_its_newest_intact_one(tmp_path):
    trainer = make_trainer()
    trainer.fit(TRAIN, batch_size=4, epochs=2, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    other = make_trainer()
    other.restore(tmp_path)
    assert other.step == 10 and not differences(state_of(other), state_of(trainer))
    (tmp_path / "step_00000010/state.msgpack").write_bytes(b"")
    with pytest.warns(FitflaxWarning, match="newer checkpoints cannot be read"):
        other.restore(tmp_path)
    assert other.step == 5


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_else(tmp_path):
    trainer = build(make_trainer())
    trainer.save(tmp_path / "state")
    train(trainer, 1)
    trainer.save(tmp_path / "state")
    other = make_trainer()
    other.restore(tmp_path / "state")
    assert other.step == 1 and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_failed_save_leaves_the_existing_checkpoint(tmp_path, monkeypatch):
    trainer = build(make_trainer())
    trainer.save(tmp_path / "state")
    train(trainer, 1)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fitflax.checkpoints.save, "write_checkpoint", full)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.save(tmp_path / "state")
    other = make_trainer()
    other.restore(tmp_path / "state")
    assert other.step == 0 and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        build(make_trainer()).save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["state.msgpack", "metadata.json"])
def test_any_damage_is_detected_and_the_state_stays_unchanged(name, tmp_path):
    trainer = build(make_trainer(model=nn.Dense(3), optimizer="sgd"))
    trainer.save(tmp_path / "state")
    file = tmp_path / "state" / name
    good = file.read_bytes()
    other = build(make_trainer(model=nn.Dense(3), optimizer="sgd", seed=3))
    before = state_of(other)
    for position in range(0, len(good), 7):
        for bad in (good[:position], good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :]):
            file.write_bytes(bad)
            with pytest.raises(CorruptCheckpointError):
                other.restore(tmp_path / "state")
    assert not differences(state_of(other), before)


def test_errors_say_what_is_missing(tmp_path):
    with pytest.raises(NotReadyError, match="build"):
        make_trainer().save(tmp_path / "state")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        make_trainer().restore(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_restored_trainer_continues_in_the_directory_that_it_was_restored_from(tmp_path):
    trainer = make_trainer()
    trainer.fit(TRAIN, batch_size=4, steps=5, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    other = make_trainer()
    other.restore(tmp_path)
    other.fit(TRAIN, batch_size=4, steps=5, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    assert fitflax.checkpoints.CheckpointStore(tmp_path).steps() == [5, 10]
