"""Outputs of every kind: they are named by keys or attributes, have losses and metrics by name, and `predict` returns them as the module does."""

import collections
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import FrozenDict
from jax.experimental import sparse

import fitflax
from fitflax import metrics
from fitflax.errors import LossError, MetricError
from fitflax.metrics import Mean
from fitflax.parallel import DataParallel, Sharded
from fitflax.steps.outputs import Returned, TotalLoss, as_vector, map_outputs, named_outputs, rows_of, summed

RNG = np.random.default_rng(0)
X = RNG.normal(size=(42, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 42)


@flax.struct.dataclass
class Record:
    logits: Any
    hidden: Any = None
    note: str = flax.struct.field(pytree_node=False, default="as trained")


class Pair(NamedTuple):
    logits: Any
    hidden: Any = None


@flax.struct.dataclass
class Picky(collections.OrderedDict):  # type: ignore[type-arg]
    """Like `ModelOutput` of transformers: a dict of the fields that are not None, which accepts only arrays."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden"):
            value = getattr(self, name)
            if value is not None:
                assert isinstance(value, jax.Array | np.ndarray), f"{name} is {value!r}"
                collections.OrderedDict.__setitem__(self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else list(self.values())[key]


def chex_kind() -> Callable[..., Any]:
    # Not imported at the top, because it is an optional dependency.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chex = pytest.importorskip("chex")

    @chex.dataclass
    class Chexed:
        logits: Any
        hidden: Any = None

    return Chexed


KINDS: dict[str, Any] = {
    "dict": dict,
    "FrozenDict": lambda **outputs: FrozenDict(outputs),
    "OrderedDict": collections.OrderedDict,
    "NamedTuple": Pair,
    "struct.dataclass": Record,
    "like ModelOutput": Picky,
    "chex.dataclass": None,
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return KINDS[request.param] or chex_kind()


class Net(nn.Module):
    kind: Callable[..., Any]
    with_hidden: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = nn.Dense(4, name="body")(x)
        logits = nn.Dense(3, name="head")(nn.relu(hidden))
        return self.kind(logits=logits, hidden=hidden) if self.with_hidden else self.kind(logits=logits, hidden=None)


class Plain(nn.Module):
    """The same network, with an output that has no name."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(4, name="body")(x)))


def trainer_of(model: nn.Module, *, num_devices: int = 1, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:num_devices]))
    options = {"loss": {"logits": "sparse_categorical_crossentropy"}, "metrics": {"logits": ["accuracy"]}, **options}
    trainer.compile(optax.adam(1e-2), **options)
    return trainer


def assert_same_kind(have: Any, want: Any) -> None:
    assert type(have) is type(want)
    assert jax.tree.structure(have) == jax.tree.structure(want)
    if hasattr(want, "keys"):
        assert list(have) == list(want)


# -- names --


def output_names(outputs: Any) -> tuple[Any, ...] | None:
    named = named_outputs(outputs)
    return None if named is None else tuple(named)


def test_attributes_and_keys_name_outputs_and_none_is_not_an_output(kind: Callable[..., Any]):
    assert output_names(kind(logits=X, hidden=X)) == ("logits", "hidden")
    assert output_names(kind(logits=X, hidden=None)) == ("logits",)
    assert output_names(kind(logits=None, hidden=X)) == ("hidden",)
    named = named_outputs(kind(logits=X, hidden=Y))
    assert named is not None and named["logits"] is X and named["hidden"] is Y


@pytest.mark.slow
def test_static_fields_single_arrays_and_classes_without_names_give_no_output_names():
    assert output_names(Record(X, note="static")) == ("logits",)
    assert output_names(X) is None
    assert output_names(sparse.BCOO.fromdense(np.eye(2))) is None
    assert output_names((X, None, X)) == ("output_1", "output_3")


def test_mapped_outputs_keep_their_type_and_order(kind: Callable[..., Any]):
    outputs = kind(logits=X, hidden=X)
    mapped = map_outputs(lambda leaf: leaf + 1, outputs)
    assert_same_kind(mapped, outputs)
    np.testing.assert_array_equal(mapped["logits"] if isinstance(mapped, dict | FrozenDict) else mapped.logits, X + 1)


def test_dicts_inside_dicts_tuples_and_lists_keep_their_order():
    outputs = {"z": {"b": X, "a": Y}, "y": [{"d": X, "c": X}, Pair({"f": X, "e": X})], "x": (X, X)}
    rebuilt = jax.tree.map(lambda leaf: leaf, Returned.of(outputs)).rebuilt()
    assert list(rebuilt) == ["z", "y", "x"] and list(rebuilt["z"]) == ["b", "a"]
    assert list(rebuilt["y"][0]) == ["d", "c"] and list(rebuilt["y"][1].logits) == ["f", "e"] and type(rebuilt["y"][1]) is Pair


@pytest.mark.parametrize("outputs", [None, (), {}, {"a": ()}, {"a": [], "b": X}])
def test_outputs_without_arrays_are_not_changed(outputs: Any):
    returned = Returned.of(outputs)
    assert jax.tree.structure(returned.rebuilt()) == jax.tree.structure(outputs)
    if outputs is not None:
        assert list(returned.by_name()) == list(output_names(outputs) or ())
    assert repr(returned)


def test_classes_of_the_user_are_filled_only_with_arrays():
    returned = Returned.of(Picky(logits=X))
    shapes = jax.tree.map(lambda leaf: leaf.shape, returned, is_leaf=lambda leaf: leaf is X)
    named = jax.tree.map(lambda leaf: "softmax", returned).by_name()
    assert named == {"logits": "softmax"}
    assert jax.tree.structure(shapes) != jax.tree.structure(returned)


# -- training --


@pytest.mark.slow
@pytest.mark.parametrize("with_hidden", [False, True])
def test_a_loss_and_metrics_by_name_get_the_whole_targets(kind: Callable[..., Any], with_hidden: bool):
    trainer, plain = trainer_of(Net(kind, with_hidden)), trainer_of(Plain(), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    for each in (trainer, plain):
        each.fit(X, Y, epochs=2, batch_size=16, verbose=0)
    have, want = trainer.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0)
    assert list(have) == ["loss", "logits_loss", "logits_accuracy"]
    assert have["loss"] == have["logits_loss"] == want["loss"] and have["logits_accuracy"] == want["accuracy"]
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, plain.state.params)
    assert trainer.train_on_batch((X, Y))["loss"] == plain.train_on_batch((X, Y))["loss"]
    assert trainer.test_on_batch((X, Y))["loss"] == plain.test_on_batch((X, Y))["loss"]


def test_functions_of_all_outputs_get_the_modules_output_type():
    def loss(outputs: Picky, targets: Any) -> Any:
        assert type(outputs) is Picky
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, targets)

    def mean_of_hidden(outputs: Picky, targets: Any) -> Any:
        assert type(outputs) is Picky
        return outputs.hidden.mean(axis=-1)

    trainer = trainer_of(Net(Picky, with_hidden=True), loss=loss, metrics={"gap": mean_of_hidden}, precision="bfloat16")
    trainer.fit(X, Y, verbose=0)
    assert list(trainer.evaluate(X, Y, verbose=0)) == ["loss", "gap"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_several_losses_by_attribute_take_targets_by_name(kind: Callable[..., Any], precision: str):
    trainer = trainer_of(
        Net(kind, with_hidden=True), loss={"logits": "sparse_categorical_crossentropy", "hidden": "mse"}, metrics={"hidden": ["mae"]}, precision=precision
    )
    trainer.fit(X, {"hidden": X[:, :4], "logits": Y}, verbose=0, batch_size=16)
    assert list(trainer.evaluate(X, {"hidden": X[:, :4], "logits": Y}, verbose=0)) == ["loss", "logits_loss", "hidden_loss", "hidden_mae"]


@pytest.mark.slow
def test_targets_by_output_may_be_a_named_tuple_or_a_dataclass():
    results = []
    for targets in (Pair, Record):

        def batches(targets: Any = targets) -> Any:
            yield X, targets(logits=Y, hidden=X[:, :4])

        trainer = trainer_of(Net(Pair, with_hidden=True), loss={"hidden": "mse", "logits": "sparse_categorical_crossentropy"}, metrics=None)
        trainer.fit(lambda batches=batches: batches(), verbose=0)
        results.append(trainer.history.history["loss"])
    assert results[0] == results[1]


def test_a_tuple_of_targets_must_have_one_entry_for_each_output():
    trainer = trainer_of(Net(lambda logits, hidden: (logits, hidden), with_hidden=True), loss=["sparse_categorical_crossentropy", "mse"], metrics=None)
    with pytest.raises(LossError, match=r"targets must be 2 arrays or a dict\. Received: \("):
        trainer.train_on_batch((X, (Y, X[:, :4], Y)))
    assert list(trainer.train_on_batch((X, (Y, X[:, :4])))) == ["loss", "output_1_loss", "output_2_loss"]


def test_targets_that_do_not_match_the_outputs_are_errors():
    with pytest.raises(LossError, match=r"The output 'logits' has no targets\. Received: targets for \['logit'\]\. Did you mean 'logit'"):
        trainer_of(Net(Record)).fit(X, {"logit": Y}, verbose=0)
    with pytest.raises(LossError, match=r"The module has the outputs \['logits', 'hidden'\], so targets must be 2 arrays or a dict"):
        trainer_of(Net(Record, with_hidden=True), loss="mse", metrics=None).fit(X, Y, verbose=0)
    with pytest.raises(MetricError, match=r"The module has the outputs \['logits', 'hidden'\], so targets must be 2 arrays or a dict"):
        trainer_of(Net(Record, with_hidden=True), metrics={"logits": ["accuracy"], "hidden": ["mae"]}).fit(X, Y, verbose=0)
    with pytest.raises(LossError, match=r"names the outputs \['logit'\], but the module's outputs are \['logits'\]\. Did you mean 'logits'"):
        trainer_of(Net(Record), loss={"logit": "mse"}).fit(X, Y, verbose=0)


class Activated(nn.Module):
    kind: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.kind(logits=nn.softmax(nn.Dense(3)(x)), hidden=None)


@pytest.mark.slow
def test_activations_and_labels_are_checked_by_attribute(kind: Callable[..., Any]):
    with pytest.warns(fitflax.errors.FitflaxWarning, match="The module's output 'logits' ends with a softmax"):
        trainer_of(Activated(kind)).fit(X, Y, verbose=0)
    with pytest.raises(fitflax.errors.DataError, match="y holds labels from 0 to 7, but the module has 3 outputs"):
        trainer_of(Net(kind)).fit(X, np.where(Y == 2, 7, Y), verbose=0)


# -- predictions --


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("num_devices", "with_hidden"), [(1, False), (8, True)])
def test_predictions_have_the_modules_output_type(kind: Callable[..., Any], num_devices: int, with_hidden: bool):
    model = Net(kind, with_hidden)
    trainer = trainer_of(model, num_devices=num_devices)
    trainer.build((X, Y))
    expected = model.kind(logits=X, hidden=X) if with_hidden else model.kind(logits=X, hidden=None)
    values = jax.tree.leaves(jax.tree.map(np.asarray, model.apply({"params": trainer.state.params}, X)))
    seen: list[Any] = []
    watch = fitflax.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: seen.append(logs["outputs"]))
    ways = {
        "one batch": trainer.predict(X, batch_size=48),
        "groups": trainer.predict(X, batch_size=8),
        "single batches": trainer.predict(X, batch_size=8, callbacks=[watch]),
        "on_batch": trainer.predict_on_batch(X),
        "iter": next(trainer.predict_iter(X, batch_size=48)),
    }
    for outputs in [*ways.values(), *seen]:
        assert_same_kind(outputs, expected)
    for outputs in ways.values():
        for have, want in zip(jax.tree.leaves(outputs), values, strict=True):
            assert isinstance(have, np.ndarray)
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_predictions_without_jit_and_in_half_precision_have_the_modules_output_type(kind: Callable[..., Any]):
    for options in ({"run_eagerly": True}, {"precision": "bfloat16"}):
        trainer = trainer_of(Net(kind, with_hidden=True), **options)
        trainer.fit(X[:16], Y[:16], batch_size=8, verbose=0)
        outputs = trainer.predict(X[:16], batch_size=8)
        assert_same_kind(outputs, kind(logits=X, hidden=X))
        assert {leaf.dtype for leaf in jax.tree.leaves(outputs)} == {np.dtype(np.float32)}


@pytest.mark.slow
def test_predictions_on_a_mesh_have_the_modules_output_type():
    model = Net(Picky, with_hidden=True)
    trainer = fitflax.Trainer(model, parallel=Sharded(mesh={"data": 8}))
    trainer.compile("adam", {"logits": "sparse_categorical_crossentropy"})
    trainer.fit(X, Y, batch_size=16, verbose=0)
    for size in (8, 48):
        outputs = trainer.predict(X, batch_size=size)
        assert_same_kind(outputs, Picky(logits=X, hidden=X))
        want = model.apply({"params": jax.device_get(trainer.state.params)}, X)
        np.testing.assert_allclose(outputs.logits, want.logits, rtol=1e-5, atol=1e-6)


@pytest.mark.mostly_slow
def test_an_exported_model_returns_outputs_by_name_in_a_dict(kind: Callable[..., Any], tmp_path: pathlib.Path):
    pytest.importorskip("flatbuffers")
    trainer = trainer_of(Net(kind, with_hidden=True))
    trainer.build((X, Y))
    outputs = jax.export.deserialize(trainer.export(tmp_path / "model").read_bytes()).call(X)
    assert type(outputs) is dict and set(outputs) == {"logits", "hidden"}
    wanted = named_outputs(trainer.predict(X))
    assert wanted is not None
    for name, value in wanted.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-5, atol=1e-6)


def test_static_fields_of_the_modules_output_type_are_kept():
    trainer = trainer_of(Net(Record))
    trainer.build((X, Y))
    assert trainer.predict(X).note == "as trained"


class Optional(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.softmax(nn.Dense(3)(x)), None


@pytest.mark.slow
def test_losses_and_targets_by_position_count_outputs_that_are_none():
    x, y = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), np.arange(8) % 3
    trainer = fitflax.Trainer(Optional(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", ["sparse_categorical_crossentropy", None], metrics=[["accuracy"], None])
    with pytest.warns(fitflax.errors.FitflaxWarning, match="output 'output_1' ends with a softmax"):
        history = trainer.fit(x, (y, y), verbose=0).history
    assert list(history) == ["loss", "output_1_loss", "output_1_accuracy"]
    assert trainer.predict(x)[1] is None
    trainer.compile("sgd", ["mse", "mse"])
    with pytest.raises(LossError, match=r"has 2 entries, but the module has 1 outputs"):
        trainer.fit(x, (y, y), verbose=0)


@pytest.mark.slow
def test_a_function_of_the_only_output_gets_a_whole_dict_of_targets_with_other_keys():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    class Named(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return {"logits": nn.Dense(2)(x)}

    def masked(outputs: Any, targets: Any) -> Any:
        return ((outputs - targets["labels"]) ** 2).mean(-1) * targets["mask"]

    targets = {"labels": np.ones((8, 2), np.float32), "mask": np.zeros(8, np.float32)}
    trainer = fitflax.Trainer(Named(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", {"logits": masked})
    assert trainer.fit(x, targets, verbose=0).history["loss"] == [0.0]
    trainer.compile("sgd", {"logits": "mse"})
    with pytest.raises(LossError, match=r"The output 'logits' has no targets\. Received: targets for \['labels', 'mask'\]"):
        trainer.fit(x, targets, verbose=0)


# -- sums and values --


def mean(value: float, weight: float = 1.0) -> Mean:
    return Mean().add(jnp.float32(value), jnp.float32(weight))


def test_logs_of_a_step_are_one_vector_in_the_order_of_keys_with_arrays_row_by_row():
    array = metrics.Precision(average=None).update(jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([0, 1]), jnp.ones(2))
    first = [jnp.float32(7), jnp.float32(8)]
    assert as_vector(first, {"b": mean(2), "a": mean(3)}).tolist() == [7, 8, 3, 2]
    assert as_vector(first, {"b": mean(2), "a": array, "c": mean(4)}).tolist() == [7, 8, 1, 1, 2, 4]
    assert as_vector([], {"a": array}).tolist() == [1, 1]
    assert as_vector([], {}).shape == (0,)


def test_metrics_are_summed_unless_they_collect_rows():
    class Foreign:
        """A third-party metric, which does not say whether it collects rows."""

    given: dict[str, Any] = {"mse": metrics.get("mse"), "auc": metrics.AUC(), "foreign": Foreign()}
    assert (list(summed(given)), list(rows_of(given))) == (["mse", "foreign"], ["auc"])


def test_losses_of_two_replicas_are_combined_by_adding_their_leaves():
    one, other = (TotalLoss({"a": mean(a, 1.0), "b": mean(b, 3.0)}) for a, b in ((1.0, 2.0), (3.0, 6.0)))
    assert one.additive
    added = jax.tree.map(jnp.add, one, other)
    np.testing.assert_array_equal([added.compute(), one.merge(other).compute()], 6.0)
    assert np.isnan(one.empty().compute())
    with pytest.raises(NotImplementedError):
        one.update(None, None, jnp.ones(1))
