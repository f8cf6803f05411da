"""NNX modules whose mode is in a configuration, and `Trainer(nnx_module, eval_model=...)`."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fitflax
from fitflax.errors import FitflaxWarning, ModelError
from fitflax.parallel import DataParallel

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X[:, :1] + 1


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.5
    deterministic: bool = False


class Block(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.config, self.linear = config, nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(config.rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.linear(x), deterministic=self.config.deterministic)


class Net(nnx.Module):
    """Like Flax's linen transformers: all modules hold one configuration."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.config, self.blocks, self.out = config, nnx.List([Block(config, rngs) for _ in range(2)]), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def make(model: Any, **options: Any) -> Any:
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]), **options)
    trainer.compile("sgd", "mse")
    return trainer


def code_in(error: Any) -> str:
    found = re.search(r"Trainer\(model, eval_model=(.*)\)\. If this is intended, pass eval_model=model\.$", str(error.value))
    assert found is not None, error.value
    return found[1]


def evaluated(code: str, model: Any) -> Any:
    return eval(code, {"model": model, "nnx": nnx, "dataclasses": dataclasses})


def test_dropout_that_a_configuration_leaves_on_is_an_error_with_the_eval_model_to_pass_and_that_model_works():
    model = Net(Config(), nnx.Rngs(0))
    trainer = make(model)
    with pytest.raises(ModelError, match=r"^Net draws random numbers in evaluation\. Dropout is on in evaluation, because the model is configured") as caught:
        trainer.fit(X, Y, validation_data=(X, Y), verbose=0)
    assert trainer.step == 0
    code = code_in(caught)
    assert code == "nnx.with_attributes(model, config=dataclasses.replace(model.config, deterministic=True))"
    trainer = make(model, eval_model=evaluated(code, model))
    trainer.fit(X, Y, validation_data=(X, Y), epochs=2, verbose=0)
    expected = model.out(model.blocks[1].linear(model.blocks[0].linear(X)))
    np.testing.assert_allclose(trainer.predict(X), expected, rtol=1e-5, atol=1e-6)
    want = pytest.approx(float(((expected - Y) ** 2).mean()), rel=1e-5)
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == trainer.history.history["val_loss"][-1] == want


class Pair(nnx.Module):
    """Its parts have different configurations under one name, one of which has no mode."""

    def __init__(self, rngs: nnx.Rngs):
        self.config = "without a mode"
        self.first, self.second = Block(Config(rate=0.25), rngs), nnx.List([Block(Config(), rngs)])
        self.table = {"training": True}
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.second[0](self.first(x))
        return self.out(x * jnp.where(jax.random.bernoulli(self.first.drop.rngs(), 0.5, x.shape), 2, 0) if self.table["training"] else x)


class FromCall(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.settings, self.out, self.drop = config, nnx.Linear(4, 1, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> Any:
        return self.drop(self.out(x), deterministic=self.settings.deterministic, rngs=rngs)


class LinenNet(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dropout(0.5)(nn.Dense(1)(x), deterministic=self.config.deterministic)


def bridged(config: Any) -> Any:
    return nnx.bridge.ToNNX(LinenNet(config), rngs=nnx.Rngs(0)).lazy_init(X)


OTHERS: dict[str, Any] = {
    "a transformation": (lambda: Stacked(Config(), nnx.Rngs(0)), "nnx.with_attributes(model, config=dataclasses.replace(model.config, deterministic=True))"),
    "several configurations": (
        lambda: Pair(nnx.Rngs(0)),
        (
            "nnx.with_attributes(nnx.with_attributes(nnx.with_attributes(model, table={**model.table, 'training': False}), "
            "only=nnx.filterlib.PathIn(('first',),), config=dataclasses.replace(model.first.config, deterministic=True)), "
            "only=nnx.filterlib.PathIn(('second', 0),), config=dataclasses.replace(model.second[0].config, deterministic=True))"
        ),
    ),
    "a linen module": (
        lambda: bridged(Config()),
        "nnx.with_attributes(model, to_nnx__module=model.to_nnx__module.clone(config=dataclasses.replace(model.to_nnx__module.config, deterministic=True)))",
    ),
}


class Stacked(nnx.Module):
    """Its layers are rematerialized."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def block(rngs: nnx.Rngs) -> Any:
            return Block(config, rngs)

        self.config, self.blocks, self.out = config, block(rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block: Any, x: Any) -> Any:
            return block(x)

        return self.out(run(self.blocks, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_mode_is_found_in_the_configurations_of_all_modules(name: str):
    create, code = OTHERS[name]
    model = create()
    with pytest.raises(ModelError) as caught:
        make(model).predict(X)
    assert code_in(caught) == code
    changed = evaluated(code, model)
    np.testing.assert_allclose(make(model, eval_model=changed).predict(X), changed(X), rtol=1e-5, atol=1e-6)


def test_streams_that_only_training_passes_are_an_error_with_the_same_advice():
    model = FromCall(Config(), nnx.Rngs(0))
    trainer = make(model)
    trainer.fit(X, Y, verbose=0)
    with pytest.raises(ModelError, match=r"(?s)cannot be run in evaluation mode .* eval_model=nnx\.with_attributes\(model, settings=dataclasses\.replace\("):
        trainer.predict(X)


def test_an_eval_model_that_is_configured_for_training_is_an_error():
    model = Net(Config(), nnx.Rngs(0))
    end = r".* If this is intended, name the streams: Trainer\(rngs="
    with pytest.raises(ModelError, match=r"because the eval_model is configured that way\. .*=dataclasses\.replace\(eval_model\.config" + end):
        make(model, eval_model=Net(Config(), nnx.Rngs(0))).predict(X)


class FromView(nnx.Module):
    """Its layers follow the mode that the trainer sets, so its configuration has no effect."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.config, self.rngs, self.out = config, rngs, nnx.Linear(4, 1, rngs=rngs)
        self.drop = nnx.Dropout(config.rate, deterministic=config.deterministic, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.split_rngs(splits=len(x))
        @nnx.vmap(in_axes=(None, 0, 0))
        def run(drop: Any, rngs: Any, x: Any) -> Any:
            return drop(x, rngs=rngs)

        return nnx.remat(lambda out, x: out(x))(self.out, run(self.drop, self.rngs, x))


class Noisy(FromView):
    def __call__(self, x: Any) -> Any:
        return self.out(x) + jax.random.normal(self.rngs(), (len(x), 1))


class ByKeyword(Noisy):
    def __call__(self, x: Any, deterministic: bool) -> Any:
        return super().__call__(x)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["a configuration without effect", "intended", "keyword", "streams named for evaluation"])
def test_a_configuration_for_training_is_allowed_if_it_has_no_effect_or_is_intended(name: str):
    create, options = {
        "a configuration without effect": (FromView, {}),
        "intended": (Noisy, {"eval_model": True}),
        "keyword": (ByKeyword, {}),
        "streams named for evaluation": (FromCall, {"rngs": {"train": ("dropout",), "eval": ("dropout",)}}),
    }[name]
    model = create(Config(), nnx.Rngs(0))
    trainer = make(model, **{key: model if value is True else value for key, value in options.items()})
    trainer.fit(X, Y, validation_split=0.5, verbose=0)
    outputs = trainer.predict(X)
    assert (name == "a configuration without effect") == np.allclose(outputs, model.out(X), rtol=1e-5, atol=1e-6)


def test_batch_statistics_that_a_configuration_leaves_on_give_one_warning():
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.config, self.norm, self.out = {"train": True}, nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(self.norm(x, use_running_average=not self.config["train"]))

    model = Normed(nnx.Rngs(0))
    trainer = make(model)
    code = r"nnx\.with_attributes\(model, config=\{\*\*model\.config, 'train': False\}\)"
    with pytest.warns(FitflaxWarning, match=rf"Normed is configured for training, but.*eval_model={code}\), or pass eval_model=model if this is intended"):
        trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X)  # Does not warn again.
    make(model, eval_model=model).predict(X)


def test_a_cache_that_only_the_eval_model_has_starts_over_at_each_call():
    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, *, decode: bool):
            self.out, self.decode = nnx.Linear(4, 1, rngs=rngs), decode
            if decode:
                self.position = nnx.Cache(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            if self.decode:
                self.position[...] += 1
                return self.out(x) * self.position[...]
            return self.out(x)

    model = Decoder(nnx.Rngs(0), decode=False)
    trainer = make(model, eval_model=Decoder(nnx.Rngs(1), decode=True))
    trainer.fit(X, Y, validation_split=0.5, batch_size=4, verbose=0)
    for _ in range(2):
        np.testing.assert_allclose(trainer.predict(X, batch_size=4), model(X), rtol=1e-5, atol=1e-6)
    assert trainer.state.model_state == {}
    assert trainer.eval_model.position[...] == 0


def test_train_and_eval_are_called_on_the_outermost_module_only_as_in_flax():
    class Custom(nnx.Module):
        def __init__(self, inner: Any = None):
            self.inner, self.out, self.scale = inner, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 3

        def eval(self, **attributes: Any) -> None:
            super().eval(**attributes)
            self.scale = 1

        def __call__(self, x: Any) -> Any:
            return self.scale * self.out(x if self.inner is None else self.inner(x))

    model = Custom(Custom())
    trainer = make(model)
    outputs = trainer.predict(X)
    assert (model.scale, model.inner.scale) == (3, 3)
    model.eval()
    assert (model.scale, model.inner.scale) == (1, 3)
    np.testing.assert_allclose(outputs, model(X), rtol=1e-5, atol=1e-6)
