"""What users get wrong, and the errors they get: what is wrong, where, and what to do; before any step runs."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fitflax
from fitflax import errors
from fitflax.callbacks import EarlyStopping
from fitflax.errors import CallbackError, ConfigError, DataError, FitflaxError, LossError, MetricError, ModelError, NotReadyError, OptimizerError, did_you_mean
from fitflax.loops import session_state
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
Y = RNG.normal(size=(12, 3)).astype(np.float32)
LABELS = np.arange(12) % 3


def make(model=None, loss="mse", metrics=None, **kwargs):
    trainer = fitflax.Trainer(model or nn.Dense(3), parallel=DataParallel(jax.devices()[:1]), **kwargs)
    trainer.compile(optax.sgd(0.1), loss=loss, metrics=metrics)
    return trainer


def fails(error, message, *args, trainer=None, **kwargs):
    """Checks that `fit` raises before it runs a step, and returns the message."""
    trainer = trainer or make()
    with pytest.raises(error, match=message) as raised:
        trainer.fit(*args, verbose=0, **kwargs)
    assert trainer.step == 0
    return str(raised.value)


# --- The error hierarchy ---


def test_every_error_is_a_fitflax_error_and_a_built_in_one():
    kinds = [getattr(errors, name) for name in errors.__all__]
    for kind in kinds:
        assert issubclass(kind, FitflaxError | Warning)
    assert [kind.__name__ for kind in kinds] == sorted(kind.__name__ for kind in kinds)
    assert issubclass(errors.DataError, ValueError) and issubclass(errors.NotReadyError, RuntimeError)


def test_the_tree_in_the_docstring_names_every_error():
    for name in errors.__all__:
        if name != "FitflaxWarning":
            assert f"{name}" in errors.__doc__, name


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [("val_acc", ["loss", "val_accuracy"], " Did you mean 'val_accuracy'?"), ("zzz", ["loss"], ""), ("x", [], "")],
)
def test_the_closest_name_is_suggested(name, known, expected):
    assert did_you_mean(name, known) == expected


# --- Data ---


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, Y[:11]), r"All arrays must have the same number of examples: `x` has 12, `y` has 11"),
        ((X, Y, np.ones(10)), r"same number of examples: .*`sample_weight` has 10"),
        (((X, X[:5]), Y), r"same number of examples: x\[0\] has 12, x\[1\] has 5"),
        (({"image": X, "label": X[:11]}, Y), r"same number of examples: x\['image'\] has 12, x\['label'\] has 11"),
        ((X, {"a": Y, "b": Y[:3]}), r"same number of examples: y\['a'\] has 12, y\['b'\] has 3"),
        ((X[:0], Y[:0]), r"0 examples"),
        ((np.float32(1.0), Y), r"must have a leading axis of examples: x is a float32 of shape \(\)|leading axis of examples"),
        ((np.array([["a"] * 4] * 12), Y), r"x must hold numbers, but its dtype is <U1; encode them as numbers first"),
        ((X, np.array(["cat"] * 12)), r"y must hold numbers, but its dtype is <U3; encode them as numbers first"),
        ((np.array([object()] * 12), Y), r"x must hold numbers, but its dtype is object"),
        (((X, Y, np.ones(12), X),), r"a tuple of 4 elements. Nest several inputs: \(\(x1, x2\), y\)"),
        ((5,), r"`data` must be arrays, an iterable of batches, or a function that returns an iterator of batches. Received: a int"),
        (("train.csv",), r"Received: a str"),
        ((None,), r"Received: a NoneType"),
        (([],), r"`data` is an empty list"),
        (([(X, Y), (X, Y)],), r"a list of length 2, whose first element is a tuple. To pass a list of batches, use a function: `lambda: batches`"),
        ((lambda: 5,), r"A function that is passed as data must return an iterable of batches. Received: a int"),
        ((lambda: iter(()),), r"The data yields no batches"),
        ((list,), r"class list|yields no batch"),
        ((lambda: [(X[:0], Y[:0])],), r"a batch of 0 examples"),
        ((lambda: [(X, Y, np.ones(12), X)],), r"A batch must be x, \(x,\), \(x, y\) or \(x, y, sample_weight\). Received: a tuple of 4 elements"),
        ((lambda: [(X, Y[:7])],), r"same number of examples: .*x.* has 12, .*y.* has 7"),
        ((lambda: [(X, np.array(["cat"] * 12))],), r"y must hold numbers"),
    ],
)
def test_data_that_cannot_form_batches_is_an_error_that_says_where(args, message):
    fails(DataError, message, *args)


@pytest.mark.parametrize(
    ("trainer", "data", "message"),
    [
        (
            {"inputs": "imgae"},
            {"image": X, "label": Y},
            r"Trainer\(inputs=...\) selects the key 'imgae', which the batches do not have. Did you mean 'image'\? Their keys: 'image', 'label'\.",
        ),
        ({"inputs": "image", "targets": "labels"}, {"image": X, "label": Y}, r"Trainer\(targets=...\) selects the key 'labels'.*Did you mean 'label'\?"),
        ({"inputs": "image"}, (X, Y), r"Trainer\(inputs='image'\) needs batches that are dicts. Received: a tuple"),
        ({"inputs": "image"}, lambda: [(X, Y)], r"needs batches that are dicts. Received: a tuple"),
    ],
)
def test_keys_that_are_missing_from_a_batch_are_errors(trainer, data, message):
    fails(DataError, message, data, trainer=make(**trainer))


def test_an_error_in_a_later_batch_names_what_is_wrong_and_keeps_what_was_trained():
    trainer = make()
    with pytest.raises(DataError, match="same number of examples"):
        trainer.fit(lambda: [(X, Y), (X, Y), (X, Y[:3])], verbose=0)
    assert trainer.step == 2


@pytest.mark.parametrize("labels", [np.array([0, 1, 3] * 4), np.array([0, -1, 2] * 4)])
@pytest.mark.mostly_slow
def test_labels_outside_the_classes_are_an_error_before_the_first_step(labels):
    message = r"y holds labels from -?\d to \d, but the module has 3 outputs, for labels 0 to 2"
    fails(DataError, message, X, labels, trainer=make(loss="sparse_categorical_crossentropy"))


def test_labels_of_validation_data_are_checked_as_well():
    message = r"labels from 1 to 3, but the module has 3 outputs"
    fails(DataError, message, X, LABELS, validation_data=(X, LABELS + 1), trainer=make(loss="sparse_categorical_crossentropy"))


def test_calling_a_module_on_the_wrong_shape_is_an_error_with_the_shapes():
    trainer = make()
    trainer.fit(X, Y, verbose=0)
    with pytest.raises(ModelError, match=r"Dense cannot be run in training mode on inputs float32\[12,5\]"):
        trainer.fit(np.ones((12, 5), np.float32), Y, verbose=0)


# --- Arguments ---


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be a positive integer. Received: 0"),
        ({"batch_size": -4}, r"batch_size must be a positive integer. Received: -4"),
        ({"batch_size": 2.5}, r"batch_size must be a positive integer. Received: 2.5"),
        ({"steps": -1}, r"steps must be a positive integer. Received: -1"),
        ({"steps": 0}, r"steps must be a positive integer. Received: 0"),
        ({"epochs": 0}, r"epochs must be a positive integer. Received: 0"),
        ({"epochs": 2.5}, r"epochs must be a positive integer. Received: 2.5"),
        ({"steps_per_epoch": True}, r"steps_per_epoch must be a positive integer. Received: True"),
        ({"validation_steps": 0}, r"validation_steps must be a positive integer"),
        ({"validation_batch_size": 0, "validation_data": (X, Y)}, r"batch_size must be a positive integer. Received: 0"),
        ({"log_every": 0}, r"log_every must be a positive integer"),
        ({"initial_epoch": -1}, r"initial_epoch must be an integer of at least 0. Received: -1"),
        ({"validation_freq": 0}, r"validation_freq must be a positive integer, a list of epochs counted from 1, or a trigger. Received: 0"),
        ({"validation_freq": [0, 1]}, r"validation_freq must be"),
        ({"validation_freq": "epoch"}, r"validation_freq must be"),
        ({"validation_split": 1.5}, r"validation_split must be between 0 and 1. Received: 1.5"),
        ({"validation_split": -0.1}, r"validation_split must be between 0 and 1"),
        ({"validation_split": 0.5, "validation_data": (X, Y)}, r"validation_split and validation_data are both given"),
        ({"validation_data": {"train": (X, Y)}}, r"names other than 'train'. Received: \['train'\]"),
        ({"class_weight": {"a": 1.0}}, r"class_weight must map integer labels"),
        (
            {"resume": "auto"},
            r"resume='auto' needs exactly one ModelCheckpoint, whose directory it uses, but there are 0. Add one to callbacks, or pass resume=path",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_invalid_arguments_of_fit_are_errors(kwargs, message):
    fails(ConfigError, message, X, Y, **kwargs)


def test_a_validation_split_that_leaves_nothing_is_an_error():
    fails(DataError, r"validation_split=0.5 of 1 examples leaves 0 for training and 1 for validation", X[:1], Y[:1], validation_split=0.5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"y": Y}, r"y can only be passed with in-memory arrays. `data` is a function, which defines its own batches; leave y out"),
        ({"sample_weight": np.ones(12)}, r"sample_weight can only be passed with in-memory arrays"),
        ({"batch_size": 4}, r"batch_size can only be passed with in-memory arrays"),
        ({"drop_remainder": True}, r"drop_remainder can only be passed with in-memory arrays"),
        ({"validation_split": 0.5}, r"validation_split requires in-memory arrays, .* pass validation_data"),
    ],
    ids=str,
)
def test_arguments_for_arrays_cannot_be_combined_with_batches(kwargs, message):
    def batches():
        return iter([(X, Y)])

    fails(ConfigError, message, batches, **kwargs)


def test_drop_remainder_that_leaves_nothing_is_an_error():
    fails(DataError, r"The data yields no batches. Received: 12 examples, batch_size=32, drop_remainder=True", X, Y, drop_remainder=True)


def test_sample_weights_given_twice_are_an_error():
    fails(ConfigError, r"sample_weight is passed twice", (X, Y, np.ones(12)), sample_weight=np.ones(12))


@pytest.mark.parametrize(
    ("make_trainer", "message"),
    [
        (lambda: fitflax.Trainer(nn.Dense), r"Trainer takes an instance of a module. Received: the class Dense. Call it: Trainer\(Dense\(...\)\)"),
        (
            lambda: fitflax.Trainer(lambda x: x),
            r"Trainer takes a flax.linen module, .*Received: a builtins.function",
        ),
        (
            lambda: fitflax.Trainer(None),
            r"Trainer takes a flax.linen module, .*Received: a builtins.NoneType",
        ),
        (lambda: fitflax.Trainer(nn.Dense(1), seed=-1), r"Trainer\(seed=...\) must be an integer of at least 0. Received: -1"),
        (lambda: fitflax.Trainer(nn.Dense(1), seed=1.5), r"Trainer\(seed=...\) must be an integer"),
        (
            lambda: fitflax.Trainer(nn.Dense(1), parallel=4),
            r"Trainer\(parallel=...\) must be a strategy, such as fitflax.parallel.DataParallel\(\). Received: 4",
        ),
        (
            lambda: fitflax.Trainer(nn.Dense(1), rngs={"training": ["x"]}),
            r"Trainer\(rngs=...\) as a dict must have only the keys 'init', 'train' and 'eval'. Received: \['training'\]",
        ),
        (lambda: fitflax.Trainer(nn.Dense(1), rngs=[3]), r"Trainer\(rngs=...\) must be names of random streams, such as 'dropout'. Received: \[3\]"),
        (lambda: fitflax.Trainer(nn.Dense(1), inputs=3), r"Trainer\(inputs=...\) must be a key, a tuple of keys or a dict \{name: key\}. Received: 3"),
        (lambda: fitflax.Trainer(nn.Dense(1), targets="label"), r"Trainer\(targets='label'\) also needs inputs="),
    ],
)
def test_invalid_arguments_of_a_trainer_are_errors(make_trainer, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer()


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        (("adm", "mse"), {}, OptimizerError, r"There is no optimizer 'adm'. Did you mean 'adam'\?"),
        ((optax.adam, "mse"), {}, OptimizerError, r"optax transformation.*Received: .*adam"),
        ((3, "mse"), {}, OptimizerError, r"optimizer must be a name or an optax transformation. Received: 3"),
        (("adam", "msee"), {}, LossError, r"There is no loss 'msee'. Did you mean 'mse'\?"),
        (("adam", 3), {}, LossError, r"A loss must be a name or a function \(outputs, targets\) -> one value per example. Received: 3"),
        (("adam", "mse", ["acuracy"]), {}, MetricError, r"There is no metric 'acuracy'. Did you mean 'accuracy'\?"),
        (("adam", "mse", [3]), {}, MetricError, r"A metric must be a name, an object .*Received: 3"),
        (("adam", "mse"), {"weighted_metrics": ["maee"]}, MetricError, r"Did you mean 'mae'\?"),
        (("adam", "mse"), {"loss_weights": "0.5"}, ConfigError, r"loss_weights must be numbers. Received: '0.5'"),
        (("adam", "mse"), {"learning_rate": -1.0}, OptimizerError, r"A learning rate must be a finite number of at least 0. Received: -1.0"),
        ((optax.sgd(0.1), "mse"), {"learning_rate": 0.1}, ConfigError, r"compile\(learning_rate=...\) requires an optimizer given by name"),
        (
            ("adabelief", "mse"),
            {},
            OptimizerError,
            r"'adabelief' has no default learning rate, because Keras does not have this optimizer. Pass learning_rate=",
        ),
    ],
)
def test_invalid_arguments_of_compile_are_errors(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        fitflax.Trainer(nn.Dense(1)).compile(*args, **kwargs)


def test_a_compile_that_fails_leaves_the_trainer_unchanged():
    trainer = make()
    before = trainer.fit(X, Y, verbose=0).history
    with pytest.raises(MetricError):
        trainer.compile("adam", "mae", ["nonsense"])
    assert list(trainer.fit(X, Y, verbose=0).history) == list(before) == ["loss"]


def test_a_compile_that_fails_after_the_optimizer_state_was_replaced_must_be_repeated(monkeypatch):
    def fails_to_start(params):
        raise MemoryError

    trainer = make()
    trainer.build(X)
    with monkeypatch.context() as patch:
        patch.setattr(session_state, "start_average", fails_to_start)
        with pytest.raises(MemoryError):
            trainer.compile("adam", "mse", ema_decay=0.9)
    with pytest.raises(NotReadyError, match=r"Call compile\(optimizer, loss, metrics\) first"):
        trainer.fit(X, Y, verbose=0)
    trainer.compile(optax.sgd(0.1), "mse")
    trainer.fit(X, Y, verbose=0)


def test_invalid_arguments_of_train_loop_are_errors():
    with pytest.raises(ConfigError, match=r"train_loop\(every=...\) takes a trigger, such as fitflax.every\(steps=10\). Received: 10"):
        make().train_loop((X, Y), steps=1, every=10)
    with pytest.raises(ConfigError, match=r"steps must be a positive integer. Received: 0"):
        make().train_loop((X, Y), steps=0)


def test_a_misspelled_argument_raises_pythons_own_error():
    with pytest.raises(TypeError, match="validation_dta"):
        make().fit(X, Y, validation_dta=(X, Y))


# --- The module ---


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, a, b):
        return nn.Dense(3)(a) + nn.Dense(3)(b)


def test_the_error_for_too_few_inputs_says_how_to_pass_several():
    text = fails(
        ModelError, r"TwoInputs cannot be initialized on inputs float32\[12,4\].*missing 1 required positional argument: 'b'", X, Y, trainer=make(TwoInputs())
    )
    assert "Pass several inputs as a tuple, ((x1, x2), y), or as keys of dicts with Trainer(inputs=...)" in text
    assert "Trainer(model, train_kwargs={'is_training': True}, eval_kwargs={'is_training': False})" in text


def test_too_many_inputs_are_an_error_that_lists_them():
    fails(
        ModelError,
        r"TwoInputs cannot be initialized on inputs \(float32\[12,4\], float32\[12,4\], float32\[12,4\]\)",
        ((X, X, X), Y),
        trainer=make(TwoInputs()),
    )


def test_an_error_inside_the_module_comes_with_the_shapes_and_the_original_message():
    class Reshaping(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x.reshape(len(x), 7, 7))

    fails(ModelError, r"Reshaping cannot be initialized on inputs float32\[12,4\].*cannot reshape", X, Y, trainer=make(Reshaping()))


def test_a_state_that_changes_its_shape_from_step_to_step_is_an_error():
    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("seen", "x", lambda: jnp.zeros((1,)))
            if not self.is_initializing():
                seen.value = jnp.concatenate([seen.value, jnp.zeros(1)])
            return nn.Dense(3)(x)

    fails(ModelError, r"model_state\['seen'\]\['x'\] is float32\[2\] instead of float32\[1\]", X, Y, trainer=make(Growing()))


# --- Losses and metrics ---


def test_the_error_for_a_loss_without_targets_says_how_to_pass_them():
    fails(LossError, r"The loss 'mse' needs targets, but the batches have none. Yield \(x, y\), pass y= or validation_data=\(x, y\), or set Trainer", X)
    fails(LossError, r"needs targets", lambda: [(X,)])
    fails(LossError, r"needs targets", {"x": X, "y": Y}, trainer=make(inputs="x"))

    class TakesDict(nn.Module):
        @nn.compact
        def __call__(self, batch):
            return nn.Dense(3)(batch["x"])

    selects = r"set Trainer\(inputs=\.\.\., targets=\.\.\.\) to select keys of dicts"
    fails(LossError, rf"The loss 'mse' needs targets.*{selects}", {"x": X, "y": Y}, trainer=make(TakesDict()))
    fails(LossError, rf"batches have no targets\. .*{selects}", {"x": X, "y": Y}, trainer=make(TakesDict(), loss=lambda outputs, targets: outputs))


def test_shapes_that_do_not_fit_the_loss_are_an_error_with_both_shapes():
    fails(LossError, r"\[12, ?3\].*\[12, ?2\]", X, Y[:, :2])


def scalar(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


@pytest.mark.slow
def test_a_scalar_loss_is_the_mean_of_its_batch_if_nothing_is_padded():
    one, other = make(loss=scalar), make()
    losses = [trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0).history["loss"] for trainer in (one, other)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(one.evaluate(X, Y, batch_size=6, verbose=0)["loss"], other.evaluate(X, Y, verbose=0)["loss"], rtol=1e-5)


def test_a_scalar_loss_of_less_than_one_batch_needs_no_padding_in_fit_and_evaluate():
    trainer = make(loss=scalar)
    history = trainer.fit(X, Y, validation_data=(X, Y), verbose=0).history
    assert list(history) == ["loss", "val_loss"]
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == history["val_loss"][0]


def test_a_scalar_loss_with_a_batch_that_must_be_padded_is_an_error_before_any_step():
    message = r"The loss returns one number for a batch, but a batch of 2 examples must be padded to 5, which would make it wrong. Return one value per example"
    fails(LossError, message, X, Y, batch_size=5, trainer=make(loss=scalar))
    fails(
        LossError,
        r"batch of 2 examples must be padded to 5",
        X,
        Y,
        validation_data=(X, Y),
        validation_batch_size=5,
        batch_size=4,
        trainer=make(loss=scalar),
    )


def test_a_scalar_loss_on_a_stream_fails_at_the_batch_that_must_be_padded():
    trainer = make(loss=scalar)
    with pytest.raises(LossError, match=r"a batch of 5 examples must be padded to 12"):
        trainer.fit(lambda: [(X, Y), (X[:5], Y[:5])], verbose=0)
    assert trainer.step == 1


def test_a_scalar_loss_with_sample_weights_is_an_error():
    fails(LossError, r"The loss is a scalar, but the data is weighted. Return one value per example", X, Y, np.ones(12), trainer=make(loss=scalar))


@pytest.mark.slow
def test_drop_remainder_and_pad_false_allow_a_scalar_loss():
    make(loss=scalar).fit(X, Y, batch_size=5, drop_remainder=True, verbose=0)
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.0), loss=scalar, pad=False)
    plain = make()
    plain.compile(optax.sgd(0.0), loss="mse")
    losses = [t.fit(X, Y, batch_size=5, verbose=0).history["loss"] for t in (trainer, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_loss_that_returns_a_tuple_is_an_error():
    def loss(outputs, targets):
        return jnp.mean((outputs - targets) ** 2, axis=-1), {}

    fails(LossError, r"A loss must return one array of values per example. The loss returned a tuple", X, Y, trainer=make(loss=loss))


def test_a_loss_without_a_leading_axis_of_examples_is_an_error():
    def loss(outputs, targets):
        return jnp.mean((outputs - targets) ** 2, axis=0)

    fails(LossError, r"A loss must return one value per example, \[12\] or \[12, ...\]. The loss returned \[3\]", X, Y, trainer=make(loss=loss))


def test_a_loss_that_fails_is_an_error_with_its_name_and_the_shapes():
    def my_loss(outputs, targets):
        return outputs @ targets

    fails(LossError, r"The loss my_loss fails on outputs float32\[12,3\] and targets float32\[12,3\]: TypeError: ", X, Y, trainer=make(loss=my_loss))


def test_a_metric_that_fails_is_an_error_with_its_key_and_the_shapes():
    def broken(outputs, targets):
        return outputs @ targets

    trainer = make(metrics={"mine": broken})
    fails(MetricError, r"The metric 'mine' fails on outputs float32\[12,3\] and targets float32\[12,3\]: TypeError: ", X, Y, trainer=trainer)


def test_a_metric_without_one_value_per_example_is_an_error():
    fails(MetricError, r"'average'.* must return one value per example", X, Y, trainer=make(metrics={"average": scalar}))


def test_weights_that_do_not_fit_the_values_of_the_loss_are_an_error():
    fails(LossError, r"sample_weight.* \[12, 3\] does not fit the loss values.* \[12\]", X, Y, np.ones((12, 3)))


class TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"head": nn.Dense(1)(x), "tail": nn.Dense(2)(x)}


@pytest.mark.parametrize(
    ("kwargs", "y", "error", "message"),
    [
        (
            {"loss": {"hed": "mse"}},
            {"head": Y[:, :1]},
            LossError,
            r"names the outputs \['hed'\], but the module's outputs are \['head', 'tail'\]. Did you mean 'head'\?",
        ),
        ({"loss": ["mse"] * 3}, {"head": Y[:, :1]}, LossError, r"compile\(loss=...\) has 3 entries, but the module has 2 outputs: \['head', 'tail'\]"),
        (
            {"loss": {"head": "mse"}},
            {"haed": Y[:, :1]},
            LossError,
            r"The output 'head' has no targets. Received: targets for \['haed'\]. Did you mean 'haed'\?",
        ),
        (
            {"loss": "mse"},
            Y,
            LossError,
            r"The module has the outputs \['head', 'tail'\], so targets must be 2 arrays or a dict.* together, pass a function",
        ),
        (
            {"loss": lambda o, t: o["head"][:, 0], "metrics": ["mae"]},
            Y,
            MetricError,
            r"To compute a metric from all outputs together, pass metrics=\{key: metric\}",
        ),
        (
            {"loss": {"head": "mse"}, "metrics": {"head": "mse", "tal": "mse"}},
            {"head": Y[:, :1]},
            MetricError,
            r"names the outputs \['tal'\].*Did you mean 'tail'\?",
        ),
    ],
)
@pytest.mark.mostly_slow
def test_unknown_outputs_are_errors_that_list_the_known_ones(kwargs, y, error, message):
    fails(error, message, X, y, trainer=make(TwoOutputs(), **kwargs))


def test_losses_by_output_for_a_module_with_one_output_are_an_error():
    fails(
        ConfigError, r"compile\(loss=...\) names the outputs \['head'\], but the module has one output without a name", X, Y, trainer=make(loss={"head": "mse"})
    )
    fails(ConfigError, r"compile\(loss=...\) has 2 entries, but the module has one output", X, Y, trainer=make(loss=["mse", "mae"]))


@pytest.mark.parametrize("loss_weights", [{"tail": 0.5}, [1.0, 0.5]])
def test_loss_weights_by_output_for_one_function_of_all_outputs_are_an_error(loss_weights):
    trainer = make(TwoOutputs())
    trainer.compile("sgd", lambda outputs, targets: outputs["head"][:, 0] - targets[:, 0], loss_weights=loss_weights)
    message = r"compile\(loss_weights=...\) has weights by output, but the loss is one function of the outputs \['head', 'tail'\]. Pass one number"
    fails(ConfigError, message, X, Y, trainer=trainer)


# --- Callbacks ---


def test_a_class_instead_of_a_callback_is_an_error_that_says_to_call_it():
    fails(CallbackError, r"callbacks must be instances. Received: the class EarlyStopping. Pass EarlyStopping\(...\)", X, Y, callbacks=[EarlyStopping])


# --- After an error ---


def test_a_trainer_still_works_after_an_error():
    trainer = make()
    for args in ((X, Y[:3]), (X,), (itertools.cycle([(X, Y)]),)):
        with pytest.raises(FitflaxError):
            trainer.fit(*args, verbose=0)
    trainer.fit(X, Y, verbose=0)
    fresh = make()
    fresh.fit(X, Y, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, fresh.state.params)


# --- What the first user stumbled over ---


@pytest.mark.parametrize("class_weight", [[1, 2, 3], "balanced"])
def test_class_weight_must_be_a_dict(class_weight):
    fails(
        ConfigError,
        r"class_weight must be a dict \{label: weight\}",
        X,
        LABELS,
        trainer=make(loss="sparse_categorical_crossentropy"),
        class_weight=class_weight,
    )


def test_binary_targets_in_arrays_are_checked():
    fails(
        DataError,
        r"y holds values from 0 to 2, but 'binary_crossentropy' takes 0, 1 or probabilities",
        X,
        LABELS,
        trainer=make(nn.Dense(1), "binary_crossentropy"),
    )


def test_a_metric_cannot_be_named_epoch():
    fails(ConfigError, "A metric cannot have the name 'epoch'", X, Y, trainer=make(metrics={"epoch": "mae"}))


@pytest.mark.parametrize(("role", "arguments"), [("data", (X.tolist(), Y)), ("y", (X, Y.tolist())), ("sample_weight", (X, Y, [1.0] * 12))])
def test_lists_of_numbers_are_not_accepted_as_arrays(role, arguments):
    fails(DataError, rf"`{role}` is a list of Python numbers. Convert it to an array: np.asarray\({role}\)", *arguments)


def test_an_optimizer_that_was_not_called_is_an_error_that_says_to_call_it():
    with pytest.raises(OptimizerError, match="Call it"):
        fitflax.Trainer(nn.Dense(1)).compile(optax.adam, "mse")


def test_the_error_of_a_monitor_suggests_the_named_validation_sets():
    message = r"the validation sets are named \['dev'\]. Use one of \['dev_loss'\]"
    fails(errors.MonitorError, message, X, Y, validation_data={"dev": (X, Y)}, callbacks=[EarlyStopping("val_loss")])


def test_a_list_of_input_arrays_is_an_error_that_suggests_tuples():
    fails(ModelError, r"The inputs are a list, which is one argument. Pass tuples: \(x, y\)", [X, X], Y)


def test_an_evaluation_cannot_be_named_train():
    with pytest.raises(ConfigError, match="other than 'train'"):
        make().eval_loop(X, Y, name="train")


def test_nested_aux_is_an_error_that_names_it():
    class Nested(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            return jnp.zeros(len(batch.mask)), {}, {"parts": {"a": 1.0}}

    trainer = Nested(nn.Dense(1))
    trainer.compile("sgd")
    fails(LossError, r"aux\['parts'\] is a dict", X, Y, trainer=trainer)


def test_a_missing_random_stream_in_compute_loss_is_an_error_that_says_how_to_add_it():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) + (0 if self.is_initializing() else jax.random.normal(self.make_rng("noise"), (len(x), 3)))

    class CustomLoss(fitflax.Trainer):
        def compute_loss(self, params, model_state, batch, *, rngs, train):
            outputs = self.model.apply({"params": params}, batch.x, rngs=rngs)
            return jnp.square(outputs).mean(-1), {}, {"outputs": outputs}

    trainer = CustomLoss(Noisy())
    trainer.compile("sgd")
    fails(ModelError, r"compute_loss.*Trainer\(rngs=", X, Y, trainer=trainer)
