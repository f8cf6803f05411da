"""The trainer of a scikit-learn estimator, which can be copied and pickled with the estimator, and shares compiled steps with those of other estimators."""

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from fitflax.leaves import is_key, key_of
from fitflax.models.modes import mode_keywords
from fitflax.parallel import DataParallel
from fitflax.trainer import Trainer

REQUIREMENT = "fitflax.sklearn needs scikit-learn 1.6 or newer, and cloudpickle: pip install 'fitflax[sklearn]'."

try:
    import cloudpickle
except ImportError as error:
    raise ImportError(REQUIREMENT) from error

__all__ = ["REQUIREMENT", "EstimatorSettings", "EstimatorTrainer", "Portable", "unwrapped"]


class Portable:
    """Pickles a value with cloudpickle, which also handles functions and classes of scripts, such as linen's initializers and optax's transformations."""

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
        key = self.module, self.optimizer, self.learning_rate, self.loss, self.steps_per_call
        shared: OrderedDict[Any, Trainer] = vars(_SHARED).setdefault("trainers", OrderedDict())
        try:
            found = shared.get(key)
        except Exception:  # noqa: BLE001 (a module, or a value in it, is not hashable)
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
        return {name: Portable(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(unwrapped(state))


_SHARED = threading.local()
_NUM_SHARED = 8


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
        """Returns the shapes of the module's outputs in evaluation; `None` if the module does not run like this."""
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
