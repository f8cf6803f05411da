import dataclasses
import io
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import fitflax
from fitflax.callbacks import Callback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore, load_inference_state
from fitflax.diagnostics import NanReport
from fitflax.errors import ConfigError, FitflaxWarning, LossError, ModelError, ShardingError
from fitflax.parallel import DataParallel, Sharded, sharded
from fitflax.parallel.placement import copy_to_host_memory

Devices = Callable[[int], list[jax.Device]]
VOCABULARY, LENGTH = 32, 8
RNG = np.random.default_rng(5)
X = RNG.integers(0, VOCABULARY, (96, LENGTH)).astype(np.int32)
Y = ((X + np.roll(X, 1, axis=1)) % VOCABULARY).astype(np.int32)
RULES = [("embed", None), ("mlp", "model"), ("heads", "model"), ("vocab", "model"), ("kv", None), ("length", None)]


def named(*axes: str) -> Any:
    return nn.with_logical_partitioning(nn.initializers.normal(0.1) if len(axes) > 1 else nn.initializers.zeros, axes)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        q, k, v = (nn.DenseGeneral((4, 4), kernel_init=named("embed", "heads", "kv"), bias_init=named("heads", "kv"), name=name)(y) for name in "qkv")
        q = nn.with_logical_constraint(q, ("batch", "length", "heads", "kv"))
        y = nn.dot_product_attention(q, k, v)
        x = x + nn.DenseGeneral(16, axis=(-2, -1), kernel_init=named("heads", "kv", "embed"), use_bias=False, name="out")(y)
        y = nn.gelu(nn.Dense(64, kernel_init=named("embed", "mlp"), bias_init=named("mlp"))(nn.LayerNorm()(x)))
        y = nn.with_logical_constraint(y, ("batch", "length", "mlp"))
        y = nn.Dropout(0.1, deterministic=not train)(y)
        return x + nn.Dense(16, kernel_init=named("mlp", "embed"), use_bias=False)(y)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, codes: Any, train: bool) -> Any:
        x = nn.Embed(VOCABULARY, 16, embedding_init=named("vocab", "embed"))(codes)
        x = Block()(x, train)
        return nn.Dense(VOCABULARY, kernel_init=named("embed", "vocab"))(x)


class Plain(nn.Module):
    """A similar model without axis names, so that FSDP splits arrays by their sizes."""

    @nn.compact
    def __call__(self, codes: Any, train: bool) -> Any:
        x = nn.Embed(VOCABULARY, 16)(codes)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.Dense(64)(x)))
        return nn.Dense(VOCABULARY)(x)


def one(**options: Any) -> Sharded:
    return Sharded({"data": 1, "model": 1}, rules=RULES, devices=jax.devices()[:1], **options)


def mesh_4x2() -> Sharded:
    return Sharded({"data": 4, "model": 2}, rules=RULES)


def fsdp(count: int = 8) -> Sharded:
    rules = dict.fromkeys(("mlp", "heads", "vocab", "kv", "length")) | {"embed": "data"}
    return Sharded({"data": -1}, rules=rules, fsdp=True, fsdp_min_size=16, devices=jax.devices()[:count])


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> fitflax.Checkpoint:
        self.values.append(checkpoint.loss)
        return checkpoint


def trainer_of(parallel: Any, model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Transformer() if model is None else model, parallel=parallel)
    trainer.compile(optax.sgd(0.2) if optimizer is None else optimizer, "sparse_categorical_crossentropy", ["accuracy"], **options)
    return trainer


def fit(trainer: fitflax.Trainer, steps: int = 20, **options: Any) -> list[float]:
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", ())]
    trainer.fit(X, Y, batch_size=24, steps=steps, callbacks=callbacks, verbose=0, **options)
    return losses.values


def losses_of(trainer: fitflax.Trainer, steps: int = 20, **options: Any) -> list[float]:
    return [checkpoint.loss for checkpoint in trainer.train_loop((X, Y), steps=steps, batch_size=24, every=fitflax.every(steps=1), **options)]


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf), tree)


def assert_equal(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, host(left), host(right))


# -- numbers --


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Losses of 20 steps, evaluation and predictions on one device with `DataParallel`, which uses no mesh."""
    trainer = trainer_of(DataParallel(jax.devices()[:1]))
    losses = losses_of(trainer)
    return {"losses": losses, "evaluation": trainer.evaluate(X, Y, verbose=0), "outputs": trainer.predict(X)}


@pytest.mark.parametrize("strategy", [fsdp, pytest.param(mesh_4x2, marks=pytest.mark.slow)])
def test_dropout_and_batch_norm_give_the_same_numbers_on_any_mesh(strategy, expected):
    trainer = trainer_of(strategy())
    losses = losses_of(trainer)
    np.testing.assert_allclose(losses, expected["losses"], atol=1e-5, rtol=0)
    assert losses[-1] < losses[0] - 0.01
    evaluation = trainer.evaluate(X, Y, verbose=0)
    assert evaluation == pytest.approx(expected["evaluation"], abs=1e-5)
    np.testing.assert_allclose(trainer.predict(X), expected["outputs"], atol=1e-4)


@pytest.mark.slow
def test_a_mesh_of_one_device_is_bit_for_bit_identical_to_data_parallel():
    trainers = [trainer_of(strategy, optimizer=optax.adam(0.01)) for strategy in (DataParallel(jax.devices()[:1]), one())]
    losses = [losses_of(trainer, 5) for trainer in trainers]
    assert losses[0] == losses[1]
    assert_equal(*[trainer.state.params for trainer in trainers])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 3},
        {"precision": "float16"},
        {"accumulate_steps": 3, "steps_per_call": 4, "ema_decay": 0.9},
    ],
    ids=str,
)
def test_every_way_to_compute_updates_gives_the_same_numbers_on_any_mesh(options):
    results = []
    for strategy in (one(), mesh_4x2(), fsdp()):
        trainer = trainer_of(strategy, **options)
        trainer.fit(X, Y, batch_size=24, steps=8, verbose=0)
        results.append(trainer.evaluate(X, Y, verbose=0)["loss"])
    assert results[1:] == pytest.approx([results[0]] * 2, abs=2e-2 if "precision" in options else 1e-5)


@pytest.mark.slow
def test_micro_batches_hold_interleaved_rows():
    class Means(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.sow("summaries", "mean", x.mean())
            return x * self.param("scale", nn.initializers.ones, ())

    for strategy in (one(), mesh_4x2()):
        trainer = fitflax.Trainer(Means(), parallel=strategy)
        trainer.compile(optax.sgd(0.0), "mse", accumulate_steps=2)
        data = np.arange(16.0, dtype=np.float32)[:, None]
        (checkpoint,) = trainer.train_loop((data, data), steps=1, batch_size=16, sown=("summaries",), shuffle=False)
        assert checkpoint.sown["summaries"]["mean"][0] == 8.0  # The mean of 1, 3, 5, ..., the rows of the last micro-batch.


def test_evaluation_and_prediction_with_a_short_last_batch_agree_with_numpy():
    trainer = trainer_of(mesh_4x2(), Plain())
    trainer.build((X, Y))
    rows = 41
    outputs = trainer.predict(X[:rows], batch_size=16)
    assert outputs.shape == (rows, LENGTH, VOCABULARY)
    log_probabilities = jax.nn.log_softmax(outputs)
    loss = -np.take_along_axis(np.asarray(log_probabilities), Y[:rows, :, None], axis=-1).mean()
    assert trainer.evaluate(X[:rows], Y[:rows], batch_size=16, verbose=0)["loss"] == pytest.approx(loss, abs=1e-5)
    np.testing.assert_allclose(trainer.predict(X[:rows], batch_size=8), outputs, atol=1e-5)


@pytest.mark.slow
def test_metrics_that_collect_rows_see_all_of_them_in_order():
    x = RNG.normal(size=(50, 4)).astype(np.float32)
    y = (x[:, 0] + RNG.normal(size=50) > 0).astype(np.int32)
    values = []
    for strategy in (DataParallel(jax.devices()[:1]), Sharded({"data": 8}, fsdp=True, fsdp_min_size=0)):
        trainer = fitflax.Trainer(nn.Dense(1), parallel=strategy)
        trainer.compile(optax.sgd(0.1), "binary_crossentropy", ["auc"], accumulate_steps=2)
        history = trainer.fit(x, y[:, None], batch_size=16, epochs=2, verbose=0)
        values.append([*history.history["auc"], trainer.evaluate(x, y[:, None], verbose=0)["auc"]])
    assert values[0] == pytest.approx(values[1], abs=1e-6)


# -- where arrays are --


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [mesh_4x2, fsdp])
def test_parameters_and_both_moments_are_split_as_the_rules_say_from_build_to_restore(strategy, tmp_path):
    trainer = trainer_of(strategy(), optimizer=optax.adam(0.01), ema_decay=0.9)
    trainer.build((X[:24], Y[:24]))
    if strategy is mesh_4x2:
        assert trainer.state.params["Block_0"]["q"]["kernel"].sharding.spec == P(None, "model")
        assert trainer.state.params["Dense_0"]["kernel"].sharding.spec == P(None, "model")
        assert trainer.state.params["Embed_0"]["embedding"].sharding.spec == P("model")
    else:
        assert trainer.state.params["Block_0"]["q"]["kernel"].sharding.spec == P("data")
        assert trainer.state.params["Block_0"]["Dense_1"]["kernel"].sharding.spec == P(None, "data")
        assert trainer.state.params["Block_0"]["LayerNorm_0"]["scale"].sharding.spec == P("data")
        assert trainer.state.model_state["batch_stats"]["Block_0"]["BatchNorm_0"]["mean"].sharding.spec == P("data")
    first = specs(trainer.state.params)

    def check(state: fitflax.TrainState) -> None:
        assert specs(state.params) == specs(state.ema_params) == specs(state.opt_state[0].mu) == specs(state.opt_state[0].nu) == first
        kernel = state.opt_state[0].nu["Block_0"]["Dense_0"]["kernel"]
        assert {shard.data.size for shard in kernel.addressable_shards} == {kernel.size // (2 if strategy is mesh_4x2 else 8)}

    check(trainer.state)
    fit(trainer, 3)
    check(trainer.state)
    other = trainer_of(strategy(), optimizer=optax.adam(0.01), ema_decay=0.9)
    other.restore(trainer.save(tmp_path / "saved"))
    other.predict(X)  # Now the axis names of the module are known.
    check(other.state)
    assert_equal(other.state, trainer.state)
    trainer.replace_state(jax.tree.map(lambda leaf: leaf, host_state(trainer.state)))
    check(trainer.state)
    assert trainer.train_on_batch((X[:24], Y[:24])) == other.train_on_batch((X[:24], Y[:24]))


def host_state(state: fitflax.TrainState) -> fitflax.TrainState:
    """The state as NumPy arrays, except for its key."""
    return dataclasses.replace(jax.tree.map(np.array, dataclasses.replace(state, key=np.int32(0))), key=state.key)


@pytest.mark.slow
def test_gradients_are_split_like_the_parameters_and_are_those_of_the_whole_batch():
    grads = []
    for strategy in (one(), mesh_4x2(), fsdp()):
        trainer = trainer_of(strategy)
        (checkpoint,) = trainer.train_loop((X, Y), steps=1, batch_size=24, grads=True)
        assert specs(checkpoint.grads) == specs(trainer.state.params)
        grads.append(host(checkpoint.grads))
    for other in grads[1:]:
        jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, atol=1e-6), grads[0], other)


def test_no_device_holds_the_whole_state_while_it_is_created():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1024)(nn.Dense(1024)(x))

    trainer = fitflax.Trainer(Wide(), parallel=Sharded({"data": 8}, fsdp=True))
    trainer.compile("adam", "mse")
    x = np.ones((8, 1024), np.float32)
    trainer.build((x, x))
    session = trainer._session
    program, strategy = session.task.need_compiled("test"), session.strategy
    lowered = program._steps.lower(
        "init",
        fitflax.steps.live_state.Carry.of(program.initial_state.shapes(jax.random.key(0), session.state.sample)),
        strategy.abstract_put(jax.random.key(0)),
        strategy.abstract_feed(session.state.sample),
    )
    memory = lowered.compile().memory_analysis()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((trainer.state.params, trainer.state.opt_state)))
    assert whole > 24 * 2**20
    assert memory.output_size_in_bytes < whole / 7 and memory.temp_size_in_bytes < whole / 8


@pytest.mark.slow
def test_each_device_receives_only_its_shard_of_a_state_on_the_host(monkeypatch):
    trainer = trainer_of(fsdp(), optimizer=optax.adam(0.01))
    trainer.build((X[:24], Y[:24]))
    state = host_state(trainer.state)
    seen = []
    original = jax.make_array_from_callback

    def spy(shape: Any, sharding: Any, callback: Any) -> Any:
        def part(index: Any) -> Any:
            data = callback(index)
            seen.append((int(np.prod(shape)), data.size))
            return data

        return original(shape, sharding, part)

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    trainer.replace_state(state)
    assert sum(part for _, part in seen) < 1.6 * sum(whole for whole, _ in seen) / 8 * 1.0 + 8 * 200
    assert {part / whole for whole, part in seen if whole >= 128} == {1 / 8}


@pytest.mark.slow
def test_replace_state_neither_shares_nor_donates_the_arrays_that_it_gets():
    trainer = trainer_of(mesh_4x2())
    trainer.build((X[:24], Y[:24]))
    mine = host_state(trainer.state)
    trainer.replace_state(mine)
    theirs = trainer.state
    before = host(theirs.params)
    for leaf in jax.tree.leaves(mine.params):
        leaf[...] = np.nan
    trainer.replace_state(theirs)
    fit(trainer, 2)
    assert_equal(theirs.params, before)  # Neither donated nor overwritten.
    assert np.isfinite(trainer.evaluate(X, Y, verbose=0)["loss"])


@pytest.mark.slow
def test_a_callback_gets_copies_that_stay_valid():
    kept = []

    class Recorder(Callback):
        def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> fitflax.Checkpoint:
            kept.append((checkpoint.step, checkpoint.model_params))
            return checkpoint

    trainer = trainer_of(mesh_4x2())
    fit(trainer, 3, callbacks=[Recorder()])
    norms = [float(optax.tree.norm(params)) for _, params in kept]
    assert len(set(norms)) == len(kept) > 0
    assert specs(kept[-1][1]) == specs(trainer.state.params)


@pytest.mark.slow
def test_logical_constraints_apply_in_fit_evaluate_and_predict_without_recompilation(compilations):
    seen: dict[str, str] = {}

    class Watched(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.Dense(16)(x)
            x = nn.with_logical_constraint(x, (None, "mlp"))
            jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.setdefault(f"{train} {x.shape}", str(sharding.spec)))
            return nn.Dense(4)(x)

    x = np.ones((64, 8), np.float32)
    trainer = fitflax.Trainer(Watched(), parallel=Sharded({"data": 4, "model": 2}, rules=[("mlp", "model")]))
    trainer.compile("adam", "mse")
    with compilations.counted() as first:
        trainer.fit(x, np.ones((64, 4), np.float32), batch_size=16, epochs=1, validation_data=(x[:24], np.ones((24, 4), np.float32)), verbose=0)
        trainer.predict(x, batch_size=32)
    assert first.count > 0
    assert set(seen.values()) == {"P(None, 'model')"} or set(seen.values()) == {"PartitionSpec(None, 'model')"}
    assert {name.split()[0] for name in seen} == {"True", "False"}
    with compilations.counted() as again:
        trainer.fit(x, np.ones((64, 4), np.float32), batch_size=16, epochs=1, validation_data=(x[:24], np.ones((24, 4), np.float32)), verbose=0)
        trainer.evaluate(x, np.ones((64, 4), np.float32), batch_size=16, verbose=0)
        trainer.predict(x, batch_size=32)
        trainer.learning_rate = 0.5
        trainer.fit(x[:40], np.ones((40, 4), np.float32), batch_size=16, epochs=1, verbose=0)
    assert again.names == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [fsdp, mesh_4x2])
def test_training_evaluation_and_prediction_are_each_compiled_once(strategy, compilations):
    trainer = trainer_of(strategy(), optimizer=optax.adam(0.01))
    with compilations.counted() as counted:
        trainer.fit(X, Y, batch_size=32, epochs=2, validation_data=(X[:40], Y[:40]), verbose=0)
        trainer.predict(X[:40])
    names = [name for name in counted.names if any(part in name for part in ("train_step", "eval", "predict", "init_state"))]
    assert sorted(name.split("(")[-1].rstrip(")").split("_")[0] for name in names) == ["eval", "init", "predict", "train"], counted.names


# -- modules --


@pytest.mark.slow
def test_remat_and_scan_keep_axis_names_and_give_the_same_numbers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.Dense(32, kernel_init=named("embed", "mlp"))(x)
            y = nn.with_logical_constraint(nn.relu(y), ("batch", "mlp"))
            return x + nn.Dense(16, kernel_init=named("mlp", "embed"))(y), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layers = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return layers()(x, None)[0]

    x = RNG.normal(size=(32, 16)).astype(np.float32)
    results = []
    for sizes in ({"data": 1, "model": 1}, {"data": 4, "model": 2}):
        strategy = Sharded(sizes, rules=[*RULES, ("layers", None)], devices=jax.devices()[: int(np.prod(list(sizes.values())))])
        trainer = fitflax.Trainer(Deep(), parallel=strategy)
        trainer.compile(optax.sgd(0.1), "mse")
        trainer.fit(x, x[:, ::-1], batch_size=16, steps=6, verbose=0)
        results.append(trainer.evaluate(x, x[:, ::-1], verbose=0)["loss"])
    kernel = next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state.params) if "Dense_0" in str(path) and leaf.ndim == 3)
    assert kernel.sharding.spec == P(None, None, "model")
    assert results[0] == pytest.approx(results[1], abs=1e-6)


def test_a_module_may_name_mesh_axes_itself():
    class Direct(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model")))(x)

    trainer = fitflax.Trainer(Direct(), parallel=Sharded({"data": 4, "model": 2}))
    trainer.compile("sgd", "mse")
    trainer.fit(np.ones((16, 8), np.float32), np.ones((16, 8), np.float32), verbose=0)
    assert trainer.state.params["Dense_0"]["kernel"].sharding.spec == P("data", "model")


@pytest.mark.slow
def test_an_overridden_train_step_and_loss_see_the_whole_batch():
    class CustomLoss(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
            values, state, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
            return values, state, {**aux, "rows": jnp.float32(batch.mask.shape[0])}

    class CustomStep(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            grads = jax.grad(lambda params: jnp.mean((self.model.apply({"params": params}, batch.x) - batch.y) ** 2))(state.params)
            return state.apply_gradient(grads, optax.sgd(0.1)), {"rows": (jnp.float32(batch.mask.shape[0]), jnp.float32(1))}

    x = np.ones((16, 8), np.float32)
    for kind in (CustomLoss, CustomStep):
        trainer = kind(nn.Dense(8), parallel=Sharded({"data": 8}, fsdp=True, fsdp_min_size=0))
        trainer.compile(optax.sgd(0.1), "mse")
        history = trainer.fit(x, x, batch_size=16, epochs=2, verbose=0)
        assert history.history["rows"] == [16.0, 16.0]
        assert trainer.state.params["kernel"].sharding.spec == P("data")


def test_a_custom_step_without_gradients_runs_even_if_gradients_are_requested():
    class Step(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            grads = jax.grad(lambda params: jnp.mean((self.model.apply({"params": params}, batch.x) - batch.y) ** 2))(state.params)
            return state.apply_gradient(grads, optax.sgd(0.1)), {}

    x = np.ones((16, 8), np.float32)
    trainer = Step(nn.Dense(8), parallel=Sharded({"data": 8}, fsdp=True, fsdp_min_size=0))
    trainer.compile(optax.sgd(0.1))
    (checkpoint,) = trainer.train_loop((x, x), steps=1, grads=True)
    assert checkpoint.grads == ()


@pytest.mark.slow
def test_constraints_by_mesh_axes_work_everywhere(tmp_path):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            def body(carry: Any, _: Any) -> Any:
                return jax.lax.with_sharding_constraint(jnp.log(carry), P("data")), None

            x = jax.lax.with_sharding_constraint(nn.Dense(8, use_bias=False, kernel_init=nn.initializers.ones)(x), P("data", "model"))
            return jax.lax.scan(body, x, None, length=2)[0]

    trainer = fitflax.Trainer(Net(), parallel=mesh_4x2())
    trainer.compile("sgd", "mse")
    x = np.ones((16, 8), np.float32)
    trainer.build((x, x))
    np.testing.assert_allclose(trainer.predict(x), np.log(np.log(8)), rtol=1e-6)
    report = trainer.hunt_nan((-x, x))
    assert report is not None and report.origins[0].operation == "log"
    pytest.importorskip("flatbuffers")
    exported = jax.export.deserialize(bytearray(trainer.export(tmp_path / "model").read_bytes()))
    np.testing.assert_allclose(exported.call(x[:3]), np.log(np.log(8)), rtol=1e-6)


# -- checkpoints --


@pytest.mark.slow
def test_a_split_state_is_saved_and_restored_by_orbax_in_shards(tmp_path):
    trainer = trainer_of(fsdp(), optimizer=optax.adam(0.01))
    fit(trainer, 4, callbacks=[ModelCheckpoint(tmp_path, every=fitflax.every(steps=2))])
    store = CheckpointStore(tmp_path)
    assert store.steps() == [2, 4]
    store.verify()
    saved = store.restore(4)
    assert saved.metadata["backend"] == "orbax"
    assert_equal(saved.train["params"]["Dense_0"]["kernel"], trainer.state.params["Dense_0"]["kernel"])
    inference = load_inference_state(tmp_path)
    assert_equal(inference.params["Dense_0"]["kernel"], trainer.state.params["Dense_0"]["kernel"])
    # A damaged Orbax file is detected, and the previous checkpoint is used.
    file = max((path for path in (tmp_path / "step_00000004/train").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = trainer_of(fsdp(), optimizer=optax.adam(0.01))
    with pytest.warns(FitflaxWarning, match="step_00000004"):
        fit(resumed, 4, callbacks=[ModelCheckpoint(tmp_path, every=fitflax.every(steps=2))], resume="auto")
    assert_equal(resumed.state, trainer.state)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_holds_the_state_of_its_step_while_training_continues(asynchronous, tmp_path):
    trainer = trainer_of(fsdp(), optimizer=optax.adam(0.01))
    params: dict[int, Any] = {}

    class Recorder(Callback):
        every = fitflax.every(steps=1)

        def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> fitflax.Checkpoint:
            params[checkpoint.step] = host(checkpoint.model_params)
            return checkpoint

    fit(trainer, 6, callbacks=[Recorder(), ModelCheckpoint(tmp_path, every=fitflax.every(steps=1), keep=6, asynchronous=asynchronous)])
    for step in range(1, 7):
        assert_equal(CheckpointStore(tmp_path).restore(step).train["params"], params[step])


@pytest.mark.slow
def test_a_run_resumes_with_fewer_devices_and_with_other_meshes(tmp_path, expected):
    """8 -> 2 -> 1 devices and back to another mesh of 8: the same batches in the same order, and equal parameters where one stops and the next resumes."""
    norms: list[float] = []
    losses: list[float] = []
    initial_states: list[Any] = []

    class Recorder(Callback):
        every = fitflax.every(steps=1)

        def on_checkpoint(self, checkpoint: fitflax.Checkpoint) -> None:
            losses.append(checkpoint.loss)

        def on_train_begin(self, logs: Any) -> None:
            initial_states.append(host(self.trainer.state) if self.trainer.step else None)

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            norms.append(float(optax.tree.norm(self.trainer.state.params)))

    state = None
    for end, strategy in ((5, fsdp(8)), (9, fsdp(2)), (14, DataParallel(jax.devices()[:1])), (17, mesh_4x2()), (20, one())):
        trainer = trainer_of(strategy)
        checkpoints = ModelCheckpoint(tmp_path, every=fitflax.every(steps=50))
        trainer.fit(X, Y, batch_size=24, steps=end, callbacks=[Recorder(), checkpoints], resume="auto", verbose=0)
        if state is not None:
            assert_equal(initial_states[-1].params, state.params)
            assert_equal(initial_states[-1].model_state, state.model_state)
        state = host(trainer.state)
    whole = trainer_of(DataParallel(jax.devices()[:1]))
    expected_norms = [
        float(optax.tree.norm(checkpoint.model_params)) for checkpoint in whole.train_loop((X, Y), steps=20, batch_size=24, every=fitflax.every(steps=1))
    ]
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    np.testing.assert_allclose(losses, expected["losses"], atol=1e-5, rtol=0)
    assert trainer.evaluate(X, Y, verbose=0) == pytest.approx(expected["evaluation"], abs=1e-5)


@pytest.mark.slow
def test_a_replicated_checkpoint_is_restored_onto_a_mesh_bit_for_bit(tmp_path):
    trainer = trainer_of(DataParallel(jax.devices()[:2]), optimizer=optax.adam(0.01))
    fit(trainer, 3)
    path = trainer.save(tmp_path / "saved")
    assert (path / "state.msgpack").stat().st_size > 10_000 and not (path / "train").exists()
    for order in ("build", "restore"):
        other = trainer_of(mesh_4x2(), optimizer=optax.adam(0.01))
        if order == "build":
            other.build((X[:24], Y[:24]))
        other.restore(path)
        assert_equal(other.state, trainer.state)
        other.evaluate(X, Y, verbose=0)
        assert other.state.opt_state[0].mu["Block_0"]["Dense_0"]["kernel"].sharding.spec == P(None, "model")


def test_a_snapshot_of_arrays_on_several_devices_has_one_copy_of_each_shard():
    strategy = mesh_4x2()
    whole = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    for spec in (P(None, "model"), P("data"), P(("data", "model")), P("model", "data")):
        array = jax.device_put(whole, jax.sharding.NamedSharding(strategy.mesh, spec))
        (copy,) = copy_to_host_memory([array])
        assert sum(shard.data.nbytes for shard in copy.addressable_shards) == whole.nbytes
        array.delete()
        np.testing.assert_array_equal(np.asarray(copy), whole)


def test_a_state_that_is_split_after_its_restore_is_saved_whole(tmp_path):
    def make() -> fitflax.Trainer:
        strategy = Sharded({"data": 2, "model": 2}, rules=RULES, devices=jax.devices()[:4])
        trainer = fitflax.Trainer(nn.Dense(8, kernel_init=named("embed", "mlp")), parallel=strategy)
        trainer.compile("adam", "mse")
        return trainer

    x, y = np.ones((8, 4), np.float32), np.ones((8, 8), np.float32)
    first, trained, again = make(), make(), make()
    first.build((x, y))
    trained.restore(first.save(tmp_path / "saved"))  # Without build, so its arrays are split when the first batch shows their axis names.
    trained.fit(x, y, callbacks=[ModelCheckpoint(tmp_path / "run")], verbose=0)
    again.build((x, y))
    again.restore(tmp_path / "run")
    assert_equal(again.state, trained.state)


@pytest.mark.slow
def test_a_state_without_split_arrays_is_copied_without_waiting():
    for strategy, waits in ((Sharded({"data": 8}, fsdp=False), False), (fsdp(), True)):
        trainer = trainer_of(strategy, Plain())
        trainer.build((X[:24], Y[:24]))
        assert trainer._session.state.need("test").snapshots_wait == waits


@pytest.mark.slow
def test_a_state_is_never_whole_on_a_device_before_the_axis_names_are_known(tmp_path):
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(516, use_bias=False, kernel_init=named("embed", "mlp"))(x)

    def make() -> fitflax.Trainer:
        trainer = fitflax.Trainer(Odd(), parallel=mesh_4x2())
        trainer.compile(optax.adam(0.1), "mse")
        return trainer

    x = np.ones((8, 500), np.float32)
    trainer = make()
    trainer.fit(x, np.ones((8, 516), np.float32), verbose=0)
    other = make()
    other.restore(trainer.save(tmp_path / "saved"))
    assert other.state.params["Dense_0"]["kernel"].sharding.spec == P(None, "data")  # 8 divides neither 500 nor 516.
    held = other.state
    out = io.StringIO()
    other.summary(sample=x, sharding=True, file=out)
    assert " -, model " in out.getvalue()
    np.testing.assert_array_equal(other.predict(x), trainer.predict(x))
    assert specs(other.state.params) == specs(other.state.opt_state[0].mu) == specs(trainer.state.params)
    assert_equal(other.state, trainer.state)
    other.fit(x, np.ones((8, 516), np.float32), verbose=0)
    assert_equal(held.params, trainer.state.params)


@pytest.fixture(scope="module")
def trained() -> fitflax.Trainer:
    """A trainer on a mesh after two steps, for tests that do not change it."""
    trainer = trainer_of(mesh_4x2())
    fit(trainer, 2)
    return trainer


@pytest.mark.slow
def test_an_inference_state_is_split_too(trained):
    inference = trained.inference_state()
    assert specs(inference.params) == specs(trained.state.params)
    server = fitflax.Trainer(Transformer(), parallel=fsdp())
    server.replace_state(inference)
    np.testing.assert_allclose(server.predict(X), trained.predict(X), atol=1e-5)
    assert server._session.state.need("test").borrow().params["Block_0"]["q"]["kernel"].sharding.spec == P("data")


@pytest.mark.slow
def test_a_partial_restore_initializes_the_rest_with_the_same_sharding(trained, tmp_path):
    path = trained.save(tmp_path / "saved")
    other = trainer_of(mesh_4x2(), optimizer=optax.adam(0.01))
    other.build((X[:24], Y[:24]))
    fit(other, 1)
    other.restore(path, partial=True, mapping={"params/Dense_0": None})
    assert_equal(other.state.params["Block_0"], trained.state.params["Block_0"])
    assert specs(other.state.params) == specs(trained.state.params) == specs(other.state.opt_state[0].nu)


# -- other tools --


@pytest.mark.slow
def test_the_summary_shows_how_arrays_are_split():
    trainer = trainer_of(mesh_4x2(), optimizer=optax.adam(0.01), ema_decay=0.9)
    trainer.build((X[:24], Y[:24]))
    out = io.StringIO()
    trainer.summary(sharding=True, file=out)
    text = out.getvalue()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Sharded(mesh={'data': 4, 'model': 2} of cpu devices, batches over ('data',)):" in lines
    assert "params/Block_0/Dense_0/kernel float32[16, 64] -, model 2.0 KB" in lines
    assert "params/Block_0/LayerNorm_0/scale float32[16] whole 64 B" in lines
    assert "batch_stats/Block_0/BatchNorm_0/mean float32[16] whole 64 B" in lines
    assert not [line for line in lines if line.startswith("opt_state")]
    params, state = trainer.state.params, trainer.state
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((params, state.model_state, state.opt_state, state.ema_params)))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state.model_state, state.opt_state, state.ema_params)))
    assert lines[-1].endswith(f"in total {held * 10 // 1024 / 10} KB of {whole * 10 // 1024 / 10} KB.")
    factored = trainer_of(fsdp(), optimizer=optax.adafactor(0.01, min_dim_size_to_factor=8))
    factored.build((X[:24], Y[:24]))
    out = io.StringIO()
    factored.summary(sharding=True, file=out)
    assert any(line.startswith("opt_state/") and "/v_row/" in line for line in out.getvalue().splitlines())


@pytest.mark.slow
def test_model_flops_are_counted_per_device(trained):
    flops = []
    alone = trainer_of(one())
    fit(alone, 1)
    for trainer in (alone, trained):
        program = trainer._session.task.need_compiled("test")
        flops.append((program.preparation.model_flops, program.preparation.forward_flops(trainer.state, trainer._session.state.sample)))
    assert flops[0][0] == pytest.approx(8 * flops[1][0]) and flops[0][1] == flops[1][1]


@pytest.mark.slow
def test_hunt_nan_finds_the_origin_on_a_mesh():
    class Bad(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.log(nn.Dense(8)(x))

    trainer = fitflax.Trainer(Bad(), parallel=Sharded({"data": 4, "model": 2}, fsdp=True, fsdp_min_size=0))
    trainer.compile("sgd", "mse")
    x = np.ones((16, 8), np.float32)
    report = trainer.hunt_nan((x, x))
    assert isinstance(report, NanReport) and report.step == 1 and report.origins[0].operation == "log"


@pytest.mark.slow
def test_find_learning_rate_and_export_work_on_a_mesh(tmp_path):
    trainer = trainer_of(mesh_4x2(), optimizer="sgd")
    fit(trainer, 2)
    before = host(trainer.state)
    assert trainer.find_learning_rate((X, Y), steps=20).suggestion is not None
    assert_equal(trainer.state, before)
    pytest.importorskip("flatbuffers")
    path = trainer.export(tmp_path / "model.jaxexport")
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    np.testing.assert_allclose(exported.call(X[:7]), trainer.predict(X[:7]), atol=1e-5)


# -- errors and warnings --


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"data": 4, "model": 3}}, r"needs 12 devices, but there are 8. Change the sizes or set one of them to -1.$"),
        ({"mesh": {"data": 4}}, r"needs 4 devices, but there are 8. .* or pass devices=jax.devices\(\)\[:4\].$"),
        ({"mesh": {"data": -1, "model": 3}}, r"needs a multiple of 3 devices, but there are 8. .*devices=jax.devices\(\)\[:6\].$"),
        ({"mesh": {"data": -1, "model": -1}}, "only one axis may be -1"),
        ({"mesh": {"data": 0}}, r"or sizes of axes such as \{'data': -1, 'model': 2\}. Received: \{'data': 0\}"),
        ({"mesh": {}}, "takes a jax.sharding.Mesh, or sizes of axes"),
        ({"mesh": 8}, "takes a jax.sharding.Mesh, or sizes of axes"),
        ({"mesh": {"data": True}}, "takes a jax.sharding.Mesh, or sizes of axes"),
        ({"mesh": {"data": -1}, "devices": []}, "a nonempty list of distinct devices"),
        ({"mesh": {"data": 2}, "devices": [0, 1]}, r"Sharded\(devices=...\) must be a nonempty list of distinct devices, .* Received: \[0, 1\]"),
        ({"mesh": {"data": -1}, "rules": [("mlp", "model")]}, r"maps 'mlp' to 'model', but the mesh has the axes \['data'\]"),
        ({"mesh": {"data": -1}, "fsdp": "model"}, r"fsdp=.* takes True, False, None, or an axis of the mesh \['data'\]. Received: 'model'"),
        ({"mesh": {"a": 4, "b": 2}, "fsdp": True}, r"needs a mesh axis 'fsdp' or 'data'. The mesh has \['a', 'b'\]"),
        ({"mesh": {"data": -1}, "fsdp_min_size": -1}, "fsdp_min_size=.* at least 0"),
        ({"mesh": {"data": -1}, "devices": 3}, r"such as jax.devices\(\)\[:4\]. Received: 3"),
        ({"mesh": {"data": -1}, "rules": 5}, r"takes pairs \(logical name, mesh axis\), .* or a dict of them. Received: 5"),
        ({"mesh": {"data": -1}, "rules": [("embed", ("data", "data"))]}, "maps 'embed' to the same mesh axis twice"),
    ],
    ids=str,
)
def test_invalid_arguments_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        Sharded(options.pop("mesh"), **options)


@pytest.mark.slow
def test_a_jax_mesh_is_accepted_and_its_axes_become_automatic():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    strategy = Sharded(mesh, rules=RULES)
    assert strategy.mesh.axis_types == (AxisType.Auto,) * 2 and dict(strategy.mesh.shape) == {"data": 2, "model": 4}
    fit(trainer_of(strategy), 1)
    with pytest.raises(ConfigError, match="Leave devices= out"):
        Sharded(mesh, devices=jax.devices())


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("mesh", "options", "axes"),
    [
        ({"data": 4, "model": 2}, {}, ("data",)),
        ({"data": 2, "fsdp": 4}, {"fsdp": True}, ("data", "fsdp")),
        ({"a": 4, "b": 2}, {"fsdp": "a"}, ("a",)),
        ({"a": 8}, {}, ("a",)),
        ({"a": 8}, {"rules": [("mlp", "a")]}, ()),
        ({"a": 4, "b": 2}, {"rules": [("batch", ("a", "b"))]}, ("a", "b")),
        ({"data": 4, "b": 2}, {"rules": [("batch", "b")]}, ("b",)),
        ({"data": 8}, {"rules": [("batch", None)]}, ()),
    ],
    ids=str,
)
def test_batches_are_split_over_the_axes_that_are_meant_for_them(mesh, options, axes):
    strategy = Sharded(mesh, **options)
    assert strategy.batch_axes == axes
    assert strategy.num_batch_shards == int(np.prod([mesh[axis] for axis in axes]))
    trainer = fitflax.Trainer(nn.Dense(8), parallel=strategy)
    trainer.compile("sgd", "mse")
    x = np.ones((20, 8), np.float32)
    trainer.fit(x, x, batch_size=10, verbose=0)
    assert trainer.predict(x).shape == (20, 8)


def test_axis_names_and_sizes_that_do_not_fit_are_errors_before_compilation(compilations):
    def dense(names: tuple[str, ...], size: int) -> nn.Module:
        return nn.Dense(size, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, names))

    x = np.ones((16, 8), np.float32)
    with compilations.counted() as counted:
        for module, message in (
            (dense(("embed", "mpl"), 8), "params/kernel has axis names that are neither in rules nor axes of the mesh: 'mpl'"),
            (dense(("embed", "mlp"), 7), r"params/kernel \[8, 7\]"),
        ):
            trainer = fitflax.Trainer(module, parallel=mesh_4x2())
            trainer.compile("sgd", "mse")
            with pytest.raises(ShardingError, match=message):
                trainer.fit(x, x, verbose=0)
            with pytest.raises(ShardingError, match=message):
                trainer.summary(sample=x)
    # Random keys are created by compiled programs, which JAX drops between tests.
    assert not [name for name in counted.names if any(part in name for part in ("train", "eval", "init", "lambda"))], counted.names


def test_a_module_with_an_unbound_axis_name_is_an_error_with_its_path():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=False, axis_name="replica", name="norm")(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return Inner(name="inner")(nn.Dense(8)(x))

    x = np.ones((16, 8), np.float32)
    for strategy in (mesh_4x2(), DataParallel(axis_name="other")):
        trainer = fitflax.Trainer(Net(), parallel=strategy)
        trainer.compile("sgd", "mse")
        with pytest.raises(
            ModelError, match=r"unbound axis name: replica. The name is used in inner/norm, a BatchNorm. Under parallel=Sharded\(...\), leave axis_name"
        ):
            trainer.fit(x, x, verbose=0)


def test_collectives_outside_the_module_are_an_error_that_says_why():
    class Step(fitflax.Trainer):
        def train_step(self, state: Any, batch: Any) -> Any:
            return state, {"loss": (jax.lax.psum(jnp.float32(1), "replica"), jnp.float32(1))}

    x = np.ones((16, 8), np.float32)
    for trainer, error in ((Step(nn.Dense(8), parallel=mesh_4x2()), ModelError), (fitflax.Trainer(nn.Dense(8), parallel=mesh_4x2()), LossError)):
        trainer.compile("sgd", lambda outputs, targets: jax.lax.pmean((outputs - targets) ** 2, "replica"))
        with pytest.raises(error, match=r"unbound axis name: replica\. Under Sharded, a step sees the whole batch, so there is no such axis"):
            trainer.fit(x, x, verbose=0)


@pytest.mark.slow
def test_large_parameters_that_stay_whole_cause_one_warning():
    x = np.ones((8, 512), np.float32)

    def build(**options: Any) -> list[str]:
        trainer = fitflax.Trainer(nn.Dense(1024), parallel=Sharded({"data": 8}, **options))
        trainer.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(x, np.ones((8, 1024), np.float32), verbose=0)
            trainer.fit(x, np.ones((8, 1024), np.float32), verbose=0)
        return [str(warning.message) for warning in caught]

    (message,) = build()
    assert message.startswith("Large parameters are replicated on 8 devices: params/kernel (2.0 MB, no axis names); 2.0 MB in total")
    assert "Pass Sharded(fsdp=True) to split arrays without axis names" in message
    assert build(fsdp=False) == build(fsdp=True) == []
    (message,) = build(fsdp=True, fsdp_min_size=2**30)
    assert "smaller than fsdp_min_size" in message and "fsdp=True" not in message


@pytest.mark.slow
def test_whole_batches_on_a_mesh_of_several_axes_cause_a_warning_unless_requested():
    def warned(mesh: dict[str, int], rules: Any) -> list[str]:
        trainer = fitflax.Trainer(Plain(), parallel=Sharded(mesh, rules=rules))
        trainer.compile("sgd", "sparse_categorical_crossentropy")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.build((X[:24], Y[:24]))
        return [str(warning.message) for warning in caught]

    (message,) = warned({"dp": 4, "tp": 2}, [("embed", "dp"), ("mlp", "tp")])
    assert message.startswith("Each device processes whole batches, because the mesh {'dp': 4, 'tp': 2} has no axis 'data'")
    assert "('batch', 'dp')" in message
    assert warned({"dp": 4, "tp": 2}, [("batch", None)]) == warned({"dp": 4, "tp": 2}, [("batch", "dp")]) == warned({"tp": 8}, [("mlp", "tp")]) == []


def test_the_summary_names_axes_over_which_nothing_is_split():
    out = io.StringIO()
    trainer = fitflax.Trainer(Plain(), parallel=mesh_4x2())
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    trainer.summary(sample=X[:8], sharding=True, file=out)
    assert "Axis 'model' is unused: no array of the state and no batch is split over it." in out.getvalue() and "over 'data'." not in out.getvalue()


class Layer(nn.Module):
    """A layer for `nn.scan`."""

    names: Any = None

    @nn.compact
    def __call__(self, carry: Any, _: Any) -> Any:
        return nn.Dense(8, kernel_init=partitioned(self.names, 2))(carry), ()


def partitioned(names: Any, count: int) -> Any:
    """Returns an initializer with axis names, unless they are `None`."""
    init = nn.initializers.lecun_normal()
    return init if names is None else nn.with_partitioning(init, (*[None] * (count - len(names)), *names))


class Partitioned(nn.Module):
    """Names axes of a mesh inside of linen's transformations, unless they are `None`."""

    model: Any = ("model",)
    several: Any = (("data", "tensor"), None)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes = {"variable_axes": {"params": 0}, "metadata_params": {nn.PARTITION_NAME: None}}
        x = nn.scan(Layer, split_rngs={"params": True}, length=2, **axes)(self.model, name="layers")(x, None)[0]
        x = nn.remat(nn.Dense)(8, kernel_init=partitioned(self.several, 2), name="dense")(x)
        x = nn.MultiHeadDotProductAttention(2, kernel_init=partitioned(self.model, 2))(x[:, None])[:, 0]
        return nn.Dense(3)(x)


LACKING = {
    "one device": lambda: DataParallel(jax.devices()[:1]),
    "replicas": lambda: DataParallel(jax.devices()[:2]),
    "data": lambda: Sharded({"data": 2}, devices=jax.devices()[:2]),
    "rules": lambda: Sharded({"data": 2, "m": 2}, rules={"model": "m"}, devices=jax.devices()[:4]),
}


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.mostly_slow
def test_axes_that_the_mesh_lacks_are_named_in_one_warning_and_not_split(name: str):
    x, y = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), np.arange(16) % 3

    def losses(model: nn.Module) -> Any:
        trainer = fitflax.Trainer(model, parallel=LACKING[name]())
        trainer.compile("sgd", "sparse_categorical_crossentropy", learning_rate=0.1, ema_decay=0.9)
        trainer.build((x, y))
        history = trainer.fit(x, y, epochs=2, batch_size=8, verbose=0, validation_data=(x, y)).history
        trainer.summary(file=io.StringIO(), sharding=True)
        return [*history["loss"], *history["val_loss"]], trainer.state.params

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logged, params = losses(Partitioned())
    (message,) = [str(warning.message) for warning in caught]
    assert "'tensor' (params/dense/kernel)" in message and ("'model' (" in message) == (name != "rules")
    np.testing.assert_allclose(logged, losses(Partitioned(None, None))[0], rtol=1e-5)
    assert params["dense"]["kernel"].sharding.spec == (P("data") if name in ("data", "rules") else P())
    assert params["layers"]["Dense_0"]["kernel"].sharding.spec == (P(None, None, "m") if name == "rules" else P())


def test_a_constraint_by_an_axis_that_the_mesh_does_not_have_is_an_error_with_the_modules_path():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jax.lax.with_sharding_constraint(nn.Dense(8)(x), P("tensor"))

    trainer = fitflax.Trainer(nn.Sequential([Net()]), parallel=mesh_4x2())
    trainer.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"not found in mesh.* The name is used in layers_0, a Net. A constraint takes axes of the mesh"):
        trainer.build((np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)))


def test_the_repr_of_a_strategy_describes_it():
    assert repr(mesh_4x2()) == "Sharded(mesh={'data': 4, 'model': 2} of cpu devices, batches over ('data',))"
    assert repr(fsdp()) == "Sharded(mesh={'data': 8} of cpu devices, batches over ('data',), fsdp over ('data',))"


def test_the_modular_loops_run_on_a_mesh():
    module, x = nn.Dense(8), np.ones((32, 8), np.float32)
    loop = fitflax.TrainLoop(module.init, module.apply, optimizer=optax.sgd(0.1), loss="mse", data=(x, x), steps=3, parallel=fsdp())
    assert [checkpoint.step for checkpoint in loop] == [1, 2, 3]


def test_large_arrays_on_devices_are_moved_one_by_one_to_where_they_belong(monkeypatch):
    monkeypatch.setattr(sharded, "SMALL_BYTES", 0)
    trainer = fitflax.Trainer(nn.Dense(8), parallel=Sharded({"data": 2}, fsdp=True, fsdp_min_size=1, devices=jax.devices()[:2]))
    trainer.compile("sgd", "mse")
    trainer.build((np.ones((4, 4), np.float32), np.ones((4, 8), np.float32)))
    before = trainer.state
    given = jax.device_put(jax.device_get(before.params), jax.devices()[1])
    trainer.replace_state(dataclasses.replace(before, params=given))
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(trainer.state.params), strict=True):
        assert new.sharding == old.sharding and np.array_equal(new, old)
