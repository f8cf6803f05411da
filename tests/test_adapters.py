"""`fitflax.adapters`: LoRA for any linen module."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax import optimizers
from fitflax.adapters import lora, merge
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import ConfigError, OptimizerError
from fitflax.parallel import DataParallel, Sharded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 5)).astype(np.float32)
Y = (np.arange(32) % 3).astype(np.int32)
KEY = jax.random.key(0)


class Net(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.relu(nn.Dense(self.width, name="body")(x)))
        x = nn.MultiHeadDotProductAttention(2, name="attention")(jnp.stack([x, x**2], 1))[:, 0]
        x = nn.Dropout(0.2, deterministic=not train)(x)
        self.sow("intermediates", "h", x)
        return nn.Dense(3, name="head")(x)


class Configured(nn.Module):
    deterministic: bool = False

    def setup(self):
        self.layers = [nn.Dense(5) for _ in range(2)]
        self.drop = nn.Dropout(0.5, deterministic=self.deterministic)

    def __call__(self, x):
        for layer in self.layers:
            x = self.drop(nn.relu(layer(x)))
        return x


class Net2D(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(4, (3, 3))(nn.remat(nn.Conv)(6, (3, 3))(x)).mean((1, 2))


class Taken(nn.Module):
    kind: str

    def setup(self):
        if self.kind == "setup":
            self.lora = self.param("lora", nn.initializers.ones, (5, 5))
        elif self.kind == "setup module":
            self.lora = nn.Dense(5)

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, name="body")(x)
        if self.kind == "module":
            return nn.Dense(5, name="lora")(x)
        return x @ self.param("lora", nn.initializers.ones, (5, 5)) if self.kind == "array" else self.lora(x) if self.kind == "setup module" else x @ self.lora


@pytest.mark.parametrize("kind", ["array", "module", "setup", "setup module"])
def test_a_module_with_parameters_called_lora_is_refused(kind):
    variables_of(Taken(kind))
    with pytest.raises(ConfigError, match=r"Taken already has parameters called 'lora'.*Rename them"):
        variables_of(lora(Taken(kind), "body"))


def test_a_module_that_is_called_twice_has_one_set_of_adapters():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = lora(nn.Dense(5, parent=None), "kernel", rank=2)
            return layer(layer(x))

    params = variables_of(Twice())["params"]
    assert {name for layer in params.values() for name in layer} == {"kernel", "bias", "lora"}


def variables_of(module, x=X, **kwargs):
    return module.init({"params": KEY, "dropout": KEY}, x, **kwargs)


def changed(variables):
    """Returns the variables with nonzero adapters."""
    adapters = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(KEY, leaf.shape), variables["params"]["lora"])
    return {**variables, "params": {**variables["params"], "lora": adapters}}


def same(left, right):
    return jax.tree.structure(left) == jax.tree.structure(right) and jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), left, right))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("module", "x", "kwargs"),
    [(Net(), X, {"train": False}), (Configured(deterministic=True), X, {}), (Net2D(), X[:, :4].reshape(-1, 2, 2, 1), {})],
    ids=["compact", "setup", "conv"],
)
def test_an_adapted_module_starts_equal_to_the_module_and_merges_back_into_it(module, x, kwargs):
    adapted = lora(module, "**", rank=2)
    original, variables = variables_of(module, x, **kwargs), variables_of(adapted, x, **kwargs)
    assert same({name: tree for name, tree in variables["params"].items() if name != "lora"}, original["params"])
    assert np.array_equal(module.apply(original, x, **kwargs), adapted.apply(variables, x, **kwargs))
    variables = changed(variables)
    outputs = adapted.apply(variables, x, **kwargs)
    assert not np.allclose(outputs, module.apply(original, x, **kwargs), atol=1e-3)
    merged = {**original, "params": merge(adapted, variables["params"])}
    np.testing.assert_allclose(module.apply(merged, x, **kwargs), outputs, rtol=1e-4, atol=1e-5)


def test_arrays_that_match_the_patterns_get_adapters_of_the_given_rank():
    adapters = variables_of(lora(Net(), ["body", "attention/*/kernel"], rank=2), train=False)["params"]["lora"]
    attention = {name: {"kernel": {"a": (8, 2), "b": (2, 8)}} for name in ("query", "key", "value", "out")}
    assert jax.tree.map(jnp.shape, adapters) == {"body": {"kernel": {"a": (5, 2), "b": (2, 8)}}, "attention": attention}
    assert not any(adapter["kernel"]["b"].any() for adapter in adapters["attention"].values())


@pytest.mark.slow
def test_collections_random_streams_and_modes_are_those_of_the_module():
    module, adapted = Net(), lora(Net(), "head", rank=1)
    original, variables = variables_of(module, train=True), variables_of(adapted, train=True)
    options = {"train": True, "rngs": {"dropout": KEY}, "mutable": ["batch_stats", "intermediates"]}
    assert same(module.apply(original, X, **options), adapted.apply(variables, X, **options))
    assert isinstance(adapted, Net) and adapted.width == 8 and adapted.clone(width=4).width == 4
    assert adapted == lora(Net(), "head", rank=1) and adapted != lora(Net(), "head", rank=2) and type(adapted) is not Net


def test_the_gradient_equals_that_of_the_product():
    adapted = lora(nn.Dense(3, use_bias=False), "kernel", rank=2, alpha=6.0)
    params = changed(variables_of(adapted))["params"]
    loss = lambda kernel: (X @ kernel).sum() ** 2  # noqa: E731
    grads = jax.grad(lambda params: adapted.apply({"params": params}, X).sum() ** 2)(params)
    a, b = params["lora"]["kernel"]["a"], params["lora"]["kernel"]["b"]
    expected = jax.grad(lambda a, b: loss(params["kernel"] + 3 * a @ b), (0, 1))(a, b)
    np.testing.assert_allclose(grads["lora"]["kernel"]["a"], expected[0], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(grads["lora"]["kernel"]["b"], expected[1], rtol=1e-4, atol=1e-3)


def trainer_of(model, seed=0, parallel=None):
    trainer = fitflax.Trainer(model, seed=seed, parallel=parallel or DataParallel(jax.devices()[:1]))
    trainer.compile(optimizers.train_only(optimizers.get("adam", 1e-2), "lora"), "sparse_categorical_crossentropy")
    trainer.build((X[:1], Y[:1]))
    return trainer


@pytest.mark.slow
def test_only_adapters_are_trained_and_a_resumed_run_is_bit_for_bit_identical(tmp_path):
    base = fitflax.Trainer(Net(), parallel=DataParallel(jax.devices()[:1]))
    base.compile("adam", "sparse_categorical_crossentropy")
    base.fit(X, Y, verbose=0)
    weights = base.save_weights(tmp_path / "base.safetensors")

    def run(directory, **options):
        trainer = trainer_of(lora(Net(), ["attention/*/kernel", "head"], rank=2))
        report = trainer.load_weights(weights, partial=True)
        assert all(path.startswith("params/lora/") for path in report.initialized) and len(report.initialized) == 10 and not report.unused
        np.testing.assert_allclose(trainer.predict(X), base.predict(X), rtol=1e-5, atol=1e-6)
        trainer.fit(X, Y, epochs=3, batch_size=8, verbose=0, callbacks=[ModelCheckpoint(tmp_path / directory)], resume="auto", **options)
        return trainer

    once = run("once")
    run("twice", steps=5)
    twice = run("twice")
    assert twice.step == 12 and same(once.state.params, twice.state.params) and same(once.state.model_state, twice.state.model_state)
    kept = {name: tree for name, tree in once.state.params.items() if name != "lora"}
    assert same(kept, base.state.params) and all(leaf.any() for leaf in jax.tree.leaves(once.state.params["lora"]))
    sizes = [leaf.size for leaf in jax.tree.leaves(once.state.opt_state) if leaf.ndim]
    assert sum(sizes) == 2 * sum(leaf.size for leaf in jax.tree.leaves(once.state.params["lora"]))

    state = once.inference_state()
    server = fitflax.Trainer(Net(), parallel=DataParallel(jax.devices()[:1]))
    server.replace_state(dataclasses.replace(state, params=merge(once.model, state.params)))
    np.testing.assert_allclose(server.predict(X), once.predict(X), rtol=1e-4, atol=1e-5)
    assert len(server.save_weights(tmp_path / "merged.safetensors").read_bytes()) > 0


@pytest.mark.slow
def test_losses_on_a_mesh_equal_those_on_one_device():
    one = trainer_of(lora(Net(), "head", rank=2), parallel=Sharded({"data": 1}, devices=jax.devices()[:1]))
    four = trainer_of(lora(Net(), "head", rank=2), parallel=Sharded({"data": 2, "model": 2}, devices=jax.devices()[:4], fsdp="model", fsdp_min_size=1))
    losses = [trainer.fit(X, Y, epochs=2, verbose=0).history["loss"] for trainer in (one, four)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_kernels_keep_their_axis_names():
    dense = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out")))
    adapted = lora(dense, "kernel", rank=2)
    variables = changed(variables_of(adapted))
    assert isinstance(variables["params"]["kernel"], nn.Partitioned)
    np.testing.assert_allclose(adapted.apply(variables, X), dense.apply({"params": merge(adapted, variables["params"])}, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: lora(Net, "head"), "takes a linen module"),
        (lambda: lora(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "kernel"), "nnx.LoRA"),
        (lambda: lora(Net(), []), "`patterns` must be a pattern of paths"),
        (lambda: lora(Net(), "head", rank=0), "rank"),
        (lambda: lora(Net(), "head", rank=True), "rank"),
        (lambda: lora(Net(), "head", alpha=0), "alpha"),
        (lambda: lora(Net(), "head", alpha=float("nan")), "alpha"),
        (lambda: lora(lora(Net(), "head"), "body"), "which has adapters"),
        (lambda: merge(Net(), {}), "takes the module that lora"),
        (lambda: merge(lora(Net(), "head"), {"head": {}}), "which have the key 'lora'"),
        (lambda: variables_of(lora(Net(), "heads"), train=False), r"'heads' matches no parameter. Did you mean 'head'\?"),
        (lambda: variables_of(lora(Net(), "**/bias"), train=False), None),
        (lambda: variables_of(lora(Net(), "head/bias"), train=False), "matches no array with at least two axes"),
    ],
)
def test_errors_name_the_mistake(make, match):
    if match is None:  # The biases of attention layers have an axis of heads.
        assert set(make()["params"]["lora"]) == {"attention"}
        return
    with pytest.raises(ConfigError, match=match):
        make()


def test_train_only_freezes_the_rest():
    params = {"a": {"w": np.ones(2), "b": np.ones(1)}, "lora": {"w": np.ones(2)}}
    tx = optimizers.train_only(optimizers.get("sgd", 1.0), ["lora", "**/b"])
    updates, _ = tx.update(params, tx.init(params), params)
    assert not updates["a"]["w"].any() and updates["a"]["b"].all() and updates["lora"]["w"].all()
    with pytest.raises(OptimizerError, match=r"train_only\(\): 'loras' matches no parameter"):
        optimizers.train_only(optimizers.get("sgd", 1.0), "loras").init(params)
    with pytest.raises(OptimizerError, match=r"train_only\(\) takes an optax transformation"):
        optimizers.train_only("adam", "lora")
