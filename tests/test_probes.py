"""Behavior that a reader of the design expected and did not find. Each case was reproduced once."""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, TerminateOnNaN
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import CallbackError, ConfigError, DataError, MetricError, RestoreError
from fitflax.parallel import DataParallel

X = np.linspace(-1, 1, 22 * 4, dtype=np.float32).reshape(22, 4)
Y = np.zeros((22, 3), np.float32)


def make_trainer(kind: type[fitflax.Trainer] = fitflax.Trainer, model: nn.Module | None = None, **options: Any) -> fitflax.Trainer:
    trainer = kind(model or nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", learning_rate=0.01, **options)
    return trainer


def test_elapsed_time_excludes_the_work_of_the_consumer_before_it_is_read():
    loop = make_trainer().train_loop(X, Y, batch_size=5, steps=4, every=fitflax.every(steps=2))
    first = next(loop)
    jax.block_until_ready(first.run.step_values.vector)
    begin = time.monotonic()
    while time.monotonic() - begin < 0.3:
        pass
    second = next(loop)
    assert first.elapsed_time < 0.2
    assert second.elapsed_time < 0.2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_checkpoint"])
@pytest.mark.mostly_slow
def test_any_exception_in_a_hook_leaves_a_checkpoint_of_that_step(tmp_path: pathlib.Path, error: type[BaseException], hook: str):
    trainer = make_trainer()

    def fail(*arguments: Any) -> None:
        if trainer.step == 3:
            raise error

    options = {"fn": fail, "every": fitflax.every(steps=1)} if hook == "on_checkpoint" else {hook: fail}
    with pytest.raises(error):
        trainer.fit(X, Y, batch_size=5, epochs=2, callbacks=[ModelCheckpoint(tmp_path), LambdaCallback(**options)], verbose=0)
    assert CheckpointStore(tmp_path).steps() == [3]


def test_a_store_restores_and_verifies_all_of_its_checkpoints(tmp_path: pathlib.Path):
    make_trainer().fit(X, Y, batch_size=5, epochs=2, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    store = CheckpointStore(tmp_path)
    store.verify()
    assert [store.restore(step).metadata["step"] for step in store.steps()] == store.steps()
    assert store.restore().metadata["step"] == store.latest() == 10


@pytest.mark.slow
def test_a_subclass_can_add_to_the_values_of_the_built_in_loss():
    class Penalized(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
            values, changed, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
            return values + 1.0, changed, aux

    plain, penalized = (make_trainer(kind, metrics=["mae"]).fit(X, Y, verbose=0).history for kind in (fitflax.Trainer, Penalized))
    assert penalized["loss"] == pytest.approx([plain["loss"][0] + 1], rel=1e-6)
    assert penalized["mae"] == plain["mae"]


@pytest.mark.parametrize("callback", [EarlyStopping("loss"), TerminateOnNaN(), fitflax.History()], ids=lambda callback: type(callback).__name__)
def test_calling_a_callback_that_cannot_handle_a_checkpoint_alone_is_an_error(callback: Any):
    (checkpoint,) = make_trainer().train_loop(X, Y, steps=1)
    with pytest.raises(CallbackError, match="cannot be called with a checkpoint"):
        callback(checkpoint)


def test_early_stopping_can_be_driven_manually():
    class Stub:
        reason = ""

        def stop(self, reason: str) -> None:
            self.reason = reason

    early = EarlyStopping("val_loss", patience=1)
    early.trainer = Stub()
    early.on_train_begin({})
    for epoch, loss in enumerate([10, 9, 8, 9]):
        early.on_epoch_end(epoch, {"val_loss": float(loss)})
    assert early.stopped_epoch == 3 and "val_loss" in early.trainer.reason


class Named(nn.Module):
    name_of_layer: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3, name=self.name_of_layer)(x)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("method", ["evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"])
def test_a_state_of_another_model_is_detected_wherever_it_is_first_used(tmp_path: pathlib.Path, method: str):
    saved = make_trainer(model=Named("a"))
    saved.build((X, Y))
    saved.save(tmp_path / "saved")
    other = make_trainer(model=Named("b"))
    other.restore(tmp_path / "saved")
    arguments = {"evaluate": (X, Y), "predict": (X,), "predict_on_batch": (X,)}.get(method, ((X, Y),))
    with pytest.raises(RestoreError, match=r"Missing: params/b/bias, params/b/kernel\. Unexpected: params/a/bias, params/a/kernel"):
        getattr(other, method)(*arguments)


def test_a_tuple_of_three_batches_is_an_error_about_sample_weight():
    batch = (X[:4], Y[:4])
    with pytest.raises(DataError, match="sample_weight must be one array"):
        make_trainer().fit((batch, batch, batch), verbose=0)


def test_a_number_is_not_a_valid_checkpoint_to_resume_from():
    with pytest.raises(ConfigError, match="Received: 5"):
        make_trainer().fit(X, Y, resume=5, verbose=0)


def test_a_metric_that_is_not_a_pytree_is_an_error_that_says_how_to_make_it_one():
    @dataclasses.dataclass
    class Counter:
        n: Any = 0

        def empty(self) -> "Counter":
            return Counter(jnp.float32(0))

        def update(self, outputs: Any, targets: Any, weights: Any) -> "Counter":
            return Counter(self.n + weights.sum())

        def merge(self, other: "Counter") -> "Counter":
            return Counter(self.n + other.n)

        def compute(self) -> Any:
            return self.n

    with pytest.raises(MetricError, match="'counter' must be a pytree"):
        make_trainer(metrics=[Counter()]).fit(X, Y, verbose=0)
