"""Steps without jit: what users see, and that they compute what compiled steps compute. JAX's options that find NaN use the same path."""

import bdb
import contextlib
import dataclasses
import subprocess
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
import fitflax.losses as losses
import fitflax.metrics as metrics
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore
from fitflax.errors import ConfigError, FitflaxError, LossError, ModelError
from fitflax.parallel import DataParallel, Sharded

X = np.random.default_rng(0).normal(size=(22, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 22).astype(np.int32)


class Net(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(x)
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


def one_device() -> DataParallel:
    return DataParallel(jax.devices()[:1])


def make(model: nn.Module | None = None, parallel: Any = None, cls: type[fitflax.Trainer] = fitflax.Trainer, loss: Any = None, **options: Any) -> Any:
    trainer = cls(model or Net(), parallel=parallel or one_device())
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "metrics": ["accuracy"], **options}
    trainer.compile(loss=loss or "sparse_categorical_crossentropy", **options)
    return trainer


def train(trainer: fitflax.Trainer, **options: Any) -> dict[str, Any]:
    options = {"batch_size": 4, "epochs": 2, "verbose": 0, **options}
    return trainer.fit(X, Y, validation_data=(X[:6], Y[:6]), **options).history


def assert_close_states(one: fitflax.Trainer, other: fitflax.Trainer) -> None:
    for a, b in zip(
        jax.tree.leaves((one.state.params, one.state.model_state, one.state.opt_state)),
        jax.tree.leaves((other.state.params, other.state.model_state, other.state.opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


# -- the same numbers --


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_steps": 2, "weighted_metrics": ["accuracy"]},
        {"steps_per_call": "auto", "ema_decay": 0.9},
        {"precision": "bfloat16"},
        {"metrics": ["auc", metrics.SampleCollector(4)]},
    ],
    ids=["plain", "accumulated", "auto", "bfloat16", "rows"],
)
def test_eager_steps_compute_what_compiled_ones_do(options):
    compiled, eager = make(**options), make(run_eagerly=True, **options)
    want, found = train(compiled), train(eager)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if "precision" in options else {"rtol": 1e-4, "atol": 1e-5}
    assert list(want) == list(found)
    for key in want:
        np.testing.assert_allclose(found[key], want[key], **tolerance, err_msg=key)
    if "precision" not in options:
        assert_close_states(compiled, eager)
        np.testing.assert_allclose(eager.predict(X), compiled.predict(X), rtol=1e-4, atol=1e-4)
        assert eager.train_on_batch((X[:4], Y[:4])).keys() == compiled.train_on_batch((X[:4], Y[:4])).keys()
        np.testing.assert_allclose(eager.predict_on_batch(X[:3]), compiled.predict_on_batch(X[:3]), rtol=1e-4, atol=1e-4)
        assert eager.test_on_batch((X[:4], Y[:4]))["loss"] == pytest.approx(compiled.test_on_batch((X[:4], Y[:4]))["loss"], abs=1e-4)


@pytest.mark.slow
def test_disable_jit_around_a_call_does_what_run_eagerly_does():
    inside, eager = make(), make(run_eagerly=True)
    with jax.disable_jit():
        found = train(inside)
    assert found == train(eager)
    train(inside)  # Compiled steps continue from this state.


def test_an_evaluation_loop_can_be_called_with_and_without_jit():
    trainer = make(nn.Dense(3))
    evaluate = trainer.eval_loop((X, Y), batch_size=4)
    checkpoint = trainer.train_loop(X, Y, batch_size=4, steps=1).next_step()
    with jax.disable_jit():
        eager = evaluate(checkpoint).metrics["eval"]["loss"]
    assert np.isclose(evaluate(checkpoint).metrics["eval"]["loss"], eager)


def test_a_trainer_that_could_not_be_traced_can_be_trained_without_jit():
    def loss(outputs, targets):
        assert outputs.max() < 1e9  # Requires concrete values.
        return (outputs[:, 0] - targets) ** 2

    trainer = make(nn.Dense(1), loss=loss, optimizer=optax.sgd(0.01), metrics=[])
    with pytest.raises(LossError):
        trainer.fit(X, Y, batch_size=22, verbose=0)
    with jax.disable_jit():
        assert np.isfinite(trainer.fit(X, Y, batch_size=22, verbose=0).history["loss"]).all()


@pytest.mark.slow
def test_eager_steps_compile_no_step(compilations):
    trainer = make(run_eagerly=True)
    train(trainer)
    trainer.predict(X)
    assert not [name for name in compilations.names if "step" in name or "init_state" in name or "metrics_of" in name or "shard_map" in name]


class Constant(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.variable("constants", "scale", lambda: jnp.ones(3))
        return nn.Dense(3)(x) * scale.value


@pytest.mark.slow
def test_what_eager_steps_return_shares_no_buffers():
    trainer = make(Constant(), run_eagerly=True)
    train(trainer, epochs=1)
    before = trainer.state
    trainer.train_on_batch((X[:4], Y[:4]))  # It leaves the constant as it is.
    trainer.compile(optax.sgd(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    train(trainer, epochs=1)  # Compiled steps donate the state's buffers.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((before.params, before.model_state)))


@pytest.mark.slow
def test_without_jit_every_step_is_a_separate_call():
    batches: list[int] = []
    trainer = make(run_eagerly=True, steps_per_call=4)
    train(trainer, epochs=1, callbacks=[LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))])
    assert batches == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("first_is_eager", [True, False])
def test_a_run_resumes_in_the_other_mode(tmp_path, first_is_eager):
    uninterrupted = make(steps_per_call=2)
    want = train(uninterrupted)
    options = {"callbacks": [ModelCheckpoint(tmp_path, every=fitflax.every(steps=3))], "resume": "auto", "steps": 8}
    train(make(run_eagerly=first_is_eager, steps_per_call=2), **options)
    assert CheckpointStore(tmp_path).latest() == 8
    trainer = make(run_eagerly=not first_is_eager, steps_per_call=2)
    found = train(trainer, **{**options, "steps": None, "callbacks": [ModelCheckpoint(tmp_path, every=fitflax.every(steps=3))]})
    for key in want:
        np.testing.assert_allclose(found[key], want[key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert_close_states(uninterrupted, trainer)


@pytest.mark.slow
def test_a_subclass_runs_eagerly():
    class Halves(fitflax.Trainer):
        def train_step(self, state, batch):
            count = self.sum_replicas(batch.mask.sum())

            def loss(params):
                variables = {"params": params, **state.model_state}
                logits, changed = self.model.apply(variables, batch.x, train=True, rngs=self.step_rngs(state), mutable=["batch_stats"])
                values = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y) * batch.mask
                return values.sum() / count, (values, changed)

            grads, (values, changed) = jax.grad(loss, has_aux=True)(state.params)
            grads = jax.tree.map(lambda grad: 0.5 * grad, self.sum_replicas(grads))
            return state.apply_gradient(grads, self.optimizer, changed), {"loss": (values.sum(), batch.mask.sum())}

    class CustomLoss(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            values, changed, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
            return 2 * values, changed, {**aux, "twice": values}

    for kind in (Halves, CustomLoss):
        want = train(make(cls=kind), batch_size=8, epochs=1)["loss"]
        np.testing.assert_allclose(train(make(cls=kind, run_eagerly=True), batch_size=8, epochs=1)["loss"], want, rtol=1e-4)
        # With several devices, the first one does all the work.
        with jax.disable_jit():
            np.testing.assert_allclose(train(make(cls=kind, parallel=DataParallel()), batch_size=8, epochs=1)["loss"], want, rtol=1e-4)


@pytest.mark.parametrize("parallel", [DataParallel, lambda: Sharded({"data": -1})], ids=["replicas", "mesh"])
def test_run_eagerly_requires_a_single_device(parallel):
    message = r"run_eagerly=True\) requires a trainer on a single device\. Received: a trainer on 8 devices\."
    with pytest.raises(ConfigError, match=message):
        make(parallel=parallel(), run_eagerly=True)
    make(parallel=parallel(), run_eagerly=False)


@pytest.mark.slow
def test_the_first_of_several_devices_does_all_the_work_as_one_replica():
    spread, alone = make(parallel=DataParallel()), make()
    want, outputs = train(alone, batch_size=8)["loss"], alone.predict(X)
    with jax.disable_jit():
        assert train(spread, batch_size=8)["loss"] == pytest.approx(want, abs=1e-5)
        assert_close_states(spread, alone)
        assert all(leaf.sharding.num_devices == 8 for leaf in jax.tree.leaves(spread.state.params))
        np.testing.assert_allclose(spread.predict(X), outputs, rtol=1e-4, atol=1e-5)
    train(spread, batch_size=8)  # Eight compiled replicas continue from it.


@pytest.mark.slow
def test_a_module_that_uses_the_axis_name_runs_eagerly():
    compiled, eager = make(Net("replica")), make(Net("replica"), run_eagerly=True)
    np.testing.assert_allclose(train(eager, epochs=1)["val_loss"], train(compiled, epochs=1)["val_loss"], rtol=1e-4)
    wrong = make(Net("batch"), run_eagerly=True)
    with pytest.raises(ModelError, match="unbound axis name: batch"):
        train(wrong)


@pytest.mark.slow
def test_a_mesh_runs_eagerly_on_all_its_devices():
    class Logical(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(8, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))(x)
            x = nn.with_logical_constraint(nn.relu(x), ("batch", "mlp"))
            return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(x))

    def mesh() -> Sharded:
        return Sharded({"data": 2, "model": 2}, rules=[("mlp", "model"), ("embed", None)], devices=jax.devices()[:4])

    compiled, eager = make(Logical(), mesh(), accumulate_steps=2), make(Logical(), mesh(), accumulate_steps=2)
    with jax.disable_jit():
        found = train(eager, epochs=1)["loss"]
    np.testing.assert_allclose(found, train(compiled, epochs=1)["loss"], rtol=1e-4)
    assert_close_states(compiled, eager)
    assert eager.state.params["Dense_0"]["kernel"].sharding == compiled.state.params["Dense_0"]["kernel"].sharding


@pytest.mark.slow
def test_a_memory_summary_requires_a_compiled_step():
    with pytest.raises(ConfigError, match=r"needs a compiled step\. Remove what disables jit"):
        make(run_eagerly=True).summary((X[:4], Y[:4]), memory=True)


# -- what users see --


def test_user_code_sees_concrete_numbers_everywhere():
    seen: dict[str, list[Any]] = {"module": [], "loss": [], "metric": [], "compute_loss": []}

    class Branching(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen["module"].append(float(x.sum()))
            hidden = nn.Dense(4)(x)
            if hidden.sum() > 0:  # This fails on a traced value.
                hidden = -hidden
            return nn.Dense(3)(hidden)

    def loss(outputs, targets):
        seen["loss"].append(float(targets.sum()))
        if (outputs > 1e6).any():
            raise ValueError("too large")
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)

    def metric(outputs, targets):
        seen["metric"].append(np.asarray(outputs).shape)
        return (outputs.argmax(-1) == targets).astype(jnp.float32)

    class CustomLoss(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            seen["compute_loss"].append((train, int(batch.y.sum()), float(jnp.asarray(batch.mask).sum())))
            return super().compute_loss(params, model_state, batch, rngs=rngs, train=train)

    trainer = make(Branching(), cls=CustomLoss, loss=loss, metrics=[metric], run_eagerly=True)
    trainer.fit(X[:8], Y[:8], batch_size=4, epochs=1, shuffle=False, validation_data=(X[:3], Y[:3]), verbose=0)
    sums = [X[:4].sum(), X[4:8].sum()]
    validated = X[[0, 1, 2, 0]].sum()  # A short batch is padded with its own rows.
    # Initialization, on zeros; the dry run of training and of evaluation; the steps; the validation.
    np.testing.assert_allclose(seen["module"], [0, sums[0], validated, *sums, validated], rtol=1e-4, atol=1e-5)
    assert seen["metric"] == [(4, 3)] * 5
    assert [entry[0] for entry in seen["compute_loss"]] == [True, False, True, True, False]
    assert seen["loss"][2:4] == [Y[:4].sum(), Y[4:8].sum()]


def test_breakpoints_stop_where_they_are_set(monkeypatch):
    stops = []

    def stop(*args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        stops.append((frame.f_code.co_name, {name: value for name, value in frame.f_locals.items() if name in ("x", "targets")}))

    monkeypatch.setattr(sys, "breakpointhook", stop)

    class Stopping(nn.Module):
        @nn.compact
        def __call__(self, x):
            breakpoint()
            return nn.Dense(3)(x)

    def loss(outputs, targets):
        breakpoint()
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)

    trainer = make(Stopping(), loss=loss, metrics=None, run_eagerly=True)
    trainer.fit(X[:4], Y[:4], batch_size=4, shuffle=False, verbose=0)
    assert [name for name, _ in stops] == ["__call__", "__call__", "loss", "__call__", "loss"]
    np.testing.assert_array_equal(stops[3][1]["x"], X[:4])
    np.testing.assert_array_equal(stops[4][1]["targets"], Y[:4])


PDB = """
import jax, numpy as np, optax
from flax import linen as nn
import fitflax
from fitflax.parallel import DataParallel

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        if x.any():
            breakpoint()
        doubled = 2 * x
        return nn.Dense(1)(doubled)

trainer = fitflax.Trainer(Net(), parallel=DataParallel(jax.devices()[:1]))
trainer.compile("sgd", "mse", run_eagerly=True)
for _ in range(2):
    trainer.fit(np.ones((2, 2), np.float32), np.ones((2, 1), np.float32), verbose=0)
    print("trained")
"""


@pytest.mark.slow
def test_a_debugger_steps_line_by_line_and_can_be_quit(tmp_path, process_env):
    script = tmp_path / "debugged.py"
    script.write_text(PDB)
    commands = "n\np 'doubled', doubled.sum().item()\nc\nn\np 'again', doubled.sum().item()\nc\nq\n"
    done = subprocess.run([sys.executable, str(script)], input=commands, capture_output=True, text=True, env=process_env, timeout=120)
    assert "('doubled', 8.0)" in done.stdout and "('again', 8.0)" in done.stdout and done.stdout.count("trained") == 1, done
    assert done.returncode == 1 and "bdb.BdbQuit" in done.stderr and "ModelError" not in done.stderr, done


# -- NaN and infinities --


@contextlib.contextmanager
def option(name: str, value: Any):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


class Bad(nn.Module):
    """Computes NaN in its forward pass, in its backward pass, or not at all."""

    where: str

    @nn.compact
    def __call__(self, x):
        moved = self.param("moved", nn.initializers.zeros, ())
        x = nn.Dense(3)(x) + moved
        if self.where == "module":
            x = x + jnp.log(moved - 1)  # the line of the module
        if self.where == "backward":
            x = x + jnp.sqrt(moved * 0)  # the line of the module
        return x


def bad_loss(outputs, targets):
    return jnp.log(-(outputs[:, 0] ** 2) - 1)  # the line of the loss


def bad_metric(outputs, targets):
    return jnp.log(-(outputs[:, 0] ** 2) - 1)  # the line of the metric


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("where", "devices"),
    [*((where, 1) for where in ("module", "backward", "loss", "metric")), ("backward", 8), ("metric", 8), ("backward", "mesh"), ("metric", "mesh")],
)
def test_debug_nans_raises_at_the_users_line(where, devices):
    parallel = Sharded({"data": 2}, devices=jax.devices()[:2]) if devices == "mesh" else DataParallel(jax.devices()[:devices])
    loss = bad_loss if where == "loss" else "sparse_categorical_crossentropy"
    trainer = make(Bad(where), parallel, loss=loss, metrics=[bad_metric] if where == "metric" else None)
    with option("jax_debug_nans", True), pytest.raises(FloatingPointError, match="nan") as caught:
        trainer.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    text = "".join(traceback.format_exception(caught.value))
    assert f"the line of the {where if where != 'backward' else 'module'}" in text
    assert not isinstance(caught.value, FitflaxError)


def test_a_nan_is_found_after_an_operation_that_disables_the_check_for_itself():
    trainer = make(Bad("module"), metrics=None)
    with option("jax_debug_nans", True):
        jnp.var(jnp.ones(3))
        with pytest.raises(FloatingPointError, match="log"):
            trainer.fit(X, Y, batch_size=4, verbose=0)


def test_debug_infs_raises_at_the_users_line():
    def loss(outputs, targets):
        return outputs[:, 0] + 1 / (0 * targets)  # the line of the loss

    trainer = make(Bad("nowhere"), loss=loss, metrics=None)
    with option("jax_debug_infs", True), pytest.raises(FloatingPointError, match="inf") as caught:
        trainer.fit(X, Y, batch_size=4, verbose=0)
    assert "the line of the loss" in "".join(traceback.format_exception(caught.value))


def test_the_steps_before_a_nan_are_saved(tmp_path):
    x = X.copy()
    x[12:] = np.inf  # The forward pass turns this batch into NaN.
    trainer = make(nn.Dense(3), metrics=None)
    with option("jax_debug_nans", True), pytest.raises(FloatingPointError), pytest.warns(fitflax.errors.FitflaxWarning, match="NaN or infinity"):
        trainer.fit(x, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    assert CheckpointStore(tmp_path).latest() == 3


def test_a_nan_in_evaluation_or_prediction_raises_too():
    broken = make(Bad("module"), metrics=None)
    broken.build((X[:4], Y[:4]))
    with option("jax_debug_nans", True):
        with pytest.raises(FloatingPointError, match="nan"):
            broken.evaluate(X, Y, verbose=0)
        with pytest.raises(FloatingPointError, match="nan"):
            broken.predict(X)


@pytest.mark.slow
def test_a_nan_in_a_custom_update_raises():
    class CustomUpdate(fitflax.Trainer):
        def train_step(self, state, batch):
            state, logs = super().train_step(state, batch)
            return dataclasses.replace(state, params=jax.tree.map(lambda leaf: jnp.log(-jnp.abs(leaf) - 1), state.params)), logs

    with option("jax_debug_nans", True), pytest.raises(FloatingPointError, match="log"):
        train(make(cls=CustomUpdate))


SPARSE = {name for name in losses.names() if "integer" in name or (name.startswith(("sparse_", "multiclass_")) and name != "multiclass_sigmoid")}
BINARY = {name for name in losses.names() if "binary" in name or "sigmoid" in name}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", sorted(losses.names()))
def test_a_healthy_loss_has_no_nan_in_intermediate_results(name):
    """Without jit, every intermediate result is checked."""
    targets: Any = Y % 2 if name in BINARY else Y if name in SPARSE else np.eye(3, dtype=np.float32)[Y]
    outputs = np.clip(X[:, :1] if name in BINARY else X[:, :3], -2, 2)
    targets = targets[:, None].astype(np.float32) if name in BINARY else targets
    with jax.disable_jit(), option("jax_debug_nans", True):
        values = losses.get(name)(outputs, targets)
    assert np.isfinite(values).all()


# The other metrics take targets of the outputs' shape.
OF_CLASSES = {name for name in metrics.names() if any(part in name for part in ("accuracy", "auc", "precision", "recall", "f1", "perplexity"))}
OF_CLASSES = (
    OF_CLASSES - {"binary_accuracy", "categorical_accuracy", "top_k_categorical_accuracy"} | SPARSE | {"acc", "confusion_matrix", "mean_iou", "specificity"}
)


@pytest.mark.slow
@pytest.mark.parametrize("names", [OF_CLASSES, set(metrics.names()) - OF_CLASSES], ids=["of classes", "of arrays"])
def test_a_healthy_metric_has_no_nan_in_intermediate_results(names):
    sparse = names == OF_CLASSES
    trainer = make(nn.Dense(3), metrics=sorted(names), loss="sparse_categorical_crossentropy" if sparse else "mse")
    targets = Y if sparse else np.eye(3, dtype=np.float32)[Y]
    with jax.disable_jit(), option("jax_debug_nans", True):
        history = trainer.fit(X[:10], targets[:10], batch_size=4, validation_data=(X[:6], targets[:6]), verbose=0).history
    assert history.keys() >= names


# -- errors of debugging tools --


@pytest.mark.mostly_slow
@pytest.mark.parametrize("where", ["module", "loss", "metric"])
def test_errors_of_debugging_tools_are_not_wrapped(where):
    class Quits(nn.Module):
        @nn.compact
        def __call__(self, x):
            if where == "module":
                raise bdb.BdbQuit
            return nn.Dense(3)(x)

    def quits(outputs, targets):
        raise bdb.BdbQuit

    loss = quits if where == "loss" else "sparse_categorical_crossentropy"
    for eager in (True, False):
        with pytest.raises(bdb.BdbQuit):
            train(make(Quits(), loss=loss, metrics=[quits] if where == "metric" else None, run_eagerly=eager))


def test_rank_promotion_in_a_custom_loss_raises_jaxs_own_error():
    def loss(outputs, targets):
        return (outputs + targets[None, :1, None])[0, :, 0]

    with option("jax_numpy_rank_promotion", "raise"), pytest.raises(ValueError, match="jax_numpy_rank_promotion") as caught:
        train(make(Bad("nowhere"), loss=loss))
    assert not isinstance(caught.value, FitflaxError)


@pytest.mark.slow
def test_a_reused_key_in_a_custom_loss_raises_jaxs_own_error():
    class CustomLoss(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            values, changed, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
            if train:
                key = jax.random.fold_in(rngs["dropout"], 7)
                values = values + jax.random.normal(key, values.shape) + jax.random.uniform(key, values.shape)
            return values, changed, aux

    with option("jax_debug_key_reuse", True), pytest.raises(jax.errors.KeyReuseError):
        train(make(Bad("nowhere"), cls=CustomLoss))


# -- transfers --


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "steps_per_call"),
    [(one_device, 1), (DataParallel, 4), *((lambda: Sharded({"data": 2, "model": -1}), steps) for steps in (1, 4))],
    ids=["one", "eight, grouped", "mesh", "mesh, grouped"],
)
def test_transfers_of_the_library_are_explicit(parallel, steps_per_call):
    want = train(make(parallel=parallel(), steps_per_call=steps_per_call), batch_size=8)
    with jax.transfer_guard("disallow"):
        trainer = make(parallel=parallel(), steps_per_call=steps_per_call)
        assert train(trainer, batch_size=8) == want
        trainer.predict(X)
        trainer.evaluate(X, Y, verbose=0)
        trainer.train_on_batch((X[:8], Y[:8]))
        trainer.test_on_batch((X[:8], Y[:8]))
        trainer.predict_on_batch(X[:8])


@pytest.mark.slow
def test_the_learning_rate_is_read_and_set_under_a_transfer_guard():
    rates = []
    with jax.transfer_guard("disallow"):
        trainer = make(optimizer="adam")

        def halve(checkpoint: Any) -> None:
            rates.append(trainer.learning_rate)
            trainer.learning_rate = trainer.learning_rate / 2

        train(trainer, callbacks=[LambdaCallback(halve, every=fitflax.every(epochs=1))])
    assert rates == pytest.approx([1e-3, 5e-4])
