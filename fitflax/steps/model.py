"""What is trained as two pure functions, `init` and `apply`: a linen module with its mode keyword found and passed, or functions of the user's own.

The module stays the user's: it is never subclassed, patched or bound, at most cloned with a mode field set.
"""

import abc
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import scope as flax_scope
from flax.linen import summary as linen_summary
from typing_extensions import override

from fitflax.axes import AxisNames, is_axes_collection
from fitflax.errors import ConfigError, ModelError
from fitflax.state import PyTree

__all__ = ["FunctionModel", "LinenModel", "Model", "adapt_module", "describe_shapes"]

RNG_HINT = " Name every random stream that the module uses: Trainer(rngs=('dropout', ...)), or Trainer(rngs={'train': ..., 'eval': ...})."

TRANSIENT = ("losses", "summaries", "intermediates")
"""Collections of sown values, which are never part of the state unless a user says otherwise."""

# The value of each mode keyword when training; its negation otherwise.
MODE_KEYWORDS = {"train": True, "training": True, "deterministic": False}


class Model(abc.ABC):
    """What is trained or evaluated, as two pure functions."""

    def init(self, rngs: dict[str, jax.Array], x: PyTree) -> tuple[dict[str, PyTree], AxisNames]:
        """Returns the variables, as in training, and the axis names of their metadata boxes, without which they come.

        Raises:
            ModelError: It fails on `x`.
        """
        with self._explaining(x, "initialized"):
            variables = self._init(rngs, x)
        return _as_arrays(_without_names(variables)), AxisNames.of(variables)

    def apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, rngs: dict[str, jax.Array], mutable: Any) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the outputs and the collections that were changed.

        Raises:
            ModelError: It fails on `x`.
        """
        with self._explaining(x, "run for training" if train else "run for evaluation"):
            outputs, changed = self._apply(variables, x, train=train, rngs=rngs, mutable=mutable)
        return outputs, _as_arrays(_without_names(changed))

    @abc.abstractmethod
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any: ...

    @abc.abstractmethod
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, rngs: dict[str, jax.Array], mutable: Any) -> tuple[PyTree, Any]: ...

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What it is called in errors."""

    @contextlib.contextmanager
    def _explaining(self, x: PyTree, what: str) -> Iterator[None]:
        """Turns what is raised inside into a `ModelError` that says more."""
        try:
            yield
        except Exception as error:
            raise self._explained(error, x, what) from error

    def _explained(self, error: Exception, x: PyTree, what: str) -> Exception:
        if isinstance(error, ModelError):
            return error
        hint = ""
        text = str(error).partition("\nThe error occurred while tracing")[0]  # JAX goes on for a page.
        if type(error).__name__ == "InvalidRngError":
            hint = self._rng_hint
        elif type(error).__name__ == "ModifyScopeVariableError":
            hint = " A collection that the module changes must be mutable: see Trainer(mutable=...), by default all but params."
        elif type(error).__name__ == "ScopeParamShapeError":
            hint = " Its parameters were made for inputs of another shape. Examples are rows: a single one needs an axis of its own, x[:1]."
        elif '"deterministic"' in text or '"use_running_average"' in text:
            layer = "nn.Dropout(rate, deterministic=not train)" if '"deterministic"' in text else "nn.BatchNorm(use_running_average=not train)"
            hint = f" Give __call__ a keyword, train, and pass it on: {layer}; the trainer sets it."
        elif isinstance(error, NameError) and "unbound axis name" in text:
            text = text.partition(". To fix this")[0]
            hint = (
                f"{_innermost_module(error)} Leave axis_name out under parallel=Sharded(...), whose steps see the whole batch; "
                "under DataParallel(axis_name=...) it is that name, by default 'replica'."
            )
        elif "is not found in mesh" in text:
            hint = f"{_innermost_module(error)} nn.with_partitioning names axes of the mesh; for other names take nn.with_logical_partitioning and rules."
        elif isinstance(x, list):
            hint = " The inputs are a list, which is one argument; for inputs and targets yield or pass a tuple, (x, y)."
        elif isinstance(error, TypeError) and "argument" in text:
            hint = self._argument_hint
        shapes = describe_shapes(x)
        period = "." if hint and not text.rstrip().endswith((".", "!", "?", ")")) else ""
        return ModelError(f"{self.name} cannot be {what} on inputs {shapes} (what a step sees of a batch): {type(error).__name__}: {text}{period}{hint}")

    @property
    @abc.abstractmethod
    def _rng_hint(self) -> str: ...

    @property
    @abc.abstractmethod
    def _argument_hint(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A module with the keywords of its two modes.

    Attributes:
        train_module: The module to train; differs from the user's only in a mode field.
        eval_module: The module to evaluate.
        train_kwargs: Keywords of `__call__` when training.
        eval_kwargs: Keywords of `__call__` otherwise.
        keyword_inputs: Whether inputs are a dict of keyword arguments.
    """

    train_module: nn.Module
    eval_module: nn.Module
    train_kwargs: Mapping[str, Any]
    eval_kwargs: Mapping[str, Any]
    keyword_inputs: bool = False

    @property
    @override
    def name(self) -> str:
        return type(self.train_module).__name__

    def _arguments(self, x: PyTree, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mode = dict(self.train_kwargs if train else self.eval_kwargs)
        if self.keyword_inputs:
            return (), {**x, **mode}
        return _positional(x), mode

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any:
        args, kwargs = self._arguments(x, train=True)
        return self.train_module.init(rngs, *args, mutable=True, **kwargs)

    def tabulate(self, rngs: dict[str, jax.Array], x: PyTree) -> str:
        """Returns linen's table of the module's layers, as in training.

        Raises:
            ModelError: The module fails on `x`.
        """
        args, kwargs = self._arguments(x, train=True)
        # As wide as it needs to be, without colors or other control characters.
        console = {"force_terminal": False, "force_jupyter": False, "no_color": True, "width": 160}
        with self._explaining(x, "tabulated"):
            return linen_summary.tabulate(self.train_module, rngs, mutable=True, console_kwargs=console)(*args, **kwargs)

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, rngs: dict[str, jax.Array], mutable: Any) -> tuple[PyTree, Any]:
        args, kwargs = self._arguments(x, train)
        module = self.train_module if train else self.eval_module
        return module.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)

    @property
    @override
    def _rng_hint(self) -> str:
        return RNG_HINT

    @property
    @override
    def _argument_hint(self) -> str:
        return (
            " Several inputs are a tuple ((x1, x2), y), or keys of dicts with Trainer(inputs=...). A keyword train, training or deterministic is set by the "
            "trainer; others go into train_kwargs and eval_kwargs: Trainer(model, train_kwargs={'is_training': True}, eval_kwargs={'is_training': False})."
        )


@dataclasses.dataclass(frozen=True)
class FunctionModel(Model):
    """Functions of the user's own, such as a module's `init` and `apply`.

    Attributes:
        init_fn: `(rngs, *inputs) -> variables`; `None` where nothing is initialized.
        apply_fn: `(variables, *inputs, rngs=, mutable=) -> (outputs, changed)`, in training and evaluation alike.
    """

    init_fn: Callable[..., Any] | None
    apply_fn: Callable[..., Any]

    @property
    @override
    def name(self) -> str:
        fn = getattr(self.apply_fn, "func", self.apply_fn)  # That of a functools.partial.
        owner = getattr(fn, "__self__", None)
        return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(fn, "__name__", repr(fn))

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any:
        assert self.init_fn is not None
        variables = self.init_fn(rngs, *_positional(x))
        if not isinstance(variables, Mapping):
            raise ModelError(f"init(rngs, *inputs) must return a dict of collections, as module.init does. It returned {describe_shapes(variables)}.")
        return variables

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, rngs: dict[str, jax.Array], mutable: Any) -> tuple[PyTree, Any]:
        result = self.apply_fn(variables, *_positional(x), rngs=rngs, mutable=mutable)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise ModelError(
                "apply(variables, *inputs, rngs=..., mutable=...) must return (outputs, changed collections), as module.apply does. "
                f"It returned {describe_shapes(result)}."
            )
        return result

    @property
    @override
    def _rng_hint(self) -> str:
        return " Name every random stream that is used: TrainLoop(rngs={'init': ..., 'train': ...}), or EvalLoop(rngs=...)."

    @property
    @override
    def _argument_hint(self) -> str:
        return " init is called as init(rngs, *inputs), apply as apply(variables, *inputs, rngs=..., mutable=...); functools.partial sets a mode keyword."


def _innermost_module(error: Exception) -> str:
    """Returns, in words, in which module of the module an error was raised."""
    found = ""
    frames = error.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module.scope is not None:
            found = f" It is named in {'/'.join(module.path) or 'the outermost module'}, a {type(module).__name__}."
        frames = frames.tb_next
    return found


def _positional(x: PyTree) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _without_names(variables: Mapping[str, Any]) -> dict[str, PyTree]:
    """Returns variables without their boxes, and without collections of nothing but axis names."""
    return dict(nn.unbox({name: tree for name, tree in variables.items() if not is_axes_collection(name, tree)}))


def _as_arrays(variables: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns variables as arrays; a module may set one to a number of Python's."""
    return {name: jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), tree) for name, tree in variables.items()}


def describe_shapes(tree: PyTree) -> str:
    """Returns the shapes and dtypes of a tree of arrays, in one line.

    >>> import numpy as np
    >>> describe_shapes({"image": np.zeros((8, 28), np.float32)})
    "{'image': float32[8,28]}"
    """

    class Text(str):
        __slots__ = ()
        __repr__ = str.__str__

    def describe(leaf: Any) -> str:
        if not hasattr(leaf, "shape"):
            return Text(type(leaf).__name__)
        return Text(f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]")

    return repr(jax.tree.map(describe, tree))


def adapt_module(
    model: nn.Module,
    *,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    keyword_inputs: bool = False,
) -> LinenModel:
    """Returns `model` with its mode keywords.

    A parameter of `__call__` named `train`, `training` or `deterministic` is passed (`**kwargs` alone does not count); where there is none, a field of
    the module with such a name is set on a clone.

    Args:
        model: The user's module.
        train_kwargs: Keywords of `__call__` in training; they override what is found.
        eval_kwargs: Keywords of `__call__` in evaluation and prediction.
        keyword_inputs: Whether inputs are a dict of keyword arguments.

    Raises:
        ConfigError: `model` is no instance of a linen module.

    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, *, deterministic):
    ...         return nn.Dropout(0.5, deterministic=deterministic)(x)
    >>> adapt_module(Net()).eval_kwargs
    {'deterministic': True}
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ConfigError(f"Trainer takes an instance of a module. Received: the class {model.__name__}; call it: Trainer({model.__name__}(...)).")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Trainer takes a flax.linen module. Received: a {type(model).__module__}.{type(model).__qualname__}.")
    parameters = inspect.signature(type(model).__call__).parameters
    named = [key for key in MODE_KEYWORDS if key in parameters]
    train_mode = {key: MODE_KEYWORDS[key] for key in named}
    eval_mode = {key: not MODE_KEYWORDS[key] for key in named}
    train_module = eval_module = model
    if not named:
        fields = [field.name for field in dataclasses.fields(model) if field.name in MODE_KEYWORDS]
        if fields:
            clone: Any = model.clone
            train_module = clone(**{key: MODE_KEYWORDS[key] for key in fields})
            eval_module = clone(**{key: not MODE_KEYWORDS[key] for key in fields})
    return LinenModel(train_module, eval_module, {**train_mode, **(train_kwargs or {})}, {**eval_mode, **(eval_kwargs or {})}, keyword_inputs)


def mutable_filter(mutable: Any, transient: tuple[str, ...]) -> Any:
    """Returns linen's filter for the collections that may change in a step: `mutable` and `transient`, never the parameters."""
    return flax_scope.subtract_filters(flax_scope.union_filters(mutable, list(transient)), "params")
