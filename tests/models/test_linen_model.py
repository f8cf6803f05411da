from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core.scope import DenyList, in_filter

import fitflax
from fitflax.errors import ConfigError, ModelError
from fitflax.leaves import describe_shapes
from fitflax.models import adapt_model, mutable_filter
from fitflax.models.base import Draws
from fitflax.models.linen_model import adapt_linen
from fitflax.parallel import DataParallel

X = np.ones((4, 1), np.float32)


class ByTrain(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return x if train else 0 * x


class ByTraining(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, training: bool = False) -> Any:
        return x if training else 0 * x


class ByDeterministic(nn.Module):
    @nn.compact
    def __call__(self, x: Any, deterministic: bool = True) -> Any:
        return 0 * x if deterministic else x


class ByField(nn.Module):
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return 0 * x if self.deterministic else x


class ByTrainField(nn.Module):
    train: bool = False

    def setup(self) -> None:
        self.inner = ByTrain()

    def __call__(self, x: Any) -> Any:
        return self.inner(x, self.train)


class Inherited(ByTraining):
    pass


class Nothing(nn.Module):
    @nn.compact
    def __call__(self, x: Any, **kwargs: Any) -> Any:
        assert not kwargs
        return x


BY_MODE = [ByTrain(), ByTraining(), ByDeterministic(), ByField(), ByTrainField(), Inherited(), nn.jit(ByTraining, static_argnames="training")()]


def apply(model: nn.Module, train: bool, **options: Any) -> Any:
    adapted = adapt_linen(model, **options)
    return adapted.apply({"params": {}}, X, train=train, draws=Draws({}), mutable=["none"])[0]


@pytest.mark.parametrize("model", BY_MODE, ids=lambda model: type(model).__name__)
def test_the_mode_of_a_module_is_found_and_set(model: nn.Module):
    np.testing.assert_array_equal(apply(model, train=True), X)
    np.testing.assert_array_equal(apply(model, train=False), 0 * X)


@pytest.mark.parametrize("model", [ByTrain(), ByField()], ids=lambda model: type(model).__name__)
def test_a_module_with_two_modes_trains_in_one_and_is_evaluated_in_the_other(model: nn.Module):
    # Keras: loss 1 in fit, 0 in evaluate and predict.
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    assert trainer.fit(X, 0 * X, verbose=0).history["loss"] == [1.0]
    assert trainer.evaluate(X, 0 * X, verbose=0)["loss"] == 0.0
    np.testing.assert_array_equal(trainer.predict(X), 0 * X)
    assert trainer.model is model


def test_explicit_keywords_override_the_mode_that_was_found():
    np.testing.assert_array_equal(apply(ByTraining(), train=True, train_kwargs={"training": False}), 0 * X)
    np.testing.assert_array_equal(apply(ByTraining(), train=False, eval_kwargs={"training": True}), X)
    assert adapt_linen(ByTraining(), train_kwargs={"scale": 2}).train_kwargs == {"training": True, "scale": 2}


def test_arbitrary_keywords_are_not_mistaken_for_a_mode():
    adapted = adapt_linen(Nothing())
    assert adapted.train_kwargs == adapted.eval_kwargs == {}
    assert adapted.train_module is adapted.eval_module


def test_a_keyword_takes_precedence_over_a_field():
    class Both(nn.Module):
        train: bool | None = None

        @nn.compact
        def __call__(self, x: Any, train: bool | None = None) -> Any:
            return x if nn.merge_param("train", self.train, train) else 0 * x

    adapted = adapt_linen(Both())
    assert adapted.train_module.train is None
    np.testing.assert_array_equal(apply(Both(), train=True), X)
    np.testing.assert_array_equal(apply(Both(), train=False), 0 * X)


def test_all_keywords_that_a_module_takes_are_passed():
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool, deterministic: bool) -> Any:
            assert train is not deterministic
            return x if train else 0 * x

    np.testing.assert_array_equal(apply(Both(), train=True), X)


class MaskedDropout(nn.Module):
    """Branches on its mode, which must therefore be static."""

    @nn.compact
    def __call__(self, x: Any, mask: Any = None, train: bool = False) -> Any:
        x = nn.Dense(8)(x)
        if train:
            x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(1)(x if mask is None else x * mask)


class Rematted(MaskedDropout):
    """Has the transformation on its method."""

    __call__ = nn.remat(MaskedDropout.__call__, static_argnums=(3,))


STATIC_MODES = {
    "remat": lambda: nn.remat(MaskedDropout, static_argnums=(3,))(),
    "jit": lambda: nn.jit(MaskedDropout, static_argnums=(3,))(),
    "both": lambda: nn.jit(nn.remat(MaskedDropout, static_argnums=(3,)), static_argnums=(3,))(),
    "method": Rematted,
    "names": lambda: nn.jit(MaskedDropout, static_argnames=("train",))(),
}


@pytest.mark.parametrize("name", STATIC_MODES)
@pytest.mark.parametrize("inputs", ["one", "two", "keywords"])
@pytest.mark.mostly_slow
def test_a_transformed_module_whose_mode_is_static_equals_a_hand_written_loop(name: str, inputs: str):
    model, rng = STATIC_MODES[name](), np.random.default_rng(0)
    x, mask, y = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 3), (6, 8), (6, 1)))
    options: dict[str, Any] = {"inputs": {"x": "x", "mask": "mask"}, "targets": "y"} if inputs == "keywords" else {}
    batch: Any = {"x": x, "mask": mask, "y": y} if inputs == "keywords" else (x if inputs == "one" else (x, mask), y)
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]), **options)
    trainer.compile("sgd", "mse", learning_rate=0.1)
    trainer.build(batch)
    arguments = (x,) if inputs == "one" else (x, mask)
    mode = ((), {"train": True}) if name == "names" else ((None,) * (2 - len(arguments)) + (True,), {})

    def outputs(params: Any, rngs: Any) -> Any:
        return model.apply({"params": params}, *arguments, *mode[0], rngs=rngs, **mode[1])

    params = trainer.state.params
    for _ in range(3):
        rngs = trainer.step_rngs(trainer.state)
        value, grads = jax.value_and_grad(lambda params, rngs=rngs: jnp.mean((outputs(params, rngs) - y) ** 2))(params)
        np.testing.assert_allclose(trainer.train_on_batch(batch)["loss"], value, rtol=1e-5)
        params = jax.tree.map(lambda one, grad: one - 0.1 * grad, params, grads)
    expected = MaskedDropout().apply({"params": trainer.state.params}, *arguments)
    np.testing.assert_allclose(
        trainer.evaluate(*(batch if isinstance(batch, tuple) else (batch,)), verbose=0)["loss"], jnp.mean((expected - y) ** 2), rtol=1e-5
    )


def test_the_users_module_is_not_changed():
    model = ByField()
    adapt_linen(model)
    assert model.deterministic is None
    assert adapt_linen(model).train_module is not model


@pytest.mark.parametrize(("model", "match"), [(nn.Dense, r"the class Dense\. Call it"), (3, "builtins.int"), (lambda x: x, "function")])
def test_a_model_must_be_an_instance_of_a_module(model: Any, match: str):
    with pytest.raises(ConfigError, match=match):
        adapt_model(model)


def test_several_inputs_are_passed_by_position_or_by_keyword():
    class Sum(nn.Module):
        def __call__(self, a: Any, b: Any) -> Any:
            return a - b

    spread = adapt_linen(Sum()).apply({}, (X, 3 * X), train=True, draws=Draws({}), mutable=["none"])[0]
    named = adapt_linen(Sum(), keyword_inputs=True).apply({}, {"b": 3 * X, "a": X}, train=True, draws=Draws({}), mutable=["none"])[0]
    np.testing.assert_array_equal(spread, -2 * X)
    np.testing.assert_array_equal(named, -2 * X)


def test_a_list_or_dict_of_inputs_is_one_argument():
    class Tree(nn.Module):
        def __call__(self, x: Any) -> Any:
            return sum(jax.tree.leaves(x))

    for x in ([X, X], {"a": X, "b": X}):
        np.testing.assert_array_equal(adapt_linen(Tree()).apply({}, x, train=True, draws=Draws({}), mutable=["none"])[0], 2 * X)


def test_metadata_boxes_are_removed():
    model = nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    variables, axes = adapt_linen(model).init({"params": jax.random.key(0)}, X)
    assert axes.by_path == {"params/kernel": (None, "model")}
    assert isinstance(variables["params"]["kernel"], jax.Array)


# -- errors --


def test_the_error_of_a_failing_module_says_on_which_inputs_and_when():
    model = adapt_linen(nn.Conv(2, (3, 3)))
    with pytest.raises(ModelError, match=r"Conv cannot be initialized on inputs float32\[4\] \(the shapes inside a step\)"):
        model.init({"params": jax.random.key(0)}, np.ones(4, np.float32))


def test_the_error_for_a_missing_random_stream_says_how_to_name_it():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    with pytest.raises(ModelError, match=r"InvalidRngError.*Trainer\(rngs=\('dropout', ...\)\)"):
        adapt_linen(Noisy()).apply({}, X, train=True, draws=Draws({}), mutable=["none"])


def test_the_error_for_too_many_arguments_says_how_to_pass_several_inputs():
    with pytest.raises(ModelError, match=r"Pass several inputs as a tuple"):
        adapt_linen(nn.Dense(1)).init({"params": jax.random.key(0)}, (X, X, X))


def test_shapes_are_described_in_one_line():
    tree = {"image": np.zeros((8, 28), np.float32), "pair": (jnp.zeros(3, int), 1)}
    assert describe_shapes(tree) == "{'image': float32[8,28], 'pair': (int32[3], int)}"


@pytest.mark.parametrize(
    ("mutable", "inside", "outside"),
    [
        (DenyList("params"), ["batch_stats", "cache", "losses"], ["params"]),
        (["batch_stats"], ["batch_stats", "losses"], ["cache", "params"]),
        ("batch_stats", ["batch_stats", "losses"], ["cache", "params"]),
        (True, ["batch_stats", "losses"], ["params"]),
        (False, ["losses"], ["batch_stats", "params"]),
        (DenyList(["params", "frozen"]), ["batch_stats", "losses"], ["frozen", "params"]),
    ],
)
def test_mutable_and_transient_collections_may_change_but_parameters_never_do(mutable: Any, inside: list[str], outside: list[str]):
    filtered = mutable_filter(mutable, ("losses",))
    assert all(in_filter(filtered, name) for name in inside)
    assert not any(in_filter(filtered, name) for name in outside)


@pytest.mark.slow
def test_a_collection_that_is_not_mutable_keeps_its_value():
    class Counter(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            count = self.variable("counts", "n", lambda: jnp.zeros((), jnp.int32))
            if self.is_mutable_collection("counts"):
                count.value += 1
            return nn.Dense(1)(x)

    counts = {}
    for mutable in (DenyList("params"), False):
        trainer = fitflax.Trainer(Counter(), mutable=mutable, parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("sgd", "mse")
        trainer.build((X, X))
        initial = int(trainer.state.model_state["counts"]["n"])
        trainer.fit(X, X, epochs=3, verbose=0)
        trainer.evaluate(X, X, verbose=0)
        counts[bool(mutable)] = int(trainer.state.model_state["counts"]["n"]) - initial
    assert counts == {True: 3, False: 0}


def test_a_variable_may_be_a_python_number():
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            calls = self.variable("counts", "calls", lambda: 0)
            if train:
                calls.value = calls.value + 1
            return nn.Dense(1)(x)

    trainer = fitflax.Trainer(Counts())
    trainer.compile("sgd", "mse")
    x = np.ones((8, 2), np.float32)
    trainer.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    assert trainer.state.model_state["counts"]["calls"].dtype == np.int32
