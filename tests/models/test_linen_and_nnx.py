"""A linen and an NNX module of the same architecture: checkpoints restore each other, axis names split them alike, and tools give the same results."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import RestoreError
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
