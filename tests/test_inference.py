"""Serving without an optimizer: what is read, what it evaluates and predicts, and what it refuses."""

import dataclasses
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fitflax
from fitflax.checkpoints import load_inference_state
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import CorruptCheckpointError, NotReadyError, OptimizerError, RestoreError
from tests.run_script import TRAIN, VALID, leaves_of, make_trainer


class Other(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(x)


def trained(tmp_path: pathlib.Path, **options) -> tuple[fitflax.Trainer, pathlib.Path]:
    trainer = make_trainer()
    trainer.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], **options)
    trainer.fit(*TRAIN, batch_size=4, epochs=2, verbose=0)
    return trainer, trainer.save(tmp_path / "final")


def damage(path: pathlib.Path, part: str) -> None:
    """Flips a bit in an array of a part of the state, which is found by its bytes."""
    saved, file = load_checkpoint(path), path / "state.msgpack"
    leaf = max(jax.tree.leaves(saved.train[part]), key=lambda leaf: leaf.nbytes)
    data = bytearray(file.read_bytes())
    begin = data.rindex(leaf.tobytes())
    data[begin + 3] ^= 1
    file.write_bytes(data)


def test_the_optimizers_bytes_are_not_read_and_all_others_are_verified(tmp_path):
    trainer, path = trained(tmp_path)
    damage(path, "opt_state")
    with pytest.raises(CorruptCheckpointError, match="train/opt_state"):
        load_checkpoint(path)
    state = load_inference_state(path)
    assert leaves_of(state.variables) == leaves_of(trainer.inference_state().variables) and int(state.step) == 10
    other = make_trainer(seed=5)
    other.restore(path, weights_only=True)
    assert leaves_of(other.state.params) == leaves_of(state.params)


def test_damaged_parameters_are_detected(tmp_path):
    _, path = trained(tmp_path)
    damage(path, "params")
    with pytest.raises(CorruptCheckpointError, match="train/params"):
        load_inference_state(path)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5}], ids=["raw", "averaged"])
@pytest.mark.slow
def test_an_inference_state_evaluates_and_predicts_like_the_trainer_that_saved_it(options, tmp_path):
    trainer, path = trained(tmp_path, **options)
    server = make_trainer(seed=3)
    server.compile("adam", "sparse_categorical_crossentropy", ["accuracy"], **options)
    server.replace_state(load_inference_state(path))
    assert server.evaluate(*VALID, verbose=0) == trainer.evaluate(*VALID, verbose=0)
    np.testing.assert_array_equal(server.predict(VALID[0]), trainer.predict(VALID[0]))
    np.testing.assert_array_equal(server.predict_on_batch(VALID[0]), trainer.predict_on_batch(VALID[0]))
    assert server.step == 10 and not jax.tree.leaves(server.state.opt_state)


def test_averages_of_parameters_in_half_precision_are_served_in_float32(tmp_path):
    x, y = VALID
    trainer, server = (fitflax.Trainer(nn.Dense(3, param_dtype=jnp.bfloat16)) for _ in range(2))
    trainer.compile("adam", "sparse_categorical_crossentropy", ema_decay=0.5)
    trainer.fit(x, y, verbose=0)
    path, loss, outputs = trainer.save(tmp_path / "final"), trainer.evaluate(x, y, verbose=0), trainer.predict(x)
    server.replace_state(load_inference_state(path))  # The module's shapes are not known yet.
    np.testing.assert_array_equal(server.predict(x), outputs)
    trainer.replace_state(trainer.inference_state())
    assert trainer.evaluate(x, y, verbose=0) == loss and trainer.state.params["kernel"].dtype == jnp.float32
    trainer.restore(path)  # Into the module's own dtypes.
    assert trainer.state.params["kernel"].dtype == jnp.bfloat16 and trainer.evaluate(x, y, verbose=0) == loss


@pytest.mark.slow
def test_an_inference_state_predicts_before_compile_which_adds_no_optimizer_state(tmp_path):
    trainer, path = trained(tmp_path)
    server = fitflax.Trainer(trainer.model)
    server.replace_state(load_inference_state(path))
    expected = trainer.predict(VALID[0])
    np.testing.assert_allclose(server.predict(VALID[0]), expected, rtol=1e-6)
    server.compile("sgd", "sparse_categorical_crossentropy")
    assert not jax.tree.leaves(server.state.opt_state)
    assert server.evaluate(*VALID, verbose=0)["loss"] == pytest.approx(trainer.evaluate(*VALID, verbose=0)["loss"], rel=1e-6)


@pytest.mark.slow
def test_training_is_refused_until_there_is_an_optimizer_state(tmp_path):
    trainer, path = trained(tmp_path)
    server = make_trainer()
    server.replace_state(trainer.inference_state())
    refused = "needs the optimizer state, but the trainer has only an InferenceState"
    for train in (
        lambda: server.fit(*TRAIN, verbose=0),
        lambda: server.train_on_batch((TRAIN[0][:4], TRAIN[1][:4])),
        lambda: server.train_loop(*TRAIN, steps=1),
    ):
        with pytest.raises(OptimizerError, match=refused):
            train()
    server.predict(VALID[0])  # Now the state is known to fit, and still has no optimizer state.
    server.restore(path)
    for each in (server, trainer):
        each.fit(*TRAIN, batch_size=4, epochs=1, shuffle=False, verbose=0)
    assert leaves_of(server.state) == leaves_of(trainer.state)


def test_a_state_of_another_module_is_refused(tmp_path):
    trainer, _ = trained(tmp_path)
    server = fitflax.Trainer(Other())
    server.compile("sgd", "mse")
    server.build((TRAIN[0], np.zeros((18, 5), np.float32)))
    before = leaves_of(server.state)
    with pytest.raises(RestoreError, match="The InferenceState"):
        server.replace_state(trainer.inference_state())
    assert leaves_of(server.state) == before
    late = fitflax.Trainer(Other())
    late.replace_state(trainer.inference_state())
    with pytest.raises(RestoreError, match="The InferenceState"):
        late.predict(VALID[0])


def test_a_state_with_a_number_instead_of_an_array_is_refused():
    trainer = make_trainer()
    trainer.build(TRAIN)
    state = trainer.inference_state()
    with pytest.raises(RestoreError, match="is float, expected float32"):
        trainer.replace_state(dataclasses.replace(state, params=jax.tree.map(lambda leaf: 0.5, state.params)))


def test_there_is_no_inference_state_before_there_is_a_state():
    with pytest.raises(NotReadyError, match="inference_state"):
        make_trainer().inference_state()
