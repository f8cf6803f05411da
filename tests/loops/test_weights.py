"""`Trainer.save_weights` and `load_weights`: names, kinds of models, what is not a weight, locations, and errors."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import linen as nn
from flax import nnx, traverse_util

import fitflax
from fitflax.checkpoints import WeightRule, checkpoint_files, load_inference_state
from fitflax.checkpoints.weight_rules import saved_weights
from fitflax.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, NotReadyError, RestoreError
from fitflax.parallel import DataParallel, Sharded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype(np.float32)
Y = (np.arange(32) % 3).astype(np.int32)


class Net(nn.Module):
    classes: int = 3

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.relu(nn.Dense(8, name="body")(x)))
        return nn.Dense(self.classes, name="head")(nn.Dropout(0.2, deterministic=not train)(x))


class Module(nnx.Module):
    def __init__(self, seed=0, classes=3):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.norm, self.drop, self.head = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.2, rngs=rngs), nnx.Linear(6, classes, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(self.drop(self.norm(x)))


def trainer_of(model=None, *, fit=False, seed=0, parallel=None, trainable=None, **options):
    trainer = fitflax.Trainer(Net() if model is None else model, seed=seed, parallel=parallel or DataParallel(jax.devices()[:1]), trainable=trainable)
    trainer.compile(optax.adam(1e-2), "sparse_categorical_crossentropy", **options)
    if fit:
        trainer.fit(X, Y, verbose=0)
    elif isinstance(trainer.model, nn.Module):
        trainer.build((X[:1], Y[:1]))
    return trainer


NAMES = {
    *(f"params.{layer}.{name}" for layer in ("body", "head") for name in ("kernel", "bias")),
    *("params.norm.scale", "params.norm.bias", "batch_stats.norm.mean", "batch_stats.norm.var"),
}


@pytest.mark.slow
def test_names_are_paths_joined_by_dots_that_flax_can_unflatten(tmp_path):
    trainer = trainer_of(fit=True)
    path = trainer.save_weights(tmp_path / "a/model.safetensors")
    arrays = safetensors.numpy.load_file(path)
    assert path == tmp_path / "a/model.safetensors" and arrays.keys() == NAMES
    outputs = Net().apply(traverse_util.unflatten_dict(arrays, sep="."), X, train=False)
    np.testing.assert_allclose(outputs, trainer.predict(X), rtol=1e-6, atol=1e-6)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "flax", "paths": "collections"}


@pytest.mark.parametrize("is_built", [True, False])
def test_weights_are_loaded_and_the_rest_of_the_state_starts_over(is_built, tmp_path):
    trainer = trainer_of(fit=True)
    path = trainer.save_weights(tmp_path / "model.safetensors")
    other = trainer_of(seed=1) if is_built else fitflax.Trainer(Net(), parallel=DataParallel(jax.devices()[:1]))
    report = other.load_weights(path)
    assert len(report.restored) == 8 and not report.initialized and not report.unused and other.step == 0
    np.testing.assert_array_equal(other.predict(X), trainer.predict(X))
    if is_built:
        assert not any(leaf.any() for leaf in jax.tree.leaves(other.state.opt_state[0].mu))
        other.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_restore_and_load_inference_state_recognize_the_file(tmp_path):
    trainer = trainer_of(fit=True)
    path = trainer.save_weights(tmp_path / "model.safetensors")
    for place in (path, tmp_path):
        other = trainer_of(seed=1)
        assert len(other.restore(place, weights_only=True).restored) == 8
        np.testing.assert_array_equal(other.predict(X), trainer.predict(X))
        assert load_inference_state(place).model_state["batch_stats"]["norm"]["mean"].shape == (8,)
    with pytest.raises(RestoreError, match=r"has no step and no optimizer state\. To restore only .*, pass weights_only=True"):
        other.restore(path)
    tuned = trainer_of(Net(classes=5))
    report = tuned.restore(path, partial=True, mapping={"params/head": None})
    assert report.initialized == ("params/head/bias", "params/head/kernel")


def test_a_loaded_state_for_inference_does_not_depend_on_the_file(tmp_path):
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors")
    state = load_inference_state(path)
    before = state.params["head"]["kernel"].copy()
    with open(path, "r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\0" * size)
    np.testing.assert_array_equal(state.params["head"]["kernel"], before)


@pytest.mark.parametrize("load", [lambda path: trainer_of().restore(path, weights_only=True), load_inference_state], ids=["restore", "inference"])
def test_weights_are_not_loaded_in_place_of_damaged_checkpoints(load, tmp_path):
    trainer = trainer_of(fit=True)
    trainer.save_weights(tmp_path / "model.safetensors")
    load(tmp_path)
    trainer.save(tmp_path / "step_00000002")
    (tmp_path / "step_00000002/metadata.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="step_00000002"):
        load(tmp_path)


def test_a_module_without_parameters_can_be_saved_and_loaded(tmp_path):
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            mean = self.variable("stats", "mean", jnp.zeros, (6,))
            mean.value = mean.value + 1
            return x - mean.value

    trainer = fitflax.Trainer(Counts(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.build((X[:1], X[:1]))
    for options in ({}, {"metadata": {"note": "x"}}):
        path = trainer.save_weights(tmp_path / "model.safetensors", **options)
        assert trainer.load_weights(path).restored == ("stats/mean",)
    with pytest.raises(RestoreError, match=r"every path must start with `params/` or another collection's name, followed by at least one more part"):
        trainer.load_weights(path, mapping={"stats.mean": "mean"})


def test_arrays_that_a_rule_computes_are_converted_too(tmp_path):
    rules = [WeightRule("{c}.{layer}.{name}", "{c}/{layer}/{name}", lambda array: array, lambda array: array.astype(np.float64))]
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors", mapping=rules, dtype="float16")
    assert {array.dtype for array in safetensors.numpy.load_file(path).values()} == {np.dtype(np.float16)}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_with_numbers_that_a_dtype_cannot_hold_are_named(dtype, tmp_path):
    trainer = trainer_of(fit=True)
    params = jax.tree.map(np.array, trainer.state.params)
    params["head"]["bias"][0] = 1e6
    params["body"]["bias"][0] = np.inf
    trainer.replace_state(trainer.state.replace_params(params))
    with pytest.raises(
        CheckpointError, match=rf"too large for dtype='{dtype}'. Pass a dtype with a larger range, such as 'bfloat16'. Arrays: params.head.bias"
    ):
        trainer.save_weights(tmp_path / "model.safetensors", dtype=dtype)
    path = trainer.save_weights(tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"too large for dtype='{dtype}'. Pass a dtype with a larger range, such as 'bfloat16'. Arrays: params/head/bias"
    ):
        trainer.load_weights(path, dtype=dtype)


def test_processes_that_find_different_weights_get_an_error(tmp_path, monkeypatch):
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors", max_shard_bytes=200)
    monkeypatch.setattr(checkpoint_files, "after_first", lambda make: make())

    def load(other):
        monkeypatch.setattr(checkpoint_files, "exchange", lambda told, topic: [told, other(told)])
        return checkpoint_files.read_collectively(lambda _: saved_weights(path)[0], num_processes=2)

    assert load(dict).train["params"]
    first = path.read_bytes()
    trainer_of(fit=True).save_weights(tmp_path / "model.safetensors", max_shard_bytes=200)
    digest = saved_weights(path)[0].metadata["digest"]
    assert path.read_bytes() != first
    with pytest.raises(CheckpointError, match=r"found different weights: those of process 1 differ"):
        load(lambda told: {**told, "digest": digest[::-1]})


def test_restore_prefers_a_fitflax_checkpoint_next_to_weights(tmp_path):
    trainer = trainer_of(fit=True)
    trainer.save_weights(tmp_path / "model.safetensors")
    trainer.save(tmp_path / "step_00000001")
    trainer_of().restore(tmp_path)
    assert trainer_of().load_weights(tmp_path).restored


@pytest.mark.slow
def test_weights_of_an_nnx_module_are_saved_and_loaded_with_and_without_rules(tmp_path):
    trainer = trainer_of(Module(), fit=True)
    path = trainer.save_weights(tmp_path / "model.safetensors")
    assert {name for name in safetensors.numpy.load_file(path) if "layers" in name} == {
        f"params.layers.{n}.{kind}" for n in "01" for kind in ("kernel", "bias")
    }
    fresh = Module(5)
    stream = nnx.state(fresh, nnx.RngState)
    other = trainer_of(fresh)
    report = other.load_weights(path)
    assert len(report.restored) == 10 and not report.initialized
    np.testing.assert_array_equal(other.predict(X), trainer.predict(X))
    assert np.array_equal(fresh.head.kernel[...], trainer.model.head.kernel[...])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), stream, nnx.state(fresh, nnx.RngState)))

    renamed = [WeightRule("old_{n}.w", "params/layers/{n}/kernel"), WeightRule("old_{n}.b", "params/layers/{n}/bias")]
    rest = [WeightRule("{collection}.{layer}.{name}", "{collection}/{layer}/{name}")]
    path = trainer.save_weights(tmp_path / "renamed.safetensors", mapping=[*renamed, *rest])
    assert {"old_0.w", "old_1.b", "params.head.kernel", "batch_stats.norm.mean"} <= safetensors.numpy.load_file(path).keys()
    third = trainer_of(Module(6))
    third.load_weights(path, mapping=[*renamed, *rest])
    np.testing.assert_array_equal(third.predict(X), trainer.predict(X))


@pytest.mark.slow
def test_frozen_parameters_of_nnx_are_parameters_in_the_file(tmp_path):
    whole = trainer_of(Module(), fit=True)
    path = whole.save_weights(tmp_path / "model.safetensors")
    only_head = trainer_of(Module(3), trainable=nnx.All(nnx.Param, nnx.PathContains("head")))
    assert "frozen" in only_head.state.model_state
    for load in (only_head.load_weights, lambda path: only_head.restore(path, weights_only=True)):
        load(path)
        np.testing.assert_array_equal(only_head.predict(X), whole.predict(X))
    again = only_head.save_weights(tmp_path / "again.safetensors")
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_dtypes_are_kept_and_are_converted_on_request(tmp_path):
    trainer = trainer_of(fit=True)
    half = trainer.save_weights(tmp_path / "half.safetensors", dtype="bfloat16")
    with safetensors.safe_open(half, "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 (not a dict)
    with pytest.raises(RestoreError, match="is bfloat16, expected float32"):
        trainer_of().load_weights(half)
    other = trainer_of()
    other.load_weights(half, dtype="float32")
    want = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.bfloat16).astype(np.float32)), trainer.state.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, want, jax.tree.map(np.asarray, other.state.params)))

    class Low(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("scales", "low", lambda: jnp.ones(3, jnp.float8_e4m3fn))
            return nn.Dense(3, param_dtype=jnp.bfloat16)(x)

    low = fitflax.Trainer(Low())
    low.compile("sgd", "sparse_categorical_crossentropy")
    low.build((X[:1], Y[:1]))
    path = low.save_weights(tmp_path / "low.safetensors")
    low.load_weights(path)
    assert low.state.model_state["scales"]["low"].dtype == jnp.float8_e4m3fn and low.state.params["Dense_0"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_averaged_parameters_are_saved(tmp_path):
    trainer = trainer_of(fit=True, ema_decay=0.5)
    arrays = safetensors.numpy.load_file(trainer.save_weights(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(arrays["params.head.kernel"], trainer.state.ema_params["head"]["kernel"])
    other = trainer_of(ema_decay=0.5)
    other.load_weights(tmp_path)
    np.testing.assert_array_equal(other.predict(X), trainer.predict(X))


def mesh_of_four():
    return Sharded({"data": 2, "model": 2}, devices=jax.devices()[:4], fsdp="model", fsdp_min_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [mesh_of_four, lambda: DataParallel(jax.devices()[:4])], ids=["sharded", "data"])
def test_arrays_that_are_split_across_devices_are_joined(parallel, tmp_path):
    alone = trainer_of(fit=True)
    path = alone.save_weights(tmp_path / "model.safetensors")
    split = trainer_of(parallel=parallel())
    split.load_weights(path)
    assert split.save_weights(tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_large_weights_are_split_into_several_files_also_in_buckets(tmp_path):
    trainer = trainer_of(fit=True)
    for place in (str(tmp_path), f"memory://weights-{tmp_path.name}/a"):
        index = trainer.save_weights(f"{place}/model.safetensors", max_shard_bytes=200, metadata={"note": "x"})
        assert str(index) == f"{place}/model.safetensors.index.json" and json.loads(index.read_bytes())["weight_map"].keys() == NAMES
        for path in (place, f"{place}/model.safetensors", index):
            other = trainer_of(seed=2)
            other.load_weights(path)
            np.testing.assert_array_equal(other.predict(X), trainer.predict(X))
            other.restore(path, weights_only=True)


def test_a_part_of_a_file_is_loaded_and_the_rest_is_reported(tmp_path):
    trainer = trainer_of(fit=True)
    mapping = {**{name: name.replace(".", "/") for name in NAMES}, "params.head.kernel": "params/head/kernel"}
    path = trainer.save_weights(tmp_path / "model.safetensors")
    with pytest.raises(RestoreError, match=r"does not cover all arrays.* Not covered: params\.head\.bias\."):
        trainer.load_weights(path, mapping={name: to for name, to in mapping.items() if name != "params.head.bias"})
    other = trainer_of(Net(classes=5), seed=3)
    before = other.state.params["head"]["kernel"]
    report = other.load_weights(path, mapping={name: to for name, to in mapping.items() if "head" not in name}, partial=True)
    assert report.initialized == ("params/head/bias", "params/head/kernel") and report.unused == ("params.head.bias", "params.head.kernel")
    np.testing.assert_array_equal(before, other.state.params["head"]["kernel"])
    with pytest.raises(RestoreError, match="Missing: params/head/bias, params/head/kernel"):
        other.load_weights(path, mapping={name: None if "head" in name else to for name, to in mapping.items()})


def advised(caught, mapping=None):
    """Returns the options of the call that the error advises, given the mapping of the call that failed."""
    text = str(caught.value)
    assert ".." not in text.replace("...", "")
    if found := re.search(r"mapping=(\{.*?\})", text):
        first = eval(found[1])
        if isinstance(mapping, list):
            return {"mapping": [*(WeightRule(name, None) for name in first), *mapping]}
        if callable(mapping):
            return {"mapping": lambda name: None if name in first else mapping(name)}
        return {"mapping": {**(mapping or {}), **first}}
    return {"dtype": re.search(r"dtype='(\w+)'", text)[1]}


HEAD = ("params/head/bias", "params/head/kernel")


def as_path(name):
    return name.replace(".", "/")


@pytest.mark.mostly_slow
@pytest.mark.parametrize("form", ["default", "dict", "rules"])
def test_following_the_advice_of_each_error_initializes_a_new_head(form, tmp_path):
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors")
    rules = [WeightRule("{collection}.{layer}.{name}", "{collection}/{layer}/{name}")]
    mapping = {"default": None, "dict": {name: as_path(name) for name in NAMES}, "rules": rules}[form]
    tuned = trainer_of(Net(classes=5))
    with pytest.raises(RestoreError, match=r"call Trainer\.load_weights\(path, partial=True, mapping=.* map these to None in it") as whole:
        tuned.load_weights(path, mapping=mapping)
    with pytest.raises(RestoreError, match="params/head/kernel has shape") as caught:
        tuned.load_weights(path, mapping=mapping, partial=True)
    assert advised(whole, mapping) == advised(caught, mapping)
    report = tuned.load_weights(path, partial=True, **advised(caught, mapping))
    assert report.initialized == HEAD and len(report.restored) == 6 and tuned.predict(X).shape == (32, 5)


@pytest.mark.slow
def test_the_advice_uses_the_names_in_the_file_for_functions_and_frozen_parameters_too(tmp_path):
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors")
    tuned = trainer_of(Net(classes=5))
    with pytest.raises(RestoreError, match="params/head/kernel has shape") as caught:
        tuned.load_weights(path, mapping=as_path, partial=True)
    assert tuned.load_weights(path, partial=True, **advised(caught, as_path)).initialized == HEAD
    path = trainer_of(Module(), fit=True).save_weights(tmp_path / "nnx.safetensors")
    frozen = trainer_of(Module(classes=5), trainable=nnx.All(nnx.Param, nnx.PathContains("norm")))
    with pytest.raises(RestoreError, match="frozen/head/kernel has shape") as caught:
        frozen.load_weights(path, partial=True)
    assert frozen.load_weights(path, partial=True, **advised(caught)).initialized == ("frozen/head/bias", "frozen/head/kernel")


@pytest.mark.slow
def test_the_mapping_that_restore_advises_works_with_restore(tmp_path):
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors")
    tuned = trainer_of(Net(classes=5))
    for options in ({"partial": True}, {"weights_only": True}):
        with pytest.raises(RestoreError, match=r"call Trainer\.restore\(.*params/head/kernel has shape") as caught:
            tuned.restore(path, **options)
        assert tuned.restore(path, partial=True, **advised(caught)).initialized == HEAD


@pytest.mark.parametrize("partial", [True, False])
def test_the_advice_about_dtypes_is_to_pass_dtype(partial, tmp_path):
    path = trainer_of(fit=True).save_weights(tmp_path / "model.safetensors", dtype="bfloat16")
    with pytest.raises(RestoreError, match="is bfloat16, expected float32") as caught:
        trainer_of().load_weights(path, partial=partial)
    assert "To load only" not in str(caught.value)
    assert trainer_of().load_weights(path, partial=partial, **advised(caught)).initialized == ()
    tuned = trainer_of(Net(classes=5))
    with pytest.raises(RestoreError, match=r"dtype='float32' to Trainer\.load_weights\. To load only what matches, call .* mapping=") as caught:
        tuned.load_weights(path, partial=True)
    assert tuned.load_weights(path, partial=True, dtype="float32", **advised(caught)).initialized == HEAD


def test_a_mapping_with_only_none_omits_these_names(tmp_path):
    trainer = trainer_of(fit=True)
    path = trainer.save_weights(tmp_path / "model.safetensors", mapping={})
    arrays = safetensors.numpy.load_file(path)
    assert arrays.keys() == NAMES
    safetensors.numpy.save_file(arrays | {"params.old.kernel": np.ones(2, np.float32)}, path)
    with pytest.raises(RestoreError, match="Unexpected: params/old/kernel"):
        trainer.load_weights(path)
    assert len(trainer.load_weights(path, mapping={"params.old.kernel": None}).restored) == 8
    with pytest.raises(RestoreError, match=r"there is no 'params.olds.kernel' \(Did you mean 'params.old.kernel'\?\)"):
        trainer.load_weights(path, mapping={"params.olds.kernel": None})


def test_names_without_collections_are_parameters(tmp_path):
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    safetensors.numpy.save_file({"Dense_0.kernel": np.ones((6, 3), np.float32), "Dense_0.bias": np.zeros(3, np.float32)}, tmp_path / "a.safetensors")
    trainer = fitflax.Trainer(Plain())
    assert trainer.load_weights(tmp_path / "a.safetensors").restored == ("params/Dense_0/bias", "params/Dense_0/kernel")
    np.testing.assert_allclose(trainer.predict(X), X.sum(1, keepdims=True).repeat(3, 1), rtol=1e-5, atol=1e-5)


def test_after_an_error_the_state_is_unchanged(tmp_path):
    trainer = trainer_of(fit=True)
    path = trainer.save_weights(tmp_path / "model.safetensors")
    before = trainer.predict(X)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        trainer.load_weights(path)
    safetensors.numpy.save_file({"params.a": np.ones(2, np.float32), "params.a.b": np.ones(2, np.float32)}, path)
    with pytest.raises(RestoreError, match=r"params/a(/b)? conflicts with params/a(/b)?, because one path contains the other"):
        trainer.load_weights(path)
    np.testing.assert_array_equal(before, trainer.predict(X))


def test_mistakes_are_named(tmp_path):
    trainer = fitflax.Trainer(Net())
    with pytest.raises(NotReadyError, match="save_weights: there is no state yet"):
        trainer.save_weights(tmp_path / "a.safetensors")
    trainer = trainer_of()
    with pytest.raises(ConfigError, match=r"must end with \.safetensors"):
        trainer.save_weights(tmp_path / "a.msgpack")
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        trainer.save_weights(tmp_path / "a.safetensors", max_shard_bytes=0)
    with pytest.raises(ConfigError, match="must map strings to strings"):
        trainer.save_weights(tmp_path / "a.safetensors", metadata={"step": 3})
    with pytest.raises(ConfigError, match="cannot be a function, which maps names only from the file to the model"):
        trainer.save_weights(tmp_path / "a.safetensors", mapping=lambda name: name)
    with pytest.raises(ConfigError, match="takes a floating-point dtype"):
        trainer.load_weights(tmp_path, dtype="int8")
    with pytest.raises(ConfigError, match="takes a floating-point dtype"):
        trainer.save_weights(tmp_path / "a.safetensors", dtype="float33")
    (tmp_path / "dir.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a directory"):
        trainer.save_weights(tmp_path / "dir.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="no such file or directory"):
        trainer.load_weights(tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError, match="no such file, and no index"):
        trainer.load_weights(tmp_path / "gone.safetensors")
    trainer.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointNotFoundError, match=r"To load a checkpoint, use restore\(path, weights_only=True\)"):
        trainer.load_weights(tmp_path / "checkpoint")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"pickled weights, pytorch_model.bin, which are not loaded, because unpickling can run code"):
        trainer.load_weights(tmp_path / "hub")
    with pytest.raises(NotReadyError, match=r"load_weights\(partial=True\) needs the module's shapes to initialize what the file does not have"):
        fitflax.Trainer(Net()).load_weights(trainer.save_weights(tmp_path / "a.safetensors"), partial=True)


def test_a_name_with_a_dot_needs_a_mapping(tmp_path):
    class Dotted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="a.b")(x)

    trainer = fitflax.Trainer(Dotted())
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    trainer.build((X[:1], Y[:1]))
    with pytest.raises(CheckpointError, match=r"contains a '\.', which separates names in the file"):
        trainer.save_weights(tmp_path / "a.safetensors")
    mapping = {"kernel": "params/a.b/kernel", "bias": "params/a.b/bias"}
    trainer.load_weights(trainer.save_weights(tmp_path / "a.safetensors", mapping=mapping), mapping=mapping)
