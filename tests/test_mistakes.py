"""Mistakes that people make, each with its one message: what is wrong, where, and what to do."""

import copy
import functools
import inspect
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import keras_names
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, ModelCheckpoint
from fitflax.errors import (
    CallbackError,
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    DirectoryInUseError,
    FitflaxWarning,
    LossError,
    MetricError,
    ModelError,
    MonitorError,
    OptimizerError,
)
from fitflax.integrations.mlflow import MLflowLogger
from fitflax.integrations.wandb import WandbLogger
from fitflax.parallel import DataParallel

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = (np.arange(16) % 3).astype(np.int32)
LABELS = "sparse_categorical_crossentropy"


class Forgotten(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5)(x))


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[:, 0]


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.Dense(3)(x * mask)


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"kind": nn.softmax(nn.Dense(3)(x)), "size": nn.sigmoid(nn.Dense(1)(x))}


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.Conv(4, (3, 3))(x), (4, 4), (4, 4))
        return nn.Dense(3)(x.reshape(len(x), -1))


class Moody(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        return nn.Dense(3)(x)


class KerasLoss(fitflax.Trainer):
    def compute_loss(self, x, y, y_pred):  # type: ignore[override]
        return y - y_pred


class KerasLossObject:
    from_logits = True

    def __call__(self, y_true, y_pred):
        return y_true - y_pred


class Forgetful(fitflax.Trainer):
    def compute_loss(self, params, model_state, batch, *, rngs, train):
        outputs = self.model.apply({"params": params, **model_state}, batch.x, train=train, rngs=rngs)
        return outputs.sum(axis=-1), {}, {}


class Nested(Callback):
    """Calls the trainer that is running."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call

    def on_epoch_end(self, epoch, logs):
        self._call(self.trainer)


def make(module: nn.Module | None = None, loss: Any = LABELS, metrics: Any = None, optimizer: Any = "adam", **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(module or nn.Dense(3), parallel=DataParallel(jax.devices()[:1]), **options)
    trainer.compile(optimizer, loss, metrics)
    return trainer


def fit(x: Any = X, y: Any = Y, *, given: dict[str, Any] | None = None, trainer: fitflax.Trainer | None = None, **made: Any) -> fitflax.Trainer:
    if trainer is None:
        trainer = make(**made)
    else:
        trainer.compile("adam")
    trainer.fit(x, y, verbose=0, **(given or {}))
    return trainer


def built() -> fitflax.Trainer:
    trainer = make()
    trainer.build((X, Y))
    return trainer


def used_up() -> Any:
    batches = iter([(X, Y)])
    list(batches)
    return batches


def bad_examples() -> np.ndarray:
    x = X.copy()
    x[[3, 5], 2] = np.nan, np.inf
    return x


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "labels of another shape": (
        lambda: fit(y=np.zeros((16, 2)), loss="mse"),
        LossError,
        "takes outputs and targets of the same shape .* Received: outputs [16, 3], targets [16, 2]. Check the model's last layer.",
    ),
    "one-hot labels for a loss of integers": (lambda: fit(y=np.eye(3)[Y]), LossError, "For one-hot targets use 'categorical_crossentropy'."),
    "labels as floats": (
        lambda: fit(y=Y.astype(np.float32)),
        LossError,
        "takes integer class labels. Received: targets of dtype float32. Cast them: targets.astype('int32').",
    ),
    "labels from 1 to 3": (lambda: fit(y=Y + 1), DataError, "y holds labels from 1 to 3, but the module has 3 outputs, for labels 0 to 2."),
    "yes and no as -1 and 1": (
        lambda: fit(y=np.where(Y > 0, 1.0, -1.0)[:, None], module=nn.Dense(1), loss="binary_crossentropy"),
        DataError,
        "y holds values from -1 to 1, but 'binary_crossentropy' takes 0, 1 or probabilities in between.",
    ),
    "probabilities out of range": (
        lambda: fit(y=2 * np.eye(3, dtype=np.float32)[Y], loss="categorical_crossentropy"),
        DataError,
        "y holds values from 0 to 2, but 'categorical_crossentropy' takes 0, 1 or probabilities in between.",
    ),
    "dropout without a mode": (
        lambda: fit(module=Forgotten()),
        ModelError,
        "Add a keyword argument `train` to __call__, which the trainer sets, and use it: nn.Dropout(rate, deterministic=not train).",
    ),
    "a collection that is not mutable": (
        lambda: fit(module=Normed(), mutable=False),
        ModelError,
        "must be mutable. Add it to Trainer(mutable=...); by default, all collections except params are mutable.",
    ),
    "a module with a missing argument": (
        lambda: fit(module=Masked()),
        ModelError,
        "missing 1 required positional argument: 'mask'. Pass several inputs as a tuple, ((x1, x2), y), or as keys of dicts with Trainer(inputs=...)",
    ),
    "a generator that is used up": (
        lambda: fit(used_up(), None),
        DataError,
        "It is an exhausted iterator. Pass a function that returns a new one: `lambda: ...`.",
    ),
    "a generator to validate on twice": (
        lambda: fit(given={"epochs": 2, "validation_data": iter([(X, Y)])}),
        DataError,
        "The data of 'val' is an iterator that has been used up or read in part. Pass a function that returns a new iterator, `lambda: ...`, or the number of",
    ),
    "a misspelt monitor": (
        lambda: fit(given={"validation_data": (X, Y), "callbacks": [EarlyStopping("val_los")]}),
        MonitorError,
        "EarlyStopping monitors 'val_los', which is not logged. Did you mean 'val_loss'? Logged keys: ['loss', 'val_loss'].",
    ),
    "a monitor of validation without any": (
        lambda: fit(given={"callbacks": [EarlyStopping()]}),
        MonitorError,
        "but there is no validation data. Pass validation_data=, or monitor a training value, such as 'loss'.",
    ),
    "a metric that needs another shape": (
        lambda: fit(metrics=["r2"]),
        MetricError,
        "Metric 'r2': It takes outputs and targets of the same shape .* outputs [16, 3], targets [16].",
    ),
    "mismatched lengths": (lambda: fit(y=Y[:10]), DataError, "All arrays must have the same number of examples: `x` has 16, `y` has 10."),
    "a complex loss": (
        lambda: fit(loss=lambda outputs, targets: outputs[:, 0] * 1j),
        LossError,
        "A loss must be real. Received: complex64[16]. Take the magnitude, abs(values), or the real part.",
    ),
    "a negative sample weight": (
        lambda: fit(given={"sample_weight": np.array([1.0] * 15 + [-2.5])}),
        DataError,
        "sample_weight must be at least 0. Received: -2.5 at index [15]. To leave out an example, give it weight 0.",
    ),
    "a negative sample weight in a batch": (
        lambda: make().fit(lambda: iter([(X, Y, -np.ones(16))]), verbose=0),
        DataError,
        "sample_weight must be at least 0. Received: -1 at index [0].",
    ),
    "strings in data": (lambda: fit(np.array([["a"] * 4] * 16)), DataError, "x must hold numbers, but its dtype is <U1; encode them as numbers first."),
    "lists of unequal length in data": (
        lambda: fit(np.array([[1, 2], [3]], dtype=object), Y[:2]),
        DataError,
        "x must hold numbers, but its dtype is object; encode them as numbers first.",
    ),
    "empty data": (lambda: fit(X[:0], Y[:0]), DataError, "The data yields no batches. Received: 0 examples, batch_size=32"),
    "batch size 0": (lambda: fit(given={"batch_size": 0}), ConfigError, "batch_size must be a positive integer. Received: 0."),
    "negative steps": (lambda: fit(given={"steps": -1}), ConfigError, "steps must be a positive integer. Received: -1."),
    "an unknown optimizer": (
        lambda: make(optimizer="adm"),
        OptimizerError,
        "There is no optimizer 'adm'. Did you mean 'adam'? Pass an optax transformation, or one of these names: ['adabelief', .*, 'yogi']",
    ),
    "an optimizer that was not called": (
        lambda: make(optimizer=__import__("optax").adam),
        OptimizerError,
        "optimizer must be a name or an optax transformation. Received: <function adam at .*>. Call it: optax.adam(learning_rate).",
    ),
    "an unknown loss": (
        lambda: make(loss="crossentropy"),
        LossError,
        "There is no loss 'crossentropy'. Did you mean 'sparse_categorical_crossentropy'? Pass a known name, .*. Known: ['binary_crossentropy', .*]",
    ),
    "an unknown metric": (
        lambda: make(metrics=["acuracy"]),
        MetricError,
        "There is no metric 'acuracy'. Did you mean 'accuracy'? Pass a known name, .*. Known: ['acc', .*]",
    ),
    "a loss that returns a tuple": (
        lambda: fit(loss=lambda outputs, targets: (outputs.sum(-1), outputs)),
        LossError,
        "A loss must return one array of values per example. The loss returned a tuple: (float32[16], float32[16,3]).",
    ),
    "a callback's class": (
        lambda: fit(given={"callbacks": [EarlyStopping]}),
        CallbackError,
        "callbacks must be instances. Received: the class EarlyStopping. Pass EarlyStopping(...).",
    ),
    "a module's class": (
        lambda: fitflax.Trainer(Forgotten),
        ConfigError,
        "Trainer takes an instance of a module. Received: the class Forgotten. Call it: Trainer(Forgotten(...)).",
    ),
    "a loss that puts each output together with each target": (
        lambda: fit(y=X[:, 0], module=nn.Dense(1), loss=lambda outputs, targets: (outputs - targets) ** 2),
        LossError,
        "The loss <lambda> returned [16, 16] for outputs [16, 1] and targets [16]: each output was combined with each target. Give .* use outputs[:, 0].",
    ),
    "a metric that puts each output together with each target": (
        lambda: fit(y=X[:, 0], module=nn.Dense(1), loss="mse", metrics=[lambda outputs, targets: abs(outputs - targets)]),
        MetricError,
        "Metric 'lambda': its function returned [16, 16] for outputs [16, 1] and targets [16]: each output was combined with each target.",
    ),
    "a loss that averages over all pairs": (
        lambda: fit(y=X[:, 0], module=nn.Dense(1), loss=lambda outputs, targets: jnp.mean((outputs - targets) ** 2, axis=-1)),
        LossError,
        "The loss <lambda> returned [16] for outputs [16, 1] and targets [16]: each output was combined with each target. Give .* use outputs[:, 0].",
    ),
    "a loss that averages over all pairs and examples": (
        lambda: fit(y=X[:, :1], module=Flat(), loss=lambda outputs, targets: jnp.mean((outputs - targets) ** 2)),
        LossError,
        "The loss <lambda> returned [] for outputs [16] and targets [16, 1]: each output was combined with each target. Give .* use targets[:, 0].",
    ),
    "a metric that averages over all pairs": (
        lambda: fit(y=X[:, 0], module=nn.Dense(1), loss="mse", metrics=[lambda outputs, targets: jnp.mean(abs(outputs - targets), axis=1)]),
        MetricError,
        "Metric 'lambda': its function returned [16] for outputs [16, 1] and targets [16]: each output was combined with each target.",
    ),
    "batch normalization without a mode": (
        lambda: fit(module=nn.BatchNorm()),
        ModelError,
        "Add a keyword argument `train` to __call__, which the trainer sets, and use it: nn.BatchNorm(use_running_average=not train).",
    ),
    "a mode under a name that is not known": (
        lambda: fit(module=Moody()),
        ModelError,
        "The trainer sets the keywords train, training and deterministic. Set others with Trainer(model, train_kwargs=",
    ),
    "Keras's compute_loss": (
        lambda: KerasLoss(nn.Dense(3)).compile("sgd"),
        ConfigError,
        "KerasLoss.compute_loss is called as compute_loss(params, model_state, batch, rngs=rngs, train=train), but is defined as compute_loss(x, y, y_pred)",
    ),
    "a compute_loss that forgets that collections change": (
        lambda: fit(trainer=Forgetful(Normed())),
        ModelError,
        "return the updated ones: outputs, updated = self.model.apply(variables, batch.x, mutable=['batch_stats']).",
    ),
    "loss and optimizer in the other order": (
        lambda: make(optimizer=LABELS, loss="adam"),
        OptimizerError,
        "compile(optimizer, loss, metrics) takes the optimizer first. Received: 'sparse_categorical_crossentropy', which is a loss.",
    ),
    "Keras's arguments of a callback": (
        lambda: EarlyStopping(restore_best_weights=True),
        CallbackError,
        "EarlyStopping does not take restore_best_weights=; use restore_best= instead.",
    ),
    "a copy of a trainer": (lambda: copy.deepcopy(built()), TypeError, "A Trainer cannot be copied or pickled, because .* with_seed(seed) returns one that"),
    "Keras's name of the data": (
        lambda: built().fit(x=X, y=Y),
        ConfigError,
        "Trainer.fit does not take x=; pass it as the first argument, data.",
    ),
    "Keras's name of steps in one call": (
        lambda: built().compile("adam", LABELS, steps_per_execution=8),
        ConfigError,
        "Trainer.compile does not take steps_per_execution=; use steps_per_call= instead.",
    ),
    "a trainer's arguments at the wrong call": (
        lambda: fitflax.Trainer(nn.Dense(3), optimizer="adam"),
        ConfigError,
        "Trainer does not take optimizer=; pass it to compile(optimizer, loss, metrics).",
    ),
    "one callback": (
        lambda: built().fit(X, Y, callback=EarlyStopping()),
        ConfigError,
        "Trainer.fit does not take callback=; use callbacks= instead, a list.",
    ),
    "Lightning's trigger": (
        lambda: fitflax.callbacks.ModelCheckpoint("runs", every_n_epochs=2),
        CallbackError,
        "ModelCheckpoint does not take every_n_epochs=; use every= instead, such as every=every(epochs=2).",
    ),
    "Lightning's number of checkpoints": (
        lambda: fitflax.callbacks.ModelCheckpoint("runs", save_top_k=3),
        CallbackError,
        "ModelCheckpoint does not take save_top_k=; use keep= instead.",
    ),
    "W&B's resume": (
        lambda: WandbLogger("digits", resume="must"),
        CallbackError,
        "WandbLogger does not take resume=; pass fit(resume=...) instead, which also continues the run of a logger.",
    ),
    "W&B's options": (
        lambda: WandbLogger("digits", group="sweep"),
        CallbackError,
        "WandbLogger does not take group=; pass options={'group': ...} instead.",
    ),
    "MLflow's name of an experiment": (
        lambda: MLflowLogger(experiment_name="digits"),
        CallbackError,
        "MLflowLogger does not take experiment_name=; use experiment= instead.",
    ),
    "a part of a generator to validate": (
        lambda: fit(lambda: iter([(X, Y)]), None, given={"validation_split": 0.2}),
        ConfigError,
        "validation_split requires in-memory arrays, .* For other data, pass validation_data=.",
    ),
    "Keras's question for a dict": (
        lambda: built().evaluate(X, Y, return_dict=True),
        ConfigError,
        "Trainer.evaluate does not take return_dict=; leave it out: the values are always returned in a dict.",
    ),
    "Keras's data to predict": (
        lambda: built().predict(x=X),
        ConfigError,
        "Trainer.predict does not take x=; pass it as the first argument, data.",
    ),
    "positional sizes": (
        lambda: built().fit(X, Y, 32, 5),
        ConfigError,
        "Trainer.fit(data, y, sample_weight, ...) takes no other positional arguments; pass batch_size= and epochs= by keyword.",
    ),
    "a positional size of evaluation": (
        lambda: built().evaluate(X, Y, None, 32),
        ConfigError,
        "Trainer.evaluate(data, y, sample_weight, ...) takes no other positional arguments; pass batch_size= by keyword.",
    ),
    "a positional size of prediction": (
        lambda: built().predict(X, 32),
        ConfigError,
        "Trainer.predict(data, ...) takes no other positional arguments; pass batch_size= by keyword.",
    ),
    "a batch as two arguments": (
        lambda: built().train_on_batch(X, Y),
        ConfigError,
        "Trainer.train_on_batch(batch) takes no other positional arguments; pass the batch as one tuple, such as (x, y).",
    ),
    "a batch by Keras's names": (
        lambda: built().test_on_batch(x=X, y=Y),
        ConfigError,
        "Trainer.test_on_batch does not take x=; pass the batch as one tuple, such as (x, y).",
    ),
    "from_logits with a loss by name": (
        lambda: built().compile("adam", LABELS, from_logits=True),
        ConfigError,
        "Trainer.compile does not take from_logits=; leave it out: crossentropies given by name always take logits.",
    ),
    "from_logits with a function of fitflax": (
        lambda: fit(loss=functools.partial(fitflax.losses.sparse_categorical_crossentropy, from_logits=True)),
        LossError,
        "unexpected keyword argument 'from_logits'. Leave out from_logits=: crossentropies of fitflax always take logits.",
    ),
    "a loss of Keras's class": (
        lambda: make(loss=KerasLossObject()),
        LossError,
        "takes the targets first, as in Keras, .* Or pass a loss by name: crossentropies given by name always take logits.",
    ),
    "Keras's way to load a model": (
        lambda: fitflax.load_model("model.keras"),
        AttributeError,
        "has no attribute 'load_model'. Create the trainer, then call trainer.restore(path) for a checkpoint or trainer.load_weights(path) for safetensors.",
    ),
    "a class of Keras's losses": (
        lambda: fitflax.losses.SparseCategoricalCrossentropy(from_logits=True),
        AttributeError,
        "Losses are functions, which compile takes by name. Did you mean 'sparse_categorical_crossentropy'?",
    ),
    "a callback of the top level": (
        lambda: fitflax.ModelCheckpoint,
        AttributeError,
        "has no attribute 'ModelCheckpoint'. It is fitflax.callbacks.ModelCheckpoint",
    ),
    "flax's name of an update": (
        lambda: built().state.apply_gradients,
        AttributeError,
        "'TrainState' object has no attribute 'apply_gradients'. Use apply_gradient(grads, optimizer, model_state).",
    ),
    "Keras's weights": (
        lambda: built().load_weights("weights.h5"),
        CheckpointNotFoundError,
        "There are no weights at weights.h5: no such file or directory.",
    ),
    "Keras's weights to save": (
        lambda: built().save_weights("weights.h5"),
        ConfigError,
        "save_weights writes safetensors, so the file name must end with .safetensors. Received: 'weights.h5'. To save a checkpoint, use save(path).",
    ),
    "inputs of another width to predict": (
        lambda: built().predict(X[:, :3], verbose=0),
        ModelError,
        "Its parameters were initialized for inputs of another shape. The first axis is that of examples: pass a single example as x[:1].",
    ),
    "a single example to predict": (lambda: built().predict(X[0], verbose=0), ModelError, "pass a single example as x[:1]."),
    "fit inside fit": (
        lambda: fit(given={"callbacks": [Nested(lambda trainer: trainer.fit(X, Y, verbose=0))]}),
        ConfigError,
        "fit() was called while fit() is running, from a callback or another thread. Use another trainer there, or call fit() after fit() has returned.",
    ),
    "compile inside fit": (
        lambda: fit(given={"callbacks": [Nested(lambda trainer: trainer.compile("sgd", LABELS))]}),
        ConfigError,
        "compile() was called while fit() is running, from a callback or another thread. Use another trainer there, or call compile() after fit() has returned",
    ),
    "build inside fit": (
        lambda: fit(given={"callbacks": [Nested(lambda trainer: trainer.build((X, Y)))]}),
        ConfigError,
        "build() was called while fit() is running, from a callback or another thread. Use another trainer there, or call build() after fit() has returned",
    ),
    "an argument that is misspelt": (lambda: fit(given={"batchsize": 8}), TypeError, "Trainer.fit does not take batchsize=. Did you mean 'batch_size'?"),
    "images with the channels first": (
        lambda: fit(np.zeros((16, 3, 8, 8), np.float32), module=Convolutional()),
        ModelError,
        "Flax's layers take the channels last, but these inputs seem to have them first. Transpose them: x.transpose(0, 2, 3, 1).",
    ),
    "dicts without keys of inputs": (
        lambda: fit(lambda: iter([{"image": X, "label": Y}]), None),
        ModelError,
        "The inputs are a dict, which is one argument. To select entries of it, pass their keys: Trainer(inputs='image', targets='label').",
    ),
    "a dict of inputs and targets": (
        lambda: fit({"x": X, "y": Y}, None),
        ModelError,
        "The inputs are a dict, which is one argument. To select entries of it, pass their keys: Trainer(inputs='x', targets='y').",
    ),
    "a dict of inputs and targets, of which it is unclear which is which": (
        lambda: fit({"left": X, "right": Y}, None),
        ModelError,
        "To select entries of it, pass their keys: Trainer(inputs='image', targets='label').",
    ),
    "inputs and targets in a list": (
        lambda: fit([X, Y], None),
        ModelError,
        "The inputs are a list, which is one argument. Pass tuples: (x, y) for inputs and targets, ((x1, x2), y) for several inputs.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.filterwarnings("ignore:shape requires ndarray or scalar:DeprecationWarning")  # JAX warns of the list.
def test_a_mistake_has_a_message_that_says_what_to_do(mistake):
    make_it, error, message = MISTAKES[mistake]
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(error, match=pattern) as caught:
        make_it()
    assert len(str(caught.value)) < 1500 and "\n" not in str(caught.value)


def test_hints_about_arguments_of_callbacks_name_only_arguments_that_exist():
    kinds = [getattr(fitflax.callbacks, name) for name in fitflax.callbacks.__all__]
    hinted = set()
    for kind in [each for each in kinds if isinstance(each, type) and issubclass(each, Callback)] + [MLflowLogger, WandbLogger]:
        parameters = inspect.signature(kind).parameters
        for argument in {*keras_names.CALLBACKS} - {*parameters}:
            with pytest.raises((CallbackError, TypeError)) as caught:
                kind(**{argument: 1})
            assert f"use {kind.__name__}(" not in str(caught.value)
            if hint := re.search(r"(?:use|pass) (\w+)=", str(caught.value)):
                assert hint[1] in parameters, caught.value
                hinted.add((kind.__name__, argument))
    assert {("ModelCheckpoint", "every_n_epochs"), ("WandbLogger", "dir"), ("WandbLogger", "log_model")} <= hinted


def test_the_error_for_a_directory_of_another_run_names_it_and_the_three_options(tmp_path: pathlib.Path):
    fit(given={"callbacks": [ModelCheckpoint(tmp_path)]})
    message = 'holds checkpoints of run .* To resume that run, pass resume="auto" .* choose another directory, or pass overwrite=True to the callback'
    with pytest.raises(DirectoryInUseError, match=re.escape(str(tmp_path)) + f" {message}"):
        fit(given={"callbacks": [ModelCheckpoint(tmp_path)]})


@pytest.mark.slow
def test_the_advice_for_a_second_run_with_only_a_best_checkpoint_works(tmp_path: pathlib.Path):
    def again(epochs: int, resume: str | None = None, *callbacks: Callback, **best: bool) -> int:
        trainer = make()
        trainer.fit(X, Y, epochs=epochs, callbacks=[BestCheckpoint(tmp_path / "best", monitor="loss", **best), *callbacks], resume=resume, verbose=0)
        return trainer.step

    again(2)
    with pytest.raises(DirectoryInUseError, match=r'otherwise resume="(.*)". To start a new run.*overwrite=True') as caught:
        again(3)
    advice = re.search('otherwise resume="(.*?)"', str(caught.value))
    assert advice is not None and again(3, advice[1]) == 3
    with pytest.raises(ConfigError, match=r"needs exactly one ModelCheckpoint, .* Add one to callbacks, or pass resume=path"):
        again(4, "auto")
    with pytest.raises(DirectoryInUseError, match=f'To resume from the other directory, pass resume="{re.escape(advice[1])}"'):
        again(4, "auto", ModelCheckpoint(tmp_path / "new"))
    assert again(4, advice[1], ModelCheckpoint(tmp_path / "new")) == 4
    assert again(5, "auto", ModelCheckpoint(tmp_path / "new")) == 5
    assert again(1, overwrite=True) == 1


# -- what may be intended, and causes a warning --


def test_a_warning_points_at_the_line_that_called_the_library():
    trainer = make(nn.Dense(3))
    with pytest.warns(FitflaxWarning, match="The data ended before the run did") as ended:
        trainer.fit(iter([(X, Y)]), steps=2, verbose=0)
    with pytest.warns(FitflaxWarning, match="has NaN or infinity in 1 of 16 examples") as spoiled:
        trainer.fit(np.where(np.arange(16)[:, None] == 3, np.nan, X), Y, verbose=0)
    assert [warning.filename for warning in [*ended, *spoiled]] == [__file__] * 2


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("module", "loss", "y", "activation"),
    [
        (nn.Sequential([nn.Dense(3), nn.softmax]), LABELS, Y, "softmax"),
        (nn.Sequential([nn.Dense(3), nn.softmax]), "categorical_crossentropy", np.eye(3, dtype=np.float32)[Y], "softmax"),
        (nn.Sequential([nn.Dense(1), nn.sigmoid, lambda x: x[:, 0]]), "binary_crossentropy", (Y > 0).astype(np.float32), "sigmoid"),
    ],
)
def test_a_softmax_before_a_loss_of_logits_warns_once(module, loss, y, activation):
    trainer = make(module, loss)
    fault = rf"The module ends with a {activation}, but the loss '{loss}' takes logits and applies the {activation} itself\."
    message = rf"{fault} Remove the {activation} from the module\."
    with pytest.warns(FitflaxWarning, match=message):
        trainer.fit(X, y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(X, y, verbose=0)


@pytest.mark.parametrize("validates", [False, True])
def test_a_softmax_that_is_only_in_evaluation_warns_if_a_loss_is_evaluated(validates):
    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            logits = nn.Dense(3)(x)
            return logits if train else nn.softmax(logits)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FitflaxWarning)
        make(Classifier()).fit(X, Y, validation_data=(X, Y) if validates else None, verbose=0)
    assert ["ends with a softmax" in str(warning.message) for warning in caught] == [True] * validates


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("training_step", "To change the loss, override compute_loss; to change the update, override train_step(state, batch)"),
        ("configure_optimizers", "Pass the optimizer to compile(optimizer, loss, metrics), or override train_step(state, batch)"),
        ("call", "Define __call__ of the Flax module that you pass to the trainer, or override compute_loss"),
    ],
)
def test_methods_of_other_trainers_that_are_never_called_cause_a_warning(name, advice):
    with pytest.warns(FitflaxWarning, match=re.escape(f"Mine defines {name}, which fitflax never calls. {advice}")):
        subclass = type("Mine", (fitflax.Trainer,), {name: lambda self, *arguments: 0})
    type("Theirs", (subclass,), {})  # Only once, for the class that defines it.


@pytest.mark.slow
def test_the_warning_names_which_of_several_outputs_has_an_activation():
    with pytest.warns(FitflaxWarning, match="The module's output 'kind' ends with a softmax") as caught:
        fit(y={"kind": Y, "size": X[:, :1]}, module=Heads(), loss={"kind": LABELS, "size": "mse"})
    assert len(caught) == 1


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("module", "loss"),
    [
        (nn.Sequential([nn.Dense(3), nn.softmax]), lambda outputs, targets: -jnp.log(outputs[jnp.arange(len(outputs)), targets])),
        (nn.Sequential([nn.Dense(3), nn.log_softmax]), LABELS),
        (nn.Sequential([nn.Dense(3), nn.softmax, nn.Dense(3)]), LABELS),
        (nn.Sequential([nn.Dense(3), lambda x: jnp.exp(x) / 2]), LABELS),
    ],
)
def test_modules_that_end_differently_and_custom_losses_do_not_warn(module, loss):
    fit(module=module, loss=loss)


def test_nan_and_infinity_in_the_data_warn_before_the_first_step():
    known = []
    look = fitflax.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: known.append(len(caught)))
    with pytest.warns(FitflaxWarning, match=r"x has NaN or infinity in 2 of 16 examples\. .* Clean or remove these examples\.") as caught:
        fit(bad_examples(), given={"callbacks": [look]})
    assert known and set(known) == {len(caught)} == {1}
    y = {"a": X.copy(), "b": np.where(np.arange(16)[:, None] == 7, -np.inf, X)}
    with pytest.warns(FitflaxWarning, match=r"y\['b'\] has NaN or infinity in 1 of 16 examples"):
        fit(y=y, module=nn.Dense(4), loss=lambda outputs, targets: (outputs - targets["a"]).mean(-1))


def test_integers_and_files_are_not_checked(tmp_path: pathlib.Path):
    np.save(tmp_path / "x.npy", bad_examples())
    trainer = make(loss=lambda outputs, targets: outputs.sum(-1) * 0)
    trainer.fit(np.load(tmp_path / "x.npy", mmap_mode="r"), Y, verbose=0)


# --- Habits from Keras ---


def trainer_of(**options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", **{"loss": LABELS, **options})
    return trainer


def pinball(y_true, y_pred):
    return jnp.abs(y_pred - y_true)


@pytest.mark.parametrize(("options", "error", "what"), [({"loss": pinball}, LossError, "loss"), ({"metrics": [pinball]}, MetricError, "metric")])
def test_a_function_that_takes_the_targets_first_is_not_called_with_swapped_arguments(options, error, what):
    with pytest.raises(
        error, match=rf"^The {what} pinball\(y_true, y_pred\) takes the targets first, as in Keras.*lambda outputs, targets: pinball\(targets, outputs\)"
    ):
        trainer_of(**options)


def test_placeholders_in_the_path_of_checkpoints_are_an_error():
    with pytest.raises(ConfigError, match=r"must not have placeholders: each checkpoint is named by its step.*\{epoch:02d\}"):
        ModelCheckpoint("w.{epoch:02d}-{val_loss:.2f}.keras")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (32, r"Received: int\. Pass sizes by name: batch_size=32"),
        ({"a": X[:, 0]}, r"Received: dict\. It applies to all outputs; to weight a single output, use a custom loss"),
    ],
)
def test_sample_weights_must_be_one_array(weights, message):
    with pytest.raises(DataError, match=rf"^sample_weight must be one array, \[examples\] or \[examples, \.\.\.\]\. {message}"):
        trainer_of().fit(X, Y, weights)


def test_the_learning_rate_of_the_optimizer_is_neither_read_nor_set_silently():
    trainer = trainer_of()
    trainer.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(AttributeError, match=r"'learning_rate'\. Use trainer\.learning_rate instead"):
        trainer.optimizer.learning_rate = 1e-5
    with pytest.raises(AttributeError, match=r"Use trainer\.learning_rate"):
        trainer.optimizer.lr  # noqa: B018
    assert isinstance(trainer.optimizer, optax.GradientTransformationExtraArgs) and trainer.optimizer.update is trainer.optimizer[1]


def test_the_error_for_the_missing_model_of_a_callback_says_where_it_is():
    class Ported(fitflax.callbacks.Callback):
        def on_train_begin(self, logs):
            self.model.summary()

    with pytest.raises(AttributeError, match=r"'Ported' object has no attribute 'model'\. Use self\.trainer: self\.trainer\.predict"):
        trainer_of().fit(X, Y, callbacks=[Ported()], verbose=0)


def test_the_short_hook_names_of_keras_are_recognized():
    class Ported(fitflax.callbacks.Callback):
        def on_batch_end(self, batch, logs):
            """Never called."""

    with pytest.warns(FitflaxWarning, match=r"Ported\.on_batch_end is not a hook .* Did you mean 'on_train_batch_end'"):
        trainer_of().fit(X, Y, callbacks=[Ported()], verbose=0)


def test_the_error_for_the_state_of_another_optimizer_names_the_cause(tmp_path):
    trainer_of().fit(X, Y, epochs=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    other = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    other.compile("adam", LABELS)
    with pytest.raises(
        fitflax.errors.RestoreError,
        match=r"does not fit this optimizer\. Compile with the optimizer of the checkpoint, or restore it with weights_only=True\. Missing: opt_state",
    ):
        other.fit(X, Y, epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0)


def test_metrics_under_a_name_that_is_not_an_output_are_an_error():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return {"left": nn.Dense(1)(x), "right": nn.Dense(1)(x)}

    trainer = fitflax.Trainer(Two())
    trainer.compile("sgd", {"left": "mse", "right": "mse"}, metrics={"lefd": ["mae"]})
    with pytest.raises(MetricError, match=r"names \['lefd'\], but the module's outputs are \['left', 'right'\]\. Did you mean 'left'"):
        trainer.fit(X, {"left": X[:, :1], "right": X[:, :1]}, verbose=0)


def test_a_fast_dev_run_shows_its_own_number_of_steps(capsys):
    trainer_of().fit(X, Y, batch_size=2, fast_dev_run=2, verbose=2)
    assert "\n2/2 - " in capsys.readouterr().out


def test_a_run_with_nothing_left_to_do_prints_a_message(tmp_path, capsys):
    for _ in range(2):
        trainer_of().fit(X, Y, epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=2)
    assert "Resumed at step 2; nothing is left to do." in capsys.readouterr().out


def test_an_evaluation_that_has_nothing_to_compute_warns_once():
    trainer = make(loss=None)
    trainer.build((X, Y))
    with pytest.warns(FitflaxWarning, match="There is nothing to compute for 'eval', because no loss and no metrics are compiled. Pass them: compile"):
        assert trainer.evaluate(X, Y, verbose=0) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.evaluate(X, Y, verbose=0) == {}
        trainer.compile("adam", None, ["accuracy"])
        assert list(trainer.evaluate(X, Y, verbose=0)) == ["accuracy"]


def test_nan_in_the_sample_weights_causes_a_warning():
    weights = np.ones(16, np.float32)
    weights[2] = np.nan
    with pytest.warns(FitflaxWarning, match="sample_weight has NaN or infinity in 1 of 16 examples"):
        fit(given={"sample_weight": weights})


@pytest.mark.slow
def test_a_module_that_cannot_be_evaluated_can_be_trained():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))

    trainer = fit(module=Noisy())
    with pytest.raises(ModelError, match="cannot be run in evaluation mode"):
        trainer.evaluate(X, Y, verbose=0)


@pytest.mark.slow
def test_metrics_are_shown_in_the_order_in_which_they_were_given(tmp_path):
    trainer = fitflax.Trainer(nn.Dense(1), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("adam", "binary_crossentropy", ["auc", "accuracy", "precision"])
    trainer.fit(X, (Y > 0)[:, None].astype(np.float32), validation_data=(X, (Y > 0)[:, None].astype(np.float32)), verbose=0)
    names = ["loss", "auc", "accuracy", "precision"]
    assert list(trainer.history.history) == [*names, *(f"val_{name}" for name in names)]
    assert list(trainer.evaluate(X, (Y > 0)[:, None].astype(np.float32), verbose=0)) == names
    assert list(trainer.test_on_batch((X, (Y > 0)[:, None].astype(np.float32)))) == names


def test_resuming_with_another_loss_learning_rate_or_class_weight_causes_a_warning(tmp_path):
    def run(loss: str = LABELS, rate: float = 0.01, **options: Any) -> fitflax.Trainer:
        trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("adam", loss, learning_rate=rate)
        trainer.fit(X, Y, epochs=len(list(tmp_path.iterdir())) + 1, callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0, **options)
        return trainer

    run()
    run()  # The same settings.
    with pytest.warns(FitflaxWarning, match=r"was saved with other settings: loss was 'sparse_.*' and is now 'multiclass_hinge_loss'\."):
        run(loss="multiclass_hinge_loss")
    with pytest.warns(FitflaxWarning) as caught:
        trainer = run(rate=1e-4, class_weight={0: 2.0})
    text = " ".join(str(warning.message) for warning in caught)
    assert "class_weight was not given and is now {'0': 2.0}; learning_rate was 0.01 and is now 0.0001; loss was" in text
    assert "The checkpoint's learning rate is used. To change it, set trainer.learning_rate." in text
    assert trainer.learning_rate == pytest.approx(0.01)


def test_resuming_with_another_schedule_uses_it_and_the_warning_says_so(tmp_path):
    def constant(step):
        return 0.01 + 0 * step

    def falling(step):
        return 0.1 / (1 + step)

    def run(schedule, steps: int) -> fitflax.Trainer:
        trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("adam", LABELS, learning_rate=schedule)
        trainer.fit(X, Y, steps=steps, epochs=9, callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0)
        return trainer

    run(constant, 2)
    with pytest.warns(FitflaxWarning, match=r"learning_rate was 'constant' and is now 'falling'\. The new schedule is used\.$"):
        trainer = run(falling, 4)
    assert trainer.learning_rate == pytest.approx(0.1 / 4)


@pytest.mark.parametrize("first", ["compile", "restore"])
def test_a_restored_learning_rate_that_is_not_the_compiled_one_causes_a_warning(first, tmp_path):
    make(optimizer="adam").fit(X, Y, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    steps = {"compile": lambda: trainer.compile("adam", LABELS, learning_rate=0.5), "restore": lambda: trainer.restore(tmp_path)}
    steps.pop(first)()
    with pytest.warns(FitflaxWarning, match="learning_rate was not given and is now 0.5. The checkpoint's learning rate is used"):
        steps.popitem()[1]()
    assert trainer.learning_rate == pytest.approx(0.001)


def test_a_function_whose_arguments_look_swapped_causes_a_warning():
    def hits(labels, logits):
        return labels

    with pytest.warns(FitflaxWarning, match=r"The metric hits\(labels, logits\) seems to take the targets first, as in Keras, but is called with"):
        make(metrics=[hits])


def test_losses_of_all_pairs_and_of_several_values_are_not_mistakes():
    """Shapes alone do not prove a mistake: there may be as many quantiles as examples, or a table of all pairs may be intended."""

    def quantiles(outputs, targets):
        error = targets[:, None] - outputs
        return jnp.concatenate([jnp.maximum(q * error, (q - 1) * error) for q in np.linspace(0.1, 0.9, 16)], axis=-1)

    def all_pairs(outputs, targets):
        scores = outputs.reshape(-1)
        return jnp.where(targets[:, None] > targets[None], jnp.logaddexp(0.0, scores[None] - scores[:, None]), 0.0)

    for loss in (quantiles, all_pairs):
        assert np.isfinite(fit(y=X[:, 0], module=nn.Dense(1), loss=loss).history.history["loss"][0])


def test_a_hint_after_an_address_begins_a_new_sentence():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), (3,))

    trainer = fitflax.Trainer(Net())
    trainer.compile("sgd", LABELS)
    with pytest.raises(ModelError, match=r"\(https://flax\.[^ ]*\)\. [A-Z]"):
        trainer.fit(X, Y, verbose=0)


def test_a_custom_callback_rejects_arguments_as_python_does_and_signatures_are_kept():
    class Mine(Callback):
        pass

    for arguments in ({"verbose": 1}, {"every": fitflax.every(steps=1)}):
        with pytest.raises(TypeError):
            Mine(**arguments)
    with pytest.raises(TypeError):
        Mine(1)
    assert str(inspect.signature(Mine)) == str(inspect.signature(Callback)) == "()"
    assert str(inspect.signature(EarlyStopping)).startswith("(monitor: str = 'val_loss', *, mode")


@pytest.mark.slow
def test_a_decorated_override_is_called_with_the_signature_of_its_decorator():
    def scaled(method):
        @functools.wraps(method)
        def call(self, params, model_state, batch, *, rngs, train):
            return method(self, params, model_state, batch, rngs=rngs, train=train, scale=2.0)

        return call

    class Scaled(fitflax.Trainer):
        @scaled
        def compute_loss(self, params, model_state, batch, *, rngs, train, scale):
            values, changed, aux = super().compute_loss(params, model_state, batch, rngs=rngs, train=train)
            return scale * values, changed, aux

    class Bound(fitflax.Trainer):
        compute_loss = functools.partialmethod(Scaled.compute_loss, None, None, None)

    trainer = Scaled(nn.Dense(3))
    trainer.compile("adam", LABELS)
    trainer.fit(X, Y, verbose=0)
    with pytest.raises(ConfigError, match=r"Bound.compute_loss is called as compute_loss\(params"):
        Bound(nn.Dense(3)).compile("adam", LABELS)


@pytest.mark.slow
def test_the_same_settings_in_another_form_are_not_a_change(tmp_path):
    for number, (rate, weights) in enumerate([(0.01, {0: 1.0, 1: 2.0}), (np.float64(0.01), {1: 2.0, 0: 1.0})]):
        trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("adam", LABELS, learning_rate=rate)
        trainer.fit(X, Y, epochs=number + 1, class_weight=weights, callbacks=[ModelCheckpoint(tmp_path)], resume="auto", verbose=0)
    dense = nn.Dense(3)
    loop = fitflax.TrainLoop(dense.init, dense.apply, optimizer="adam", loss=LABELS, data=(X, Y), steps=1, parallel=DataParallel(jax.devices()[:1]))
    with ModelCheckpoint(tmp_path / "loop") as save:
        for checkpoint in loop:
            save(checkpoint)
    fitflax.TrainLoop(
        dense.init, dense.apply, optimizer="adam", loss=LABELS, data=(X, Y), steps=2, parallel=DataParallel(jax.devices()[:1]), restore_from=tmp_path / "loop"
    ).next_step()
