"""A linen and an NNX module of the same architecture: checkpoints restore each other, axis names split them alike, and tools give the same results."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import fitflax
from fitflax import optimizers
from fitflax.callbacks import ModelCheckpoint, TerminateOnNaN
from fitflax.errors import RestoreError, ShardingError
from fitflax.leaves import named_leaves
from fitflax.parallel import DataParallel, Sharded
from tests.nnx_hand_written import values

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 22)
LABELS = "sparse_categorical_crossentropy"
LAYERS = {"l1": "Dense_0", "norm": "BatchNorm_0", "out": "Dense_1"}
SAME = {name: name for name in LAYERS}
TO_NNX = {**{f"params/{ours}": f"params/{theirs}" for ours, theirs in LAYERS.items()}, "batch_stats/norm": "batch_stats/BatchNorm_0"}
TO_LINEN = {theirs: ours for ours, theirs in TO_NNX.items()}
STREAMS = ("rngs/drop/rngs/count", "rngs/drop/rngs/key")


class Linen(nn.Module):
    """`names` are those of its layers; by default, linen numbers them."""

    rate: float = 0.0
    names: tuple[str | None, ...] = (None, None, None)

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        l1, norm, out = self.names
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name=norm)(nn.Dense(8, name=l1)(x)))
        return nn.Dense(3, name=out)(nn.Dropout(self.rate, deterministic=not train)(x) if self.rate else x)


class Module(nnx.Module):
    """The same as an NNX module."""

    def __init__(self, rate: float = 0.0, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.l1, self.norm, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.l1(x)))
        return self.out(x if self.drop is None else self.drop(x))


def named(rate: float = 0.0) -> Linen:
    return Linen(rate, tuple(SAME))


def make(model: Any, place: str = "one", optimizer: Any = "adam", loss: Any = LABELS) -> fitflax.Trainer:
    devices = jax.devices()[:4]
    parallel = DataParallel(devices[:1]) if place == "one" else Sharded({"data": 4}, devices=devices, fsdp=True, fsdp_min_size=8)
    trainer = fitflax.Trainer(model, parallel=parallel)
    trainer.compile(optimizer, loss, ["accuracy"])
    return trainer


def fit(trainer: fitflax.Trainer, **options: Any) -> list[float]:
    return trainer.fit(X, Y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **options}).history["loss"]


def contents(trainer: fitflax.Trainer, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the step, parameters, batch statistics and Adam's state by the layers of the NNX module; `names` are those in the trainer's model."""
    state = trainer.state
    trees = {"params": state.params, "batch_stats": state.model_state["batch_stats"], **{name: optax.tree.get(state.opt_state, name) for name in ("mu", "nu")}}
    found = {f"{kind}/{layer}": dict(tree[name]) for kind, tree in trees.items() for layer, name in names.items() if name in tree}
    return {**found, "step": state.step, "counts": [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]}


def streams_of(trainer: fitflax.Trainer) -> dict[str, Any]:
    return {path: value for path, value in values(trainer.model).items() if "rngs" in path}


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# -- checkpoints --


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("rate", "place"), [(0.5, "one"), (0.0, "one"), (0.5, "mesh"), (0.0, "mesh")])
def test_a_checkpoint_of_one_kind_restores_the_other_with_optimizer_state_and_step(rate: float, place: str, tmp_path):
    linen, module = make(Linen(rate), place), make(Module(rate), place)
    fit(linen, epochs=2)
    fit(module)
    streams = streams_of(module)
    report = module.restore(linen.save(tmp_path / "linen"), mapping=TO_NNX)
    assert module.step == 6 and len(contents(linen, LAYERS)) == 3 * 3 + 1 + 2
    assert_equal(contents(module, SAME), contents(linen, LAYERS))
    assert (report.initialized, report.unused) == (STREAMS if rate else (), ())
    assert_equal(streams_of(module), streams)
    np.testing.assert_array_equal(module.model.out.kernel[...], linen.state.params["Dense_1"]["kernel"])
    np.testing.assert_allclose(module.predict(X), linen.predict(X), rtol=1e-5, atol=1e-6)

    losses = fit(module)
    if not rate:  # Otherwise, the masks differ.
        np.testing.assert_allclose(losses, fit(linen), rtol=1e-5)
    report = linen.restore(module.save(tmp_path / "nnx"), mapping=TO_LINEN)
    assert linen.step == 9
    assert_equal(contents(linen, LAYERS), contents(module, SAME))
    assert (report.initialized, report.unused) == ((), STREAMS if rate else ())
    np.testing.assert_allclose(linen.predict(X), module.predict(X), rtol=1e-5, atol=1e-6)
    assert np.isfinite(fit(linen)).all()


def test_with_equal_names_no_mapping_is_needed_but_a_run_does_not_resume_as_the_other_kind(tmp_path):
    linen, module = make(named(0.5)), make(Module(0.5))
    fit(linen, callbacks=[ModelCheckpoint(tmp_path / "linen")])
    with pytest.raises(RestoreError, match=r"does not fit this model\..*Missing: rngs/drop/rngs/count, rngs/drop/rngs/key"):
        fit(module, resume=tmp_path / "linen")
    module.restore(tmp_path / "linen")
    assert_equal(contents(module, SAME), contents(linen, SAME))
    fit(module, callbacks=[ModelCheckpoint(tmp_path / "nnx")])
    new = make(named(0.5))
    with pytest.raises(RestoreError, match="Unexpected: rngs/drop/rngs/count"):
        fit(new, resume=tmp_path / "nnx")
    assert new.restore(tmp_path / "nnx").unused == STREAMS  # Before its shapes are known.
    assert_equal(contents(new, SAME), contents(module, SAME))
    new.predict(X)


def test_streams_are_not_left_out_between_nnx_modules(tmp_path):
    path = make(Module(0.5)).save(tmp_path / "dropout")
    with pytest.raises(RestoreError, match="Unexpected: rngs/drop/rngs/count, rngs/drop/rngs/key"):
        make(Module()).restore(path)


def test_a_linen_collection_called_rngs_is_restored(tmp_path):
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.variable("rngs", "drop", jnp.zeros, ())
            return nn.Dense(3)(x)

    trainer = make(Counts())
    trainer.build((X, Y))
    report = make(Counts()).restore(trainer.save(tmp_path / "counts"))
    assert "rngs/drop" in report.restored and not report.unused


# -- axis names --

RULES = [("embed", None), ("mlp", "model"), ("vocab", "model"), ("classes", None), ("layers", None)]
CODES = RNG.integers(0, 16, (24, 5))
AXES = {"embed": {"embedding": ("vocab", "embed")}, "up": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}, "down": {"kernel": ("mlp", "classes")}}
INITIALIZERS = {"kernel": nn.initializers.lecun_normal(), "bias": nn.initializers.zeros, "embedding": nn.initializers.normal()}


class NamedLinen(nn.Module):
    """Has arrays with axis names, and a normalization without."""

    @nn.compact
    def __call__(self, codes: Any, train: bool = False) -> Any:
        def inits(layer: str) -> Any:
            return {f"{name}_init": nn.with_logical_partitioning(INITIALIZERS[name], axes) for name, axes in AXES[layer].items()}

        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Embed(16, 8, name="embed", **inits("embed"))(codes))
        return nn.Dense(16, name="down", **inits("down"))(nn.relu(nn.Dense(32, name="up", **inits("up"))(x)))


class NamedModule(nnx.Module):
    """The same as an NNX module."""

    def __init__(self) -> None:
        def inits(layer: str) -> Any:
            return {f"{name}_init": nnx.with_partitioning(INITIALIZERS[name], axes) for name, axes in AXES[layer].items()}

        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(16, 8, rngs=rngs, **inits("embed")), nnx.BatchNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs, **inits("up")), nnx.Linear(32, 16, rngs=rngs, **inits("down"))

    def __call__(self, codes: Any) -> Any:
        return self.down(nnx.relu(self.up(self.norm(self.embed(codes)))))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(kind,) * 2)


def created(how: str) -> NamedModule:
    """Creates the module in one of the ways that Flax documents for logical names."""
    if how == "not placed":
        with nnx.use_eager_sharding(False):
            return NamedModule()
    with jax.set_mesh(mesh_of(AxisType.Explicit if how == "on an explicit mesh" else AxisType.Auto)), nnx.logical_axis_rules(RULES):
        return NamedModule()


def split(model: Any, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model, parallel=Sharded(mesh_of(AxisType.Auto), **{"rules": RULES, "fsdp": True, "fsdp_min_size": 8, **options}))
    trainer.compile(optax.adam(1e-2), LABELS, ema_decay=0.9)
    return trainer


def places(trainer: fitflax.Trainer) -> Any:
    """Returns how each array is split, and which part of it a device holds."""
    state, names = trainer.state, ("params", "ema_params", "model_state")
    trees = {**{name: getattr(state, name) for name in names}, **{name: optax.tree.get(state.opt_state, name) for name in ("mu", "nu")}}
    return jax.tree.map(lambda leaf: (leaf.sharding.spec, {shard.data.shape for shard in leaf.addressable_shards}), trees)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("how", ["not placed", "on an automatic mesh", "on an explicit mesh"])
def test_logical_axis_names_split_an_nnx_module_as_a_linen_one(how: str, tmp_path):
    linen, module = split(NamedLinen()), split(created(how))
    linen.fit(CODES, CODES, batch_size=8, verbose=0)
    module.restore(linen.save(tmp_path / "linen"))
    found = places(module)
    assert found == places(linen)
    assert found["mu"]["up"]["kernel"] == (jax.P(None, "model"), {(8, 16)})
    assert found["params"]["down"]["kernel"] == (jax.P("model"), {(16, 16)})
    assert found["model_state"]["batch_stats"]["norm"]["mean"] == (jax.P("data"), {(4,)})
    losses = [trainer.fit(CODES, CODES, batch_size=8, shuffle=False, verbose=0).history["loss"] for trainer in (linen, module)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert places(module) == found
    assert module.model.up.kernel[...].sharding.spec == jax.P(None, "model")


@pytest.mark.slow
def test_names_of_stacked_layers_may_include_the_axis_of_layers():
    stacked = {nnx.PARTITION_NAME: "layers"}

    class Stacked(nnx.Module):
        def __init__(self) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=stacked)
            def block(rngs: nnx.Rngs) -> Any:
                return nnx.Linear(4, 4, kernel_init=nnx.with_partitioning(INITIALIZERS["kernel"], ("embed", "mlp")), rngs=rngs)

            self.blocks, self.out = block(nnx.Rngs(0)), nnx.Linear(4, 3, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=stacked)
            def run(block: Any, x: Any) -> Any:
                return nnx.tanh(block(x))

            return self.out(run(self.blocks, x))

    with nnx.use_eager_sharding(False):
        trainer, alone = split(Stacked()), make(Stacked(), optimizer=optax.adam(1e-2))
    assert trainer.state.logical_axes(strict=False).params["blocks"]["kernel"] == jax.P("layers", "embed", "mlp")
    np.testing.assert_allclose(fit(trainer), fit(alone), rtol=1e-5)
    assert trainer.state.params["blocks"]["kernel"].sharding.spec == jax.P(None, None, "model")


def test_a_logical_name_without_a_rule_is_an_error():
    trainer = split(created("not placed"), rules=RULES[:2])
    with pytest.raises(ShardingError, match=r"params/embed/embedding has axis names that are neither in rules nor axes of the mesh: 'vocab'"):
        trainer.fit(CODES, CODES, verbose=0)


# -- tools --


def trained(trainer: fitflax.Trainer) -> Any:
    before = named_leaves(jax.device_get(trainer.state.params))
    fit(trainer)
    after = trainer.state.params
    changed = [path for (path, old), (_, new) in zip(before, named_leaves(after), strict=True) if not np.array_equal(old, new)]
    return changed, after


def rates_of_groups(trainer: fitflax.Trainer) -> Any:
    trainer.learning_rates = {"out": 0.25}
    return trainer.learning_rates, trained(trainer)


def evaluated(trainer: fitflax.Trainer) -> Any:
    evaluate = trainer.eval_loop(X[:20], Y[:20], batch_size=8, name="valid")
    return [dict(evaluate(checkpoint).metrics["valid"]) for checkpoint in trainer.train_loop(X, Y, steps=2, batch_size=8, shuffle=False)]


def hunted(trainer: fitflax.Trainer) -> Any:
    report = trainer.hunt_nan(X, Y, batch_size=8, shuffle=False)
    assert report is not None and trainer.step == 0
    return report.step, report.culprit, [(origin.kind, origin.operation, origin.is_backward, origin.source) for origin in report.origins]


def stopped(trainer: fitflax.Trainer) -> Any:
    fit(trainer, callbacks=[TerminateOnNaN()])
    return trainer.stop_reason


def searched(trainer: fitflax.Trainer) -> Any:
    curve = trainer.find_learning_rate(X, Y, batch_size=8, steps=10, lowest=1e-3, highest=1.0, shuffle=False)
    assert trainer.step == 0
    return curve.rates, curve.losses


def summarized(trainer: fitflax.Trainer) -> Any:
    file = io.StringIO()
    trainer.summary((X[:8], Y[:8]), file=file)
    table, _, below = file.getvalue().rpartition("┘")
    assert all(layer in table for layer in SAME) and "float32[8,3]" in table
    return below


def logarithm(outputs: Any, targets: Any) -> Any:
    return jnp.log(outputs[:, 0] - 9)


def root_of_zero(outputs: Any, targets: Any) -> Any:
    return jnp.sqrt(0 * outputs[:, 0])


def kernels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key == "kernel", params)


def labels(params: Any) -> Any:
    return {name: "out" if name == "out" else "rest" for name in params}


GROUPS = optax.multi_transform({"out": optimizers.get("sgd", 0.5), "rest": optimizers.get("sgd", 0.01)}, labels)
# The optimizer, the loss, what is done with a trainer, and what is true for the result.
TOOLS: dict[str, tuple[Any, Any, Callable[[fitflax.Trainer], Any], Callable[[Any], bool]]] = {
    "hunt_nan in the loss": ("sgd", logarithm, hunted, lambda found: found[:2] == (1, "the loss") and found[2][0][:3] == ("NaN", "log", False)),
    "hunt_nan in the gradient": ("sgd", root_of_zero, hunted, lambda found: "the gradient of " in found[1] and found[2][-1][:3] == ("NaN", "mul", True)),
    "TerminateOnNaN": ("sgd", logarithm, stopped, lambda reason: reason.endswith("not finite at step 1")),
    "find_learning_rate": ("sgd", LABELS, searched, lambda curve: len(curve[0]) == 10),
    "eval_loop": ("sgd", LABELS, evaluated, lambda metrics: metrics[0] != metrics[1]),
    "summary": ("adam", LABELS, summarized, lambda text: "trainable weights: 83 = 332 B" in text),
    "freeze": (optimizers.freeze(optax.sgd(0.1), ["l1", "*/scale"]), LABELS, trained, lambda found: found[0] == ["norm/bias", "out/bias", "out/kernel"]),
    "train_only": (optimizers.train_only(optax.sgd(0.1), "out/*"), LABELS, trained, lambda found: found[0] == ["out/bias", "out/kernel"]),
    "groups": (GROUPS, LABELS, rates_of_groups, lambda found: found[0] == {"out": 0.25, "rest": pytest.approx(0.01)}),
    "weight decay": (optax.chain(optax.add_decayed_weights(0.5, kernels), optax.sgd(0.1)), LABELS, trained, lambda found: "l1/kernel" in found[0]),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_gives_the_same_result_for_both_kinds(name: str):
    optimizer, loss, use, is_expected = TOOLS[name]
    linen, module = (make(model, optimizer=optimizer, loss=loss) for model in (named(), Module()))
    for trainer in (linen, module):
        trainer.build((X[:8], Y[:8]))
    linen.replace_params(module.state.params)
    results = use(linen), use(module)
    assert is_expected(results[1])
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert one == other if isinstance(one, str | int) else np.allclose(one, other, rtol=1e-4, atol=1e-6), name
