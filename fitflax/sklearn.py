"""scikit-learn estimators with a linen module as the model, trained by `Trainer`. Requires the extra `sklearn`.

>>> from sklearn.datasets import load_iris
>>> x, y = load_iris(return_X_y=True)
>>> LinenClassifier(learning_rate=0.01, epochs=30, random_state=0).fit(x, y).score(x, y) > 0.9
True
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import linen as nn

from fitflax.callbacks import Callback, EarlyStopping
from fitflax.callbacks.history import History
from fitflax.errors import ConfigError, DirectoryInUseError, LossError, ModelError
from fitflax.estimator_trainer import REQUIREMENT, Crossentropy, EstimatorSettings, EstimatorTrainer, Network, Portable, Regression, unwrapped
from fitflax.leaves import describe_shapes
from fitflax.models import nnx_modules
from fitflax.optimizers import get, get_learning_rate
from fitflax.trainer import Trainer

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(REQUIREMENT) from error

__all__ = ["LinenClassifier", "LinenRegressor"]

# Fields that every module has, which are not parameters.
_MODULE_FIELDS = ("parent", "name")
# Parameters that may contain functions, which pickle cannot always serialize.
_CLOUDPICKLED = ("module", "optimizer", "learning_rate", "loss", "callbacks", "_trained_with")
# Parameters that belong to a trained model.
_OF_TRAINED = ("module", "optimizer", "learning_rate", "loss")
# The names of these classes in estimators that version 0.1 pickled.
_Settings, _Trained, _Network, _Crossentropy, _Regression = EstimatorSettings, EstimatorTrainer, Network, Crossentropy, Regression

_SEVERAL_OUTPUTS = "The module of an estimator must return one array, such as logits. It returned {}. Return only that array, or use Trainer."


class _LinenEstimator(BaseEstimator):  # type: ignore[misc]
    """The base class of the classifier and the regressor. As usual in scikit-learn, `fit` sets the attributes that end with an underscore."""

    _trained: EstimatorTrainer
    _trained_with: dict[str, Any]
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

    # -- parameters, including the fields of the module --

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments and, if `deep`, the module's fields as `module__<field>`."""
        params: dict[str, Any] = super().get_params(deep=False)
        if deep and isinstance(self.module, nn.Module):
            params |= {f"module__{name}": getattr(self.module, name) for name in _fields(self.module)}
        return params

    def set_params(self, **params: Any) -> Self:
        """Sets constructor arguments; `module__features=64` replaces the module with a clone that has this value."""
        fields = {name.removeprefix("module__"): value for name, value in params.items() if name.startswith("module__")}
        super().set_params(**{name: value for name, value in params.items() if not name.startswith("module__")})
        if fields:
            if not isinstance(self.module, nn.Module):
                raise ValueError(f"Invalid parameter 'module__{min(fields)}': module must be an instance. Received: {self.module!r}.")
            unknown = sorted(set(fields) - set(_fields(self.module)))
            if unknown:
                raise ValueError(f"Invalid parameter 'module__{unknown[0]}'. The fields of {type(self.module).__name__} are {_fields(self.module)}.")
            self.module = self.module.clone(**fields)
        return self

    # -- training --

    def _make_loss(self, num_outputs: int) -> Any:
        """Returns the loss for a module with this number of outputs."""
        raise NotImplementedError

    def _make_module(self, num_outputs: int) -> nn.Module:
        module: Any = self.module
        if module is None:
            return Network(num_outputs)
        kind = module if isinstance(module, type) else type(module)
        is_module = isinstance(module, nn.Module) or issubclass(kind, nnx_modules())
        result = module(num_outputs) if callable(module) and not is_module else module
        if isinstance(result, nn.Module):
            return result
        name = f"the class {result.__name__}" if isinstance(result, type) else f"a {type(result).__name__}"
        raise ConfigError(
            f"{type(self).__name__}(module=...) takes a linen module, or a function that returns one for a number of outputs. Received: {name}. "
            "To train an NNX module, use Trainer."
        )

    def _new_trainer(self, x: Any, num_outputs: int) -> EstimatorTrainer:
        module = self._make_module(num_outputs)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        settings = EstimatorSettings(module, seed, self.optimizer, self.learning_rate, self._make_loss(num_outputs), self.steps_per_call)
        return EstimatorTrainer(settings, jax.ShapeDtypeStruct((self.batch_size, *x.shape[1:]), x.dtype))

    def _train(self, x: Any, y: Any, sample_weight: Any, num_outputs: int, *, class_weight: dict[int, float] | None = None, stratify: Any = None) -> None:
        """Trains a new model for all epochs, with held-out data if `early_stopping` is set; a previous fit is replaced only on success."""
        weights, trained = _checked_weights(sample_weight, x), self._new_trainer(x, num_outputs)
        options: dict[str, Any] = {"epochs": self.epochs, "shuffle": self.shuffle, "class_weight": class_weight}
        callbacks: list[Callback] = []
        if self.early_stopping:
            rows = np.arange(len(x)) if weights is None else np.flatnonzero(weights)
            strata = None if stratify is None else stratify[rows]
            kept, held = train_test_split(rows, test_size=self.validation_fraction, stratify=strata, random_state=trained.seed)
            kept = np.concatenate([kept, np.setdiff1d(np.arange(len(x)), rows)])  # Examples without weight can affect batch statistics.
            options["validation_data"] = (x[held], y[held]) if weights is None else (x[held], y[held], weights[held])
            x, y, weights = x[kept], y[kept], None if weights is None else weights[kept]
            callbacks = [EarlyStopping("val_loss", patience=self.patience, restore_best=True)]
        history = self._fit_trainer(trained, x, y, weights, callbacks, **options)
        self._trained, self.n_iter_, self.history_ = trained, len(history.epoch), dict(history.history)
        self._trained_with = self._params_of_trained()

    def _train_epoch(self, x: Any, y: Any, sample_weight: Any, num_outputs: int, *, class_weight: dict[int, float] | None = None) -> None:
        """Trains for one epoch, in an order that depends only on the seed and the number of epochs, so that copies of the estimator continue the same way."""
        weights = _checked_weights(sample_weight, x)
        trained = self._trained if self.__sklearn_is_fitted__() else self._new_trainer(x, num_outputs)
        epochs_run = getattr(self, "n_iter_", 0)
        if self.shuffle:
            order = np.random.default_rng((trained.seed, epochs_run)).permutation(len(x))
            x, y, weights = x[order], y[order], None if weights is None else weights[order]
        if epochs_run and not _is_same(self.learning_rate, self._trained_with["learning_rate"]):
            trained.trainer.learning_rate = float(get_learning_rate(get(self.optimizer, self.learning_rate).init(np.zeros(1, np.float32))))  # type: ignore[arg-type]
        history = self._fit_trainer(trained, x, y, weights, epochs=1, shuffle=False, class_weight=class_weight)
        earlier = getattr(self, "history_", {})
        self._trained, self.n_iter_, self._trained_with = trained, epochs_run + 1, self._params_of_trained()
        self.history_ = {key: [*earlier.get(key, []), *values] for key, values in history.history.items()}

    def _fit_trainer(self, trained: EstimatorTrainer, x: Any, y: Any, weights: Any, callbacks: Sequence[Callback] = (), **options: Any) -> History:
        """Calls `Trainer.fit`, and rewrites its errors for estimators."""
        callbacks = [*(self.callbacks or []), *callbacks]
        try:
            return trained.trainer.fit(x, y, weights, batch_size=self.batch_size, verbose=self.verbose, callbacks=callbacks, **options)
        except DirectoryInUseError as error:
            text, resumes, _ = str(error).partition(" To resume that run")
            if not resumes:
                raise
            raise DirectoryInUseError(
                f"{text} An estimator starts a new run. Choose another directory, or pass overwrite=True to the callback, which replaces these checkpoints."
            ) from error
        except ConfigError as error:
            if not self.early_stopping or not str(error).startswith("EarlyStopping(restore_best=True)"):
                raise
            raise ConfigError(
                f"{type(self).__name__}(early_stopping=True) cannot be combined with a schedule-free optimizer, because it restores the best parameters "
                "without the optimizer state, from which the evaluated parameters are computed. Pass another optimizer, or early_stopping=False."
            ) from error
        except LossError as error:
            outputs = trained.output_shapes()
            if outputs is None or hasattr(outputs, "shape"):
                raise
            raise LossError(_SEVERAL_OUTPUTS.format(describe_shapes(outputs))) from error

    def _params_of_trained(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_TRAINED}

    def _check_partial_fit(self) -> None:
        """Raises `ValueError` if a parameter cannot be used in `partial_fit`, or cannot change since the last call."""
        if self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping=True, because it trains for one epoch. Set early_stopping=False, or call fit.")
        if not self.__sklearn_is_fitted__():
            return
        changed = [name for name, used in self._trained_with.items() if not _is_same(getattr(self, name), used)]
        rates = self.learning_rate, self._trained_with["learning_rate"]
        if "learning_rate" in changed and isinstance(self.optimizer, str) and not any(map(callable, rates)):
            changed.remove("learning_rate")
        if changed:
            raise ValueError(
                f"partial_fit continues the current model, so {', '.join(changed)} cannot change; only a learning_rate that is a number can. "
                "Restore the earlier value, or call fit to train a new model."
            )

    # -- prediction --

    def _outputs(self, x: Any) -> np.ndarray:
        """Returns the module's outputs, float64 `[n, outputs]`."""
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, allow_nd=True, dtype=self.dtype)
        # Only full batches, so that one step is compiled and predictions do not depend on the number of examples.
        rows = len(x)
        if missing := -rows % self.batch_size:
            x = np.concatenate([x, np.repeat(x[-1:], missing, axis=0)])
        outputs = self._trained.trainer.predict(x, batch_size=self.batch_size)
        if not hasattr(outputs, "shape"):
            raise ModelError(_SEVERAL_OUTPUTS.format(describe_shapes(outputs)))
        return np.asarray(outputs[:rows], np.float64).reshape(rows, -1)

    @property
    def trainer_(self) -> Trainer:
        """The underlying trainer: `trainer_.summary()`, `trainer_.save(path)`, `trainer_.export(path)`."""
        check_is_fitted(self)
        return self._trained.trainer

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_trained")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if "_trained_with" in state:  # Keep only values that have changed, because functions are not equal to their copies.
            state = {**state, "_trained_with": {name: used for name, used in self._trained_with.items() if not _is_same(getattr(self, name), used)}}
        return {name: Portable(value) if name in _CLOUDPICKLED else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(unwrapped(state))
        if self.__sklearn_is_fitted__():
            self._trained_with = {**self._params_of_trained(), **vars(self).get("_trained_with", {})}


def _checked_weights(sample_weight: Any, x: Any) -> Any:
    return None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float32, ensure_non_negative=True)


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 (modules with arrays cannot be compared)
        return False


def _fields(module: nn.Module) -> list[str]:
    return [field.name for field in dataclasses.fields(module) if field.init and field.name not in _MODULE_FIELDS]


class LinenClassifier(ClassifierMixin, _LinenEstimator):  # type: ignore[misc]
    """Wraps a linen module as a scikit-learn classifier.

    Labels may be integers, strings or booleans. Training runs on one device; for several devices or checkpoints, use `Trainer`.

    Args:
        module: A module that returns logits `[batch, classes]` or, for two classes, `[batch, 1]`; or a function that makes one from the number of classes,
            such as a module class whose first field is that number. By default one hidden layer of 100 ReLU units. The fields of a module are parameters that
            a search can set: `module__features`.
        dtype: The dtype that inputs are converted to; `None` keeps theirs, such as integers for an embedding.
        optimizer: A name, or an optax transformation.
        learning_rate: A number or a schedule, for an optimizer given by name.
        loss: A name, or a function `(outputs, targets) -> values` whose targets are indices into `classes_`. By default crossentropy.
        epochs: The number of epochs; the maximum with `early_stopping`.
        batch_size: The number of examples per batch.
        shuffle: Whether each epoch has its own order.
        early_stopping: Whether to hold out data, stop when the loss on it no longer decreases, and keep the best weights.
        validation_fraction: The fraction of held-out data, stratified by class. Examples of weight 0 are neither held out nor counted.
        patience: The number of epochs without improvement after which training stops.
        class_weight: `{label: weight}`, or `"balanced"`.
        steps_per_call: The number of steps per call of the device; see `Trainer.compile`.
        callbacks: Callbacks, such as `LearningRateScheduler`; copied when scikit-learn clones the estimator.
        random_state: The source of all randomness; pass an integer for reproducible results.
        verbose: As in `Trainer.fit`.

    Attributes:
        classes_: The labels, sorted.
        n_features_in_: The second dimension of the inputs.
        n_iter_: The number of epochs run.
        history_: `{key: value of each epoch}`.
        trainer_: The underlying trainer.

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
        arguments = locals()
        super().__init__(**{name: arguments[name] for name in _LinenEstimator._get_param_names()})
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a new model.

        Args:
            X: Inputs `[n, ...]`.
            y: Labels `[n]`.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: scikit-learn or `Trainer` does not accept the data or the parameters.
        """
        x, y = validate_data(self, X, y, allow_nd=True, dtype=self.dtype)
        check_classification_targets(y)
        classes = np.unique(y)
        by_label = None
        if self.class_weight is not None:
            by_label = dict(enumerate(compute_class_weight(self.class_weight, classes=classes, y=y).tolist()))
        self._train(x, _label_indices(classes, y), sample_weight, len(classes), class_weight=by_label, stratify=y)
        self.classes_: np.ndarray = classes
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Trains the current model for one epoch on these examples.

        A `learning_rate` that has changed since the last call is used from now on, if both are numbers. Other parameters of the model cannot change.

        Args:
            X: Inputs `[n, ...]`.
            y: Labels `[n]`.
            classes: All labels that will occur; required in the first call.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: Labels are not among `classes`, `early_stopping` is set, `module`, `optimizer` or `loss` has changed, and as in `fit`.

        >>> model = LinenClassifier(random_state=0)
        >>> for x in np.array([[[0.0], [1.0]], [[0.1], [0.9]]]):
        ...     model = model.partial_fit(x, ["low", "high"], classes=["low", "high"])
        >>> model.n_iter_
        2
        """
        self._check_partial_fit()
        is_first = not self.__sklearn_is_fitted__()
        x, y = validate_data(self, X, y, allow_nd=True, dtype=self.dtype, reset=is_first)
        check_classification_targets(y)
        if is_first and classes is None:
            raise ValueError("The first call of partial_fit needs classes=, all labels that will occur.")
        known = np.unique(classes) if is_first else self.classes_
        if classes is not None and not np.array_equal(np.unique(classes), known):
            raise ValueError(f"classes must be the same as in the first call of partial_fit: {known}. Received: {classes!r}.")
        classes = known
        unknown = np.setdiff1d(y, classes)
        if len(unknown):
            raise ValueError(f"y has the labels {unknown.tolist()}, which are not among the classes {classes.tolist()}.")
        by_label = None
        if self.class_weight is not None:
            if not isinstance(self.class_weight, dict):
                advice = "needs all labels, but partial_fit sees only some at a time. Pass a dict {label: weight}."
                raise ValueError(f"class_weight={self.class_weight!r} {advice}")
            by_label = {place: self.class_weight[label] for place, label in enumerate(classes.tolist()) if label in self.class_weight}
        self._train_epoch(x, _label_indices(classes, y), sample_weight, len(classes), class_weight=by_label)
        self.classes_ = classes
        return self

    def _make_loss(self, num_outputs: int) -> Any:
        return Crossentropy(num_outputs) if self.loss is None else self.loss

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable label of each example, `[n]`, for inputs `[n, ...]`."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(axis=1)])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of the classes, float64 `[n, classes]`, in the order of `classes_`, for inputs `[n, ...]`."""
        logits = self._outputs(X)
        if logits.shape[1] == 1:
            if len(self.classes_) == 1:
                return np.ones_like(logits)
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


class LinenRegressor(RegressorMixin, _LinenEstimator):  # type: ignore[misc]
    """Wraps a linen module as a scikit-learn regressor, for one or more targets.

    Other arguments and attributes are those of `LinenClassifier`. Held-out data for `early_stopping` is not stratified.

    Args:
        module: A module that returns `[batch, targets]` or, for one target, `[batch]`; or a function that makes one from the number of targets. By default
            one hidden layer of 100 ReLU units.
        loss: A name, or a function `(outputs, targets) -> values`; by default the squared error.

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
            ValueError: scikit-learn or `Trainer` does not accept the data or the parameters.
        """
        x, y = self._validated(X, y, reset=True)
        self._train(x, y, sample_weight, int(np.prod(y.shape[1:])))
        self._target_shape = y.shape[1:]
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains the current model for one epoch on these examples.

        A `learning_rate` that has changed since the last call is used from now on, if both are numbers. Other parameters of the model cannot change.

        Args:
            X: Inputs `[n, ...]`.
            y: Targets `[n]` or `[n, targets]`.
            sample_weight: Weights `[n]`.

        Raises:
            ValueError: The number of targets differs from that of the first call, `early_stopping` is set, `module`, `optimizer` or `loss` has changed, and
                as in `fit`.

        >>> model = LinenRegressor(random_state=0)
        >>> for x in np.array([[[0.0], [1.0]], [[0.1], [0.9]]]):
        ...     model = model.partial_fit(x, 2 * x[:, 0])
        >>> model.n_iter_
        2
        """
        self._check_partial_fit()
        is_first = not self.__sklearn_is_fitted__()
        x, y = self._validated(X, y, reset=is_first)
        if not is_first and y.shape[1:] != self._target_shape:
            raise ValueError(
                f"The targets of an example must have shape {list(self._target_shape)}, as in the first call of partial_fit. Received: {list(y.shape[1:])}."
            )
        self._train_epoch(x, y, sample_weight, int(np.prod(y.shape[1:])))
        self._target_shape = y.shape[1:]
        return self

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        x, y = validate_data(self, X, y, allow_nd=True, dtype=self.dtype, multi_output=True, y_numeric=True, reset=reset)
        return x, np.asarray(y, np.float32)

    def _make_loss(self, num_outputs: int) -> Any:
        return Regression(self.loss) if callable(self.loss) else self.loss or "mse"

    def predict(self, X: Any) -> np.ndarray:
        """Returns the module's outputs in the shape of the targets, float64 `[n]` or `[n, targets]`, for inputs `[n, ...]`."""
        outputs = self._outputs(X)
        return outputs.reshape(len(outputs), *self._target_shape)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _label_indices(classes: Any, y: Any) -> Any:
    return np.searchsorted(classes, y).astype(np.int32)
