"""scikit-learn estimators whose model is a linen module; `Trainer` does the work. Needs the extra `sklearn`.

>>> from sklearn.datasets import load_iris
>>> x, y = load_iris(return_X_y=True)
>>> LinenClassifier(learning_rate=0.01, epochs=30, random_state=0).fit(x, y).score(x, y) > 0.9
True
"""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import linen as nn

from fitflax.callbacks import Callback, EarlyStopping
from fitflax.errors import LossError
from fitflax.leaves import is_key
from fitflax.losses import binary_crossentropy, sparse_categorical_crossentropy
from fitflax.parallel import DataParallel
from fitflax.trainer import Trainer

try:
    import cloudpickle
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("fitflax.sklearn needs scikit-learn 1.6 or newer, and cloudpickle: pip install 'fitflax[sklearn]'.") from error

__all__ = ["LinenClassifier", "LinenRegressor"]

_HIDDEN = 100
# Fields that every module has.
_OF_MODULES = ("parent", "name")
# Parameters that are functions, or hold some.
_FUNCTIONS = ("module", "optimizer", "learning_rate", "loss", "callbacks")


class _Network(nn.Module):
    """One hidden layer of 100 relu units."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(_HIDDEN)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_outputs)(x)


@dataclasses.dataclass(frozen=True)
class _Crossentropy:
    """The crossentropy of logits `[batch, classes]`, or of two classes `[batch, 1]` or `[batch]`."""

    classes: int

    def __call__(self, outputs: Any, targets: Any) -> jax.Array:
        if outputs.ndim == 1 or outputs.shape[-1] == 1:
            if self.classes <= 2:
                return binary_crossentropy(outputs, targets)
        elif outputs.shape[-1] == self.classes:
            return sparse_categorical_crossentropy(outputs, targets)
        raise LossError(f"There are {self.classes} classes, but the module returns {list(outputs.shape)}; its last layer must have {self.classes} features.")


@dataclasses.dataclass(frozen=True)
class _Regression:
    """A function of outputs and targets of one shape: of one target the module may return `[batch, 1]` or `[batch]`, which must not broadcast."""

    loss: Any

    def __call__(self, outputs: Any, targets: Any) -> Any:
        is_same = hasattr(outputs, "shape") and outputs.size == targets.size
        return self.loss(outputs.reshape(targets.shape) if is_same else outputs, targets)


class _Portable:
    """Has a value pickled by what can pickle functions and classes of scripts as well: linen's initializers and optax's transformations are functions.

    Args:
        value: Anything.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (cloudpickle.dumps(self.value),)


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state with the values that were to be pickled, where it was copied instead."""
    return {name: value.value if isinstance(value, _Portable) else value for name, value in state.items()}


@dataclasses.dataclass
class _Settings:
    """What a trainer is made of."""

    module: nn.Module
    seed: int
    optimizer: Any
    learning_rate: Any
    loss: Any
    steps_per_call: int

    def make(self) -> Trainer:
        """Returns a trainer, which shares its compiled steps with earlier ones of this thread that differ in their seed alone."""
        key = self.module, self.optimizer, self.learning_rate, self.loss, self.steps_per_call
        shared: OrderedDict[Any, Trainer] = vars(_SHARED).setdefault("trainers", OrderedDict())
        try:
            found = shared.get(key)
        except Exception:  # noqa: BLE001 (a module, or whatever it holds, without a hash)
            return self._make()
        if found is None:
            found = shared[key] = self._make()
        shared.move_to_end(key)
        while len(shared) > _NUM_SHARED:
            shared.popitem(last=False)
        return found.with_seed(self.seed)

    def _make(self) -> Trainer:
        trainer = Trainer(self.module, seed=self.seed, parallel=DataParallel(jax.local_devices()[:1]))
        trainer.compile(self.optimizer, self.loss, learning_rate=self.learning_rate, steps_per_call=self.steps_per_call)
        return trainer

    def __getstate__(self) -> dict[str, Any]:
        return {name: _Portable(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_unpacked(state))


_SHARED = threading.local()
_NUM_SHARED = 8


class _Trained:
    """A trainer that can be pickled and copied: by what it is made of and its arrays; it is made again when it is first needed.

    Args:
        settings: What it is made of.
        sample: The shape of one batch's inputs.
    """

    def __init__(self, settings: _Settings, sample: jax.ShapeDtypeStruct) -> None:
        self._settings = settings
        self._sample = sample
        self._leaves: list[Any] | None = None
        self._trainer: Trainer | None = settings.make()
        self._lock = threading.Lock()

    @property
    def seed(self) -> int:
        """What its randomness follows from."""
        return self._settings.seed

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        with self._lock:  # A model that is served may be asked for by several threads at once.
            if self._trainer is None:
                trainer = self._settings.make()
                trainer.build((self._sample,))
                leaves, treedef = jax.tree.flatten(trainer.state)
                assert self._leaves is not None
                trainer.replace_state(jax.tree.unflatten(treedef, [_like(saved, leaf) for saved, leaf in zip(self._leaves, leaves, strict=True)]))
                self._trainer, self._leaves = trainer, None
            return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        leaves = self._leaves
        if self._trainer is not None:
            leaves = [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(self._trainer.state)]
        sample = self._sample.shape, str(self._sample.dtype)
        return {"settings": self._settings, "sample": sample, "leaves": leaves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings, self._leaves, self._trainer, self._lock = state["settings"], state["leaves"], None, threading.Lock()
        self._sample = jax.ShapeDtypeStruct(*state["sample"])


def _like(saved: Any, leaf: Any) -> Any:
    return jax.random.wrap_key_data(saved, impl=jax.random.key_impl(leaf)) if is_key(leaf) else saved


class _LinenEstimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share. Attributes that end in an underscore are there after `fit`, as scikit-learn has it."""

    _trained: _Trained
    n_iter_: int
    history_: dict[str, list[float]]

    def __init__(
        self,
        module: nn.Module | Callable[[int], nn.Module] | None = None,
        *,
        dtype: Any = "float32",
        optimizer: Any = "adam",
        learning_rate: Any = None,
        loss: Any = None,
        epochs: int = 100,
        batch_size: int = 32,
        shuffle: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        steps_per_call: int = 16,
        callbacks: Sequence[Callback] | None = None,
        random_state: Any = None,
        verbose: int | str = 0,
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.steps_per_call = steps_per_call
        self.callbacks = callbacks
        self.random_state = random_state
        self.verbose = verbose

    # -- parameters: fields of the module are parameters, too --

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments; with `deep` the module's fields as well, as `module__features`.

        Args:
            deep: Whether those of the module are wanted.
        """
        params: dict[str, Any] = super().get_params(deep=False)
        if deep and isinstance(self.module, nn.Module):
            params |= {f"module__{name}": getattr(self.module, name) for name in _fields(self.module)}
        return params

    def set_params(self, **params: Any) -> Self:
        """Sets the constructor's arguments; `module__features=64` puts a clone of the module with that field in its place.

        Args:
            **params: By name.

        Raises:
            ValueError: There is no such parameter.
        """
        own = {name: value for name, value in params.items() if not name.startswith("module__")}
        super().set_params(**own)
        fields = {name.removeprefix("module__"): value for name, value in params.items() if name not in own}
        if fields:
            if not isinstance(self.module, nn.Module):
                raise ValueError(f"Invalid parameter 'module__{min(fields)}': fields are those of an instance, and module is none.")
            unknown = sorted(set(fields) - set(_fields(self.module)))
            if unknown:
                raise ValueError(f"Invalid parameter 'module__{unknown[0]}': {type(self.module).__name__} has the fields {_fields(self.module)}.")
            self.module = self.module.clone(**fields)
        return self

    # -- training --

    def _new(self, x: Any, num_outputs: int, loss: Any) -> _Trained:
        """Returns a new trainer."""
        if self.module is None:
            module: Any = _Network(num_outputs)
        else:
            module = self.module if isinstance(self.module, nn.Module) else self.module(num_outputs)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        settings = _Settings(module, seed, self.optimizer, self.learning_rate, loss, self.steps_per_call)
        return _Trained(settings, jax.ShapeDtypeStruct((self.batch_size, *x.shape[1:]), x.dtype))

    def _train(self, trained: _Trained, x: Any, y: Any, weights: Any, *, class_weight: dict[int, float] | None = None, stratify: Any = None) -> None:
        """Trains for all epochs, with a part held out for early stopping where that is asked for; what was trained before goes only when this is done."""
        callbacks = list(self.callbacks or [])
        validation: tuple[Any, ...] | None = None
        if self.early_stopping:
            split = functools.partial(train_test_split, test_size=self.validation_fraction, stratify=stratify, random_state=trained.seed)
            if weights is None:
                x, held_x, y, held_y = split(x, y)
                validation = held_x, held_y
            else:
                x, held_x, y, held_y, weights, held_weights = split(x, y, weights)
                validation = held_x, held_y, held_weights
            callbacks.append(EarlyStopping("val_loss", patience=self.patience, restore_best=True))
        options: dict[str, Any] = {"batch_size": self.batch_size, "shuffle": self.shuffle, "verbose": self.verbose, "class_weight": class_weight}
        history = trained.trainer.fit(x, y, weights, epochs=self.epochs, validation_data=validation, callbacks=callbacks, **options)
        self._trained, self.n_iter_, self.history_ = trained, len(history.epoch), dict(history.history)

    def _train_once(self, trained: _Trained, x: Any, y: Any, weights: Any, *, class_weight: dict[int, float] | None = None) -> None:
        """Trains for one epoch, in an order that follows from the seed and the number of epochs, and so goes on in a copy of the estimator."""
        made = getattr(self, "n_iter_", 0)
        if self.shuffle:
            order = np.random.default_rng((trained.seed, made)).permutation(len(x))
            x, y, weights = x[order], y[order], None if weights is None else weights[order]
        options: dict[str, Any] = {"batch_size": self.batch_size, "shuffle": False, "verbose": self.verbose, "class_weight": class_weight}
        history = trained.trainer.fit(x, y, weights, epochs=1, callbacks=list(self.callbacks or []), **options)
        earlier = getattr(self, "history_", {})
        self._trained, self.n_iter_ = trained, made + 1
        self.history_ = {key: [*earlier.get(key, []), *values] for key, values in history.history.items()}

    def _weights(self, sample_weight: Any, x: Any) -> Any:
        return None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float32, ensure_non_negative=True)

    # -- prediction --

    def _outputs(self, x: Any) -> np.ndarray:
        """Returns the module's outputs, float64 `[n, outputs]`."""
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, allow_nd=True, dtype=self.dtype)
        # Always whole batches: one compiled step, and an example's prediction does not depend on how many others are asked for.
        rows = len(x)
        if missing := -rows % self.batch_size:
            x = np.concatenate([x, np.repeat(x[-1:], missing, axis=0)])
        return np.asarray(self._trained.trainer.predict(x, batch_size=self.batch_size)[:rows], np.float64).reshape(rows, -1)

    @property
    def trainer_(self) -> Trainer:
        """The trainer, with all that it can do: `trainer_.summary()`, `trainer_.save(path)`, `trainer_.export(path)`."""
        check_is_fitted(self)
        return self._trained.trainer

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_trained")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: _Portable(value) if name in _FUNCTIONS else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(_unpacked(state))


def _fields(module: nn.Module) -> list[str]:
    return [field.name for field in dataclasses.fields(module) if field.init and field.name not in _OF_MODULES]


class LinenClassifier(ClassifierMixin, _LinenEstimator):  # type: ignore[misc]
    """A linen module as a scikit-learn classifier.

    Labels are of any kind: integers, strings, booleans. Training runs on one device; for several, checkpoints and all else use `Trainer`.

    Args:
        module: A module whose outputs are logits `[batch, classes]`, or for two classes `[batch, 1]` as well; or what makes one of the number of classes, such
            as the class of a module whose first field that is. By default one hidden layer of 100 relu units. Fields of a module are parameters for
            searches: `module__features`.
        dtype: What inputs are converted to; `None` leaves them as they are, as integers for an embedding must be.
        optimizer: A name, or an optax transformation.
        learning_rate: With a name: a number or a schedule.
        loss: A name, or a function `(outputs, targets) -> values`; targets are the positions of labels in `classes_`. By default crossentropy.
        epochs: Passes over the data, the most there are with `early_stopping`.
        batch_size: Rows of a batch.
        shuffle: Whether each pass has an order of its own.
        early_stopping: Whether a part of the data is held out, training ends when the loss there no longer falls, and the best weights are taken.
        validation_fraction: How much of the data that is, in the proportions of the classes.
        patience: For how many epochs it may not fall.
        class_weight: `{label: weight}`, or `"balanced"`.
        steps_per_call: How many updates go in one call of the device; see `Trainer.compile`.
        callbacks: More of them, such as `LearningRateScheduler`; a copy is used where scikit-learn clones.
        random_state: Where all randomness comes from; an integer for the same result each time.
        verbose: As in `Trainer.fit`.

    Attributes:
        classes_: The labels, sorted.
        n_features_in_: The second dimension of the inputs.
        n_iter_: Epochs made.
        history_: `{key: value of each epoch}`.
        trainer_: The trainer.

    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> y = np.where(x[:, 0] * x[:, 1] > 0, "same", "different")
    >>> model = LinenClassifier(learning_rate=0.02, epochs=60, random_state=0).fit(x, y)
    >>> model.predict([[1, 1], [1, -1]]).tolist(), model.predict_proba([[1, 1]]).shape
    (['same', 'different'], (1, 2))
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int], nn.Module] | None = None,
        *,
        dtype: Any = "float32",
        optimizer: Any = "adam",
        learning_rate: Any = None,
        loss: Any = None,
        epochs: int = 100,
        batch_size: int = 32,
        shuffle: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        class_weight: Any = None,
        steps_per_call: int = 16,
        callbacks: Sequence[Callback] | None = None,
        random_state: Any = None,
        verbose: int | str = 0,
    ) -> None:
        super().__init__(
            module,
            dtype=dtype,
            optimizer=optimizer,
            learning_rate=learning_rate,
            loss=loss,
            epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            steps_per_call=steps_per_call,
            callbacks=callbacks,
            random_state=random_state,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a new model.

        Args:
            X: Inputs `[n, ...]`.
            y: Labels `[n]`.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: What scikit-learn does not take, or `Trainer` does not.
        """
        x, y = validate_data(self, X, y, allow_nd=True, dtype=self.dtype)
        check_classification_targets(y)
        classes = np.unique(y)
        by_label = None
        if self.class_weight is not None:
            by_label = dict(enumerate(compute_class_weight(self.class_weight, classes=classes, y=y).tolist()))
        weights = self._weights(sample_weight, x)
        self._train(self._new_classifier(x, classes), x, _positions(classes, y), weights, class_weight=by_label, stratify=y)
        self.classes_: np.ndarray = classes
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Trains for one epoch over these examples, on from where the model is.

        Args:
            X: Inputs `[n, ...]`.
            y: Labels `[n]`.
            classes: All labels there will be; needed in the first call.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: Labels that are not among `classes`, and as in `fit`.
        """
        is_first = not self.__sklearn_is_fitted__()
        x, y = validate_data(self, X, y, allow_nd=True, dtype=self.dtype, reset=is_first)
        check_classification_targets(y)
        if is_first:
            if classes is None:
                raise ValueError("The first call of partial_fit needs classes, all labels there will be.")
            classes = np.unique(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes={classes!r} are not those of the first call of partial_fit, {self.classes_}.")
        classes = classes if is_first else self.classes_
        unknown = np.setdiff1d(y, classes)
        if len(unknown):
            raise ValueError(f"y has the labels {unknown.tolist()}, which are not among the classes {classes.tolist()}.")
        by_label = None
        if self.class_weight is not None:
            if not isinstance(self.class_weight, dict):
                raise ValueError(f"class_weight={self.class_weight!r} needs all labels, of which partial_fit sees a part at a time. Pass {{label: weight}}.")
            by_label = {place: self.class_weight[label] for place, label in enumerate(classes.tolist()) if label in self.class_weight}
        weights = self._weights(sample_weight, x)
        self._train_once(self._new_classifier(x, classes) if is_first else self._trained, x, _positions(classes, y), weights, class_weight=by_label)
        self.classes_ = classes
        return self

    def _new_classifier(self, x: Any, classes: Any) -> _Trained:
        return self._new(x, len(classes), _Crossentropy(len(classes)) if self.loss is None else self.loss)

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable label of each example, `[n]`.

        Args:
            X: Inputs `[n, ...]`.
        """
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(axis=1)])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of the classes, in the order of `classes_`, float64 `[n, classes]`.

        Args:
            X: Inputs `[n, ...]`.
        """
        logits = self._outputs(X)
        if logits.shape[1] == 1:
            if len(self.classes_) == 1:
                return np.ones_like(logits)
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


class LinenRegressor(RegressorMixin, _LinenEstimator):  # type: ignore[misc]
    """A linen module as a scikit-learn regressor, of one target or several.

    Args:
        module: A module whose outputs are `[batch, targets]`, or for one target `[batch]`; or what makes one of the number of targets. By default one hidden
            layer of 100 relu units.
        dtype: As in `LinenClassifier`, like all that is not said here.
        optimizer: A name, or an optax transformation.
        learning_rate: With a name: a number or a schedule.
        loss: A name, or a function `(outputs, targets) -> values`; by default the squared error.
        epochs: Passes over the data, the most there are with `early_stopping`.
        batch_size: Rows of a batch.
        shuffle: Whether each pass has an order of its own.
        early_stopping: Whether a part of the data is held out to end by.
        validation_fraction: How much of the data that is.
        patience: For how many epochs its loss may not fall.
        steps_per_call: How many updates go in one call of the device.
        callbacks: More of them.
        random_state: Where all randomness comes from.
        verbose: As in `Trainer.fit`.

    Attributes:
        n_features_in_: The second dimension of the inputs.
        n_iter_: Epochs made.
        history_: `{key: value of each epoch}`.
        trainer_: The trainer.

    >>> x = np.linspace(-1, 1, 200)[:, None]
    >>> LinenRegressor(learning_rate=0.01, epochs=100, random_state=0).fit(x, np.sin(3 * x[:, 0])).score(x, np.sin(3 * x[:, 0])) > 0.95
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a new model.

        Args:
            X: Inputs `[n, ...]`.
            y: Targets `[n]` or `[n, targets]`.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: What scikit-learn does not take, or `Trainer` does not.
        """
        x, y = self._checked(X, y, reset=True)
        self._train(self._new_regressor(x, y), x, y, self._weights(sample_weight, x))
        self._target_shape = y.shape[1:]
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains for one epoch over these examples, on from where the model is.

        Args:
            X: Inputs `[n, ...]`.
            y: Targets `[n]` or `[n, targets]`.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: Another number of targets than before, and as in `fit`.
        """
        is_first = not self.__sklearn_is_fitted__()
        x, y = self._checked(X, y, reset=is_first)
        if not is_first and y.shape[1:] != self._target_shape:
            raise ValueError(f"y has {y.shape[1:] or 'one target'} for each example, and had {self._target_shape or 'one'} in the first call of partial_fit.")
        self._train_once(self._new_regressor(x, y) if is_first else self._trained, x, y, self._weights(sample_weight, x))
        self._target_shape = y.shape[1:]
        return self

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        x, y = validate_data(self, X, y, allow_nd=True, dtype=self.dtype, multi_output=True, y_numeric=True, reset=reset)
        return x, np.asarray(y, np.float32)

    def _new_regressor(self, x: Any, y: Any) -> _Trained:
        return self._new(x, int(np.prod(y.shape[1:])), _Regression(self.loss) if callable(self.loss) else self.loss or "mse")

    def predict(self, X: Any) -> np.ndarray:
        """Returns the module's outputs in the shape of the targets, float64 `[n]` or `[n, targets]`.

        Args:
            X: Inputs `[n, ...]`.
        """
        outputs = self._outputs(X)
        return outputs.reshape(len(outputs), *self._target_shape)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _positions(classes: Any, y: Any) -> Any:
    return np.searchsorted(classes, y).astype(np.int32)
