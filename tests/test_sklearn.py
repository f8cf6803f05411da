"""`fitflax.sklearn`: scikit-learn estimators around a linen module."""

import copy
import pathlib
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.errors import ConfigError, DirectoryInUseError, LossError, ModelError
from fitflax.sklearn import LinenClassifier, LinenRegressor
from fitflax.trainer import Trainer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4))
LABELS = np.where(X[:, 0] > 0, "up", np.where(X[:, 1] > 0, "left", "right"))
TARGETS = X @ np.array([1.0, -2.0, 0.5, 0.0]) + 1

# Why an estimator that trains on minibatches in float32 cannot pass these checks.
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "float32 sums of other rows in another order are equal to 1e-6, and 1e-7 is asked for; with more "
    "rows than batch_size, batches would be cut elsewhere, too",
}


def _small(estimator):
    return estimator(learning_rate=0.05, epochs=20, random_state=0)


@pytest.mark.slow
@parametrize_with_checks([_small(LinenClassifier), _small(LinenRegressor)], expected_failed_checks=lambda estimator: EXPECTED)
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_few_checks_of_scikit_learn_are_expected_to_fail():
    assert len(EXPECTED) <= 6


class MLP(nn.Module):
    num_outputs: int
    features: int = 16
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(nn.Dense(self.features)(x)))
        return nn.Dense(self.num_outputs)(x)


def classifier(**options):
    return LinenClassifier(**{"learning_rate": 0.02, "epochs": 30, "random_state": 0, **options})


def regressor(**options):
    return LinenRegressor(**{"learning_rate": 0.02, "epochs": 60, "random_state": 0, **options})


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS.astype(object), np.unique(LABELS, return_inverse=True)[1] * 10 - 7, LABELS == "up", np.where(LABELS == "up", 1.0, 2.0)],
    ids=["strings", "objects", "integers", "booleans", "floats"],
)
@pytest.mark.mostly_slow
def test_labels_of_any_kind_are_predicted_in_their_original_form(labels):
    model = classifier().fit(X, labels)
    assert model.classes_.tolist() == np.unique(labels).tolist()
    predicted = model.predict(X)
    assert predicted.dtype == np.unique(labels).dtype and model.score(X, labels) == (predicted == labels).mean() > 0.9
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (120, len(model.classes_)) and probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert (model.classes_[probabilities.argmax(axis=1)] == predicted).all()


@pytest.mark.parametrize("module", [None, MLP, MLP(3), lambda classes: MLP(classes, features=8), nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)])])
@pytest.mark.mostly_slow
def test_a_module_is_an_instance_or_a_callable_that_takes_the_number_of_classes(module):
    assert classifier(module=module).fit(X, LABELS).score(X, LABELS) > 0.9


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.mostly_slow
def test_two_classes_may_have_one_logit(outputs):
    model = classifier(module=MLP(outputs)).fit(X, LABELS == "up")
    assert model.score(X, LABELS == "up") > 0.95
    assert model.predict_proba(X).shape == (120, 2)


@pytest.mark.parametrize(
    ("module", "received"),
    [
        (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "a Linear"),
        (nnx.Linear, "the class Linear"),
        (lambda outputs: nnx.Linear(4, outputs, rngs=nnx.Rngs(0)), "a Linear"),
        (lambda outputs: MLP, "the class MLP"),
        ((MLP(3).init, MLP(3).apply), "a tuple"),
    ],
    ids=["an NNX module", "its class", "a function that returns one", "a function that returns a class", "functions"],
)
def test_only_linen_modules_are_accepted(module, received):
    with pytest.raises(ConfigError, match=rf"LinenClassifier\(module=...\) takes a linen module.*Received: {received}\. To train an NNX module, use Trainer"):
        classifier(module=module).fit(X, LABELS)


def test_a_module_with_the_wrong_number_of_classes_is_an_error():
    with pytest.raises(LossError, match=r"There are 3 classes, but the module's outputs have shape \[32, 5\]. Its last layer must have 3 features"):
        classifier(module=MLP(5)).fit(X, LABELS)
    with pytest.raises(LossError, match="There are 3 classes"):
        classifier(module=MLP(1)).fit(X, LABELS)


@pytest.mark.slow
def test_one_or_several_targets_are_learned():
    one = regressor().fit(X, TARGETS)
    assert one.predict(X).shape == (120,) and one.score(X, TARGETS) > 0.95
    two = regressor(module=MLP).fit(X, np.stack([TARGETS, -TARGETS], axis=1))
    assert two.predict(X).shape == (120, 2) and two.score(X, np.stack([TARGETS, -TARGETS], axis=1)) > 0.95
    assert MultiOutputRegressor(regressor(epochs=1)).fit(X, np.stack([TARGETS, TARGETS], axis=1)).predict(X).shape == (120, 2)


@pytest.mark.slow
def test_the_same_random_state_gives_the_same_model_and_another_gives_a_different_one():
    first, second, third = (regressor(random_state=seed, epochs=3).fit(X, TARGETS).predict(X) for seed in (1, 1, 2))
    assert np.array_equal(first, second) and not np.array_equal(first, third)


def test_a_prediction_does_not_depend_on_the_number_of_rows():
    model = classifier(epochs=3).fit(X, LABELS)
    whole = model.predict_proba(X)
    for rows in (1, 31, 33, 119):
        assert np.array_equal(model.predict_proba(X[:rows]), whole[:rows])


@pytest.mark.slow
def test_a_weight_is_equivalent_to_repeating_an_example():
    counts = RNG.integers(0, 3, 120)
    weighted = regressor(batch_size=512, epochs=20).fit(X, TARGETS, sample_weight=counts)
    repeated = regressor(batch_size=512, epochs=20).fit(np.repeat(X, counts, axis=0), np.repeat(TARGETS, counts))
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_class_weights_work_as_in_scikit_learn():
    y = np.where(X[:, 0] + RNG.normal(size=120) > 1.5, "rare", "common")
    plain = classifier(epochs=20).fit(X, y).predict(X)
    balanced = classifier(epochs=20, class_weight="balanced").fit(X, y).predict(X)
    heavy = classifier(epochs=20, class_weight={"rare": 1000.0, "common": 0.001}).fit(X, y).predict(X)
    assert (plain == "rare").sum() < (balanced == "rare").sum() < (heavy == "rare").sum()


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("estimator", "y"), [(LinenClassifier, LABELS), (LinenRegressor, TARGETS)], ids=["classifier", "regressor"])
def test_early_stopping_holds_out_examples_with_weight(estimator, y, monkeypatch):
    rows = np.flatnonzero(RNG.random(len(X)) < 0.4)
    weights = np.zeros(len(X))
    weights[rows] = 2.0
    fit, data = Trainer.fit, []

    def recorded(self, *arguments, **options):
        data.append((arguments, options["validation_data"]))
        return fit(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "fit", recorded)
    model = estimator(early_stopping=True, epochs=2, validation_fraction=0.3, random_state=0).fit(X, y, sample_weight=weights)
    assert np.isfinite(model.history_["val_loss"]).all()
    (x, _, used), (held, _, held_weights) = data[0]
    stratify = y[rows] if estimator is LinenClassifier else None
    expected = train_test_split(rows, test_size=0.3, stratify=stratify, random_state=model._trained.seed)[1]
    np.testing.assert_array_equal(held, X[expected].astype(np.float32))
    np.testing.assert_array_equal(held_weights, np.full(len(expected), 2.0))
    assert len(x) == len(X) - len(expected) and (used == 2.0).sum() == len(rows) - len(expected)


def test_early_stopping_holds_out_examples_and_stops_after_patience_epochs():
    noise = RNG.integers(0, 2, 120)
    model = classifier(early_stopping=True, validation_fraction=0.25, patience=3, epochs=200, learning_rate=0.1).fit(X, noise)
    losses = model.history_["val_loss"]
    assert model.n_iter_ == len(losses) < 200 and int(np.argmin(losses)) == len(losses) - 4
    weighted = classifier(early_stopping=True, patience=2, epochs=50).fit(X, noise, sample_weight=np.ones(120))
    assert "val_loss" in weighted.history_


def test_partial_fit_continues_training_and_knows_all_classes_from_the_first_call():
    model = classifier()
    with pytest.raises(ValueError, match="first call of partial_fit needs classes"):
        model.partial_fit(X[:40], LABELS[:40])
    only = LABELS[:40] != "left"
    model.partial_fit(X[:40][only], LABELS[:40][only], classes=["up", "left", "right"])
    for _ in range(40):
        for begin in range(0, 120, 40):
            model.partial_fit(X[begin : begin + 40], LABELS[begin : begin + 40])
    assert model.score(X, LABELS) > 0.9 and model.n_iter_ == 121
    with pytest.raises(ValueError, match=r"labels \['down'\], which are not among the classes"):
        model.partial_fit(X[:2], ["down", "up"])
    with pytest.raises(ValueError, match="must be the same as in the first call"):
        model.partial_fit(X[:2], LABELS[:2], classes=["up", "down"])
    other = regressor()
    for _ in range(60):
        other.partial_fit(X, TARGETS)
    assert other.score(X, TARGETS) > 0.9
    with pytest.raises(ValueError, match=r"The targets of an example must have shape \[\], .* Received: \[2\]"):
        other.partial_fit(X, np.stack([TARGETS, TARGETS], axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("is_pickled", [False, True])
def test_partial_fit_uses_a_changed_learning_rate(is_pickled):
    model = LinenRegressor(optimizer="sgd", learning_rate=0.01, batch_size=120, random_state=0).fit(X[:40], TARGETS[:40])
    if is_pickled:
        model = pickle.loads(pickle.dumps(model.set_params(learning_rate=0.5)))
    before = model.trainer_.state.params
    slow, fast, default = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    for each, rate in ((slow, 0.001), (fast, 0.1), (default, None)):
        each.set_params(learning_rate=rate).partial_fit(X, TARGETS)
        assert each.trainer_.learning_rate == np.float32(0.01 if rate is None else rate)
    moved = [jax.tree.map(lambda one, other: np.asarray(one - other), each.trainer_.state.params, before) for each in (slow, fast)]
    jax.tree.map(lambda small, large: np.testing.assert_allclose(100 * small, large, atol=1e-4), *moved)
    slow.trainer_.learning_rate = 0.25
    assert slow.partial_fit(X, TARGETS).trainer_.learning_rate == 0.25


def test_partial_fit_rejects_early_stopping_and_changes_of_the_model():
    with pytest.raises(ValueError, match="does not support early_stopping=True"):
        classifier(early_stopping=True).partial_fit(X, LABELS, classes=np.unique(LABELS))
    model = classifier(module=MLP(3), optimizer=optax.adam(0.01), learning_rate=None).partial_fit(X, LABELS, classes=np.unique(LABELS))
    for each in (model, pickle.loads(pickle.dumps(model))):
        each.partial_fit(X, LABELS)
        epochs, optimizer = each.n_iter_, each.optimizer
        each.set_params(module__features=8, optimizer=optax.sgd(0.1), loss="hinge")
        with pytest.raises(ValueError, match="so module, optimizer, loss cannot change; only a learning_rate that is a number can"):
            each.partial_fit(X, LABELS)
        with pytest.raises(ValueError, match="so module, optimizer, loss cannot change"):
            pickle.loads(pickle.dumps(each)).partial_fit(X, LABELS)
        assert each.n_iter_ == epochs
        each.set_params(module=MLP(3), optimizer=optimizer, loss=None).partial_fit(X, LABELS)
        assert each.n_iter_ == epochs + 1
    scheduled = regressor().partial_fit(X, TARGETS).set_params(learning_rate=optax.constant_schedule(0.1))
    with pytest.raises(ValueError, match="so learning_rate cannot change"):
        scheduled.partial_fit(X, TARGETS)


class TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        hidden = nn.Dense(3)(x)
        return hidden, nn.Dense(3)(hidden)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("make", [LinenClassifier, LinenRegressor])
def test_a_module_with_several_outputs_is_an_error_that_says_so(make):
    targets = LABELS if make is LinenClassifier else TARGETS
    message = r"must return one array, such as logits\. It returned \(float32\[32,3\], float32\[32,3\]\)\. Return only that array, or use Trainer"
    with pytest.raises(LossError, match=message):
        make(TwoOutputs(), epochs=1).fit(X, targets)
    first = make(TwoOutputs(), epochs=1, loss=lambda outputs, targets: (outputs[0][:, 0] - targets) ** 2).fit(X, targets)
    with pytest.raises(ModelError, match="must return one array"):
        first.predict(X)


def test_the_error_for_a_directory_in_use_does_not_recommend_to_resume(tmp_path):
    callbacks = [ModelCheckpoint(tmp_path)]
    model = regressor(epochs=1, callbacks=callbacks).fit(X, TARGETS)
    for train in (model.fit, regressor(callbacks=callbacks).partial_fit):
        with pytest.raises(DirectoryInUseError, match=r"holds checkpoints of run .* An estimator starts a new run") as caught:
            train(X, TARGETS)
        assert "resume" not in str(caught.value)


@pytest.mark.parametrize(
    "wrap", [lambda optimizer: optimizer, lambda optimizer: optax.multi_transform({"all": optimizer}, lambda params: "all")], ids=["itself", "labels"]
)
def test_the_error_for_early_stopping_with_a_schedule_free_optimizer_names_arguments_of_the_estimator(wrap):
    optimizer = wrap(optax.contrib.schedule_free_sgd(0.1))
    with pytest.raises(ConfigError, match=r"LinenRegressor\(early_stopping=True\) .*Pass another optimizer, or early_stopping=False\.") as caught:
        regressor(optimizer=optimizer, learning_rate=None, early_stopping=True).fit(X, TARGETS)
    assert "restore_best" not in str(caught.value)


def test_partial_fit_continues_bit_for_bit_after_pickling():
    model = regressor(epochs=2).fit(X, TARGETS)
    other = pickle.loads(pickle.dumps(model))
    for each in (model, other):
        each.partial_fit(X, TARGETS)
    assert np.array_equal(model.predict(X), other.predict(X))


@pytest.mark.parametrize(
    "options",
    [{}, {"module": nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])}, {"optimizer": optax.adam(0.01), "learning_rate": None}],
    ids=["the default", "a module", "an optimizer"],
)
@pytest.mark.mostly_slow
def test_estimators_that_hold_functions_can_be_pickled(options):
    model = classifier(epochs=3, **options).fit(X, LABELS)
    twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))
    assert np.array_equal(twice.predict_proba(X), model.predict_proba(X))
    assert not hasattr(pickle.loads(pickle.dumps(clone(model))), "classes_")


def test_fields_of_the_module_are_parameters_of_the_estimator():
    model = classifier(module=MLP(3))
    assert {name: value for name, value in model.get_params().items() if name.startswith("module__")} == {
        "module__num_outputs": 3,
        "module__features": 16,
        "module__rate": 0.0,
    }
    assert "module__features" not in model.get_params(deep=False)
    assert model.set_params(module__features=5, epochs=2).module == MLP(3, features=5) and model.epochs == 2
    with pytest.raises(ValueError, match=r"Invalid parameter 'module__width'.*fields of MLP are \['num_outputs', 'features', 'rate'\]"):
        model.set_params(module__width=3)
    with pytest.raises(ValueError, match=r"Invalid parameter 'module__features': module must be an instance\. Received: "):
        classifier(module=MLP).set_params(module__features=3)


@pytest.mark.slow
def test_a_search_can_tune_the_modules_fields_and_the_learning_rate():
    search = GridSearchCV(classifier(module=MLP(3), epochs=5), {"module__features": [1, 32], "learning_rate": [1e-5, 0.05]}, cv=2).fit(X, LABELS)
    assert search.best_params_ == {"module__features": 32, "learning_rate": 0.05}
    assert search.best_estimator_.module.features == 32


@pytest.mark.slow
def test_estimators_that_differ_only_in_their_seed_share_compiled_functions(compilations):
    cross_val_score(regressor(epochs=2, batch_size=16), X, TARGETS, cv=3)
    with compilations.counted() as counted:
        cross_val_score(regressor(epochs=2, batch_size=16, random_state=5), X, TARGETS, cv=3)
    assert counted.names == []


@pytest.mark.slow
def test_inputs_may_have_any_shape_and_stay_integers_if_dtype_is_none():
    images = RNG.normal(size=(40, 6, 6, 1))

    class CNN(nn.Module):
        classes: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.classes)(nn.relu(nn.Conv(4, (3, 3))(x)).reshape(x.shape[0], -1))

    assert classifier(module=CNN, epochs=2).fit(images, images[:, 0, 0, 0] > 0).predict(images).shape == (40,)

    class Embedded(nn.Module):
        classes: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.classes)(nn.Embed(7, 8)(x).mean(axis=1))

    tokens = RNG.integers(0, 7, (60, 5)).astype(np.int32)
    model = classifier(module=Embedded, dtype=None, epochs=60).fit(tokens, (tokens == 3).any(axis=1))
    assert model.score(tokens, (tokens == 3).any(axis=1)) > 0.8


@pytest.mark.slow
def test_callbacks_losses_and_the_trainer_are_available(tmp_path):
    seen = []
    model = regressor(epochs=3, loss="mae", callbacks=[LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))]).fit(X, TARGETS)
    assert seen == [0, 1, 2] and list(model.history_) == ["loss"]
    assert model.trainer_.step > 0 and model.trainer_.save(tmp_path / "saved").is_dir()


def test_using_an_estimator_before_fit_is_a_not_fitted_error():
    for model in (LinenClassifier(), LinenRegressor()):
        with pytest.raises(NotFittedError):
            model.predict(X)
        with pytest.raises(NotFittedError):
            model.trainer_  # noqa: B018 (reading it is what fails)
    assert is_classifier(LinenClassifier()) and is_regressor(LinenRegressor())


LOADING = """
import pickle, sys
import numpy as np
model, x, expected = pickle.load(open(sys.argv[1], "rb"))
assert np.abs(model.predict_proba(x) - expected).max() < 1e-6
print(round(model.score(x, model.predict(x)), 3))
"""


@pytest.mark.slow
def test_a_search_on_the_digits_reaches_97_percent_and_loads_in_another_process(tmp_path):
    x, y = load_digits(return_X_y=True)
    x, held_x, y, held_y = train_test_split(x, y, test_size=0.25, stratify=y, random_state=0)
    pipeline = make_pipeline(StandardScaler(), LinenClassifier(MLP(10, features=64), epochs=15, random_state=0))
    search = GridSearchCV(pipeline, {"linenclassifier__learning_rate": [1e-4, 3e-3], "linenclassifier__module__rate": [0.0, 0.3]}, cv=2).fit(x, y)
    assert search.score(held_x, held_y) >= 0.97
    path = tmp_path / "search.pickle"
    path.write_bytes(pickle.dumps((search, held_x, search.predict_proba(held_x))))
    # Pickle finds the module's class by its name.
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {root!r})\n{LOADING}", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1.0\n", done.stderr


@pytest.mark.slow
def test_a_linear_module_learns_the_diabetes_data_as_well_as_a_linear_model():
    x, y = load_diabetes(return_X_y=True)
    scaled = StandardScaler().fit_transform(x)
    model = LinenRegressor(lambda targets: nn.Dense(targets), learning_rate=1.0, epochs=100, random_state=0).fit(scaled, y)
    assert model.score(scaled, y) == pytest.approx(LinearRegression().fit(scaled, y).score(scaled, y), abs=0.01)


@pytest.mark.slow
def test_probabilities_are_finite_for_huge_logits():
    model = classifier(module=lambda classes: _Huge(classes), epochs=1).fit(X, LABELS)
    assert np.isfinite(model.predict_proba(X)).all()


class _Huge(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x) * jnp.float32(1e4)


def test_a_custom_loss_gets_outputs_and_targets_of_the_same_shape():
    for module in (None, lambda targets: nn.Dense(targets)):
        model = regressor(module=module, loss=lambda outputs, targets: (outputs - targets) ** 2).fit(X, TARGETS)
        assert model.score(X, TARGETS) > 0.9
    two = np.stack([TARGETS, -TARGETS], axis=1)
    assert regressor(loss=lambda outputs, targets: (outputs - targets) ** 2).fit(X, two).score(X, two) > 0.9


@pytest.mark.slow
def test_copies_are_independent_estimators():
    model = classifier(module=MLP, epochs=2).fit(X, LABELS)
    for other in (copy.copy(model), copy.deepcopy(model)):
        assert np.array_equal(other.predict_proba(X), model.predict_proba(X))
        assert other.fit(X, LABELS).n_iter_ == 2


@pytest.mark.slow
def test_a_loaded_model_serves_several_threads_simultaneously():
    model = classifier(epochs=2).fit(X, LABELS)
    expected, data = model.predict_proba(X), pickle.dumps(model)
    for _ in range(3):
        served = pickle.loads(data)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(served.predict_proba, [X] * 8))
        assert all(np.array_equal(one, expected) for one in found)


def test_a_fit_that_fails_keeps_the_previous_model():
    model = classifier(epochs=2)
    with pytest.raises(ValueError, match="Negative values"):
        model.fit(X, LABELS, sample_weight=-np.ones(120))
    with pytest.raises(NotFittedError):
        model.predict(X)
    expected = model.fit(X, LABELS).predict_proba(X)
    with pytest.raises(LossError):
        model.set_params(module=MLP(7)).fit(X, LABELS)
    assert np.array_equal(model.predict_proba(X), expected)


@pytest.mark.slow
def test_class_weights_in_partial_fit_are_given_by_label():
    with pytest.raises(ValueError, match=r"class_weight='balanced' needs all labels.*Pass a dict \{label: weight\}"):
        classifier(class_weight="balanced").partial_fit(X, LABELS, classes=np.unique(LABELS))
    model = classifier(class_weight={"up": 1e4, "left": 1e-4, "right": 1e-4})
    for _ in range(20):
        model.partial_fit(X, LABELS, classes=np.unique(LABELS))
    assert (model.predict(X) == "up").mean() > 0.9


def test_each_partial_fit_has_a_different_order_that_a_copy_continues(monkeypatch):
    orders, fit = [], Trainer.fit

    def recording(self, x, *arguments, **options):
        orders.append(x[:, 0].tolist())
        return fit(self, x, *arguments, **options)

    monkeypatch.setattr(Trainer, "fit", recording)
    model = regressor()
    for _ in range(2):
        model.partial_fit(X[:20], TARGETS[:20])
    pickle.loads(pickle.dumps(model)).partial_fit(X[:20], TARGETS[:20])
    model.partial_fit(X[:20], TARGETS[:20])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1] != orders[2] != orders[0] and orders[2] == orders[3]
    regressor(shuffle=False).partial_fit(X[:20], TARGETS[:20])
    assert orders[4] == X[:20, 0].astype(np.float32).tolist()
