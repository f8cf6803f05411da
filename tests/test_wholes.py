"""Batches that are passed whole, such as graphs: the same numbers as a hand-written loop, on one or several devices, and what such batches do not support."""

import json
import operator
import signal
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.data import Shard
from fitflax.data.batch import Triple
from fitflax.errors import ConfigError, DataError, FitflaxWarning
from fitflax.parallel import DataParallel, Sharded
from fitflax.triggers import every
from tests import compiled_programs, graph_script
from tests.data.test_whole_batches import Own
from tests.graph_script import GraphNet, Graphs, batches, right, stream, trainer_of
from tests.ports import reserve_port
from tests.test_many_processes import PIPES, Group, environment

pytestmark = pytest.mark.filterwarnings("ignore:This data source cannot seek")


def losses_of(outputs, labels):
    return jnp.maximum(outputs, 0) - outputs * labels + jnp.log1p(jnp.exp(-jnp.abs(outputs)))


def hand_written_loop(params, groups, *, rate=0.05):
    """Returns the losses and parameters after each step of a loop over groups of batches. All graphs of a group count equally."""
    optimizer = optax.adam(rate)
    net = GraphNet()

    def loss_fn(params, group):
        sums = [(jnp.sum(w * losses_of(net.apply({"params": params}, graphs), y)), jnp.sum(w)) for graphs, y, w in group]
        return sum(total for total, _ in sums) / sum(weight for _, weight in sums)

    step = jax.jit(jax.value_and_grad(loss_fn))
    opt_state = optimizer.init(params)
    losses, states = [], []
    for group in groups:
        loss, grads = step(params, group)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        states.append(jax.tree.map(np.asarray, params))
    return losses, states


def in_groups(items, size):
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def assert_close(one, other, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)


# -- numbers --


@pytest.mark.mostly_slow
@pytest.mark.parametrize("devices", [1, 4])
def test_losses_and_parameters_equal_those_of_a_hand_written_loop(devices: int):
    data = batches(10)
    trainer = trainer_of(devices)
    trainer.build(data[0])
    losses, states = hand_written_loop(jax.tree.map(np.asarray, trainer.state.params), in_groups(data, devices))
    seen = []
    for checkpoint in trainer.train_loop(stream(10), steps=len(losses)):
        seen.append(checkpoint.loss)
        assert_close(checkpoint.model_params, states[checkpoint.step - 1])
    np.testing.assert_allclose(seen, losses, rtol=1e-5)
    assert len(seen) == -(-10 // devices)


@pytest.mark.slow
def test_one_device_equals_a_hand_written_loop_with_the_compiled_loss_up_to_rounding():
    """The loss has the same formula and is compiled in the same way, so that only rounding may differ."""
    data = batches(4)
    trainer = fitflax.Trainer(GraphNet(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.1), losses_of)
    trainer.build(data[0])
    params = jax.tree.map(jnp.asarray, trainer.state.params)

    @jax.jit
    def step(params, graphs, y, w):
        loss, grads = jax.value_and_grad(lambda params: jnp.sum(w * losses_of(GraphNet().apply({"params": params}, graphs), y)) / jnp.sum(w))(params)
        return loss, jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)

    for graphs, y, w in data:
        loss, params = step(params, graphs, y, w)
        assert trainer.train_on_batch((graphs, y, w))["loss"] == pytest.approx(float(loss), rel=2e-7)
        assert_close(trainer.state.params, params, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_several_steps_per_call_give_the_same_parameters():
    one, several = trainer_of(2), trainer_of(2, steps_per_call=3)
    for trainer in (one, several):
        trainer.fit(stream(10), epochs=2, verbose=0)
    assert one.step == several.step == 10
    assert_close(one.state.params, several.state.params)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_evaluate_counts_every_real_graph_once(devices: int):
    data = batches(7, seed=3)
    trainer = trainer_of(devices, metrics=[right], weighted_metrics=[right])
    trainer.build(data[0])
    outputs = [np.asarray(GraphNet().apply({"params": jax.device_get(trainer.state.params)}, graphs)) for graphs, _, _ in data]
    every, labels, weights = (np.concatenate(parts) for parts in zip(*((out, y, w) for out, (_, y, w) in zip(outputs, data, strict=True)), strict=True))
    is_right, real = (every > 0) == labels, weights.any(axis=1)
    expected = {
        "loss": (weights * np.asarray(losses_of(every, labels))).sum() / weights.sum(),
        "right": is_right[real].mean(),
        "weighted_right": (is_right * weights).sum() / weights.sum(),
    }
    assert trainer.evaluate(stream(7, 3), verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_class_weights_multiply_weights_and_exclude_no_graph():
    data = [(graphs, (y[:, 0] > 0).astype(np.int32), w[:, 0]) for graphs, y, w in batches(3)]
    trainer = fitflax.Trainer(GraphNet(), parallel=DataParallel(jax.devices()[:2], combine_whole_batches=True))
    trainer.compile("sgd", "sparse_categorical_crossentropy", ["accuracy"])
    trainer.build(data[0])
    outputs = np.concatenate([GraphNet().apply({"params": jax.device_get(trainer.state.params)}, graphs) for graphs, _, _ in data])
    labels, weights = np.concatenate([y for _, y, _ in data]), np.concatenate([w for _, _, w in data])
    seen = {}
    trainer.compile(optax.sgd(0.0), "sparse_categorical_crossentropy", ["accuracy"])
    history = trainer.fit(
        lambda: iter(data), class_weight={0: 0.0, 1: 2.0}, verbose=0, callbacks=[LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs))]
    )
    assert history.history["accuracy"] == [pytest.approx((outputs.argmax(axis=1) == labels)[weights > 0].mean())]
    values = np.asarray(optax.softmax_cross_entropy_with_integer_labels(outputs, labels))
    both = weights * np.where(labels == 1, 2.0, 0.0)
    assert seen["loss"] == pytest.approx((both * values).sum() / both.sum(), rel=1e-5)


# -- steps, positions and compilations --


@pytest.mark.slow
def test_nothing_is_compiled_again_if_shapes_stay_the_same(compilations):
    trainer = trainer_of(4, metrics=[right])
    options = {"validation_data": stream(5, 1), "verbose": 0}
    trainer.fit(stream(10), epochs=1, **options)
    trainer.predict(stream(5))
    with compilations.counted() as later:
        trainer.fit(stream(10), epochs=2, **options)
        trainer.evaluate(stream(3), verbose=0)
        trainer.predict(stream(3))
        trainer.train_on_batch(batches(1)[0])
        trainer.test_on_batch(batches(1)[0])
    assert later.count == 0


@pytest.mark.slow
def test_new_shapes_are_compiled_once_and_named():
    larger = batches(2, seed=5, nodes=32)
    trainer = trainer_of(2)
    with pytest.warns(FitflaxWarning, match=r"compiled again: x.nodes: float32\[48, 3\] -> float32\[64, 3\]. Pad inputs to one or a few sizes") as caught:
        trainer.fit(lambda: iter([*batches(2), *larger, *batches(2), *larger]), verbose=0)
    assert len(caught) == 1 and trainer.step == 4


def test_batches_of_one_step_must_have_the_same_structure_and_shapes():
    data = [*batches(1), *batches(1, nodes=32)]
    with pytest.raises(
        DataError, match=r"The 2 batches of a step, one for each device, .*: x.nodes: float32\[24, 3\] and float32\[32, 3\]. Pad all batches to one size"
    ):
        trainer_of(2).fit(lambda: iter(data), verbose=0)
    with pytest.raises(DataError, match=r"sample_weight: float32\[6, 2\] and None"):
        trainer_of(2).fit(lambda: iter([data[0], data[0][:2]]), verbose=0)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("kind", ["function", "iterator"])
def test_the_steps_of_an_epoch_continue_across_the_ends_of_passes(devices: int, kind: str):
    trainer = trainer_of(devices)
    data = stream(40)() if kind == "iterator" else stream(10)
    trainer.fit(data, epochs=2, steps_per_epoch=5, verbose=0)
    assert trainer.step == 10
    position = trainer._session.state.last_progress.position
    real = [int(w.any(axis=1).sum()) for _, _, w in batches(40 if kind == "iterator" else 10)]
    passes, rest = (0, 10 * devices) if kind == "iterator" else divmod(10, -(-10 // devices))
    used = rest if kind == "iterator" else rest * devices
    if kind == "function" and rest == 0:
        passes, used = passes - 1, 10  # The end of a pass is noticed only when the next batch is requested.
    assert (position.passes, position.examples) == (passes, sum(real[:used]))


@pytest.mark.slow
def test_batches_that_an_iterator_yielded_but_no_step_used_come_next():
    numbers = []

    def numbered():
        for number, batch in enumerate(batches(12)):
            numbers.append(number)
            yield batch

    data = numbered()
    one, two = trainer_of(2), trainer_of(2)
    one.fit(data, steps=2, verbose=0)
    one.fit(data, steps=2, verbose=0)
    two.fit(stream(12), steps=4, verbose=0)
    assert_close(one.state.params, two.state.params, rtol=0, atol=0)
    assert numbers == list(range(8))


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_group_loses_no_batch():
    class Flaky:
        def __init__(self):
            self.left, self.fails = iter(batches(6)), True

        def __iter__(self):
            return self

        def __next__(self):
            batch = next(self.left)
            self.count = getattr(self, "count", 0) + 1
            if self.count == 4 and self.fails:
                self.fails, self.left = False, iter([batch, *self.left])
                raise OSError("try again")
            return batch

    flaky, calm = trainer_of(4), trainer_of(4)
    data = Flaky()
    with pytest.raises(OSError, match="try again"):
        flaky.fit(data, verbose=0)
    flaky.fit(data, verbose=0)
    calm.fit(iter(batches(6)), verbose=0)
    assert flaky.step == calm.step == 2
    assert_close(flaky.state.params, calm.state.params, rtol=0, atol=0)


@pytest.mark.slow
def test_a_batch_of_only_padding_does_not_affect_the_loss_and_is_a_step():
    empty = batches(1)[0]
    empty = (*empty[:2], np.zeros_like(empty[2]))
    data = [batches(2)[0], empty, batches(2)[1]]
    trainer = trainer_of(1)
    trainer.fit(lambda: iter(data), verbose=0)
    assert trainer.step == 3
    with_it, without = (trainer.evaluate(lambda given=given: iter(given), verbose=0)["loss"] for given in (data, data[::2]))
    assert with_it == pytest.approx(without)
    assert np.isfinite(jax.tree.leaves(trainer.state.params)[0]).all()


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {"kill_at": 14}), (4, {"kill_at": 6, "steps_per_epoch": 4}), (2, {"kill_at": 9, "steps_per_call": 2})],
    ids=["one device", "steps_per_epoch", "steps_per_call"],
)
@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path, process_env, devices: int, options: dict):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    common = {"devices": devices, **{key: value for key, value in options.items() if key != "kill_at"}}

    def result_of(name: str) -> dict:
        return json.loads((tmp_path / name / "result.json").read_text())

    def run(status: int = 0, **more):
        arguments = {"directory": str(tmp_path / "parts"), **common, **more}
        done = subprocess.run(
            [sys.executable, graph_script.__file__, json.dumps(arguments)], env=process_env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == status, done.stderr

    graph_script.main(str(tmp_path / "whole"), **common)
    run(-signal.SIGKILL, kill_at=options["kill_at"])
    run()
    whole, parts = result_of("whole"), result_of("parts")
    assert 0 < parts.pop("began_at") <= options["kill_at"] and whole.pop("began_at") == 0
    assert parts == whole


# -- several processes --


def in_processes(count: int, runs: dict[str, dict]) -> Group:
    env, port = environment() | {"PJRT_NPROC": "16"}, reserve_port()
    env.pop("JAX_NUM_CPU_DEVICES", None)
    given = [json.dumps({"count": count, "index": index, "port": port, "runs": runs}) for index in range(count)]
    envs = compiled_programs.of_processes(env, count)
    return Group.of([subprocess.Popen([sys.executable, graph_script.__file__, each], env=own, **PIPES) for each, own in zip(given, envs, strict=True)])


DATA = {"the same data": False, "shards": True}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Group]:
    """The outputs of one process with four devices, and of two with two each, from runs one after another."""
    one = {name: {"sharded": sharded} for name, sharded in DATA.items()}
    resumed = {f"{name}, resumed": {"sharded": sharded, "directory": str(tmp_path_factory.mktemp("run"))} for name, sharded in DATA.items()}
    mistakes = {mistake: {"sharded": True, "mistake": mistake} for mistake in ("not combined", "shapes")}
    return {1: in_processes(1, one), 2: in_processes(2, {**one, **resumed, **mistakes})}


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", DATA)
def test_several_processes_train_like_one_with_the_same_number_of_devices(name: str, resumes: bool, groups):
    (expected,) = groups[1].results(name)
    found = groups[2].results(f"{name}, resumed" if resumes else name)
    outputs = [each.pop("outputs") for each in found]
    rows = expected.pop("outputs")
    for each in found:
        for key, value in expected.items():
            assert each[key] == pytest.approx(value, abs=1e-5), key
    if DATA[name]:  # Each process has the rows of its own graphs, one batch after another.
        assert sorted(outputs[0] + outputs[1]) == pytest.approx(np.array(sorted(rows)), abs=1e-4)
    else:
        assert outputs[0] == outputs[1] == pytest.approx(np.array(rows), abs=1e-4)


@pytest.mark.slow
def test_shards_with_batches_of_different_shapes_are_an_error_in_all_processes(groups):
    assert groups[2].statuses == [3, 3]
    for output in groups[2].outputs_of("shapes"):
        assert "x.nodes: float32[48, 3]" in output and "x.nodes: float32[64, 3]" in output, output


@pytest.mark.slow
def test_shards_are_combined_only_if_requested(groups):
    for output in groups[2].outputs_of("not combined"):
        assert "A step on 4 devices would take 4 batches" in output, output


# -- without combining batches --


def test_training_on_several_devices_is_an_error_unless_batches_may_be_combined():
    trainer = trainer_of(2, combines=False)
    trainer.build(batches(1)[0])
    before = jax.tree.map(np.asarray, trainer.state.params)
    message = (
        r"The inputs share no axis of examples, .* A step on 2 devices would take 2 batches, so training would depend on the number of devices\. "
        r"Train on one device, with .*DataParallel\(jax.devices\(\)\[:1\]\)\), or allow it with DataParallel\(combine_whole_batches=True\)"
    )
    fails(ConfigError, message, stream(4), trainer=trainer)
    with pytest.raises(ConfigError, match=message):
        trainer.train_loop(stream(4), steps=1)
    assert trainer.step == 0
    assert_close(trainer.state.params, before, rtol=0, atol=0)


def test_a_run_that_resumes_with_another_number_of_combined_batches_warns(tmp_path):
    def run(devices: int, epochs: int):
        trainer = trainer_of(devices)
        trainer.fit(stream(4), epochs=epochs, callbacks=[ModelCheckpoint(tmp_path, every=every(epochs=1))], resume="auto", verbose=0)
        return trainer

    run(2, 1)
    for _ in range(2):  # The second time, no batch is left.
        run(2, 2)  # A warning would be an error.
    with pytest.warns(FitflaxWarning, match=r"was saved with other settings: whole_batches_per_update was 2 and is now 1\."):
        assert run(1, 3).step == 8


def test_batches_with_rows_may_resume_on_another_number_of_devices(tmp_path):
    x = np.ones((8, 3), np.float32)
    for devices in (1, 2):
        trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:devices], combine_whole_batches=True))
        trainer.compile("sgd", "mse")
        trainer.fit(x, x[:, :1], epochs=devices, callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0)  # A warning would be an error.
        assert trainer.step == devices


def test_without_combining_evaluations_and_single_batches_do_not_depend_on_the_number_of_devices():
    one, several = (trainer_of(devices, combines=False, metrics=[right]) for devices in (1, 2))
    train, *valid = batches(4)
    assert several.train_on_batch(train) == pytest.approx(one.train_on_batch(train), rel=1e-5)
    assert_close(several.state.params, one.state.params)
    for steps in (None, 2):
        found, expected = (trainer.evaluate(lambda: iter(valid), steps=steps, verbose=0) for trainer in (several, one))
        assert found == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(*(trainer.predict(lambda: iter(valid), steps=steps) for trainer in (several, one)), rtol=1e-5, atol=1e-6)
    assert [len(outputs) for outputs in several.predict_iter(lambda: iter(valid))] == [int(w.any(axis=1).sum()) for _, _, w in valid]


def test_a_shard_on_one_of_several_devices_is_rejected_like_the_batches_of_all():
    two = jax.devices()[:2]
    for strategy, message in ((DataParallel(two), "A step on 2 devices"), (Sharded({"data": 2}, devices=two), "splits the rows of each batch over 2 devices")):
        strategy.part = (0, 2)  # As in a process that has one of the devices.
        with pytest.raises(ConfigError, match=message):
            strategy.part_batcher(is_training=True)(Triple(*batches(1)[0]))


# -- single batches, and predictions --


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_a_single_batch_gives_the_same_results_on_any_number_of_devices(devices: int):
    data = batches(1)[0]
    trainer, alone = trainer_of(devices, metrics=[right]), trainer_of(1, metrics=[right])
    assert trainer.train_on_batch(data) == pytest.approx(alone.train_on_batch(data), rel=1e-5)
    assert trainer.test_on_batch(data) == pytest.approx(alone.test_on_batch(data), rel=1e-5)
    assert_close(trainer.state.params, alone.state.params)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_predict_omits_padding_that_weights_indicate_and_keeps_all_rows_otherwise(devices: int):
    data = batches(5)
    trainer = trainer_of(devices)
    trainer.build(data[0])
    outputs = [np.asarray(GraphNet().apply({"params": jax.device_get(trainer.state.params)}, graphs)) for graphs, _, _ in data]
    real = [w.any(axis=1) for _, _, w in data]
    expected = np.concatenate([out[rows] for out, rows in zip(outputs, real, strict=True)])
    np.testing.assert_allclose(trainer.predict(lambda: iter(data)), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(list(trainer.predict_iter(lambda: iter(data)))), expected, rtol=1e-5, atol=1e-6)
    whole = np.concatenate(outputs)
    np.testing.assert_allclose(trainer.predict(lambda: iter([graphs for graphs, _, _ in data])), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.predict(lambda: iter([batch[:2] for batch in data])), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.predict_on_batch(data[0][0]), outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_of_nodes_are_predicted_as_well():
    class OfNodes(nn.Module):
        @nn.compact
        def __call__(self, graphs):
            return nn.Dense(1)(graphs.nodes)

    trainer = fitflax.Trainer(OfNodes(), parallel=DataParallel(jax.devices()[:4]))
    trainer.compile("sgd", "mse")
    graphs = [graphs for graphs, _, _ in batches(5)]
    trainer.train_on_batch((graphs[0], np.ones((graph_script.NODES, 1), np.float32)))  # Nodes are the examples here.
    expected = np.concatenate([trainer.predict_on_batch(each) for each in graphs])
    np.testing.assert_allclose(trainer.predict(lambda: iter(graphs)), expected, rtol=1e-6)


# -- other features that use steps --


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_rows_that_a_metric_collects_are_those_of_real_graphs(devices: int):
    data = [(graphs, (y[:, 0] > 0).astype(np.float32), w[:, 0]) for graphs, y, w in batches(6)]

    class First(nn.Module):
        @nn.compact
        def __call__(self, graphs):
            return GraphNet()(graphs)[:, 0]

    trainer = fitflax.Trainer(First(), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile("adam", "binary_crossentropy", [fitflax.metrics.AUC(num_thresholds=None)])
    trainer.build(data[0])
    scores = trainer.predict(lambda: iter(data))
    labels = np.concatenate([y[w > 0] for _, y, w in data])
    higher = scores[labels > 0][:, None] - scores[labels == 0]
    assert trainer.evaluate(lambda: iter(data), verbose=0)["auc"] == pytest.approx((higher > 0).mean() + (higher == 0).mean() / 2)


@pytest.mark.slow
def test_without_jit_one_device_trains_the_same_and_several_are_an_error():
    one, other = trainer_of(1, run_eagerly=True), trainer_of(1)
    for trainer in (one, other):
        trainer.fit(stream(3), verbose=0)
    assert_close(one.state.params, other.state.params)
    np.testing.assert_allclose(one.predict(stream(2)), other.predict(stream(2)), rtol=1e-4, atol=1e-5)
    with jax.disable_jit():
        fails(
            ConfigError,
            "Without jit, several devices cannot process inputs that share no axis .* Debug the program on one device",
            stream(4),
            trainer=trainer_of(2),
        )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_origin_of_a_nan_is_found_in_graphs(devices: int):
    data = batches(2)
    data[1][0].edges[3] = np.nan
    report = trainer_of(devices).hunt_nan(lambda: iter(data))
    assert report is not None and report.step == (2 if devices == 1 else 1) and "edges" in str(report)


@pytest.mark.slow
def test_a_learning_rate_is_found_for_graphs():
    trainer = fitflax.Trainer(GraphNet(), parallel=DataParallel(jax.devices()[:2], combine_whole_batches=True))
    trainer.compile("adam", optax.sigmoid_binary_cross_entropy)
    assert np.isfinite(trainer.find_learning_rate(stream(20), steps=8).losses).all()


@pytest.mark.slow
def test_transfers_are_explicit_under_the_transfer_guard_of_jax():
    trainer = trainer_of(2)
    with jax.transfer_guard("disallow"):
        trainer.fit(stream(3), verbose=0)
    assert trainer.step == 2


# -- other structures --


@flax.struct.dataclass
class Packed:
    tokens: jax.Array
    offsets: jax.Array
    scale: jax.Array


class BagOfTokens(nn.Module):
    @nn.compact
    def __call__(self, packed, train: bool = False):
        assert packed.scale.shape == ()
        segments = jnp.searchsorted(packed.offsets, jnp.arange(packed.tokens.shape[0]), side="right") - 1
        sums = jax.ops.segment_sum(nn.Embed(11, 4)(packed.tokens), segments, packed.offsets.shape[0] - 1)
        return nn.Dense(1)(sums * packed.scale)


def packed(seed):
    rng = np.random.default_rng(seed)
    return Packed(rng.integers(0, 11, 20), np.array([0, 3, 9, 20]), np.float32(seed + 1)), rng.normal(size=(3, 1)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", "four", "sharded"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_scalars_reach_the_module_as_scalars(strategy: str, steps_per_call: int, capsys):
    parallel = {
        "one": DataParallel(jax.devices()[:1]),
        "four": DataParallel(jax.devices()[:4], combine_whole_batches=True),
        "sharded": Sharded({"data": 1, "model": 2}, devices=jax.devices()[:2]),
    }
    trainer = fitflax.Trainer(BagOfTokens(), parallel=parallel[strategy])
    trainer.compile(optax.sgd(0.1), "mse", steps_per_call=steps_per_call)
    data = [packed(seed) for seed in range(6)]
    trainer.build(data[0])
    params, size = jax.device_get(trainer.state.params), 4 if strategy == "four" else 1
    for group in in_groups(data, size):
        grads = jax.grad(lambda params, group=group: sum(jnp.mean((BagOfTokens().apply({"params": params}, x) - y) ** 2) for x, y in group) / len(group))(
            params
        )
        params = jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
    trainer.fit(lambda: iter(data), verbose=0)
    assert_close(jax.device_get(trainer.state.params), params)
    expected = np.concatenate([BagOfTokens().apply({"params": params}, x) for x, _ in data])
    np.testing.assert_allclose(trainer.predict(lambda: iter([x for x, _ in data])), expected, rtol=1e-4, atol=1e-5)
    trainer.summary()
    trainer.summary(sample=data[0])
    assert capsys.readouterr().out.count("scale: float32[]") == 2


@pytest.mark.slow
def test_a_structure_whose_arrays_have_rows_is_batched_like_arrays():
    rng = np.random.default_rng(0)
    rows = Packed(rng.integers(0, 11, (10, 3)), rng.normal(size=(10, 2)).astype(np.float32), rng.normal(size=10).astype(np.float32))
    y = rng.normal(size=(10, 1)).astype(np.float32)

    class OfRows(nn.Module):
        @nn.compact
        def __call__(self, packed):
            return nn.Dense(1)(packed.offsets * packed.scale[:, None]) + nn.Embed(11, 1)(packed.tokens).sum(axis=1)

    def trained(*data, **options):
        trainer = fitflax.Trainer(OfRows(), parallel=DataParallel(jax.devices()[:2]))
        trainer.compile(optax.sgd(0.1), "mse")
        trainer.fit(*data, verbose=0, epochs=2, **options)
        return trainer

    def cut():
        for cut in (slice(0, 4), slice(4, 8), slice(8, 10)):
            yield jax.tree.map(operator.itemgetter(cut), (rows, y))

    one, two = trained(rows, y, batch_size=4, shuffle=False), trained(cut)
    assert_close(one.state.params, two.state.params, rtol=0, atol=0)
    np.testing.assert_array_equal(one.predict(rows, batch_size=4), two.predict(rows, batch_size=4))
    assert one.predict(rows, batch_size=4).shape == (10, 1)
    trained(rows, y, batch_size=4, validation_split=0.3)


def test_a_class_without_a_repr_is_compiled_once_and_can_be_evaluated_and_predicted(compilations):
    class OfRows(nn.Module):
        @nn.compact
        def __call__(self, rows):
            return nn.Dense(1)(rows.a)

    x, y = Own(np.ones((8, 2), np.float32)), np.ones((8, 1), np.float32)
    trainer = fitflax.Trainer(OfRows(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.fit(x, y, batch_size=4, verbose=0)
    with compilations.counted() as again:
        trainer.fit(x, y, batch_size=4, verbose=0)
    assert again.count == 0
    assert np.isfinite(trainer.evaluate(x, y, verbose=0)["loss"]) and trainer.predict(x).shape == (8, 1)


def test_a_namedtuple_is_one_argument_and_not_inputs_and_targets():
    class Pair(Graphs):
        pass

    given = []

    class Seen(nn.Module):
        @nn.compact
        def __call__(self, graphs):
            given.append(type(graphs))
            return nn.Dense(1)(graphs.nodes)

    rows = Pair(*(np.ones((4, 2), np.float32) for _ in range(5)))
    trainer = fitflax.Trainer(Seen())
    trainer.compile("sgd", lambda outputs: (outputs[:, 0] - 1) ** 2)
    trainer.train_on_batch(rows)
    trainer.fit(lambda: iter([rows, rows]), verbose=0)
    trainer.fit(rows, batch_size=2, verbose=0)
    assert set(given) == {Pair} and trainer.step == 5


@pytest.mark.parametrize("container", [list, tuple])
def test_a_list_that_is_yielded_is_inputs_and_targets(container: type):
    x, y, w = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), np.array([1, 0, 1, 1], np.float32)
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    expected = trainer.train_on_batch((x, y, w))
    other = fitflax.Trainer(nn.Dense(1))
    other.compile("sgd", "mse")
    assert other.train_on_batch(container([x, y, w])) == expected
    other.fit(lambda: iter([container([x, y])]), verbose=0)
    with pytest.raises(DataError, match=f"Received: a {container.__name__} of 4 elements"):
        other.train_on_batch(container([x, y, w, w]))
    with pytest.raises(DataError, match="A batch cannot be a list of Python numbers"):
        other.train_on_batch([1.0, 2.0, 3.0])


# -- what is not supported --


def fails(error, message, *data, trainer=None, **options):
    trainer = trainer or trainer_of(1)
    with pytest.raises(error, match=message):
        trainer.fit(*data, verbose=0, **options)


def test_unsupported_uses_of_whole_batches_are_errors_that_say_what_to_do():
    graphs, y, w = batches(1)[0]
    sharded = fitflax.Trainer(GraphNet(), parallel=Sharded({"data": 4}, devices=jax.devices()[:4]))
    sharded.compile("adam", optax.sigmoid_binary_cross_entropy)
    fails(ConfigError, "splits the rows of each batch over 4 devices. Use one device, DataParallel", stream(4), trainer=sharded)
    fails(ConfigError, "cannot be split into micro-batches. Leave accumulate_steps=2 out", stream(4), trainer=trainer_of(1, accumulate_steps=2))
    fails(
        DataError,
        r"needs 2 batches, one for each device, but this one has 1\. .* leave out compile\(pad=False\)",
        stream(3),
        trainer=trainer_of(2, pad=False),
    )
    fails(ConfigError, "validation_split requires in-memory arrays", stream(4), validation_split=0.5)
    fails(DataError, "In-memory data is split into batches, .* x.nodes has 24, .* a function that yields batches", graphs, y)
    fails(DataError, "In-memory data is split into batches", (graphs, y, w))
    fails(DataError, "To pass a list of batches, use a function", batches(3))
    fails(DataError, "To pass a list of batches, use a function", [graphs, graphs])
    fails(DataError, ": x.nodes has 24, .* targets or weights must give the number of examples: yield", lambda: iter([graphs]))
    fails(DataError, "has 5.*has 6", lambda: iter([(graphs, y, w[:5])]))
    fails(DataError, "Every array must have a leading axis", lambda: iter([(graphs, np.float32(1))]))
    fails(DataError, r"a pytree \(a Graphs\) with leaves that are not arrays", Graphs(*graphs[:5], globals="text"))
    # All arrays have the same length, which differs from that of the targets: a mistake.
    fails(DataError, "All arrays must have the same number of examples", lambda: iter([({"a": np.ones(4), "b": np.ones(4)}, np.ones(3))]))
    fails(DataError, "Put single examples into batches first", lambda: iter([([1.0, 2.0], np.ones(2))]))


def test_a_structure_with_a_different_length_than_the_targets_is_passed_whole():
    class OfGraph(nn.Module):
        @nn.compact
        def __call__(self, graph):
            return nn.Dense(1)(graph.nodes.sum(axis=0, keepdims=True))

    trainer = fitflax.Trainer(OfGraph(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.fit(lambda: iter([(Graphs(*(np.ones((4, 1), np.float32) for _ in range(5))), np.ones((1, 1), np.float32))] * 2), verbose=0)
    assert trainer.step == 2


@pytest.mark.slow
def test_without_targets_the_weights_give_the_number_of_graphs():
    trainer = fitflax.Trainer(GraphNet(), parallel=DataParallel(combine_whole_batches=True))
    trainer.compile("sgd", lambda outputs: outputs[:, 0] ** 2)
    data = [(graphs, (), w[:, 0]) for graphs, _, w in batches(3)]
    trainer.fit(lambda: iter(data), verbose=0)
    outputs = np.concatenate([np.asarray(GraphNet().apply({"params": jax.device_get(trainer.state.params)}, graphs))[:, 0] for graphs, _, _ in data])
    weights = np.concatenate([w for _, _, w in data])
    assert trainer.evaluate(lambda: iter(data), verbose=0)["loss"] == pytest.approx((outputs**2 * weights).sum() / weights.sum(), rel=1e-5)


def test_a_model_of_whole_batches_cannot_be_exported(tmp_path):
    pytest.importorskip("flatbuffers")
    trainer = trainer_of(1)
    trainer.build(batches(1)[0])
    with pytest.raises(ConfigError, match="export needs inputs whose arrays all have an axis of examples"):
        trainer.export(tmp_path / "model")


@pytest.mark.slow
def test_the_progress_bar_counts_the_steps_of_a_pass():
    known = {}
    loader = type("Loader", (), {"__iter__": lambda self: iter(batches(10)), "__len__": lambda self: 10})()
    callback = LambdaCallback(on_train_begin=lambda logs: known.update(callback.params))
    trainer_of(4).fit(loader, epochs=1, verbose=0, callbacks=[callback])
    assert known["steps"] == 3


@pytest.mark.slow
def test_a_batch_may_already_be_on_a_device():
    data = [jax.tree.map(jnp.asarray, batch) for batch in batches(5)]
    one, two = trainer_of(4), trainer_of(4)
    one.fit(lambda: iter(data), verbose=0)
    two.fit(stream(5), verbose=0)
    assert_close(one.state.params, two.state.params, rtol=0, atol=0)


@pytest.mark.slow
def test_arrays_without_elements_are_split_as_well():
    graphs, y, w = batches(1)[0]
    data = [(graphs._replace(globals=np.zeros((5, 0), np.float32), edges=graphs.edges), y, w)] * 4
    trainer = trainer_of(4)
    trainer.fit(lambda: iter(data), verbose=0)
    assert trainer.step == 1


def test_overfit_batches_limits_each_epoch_to_a_few_batches():
    trainer = trainer_of(2)
    history = trainer.fit(stream(10), overfit_batches=4, epochs=3, verbose=0)
    assert trainer.step == 6 and len(history.epoch) == 3


@pytest.mark.slow
def test_a_shard_in_a_single_process_is_all_of_the_data():
    one, two = trainer_of(2), trainer_of(2)
    one.fit(Shard(stream(5)), verbose=0)
    two.fit(stream(5), verbose=0)
    assert_close(one.state.params, two.state.params, rtol=0, atol=0)
