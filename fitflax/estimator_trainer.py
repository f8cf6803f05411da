"""The trainer of a scikit-learn estimator, which can be pickled with it and shares compiled steps with others; the default network and losses."""

import contextlib
import dataclasses
import functools
import threading
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from fitflax.errors import LossError
from fitflax.leaves import is_key, key_of
from fitflax.losses import binary_crossentropy, sparse_categorical_crossentropy
from fitflax.models.base import mode_keywords
from fitflax.parallel import DataParallel
from fitflax.trainer import Trainer

REQUIREMENT = "fitflax.sklearn needs scikit-learn 1.6 or newer, and cloudpickle: pip install 'fitflax[sklearn]'."

try:
    import cloudpickle
except ImportError as error:
    raise ImportError(REQUIREMENT) from error


class Portable:
    """Pickles a value with cloudpickle, which also handles local functions, as in linen's initializers and optax's transformations, and classes of scripts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (cloudpickle.dumps(self.value),)


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state without `Portable` wrappers, which remain if the state was copied instead of pickled."""
    return {name: value.value if isinstance(value, Portable) else value for name, value in state.items()}


@dataclasses.dataclass
class EstimatorSettings:
    """The settings that a trainer is created from."""

    module: nn.Module
    seed: int
    optimizer: Any
    learning_rate: Any
    loss: Any
    steps_per_call: int

    def make(self) -> Trainer:
        """Returns a trainer that shares compiled steps with earlier trainers of this thread whose settings differ only in the seed."""
        key = threading.get_ident(), self.module, self.optimizer, self.learning_rate, self.loss, self.steps_per_call
        try:
            trainer = _shared_trainer(*key)
        except Exception:  # noqa: BLE001 (a module, or a value in it, is not hashable; other errors are raised again below)
            trainer = _new_trainer(*key)
        return trainer.with_seed(self.seed)

    def __getstate__(self) -> dict[str, Any]:
        return {name: Portable(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(unwrapped(state))


def _new_trainer(_thread: int, module: nn.Module, optimizer: Any, learning_rate: Any, loss: Any, steps_per_call: int) -> Trainer:
    trainer = Trainer(module, parallel=DataParallel(jax.local_devices()[:1]))
    trainer.compile(optimizer, loss, learning_rate=learning_rate, steps_per_call=steps_per_call)
    return trainer


_shared_trainer = functools.lru_cache(maxsize=16)(_new_trainer)


class EstimatorTrainer:
    """A trainer that can be pickled and copied, as its settings and arrays; it is recreated on first use."""

    def __init__(self, settings: EstimatorSettings, sample: jax.ShapeDtypeStruct) -> None:
        self._settings = settings
        self._sample = sample
        self._leaves: list[Any] | None = None
        self._trainer: Trainer | None = settings.make()
        self._lock = threading.Lock()

    @property
    def seed(self) -> int:
        """The seed of the trainer."""
        return self._settings.seed

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        with self._lock:  # A served model may be used by several threads.
            if self._trainer is None:
                trainer = self._settings.make()
                trainer.build((self._sample,))
                leaves, treedef = jax.tree.flatten(trainer.state)
                assert self._leaves is not None
                trainer.replace_state(jax.tree.unflatten(treedef, [_restored_leaf(saved, leaf) for saved, leaf in zip(self._leaves, leaves, strict=True)]))
                self._trainer, self._leaves = trainer, None
            return self._trainer

    def output_shapes(self) -> Any:
        """Returns the shapes of the module's outputs in evaluation; `None` if the module cannot be run in this way."""
        module = self._settings.module
        mode: dict[str, Any] = dict(mode_keywords(type(module).__call__, train=False))
        with contextlib.suppress(Exception):
            return jax.eval_shape(lambda x: module.init_with_output(jax.random.key(0), x, **mode)[0], self._sample)
        return None

    def __getstate__(self) -> dict[str, Any]:
        leaves = self._leaves
        if self._trainer is not None:
            leaves = [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(self._trainer.state)]
        sample = self._sample.shape, str(self._sample.dtype)
        return {"settings": self._settings, "sample": sample, "leaves": leaves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings, self._leaves, self._trainer, self._lock = state["settings"], state["leaves"], None, threading.Lock()
        self._sample = jax.ShapeDtypeStruct(*state["sample"])


def _restored_leaf(saved: Any, leaf: Any) -> Any:
    return key_of(saved, jax.random.key_impl(leaf)) if is_key(leaf) else saved


class Network(nn.Module):
    """A network with one hidden layer of 100 ReLU units."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the outputs `[batch, num_outputs]`."""
        x = nn.relu(nn.Dense(100)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_outputs)(x)


@dataclasses.dataclass(frozen=True)
class Crossentropy:
    """Crossentropy of logits `[batch, classes]`, or, for two classes, `[batch, 1]` or `[batch]`."""

    classes: int

    def __call__(self, outputs: Any, targets: Any) -> jax.Array:
        """Returns the loss of each example."""
        if outputs.ndim == 1 or outputs.shape[-1] == 1:
            if self.classes <= 2:
                return binary_crossentropy(outputs, targets)
        elif outputs.shape[-1] == self.classes:
            return sparse_categorical_crossentropy(outputs, targets)
        raise LossError(
            f"There are {self.classes} classes, but the module's outputs have shape {list(outputs.shape)}. Its last layer must have {self.classes} features."
        )


@dataclasses.dataclass(frozen=True)
class Regression:
    """A loss of outputs and targets of the same shape: `[batch, 1]` and `[batch]` for one target must not broadcast against each other."""

    loss: Any

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Returns what the custom loss returns."""
        is_same = hasattr(outputs, "shape") and outputs.size == targets.size
        return self.loss(outputs.reshape(targets.shape) if is_same else outputs, targets)
