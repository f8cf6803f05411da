"""From a saved state back to a live one: before and after build and compile, weights alone, and into models that it does not fit."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FitflaxWarning, NotReadyError, RestoreError
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
def test_a_restored_state_is_the_saved_one_in_any_order_of_calls(order, saved):
    path, state, values, later = saved
    trainer = bare()
    ORDERS[order](trainer, path)
    assert trainer.step == 7
    assert not differences(state_of(trainer), state)
    assert trainer.evaluate(VALID, verbose=0) == values
    train(trainer, 2)
    # A trainer that has trained goes on with another pass over the data: the order of examples is not part of a state.
    assert bool(differences(state_of(trainer), later)) == ("train" in order)


def test_a_restored_state_predicts_without_compile(saved):
    path, *_ = saved
    expected = compiled(bare())
    expected.restore(path)
    trainer = bare()
    trainer.restore(path)
    assert np.array_equal(trainer.predict(VALID[0]), expected.predict(VALID[0]))


@pytest.mark.slow
def test_weights_only_takes_parameters_and_collections_and_begins_afresh(saved):
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


def test_a_state_of_step_0_restores(tmp_path):
    """Case 28."""
    trainer = build(make_trainer())
    trainer.save(tmp_path / "state")
    again = make_trainer(seed=5)
    again.restore(tmp_path / "state")
    assert again.step == 0 and not differences(state_of(again), state_of(trainer))


class Other(nn.Module):
    """Lacks a layer of `Network`, has one more, and one of another width."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(6)(x))
        return nn.Dense(3, name="head")(x)


def test_another_model_is_one_error_that_lists_all_differences(saved):
    """Case 28."""
    path, *_ = saved
    trainer = build(compiled(bare(Other())))
    before = state_of(trainer)
    with pytest.raises(RestoreError) as caught:
        trainer.restore(path, weights_only=True)
    message = str(caught.value)
    assert str(path) in message
    for name in ("params/head/kernel", "params/head/bias", "params/norm/scale", "batch_stats/norm/mean"):
        assert name in message.split("unexpected")[0], name
    for name in ("params/Dense_1/kernel", "params/BatchNorm_0/scale", "batch_stats/BatchNorm_0/var"):
        assert name in message.split("unexpected")[1], name
    assert "params/Dense_0/kernel is (4, 8) on disk but (4, 6) here" in message
    assert not differences(state_of(trainer), before)


def test_another_optimizer_is_an_error_that_says_so(saved):
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


def test_a_model_that_a_bare_restore_does_not_fit_is_found_before_training(saved):
    path, *_ = saved
    trainer = bare(Other())
    trainer.restore(path)
    with pytest.raises((RestoreError, fitflax.errors.ModelError, CheckpointError)):
        compiled(trainer, "adam")
        train(trainer, 1)
    assert trainer.step == 7


def test_a_directory_of_checkpoints_gives_its_newest_good_one(tmp_path):
    trainer = make_trainer()
    trainer.fit(TRAIN, batch_size=4, epochs=2, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    again = make_trainer()
    again.restore(tmp_path)
    assert again.step == 10 and not differences(state_of(again), state_of(trainer))
    (tmp_path / "step_00000010/state.msgpack").write_bytes(b"")
    with pytest.warns(FitflaxWarning, match="newer checkpoints cannot be read"):
        again.restore(tmp_path)
    assert again.step == 5


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_else(tmp_path):
    trainer = build(make_trainer())
    trainer.save(tmp_path / "state")
    train(trainer, 1)
    trainer.save(tmp_path / "state")
    again = make_trainer()
    again.restore(tmp_path / "state")
    assert again.step == 1 and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    trainer = build(make_trainer())
    trainer.save(tmp_path / "state")
    train(trainer, 1)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fitflax.checkpoints.directories, "write_checkpoint", full)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.save(tmp_path / "state")
    again = make_trainer()
    again.restore(tmp_path / "state")
    assert again.step == 0 and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_something_else_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        build(make_trainer()).save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["state.msgpack", "metadata.json"])
def test_every_damage_is_noticed_and_the_state_is_as_it_was(name, tmp_path):
    trainer = build(make_trainer(model=nn.Dense(3), optimizer="sgd"))
    trainer.save(tmp_path / "state")
    file = tmp_path / "state" / name
    good = file.read_bytes()
    again = build(make_trainer(model=nn.Dense(3), optimizer="sgd", seed=3))
    before = state_of(again)
    for place in range(0, len(good), 7):
        for bad in (good[:place], good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :]):
            file.write_bytes(bad)
            with pytest.raises(CorruptCheckpointError):
                again.restore(tmp_path / "state")
    assert not differences(state_of(again), before)


def test_errors_name_what_to_do(tmp_path):
    with pytest.raises(NotReadyError, match="build"):
        make_trainer().save(tmp_path / "state")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        make_trainer().restore(tmp_path / "nowhere")


def test_a_restored_trainer_goes_on_in_the_directory_that_it_came_from(tmp_path):
    trainer = make_trainer()
    trainer.fit(TRAIN, batch_size=4, steps=5, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    again = make_trainer()
    again.restore(tmp_path)
    again.fit(TRAIN, batch_size=4, steps=5, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    assert fitflax.checkpoints.CheckpointStore(tmp_path).steps() == [5, 10]
