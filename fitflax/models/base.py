"""The interface through which steps use a model of any kind, as pure functions of its variables.

The user's model is never subclassed, patched or bound. Only the user sets mode fields of a configuration, such as `config.deterministic`; this module
generates the code for it, which errors and warnings show.
"""

import abc
import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import scope as flax_scope

from fitflax.errors import ConfigError, ModelError, is_of_debugger
from fitflax.leaves import describe_shapes, listed, named_leaves
from fitflax.parallel.placement import outside_mesh
from fitflax.state import AxisNames, Batch, PyTree, is_axes_collection, parts_of

# The value of each mode keyword when training; its negation otherwise.
MODE_KEYWORDS = {"train": True, "training": True, "deterministic": False}

RNG_HINT = (
    " Name every random stream that the module uses: Trainer(rngs=('dropout', ...)) for initialization and training, "
    "Trainer(rngs={'init': ..., 'train': ..., 'eval': ...}) to use streams in evaluation as well."
)
ARGUMENT_HINT = (
    " Pass several inputs as a tuple, ((x1, x2), y), or as keys of dicts with Trainer(inputs=...). The trainer sets the keywords train, training and "
    "deterministic. Set others with "
)

TRANSIENT = ("losses", "summaries", "intermediates", "perturbations")
"""Collections of sown values, and of zeros that `perturb` adds; by default not part of the state."""

_MISSING_AXIS = "is not found in mesh"

# Limits of the search for mode fields: the nested levels, and the objects without such fields, because a tokenizer has many of them.
_MAX_DEPTH, _MAX_OBJECTS = 6, 1000
LINEN_FIELDS = ("parent", "name")

# Keys of dicts that usually hold targets.
_TARGET_NAMES = ("y", "label", "labels", "target", "targets")

Losses = Callable[[PyTree, PyTree], tuple[Any, dict[str, Any]]]
"""`(outputs, targets) -> (values, aux)`."""


class Draws(NamedTuple):
    """The sources of randomness of a call: keys of the named random streams, and the salt of random streams among the variables.

    The salt is an int32 that is folded into their keys; 0 leaves them unchanged, as does `None`.
    """

    rngs: dict[str, jax.Array]
    salt: Callable[[], jax.Array] | None = None


class Model(abc.ABC):
    """A model to train or evaluate, as pure functions; with `keyword_inputs`, inputs are a dict of keyword arguments."""

    # The arguments of an overridden `compute_loss`.
    loss_arguments: tuple[str, ...] = ("params", "model_state", "batch")
    loss_keywords: tuple[str, ...] = ("rngs", "train")
    keyword_inputs: bool
    frozen: tuple[str, ...] = ()  # Collections of parameters that are not trained.
    has_eval_model: bool = False  # Whether the user gave a module for evaluation, whose parameters may differ by mistake.
    # How to fix errors about random streams and about arguments; appended to their texts.
    rng_hint: ClassVar[str] = RNG_HINT
    argument_hint: ClassVar[str]

    def init(self, rngs: dict[str, jax.Array], x: PyTree) -> tuple[dict[str, PyTree], AxisNames]:
        """Returns the initial variables, in training mode and without metadata boxes, and the axis names from those boxes."""

        def variables_and_names() -> tuple[dict[str, PyTree], AxisNames]:
            boxed = self._init(rngs, x, train=True)
            return without_names(boxed), AxisNames.of(boxed)

        with self._explain_errors(x, "initialized", train=True):
            variables, axes = with_any_mesh(variables_and_names)
        return _as_arrays(variables), axes

    def init_for_evaluation(self, rngs: dict[str, jax.Array], x: PyTree) -> PyTree:
        """Returns the initial parameters of the model to evaluate, whose shapes show whether it fits."""
        with self._explain_errors(x, "initialized", train=False):
            return with_any_mesh(lambda: without_names(self._init(rngs, x, train=False))).get("params", {})

    def check_eval_params(self, params: PyTree, eval_params: PyTree) -> None:
        """Checks that the model to evaluate has the parameters of the one to train; `eval_params` are the shapes of the result of `init_for_evaluation`."""
        have, want = ({f"params/{path}": leaf for path, leaf in named_leaves(tree)} for tree in (eval_params, params))
        check_eval_model(self.name, self._eval_name, have, want, want)

    def apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the outputs and the changed collections, for variables `{collection: tree}`; `mutable` is a linen filter for collections that may change."""
        with self._explain_errors(x, f"run in {'training' if train else 'evaluation'} mode", train=train):
            outputs, changed = self._apply(variables, x, train=train, draws=draws, mutable=mutable)
            variables = with_any_mesh(lambda: without_names(changed))
        return outputs, _as_arrays(variables)

    @abc.abstractmethod
    def _init(self, rngs: dict[str, jax.Array], x: PyTree, *, train: bool) -> Any: ...

    @abc.abstractmethod
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]: ...

    def call_loss(self, compute_loss: Callable[..., Any], variables: dict[str, PyTree], batch: Batch, *, train: bool, draws: Draws, mutable: Any) -> Any:
        """Returns the result of an overridden `compute_loss`, which should be `(values, changed collections, aux)`; arguments as in `apply`."""
        params, model_state = parts_of(variables)
        return compute_loss(params, model_state, batch, rngs=draws.rngs, train=train)

    def default_loss(
        self, losses: Losses, mutable: Any, params: PyTree, model_state: dict[str, PyTree], batch: Batch, *, rngs: dict[str, jax.Array], train: bool
    ) -> Any:
        """Returns the result of the default `compute_loss`, called like an overridden one with `loss_arguments` and `loss_keywords`."""
        outputs, changed = self.apply({"params": params, **model_state}, batch.x, train=train, draws=Draws(rngs), mutable=mutable)
        values, aux = losses(outputs, batch.y)
        return values, changed, aux

    def merge(self, variables: Mapping[str, PyTree], *, train: bool, salt: Callable[[], jax.Array] | None = None) -> Any:
        """Returns a module that holds these variables, `{collection: tree}`; changes to it do not affect them. Only for NNX modules."""
        raise ConfigError(f"Only NNX modules hold their variables. Call {self.name} with them: model.apply({{'params': params, **model_state}}, x).")

    def split(self, module: Any) -> dict[str, PyTree]:
        """Returns the variables of a module from `merge`, `{collection: tree}`. Raises a `ModelError` if it has new ones."""
        raise ConfigError(f"Only NNX modules hold their variables. {self.name} returns what it changes: outputs, changed = model.apply(..., mutable=[...]).")

    def tabulate(self, rngs: dict[str, jax.Array], x: PyTree) -> str | None:
        """Returns a table of the layers in training mode; `None` if the model has none."""
        return None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The numbers, booleans and strings that the model was constructed with, by name."""
        return {}

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The model's name in errors."""

    @property
    def _eval_name(self) -> str:
        return self.name

    def _evaluation_code(self, keywords: Collection[str] = tuple(MODE_KEYWORDS)) -> str | None:
        """Returns code that creates the model to evaluate with its configurations set for evaluation, as `evaluation_code` does."""
        return None

    @property
    def _has_eval_mode(self) -> bool:
        """Whether a separate module, a field or an argument sets the mode of evaluation."""
        return True

    @property
    def mode_fault(self) -> str | None:
        """A message if the model seems to be in training mode during evaluation; `None` otherwise."""
        # Dropout in evaluation raises an error, but `nn.BatchNorm` in training mode does not.
        if self._has_eval_mode or self._evaluation_code(("train", "training")) is None:
            return None
        return (
            f"{self.name} is configured for training, but evaluation uses it unchanged. Pass a module for evaluation, "
            f"Trainer(model, eval_model={self._evaluation_code()}), or pass eval_model=model if this is intended."
        )

    def _configured_dropout(self, what: str) -> str | None:
        """Returns a sentence about dropout in evaluation if a configuration of the model, called `what`, sets the mode; `None` otherwise."""
        code = self._evaluation_code()
        if code is None:
            return None
        return f" Dropout is on in evaluation, because the {what} is configured that way. Pass a module for evaluation: Trainer(model, eval_model={code})."

    @contextlib.contextmanager
    def _explain_errors(self, x: PyTree, what: str, *, train: bool) -> Iterator[None]:
        """Wraps exceptions in a `ModelError` that explains them."""
        try:
            yield
        except Exception as error:
            if is_of_debugger(error) or isinstance(error, ModelError):
                raise
            text = str(error).partition("\nThe error occurred while tracing")[0]  # JAX appends a page of details.
            text, hint = self._hint(error, text, x, train)
            period = "." if hint and text.strip() and not text.rstrip().endswith((".", "!", "?")) else ""
            name = self.name if train else f"The eval_model {self._eval_name}" if self.has_eval_model else self._eval_name
            cannot = f"{name} cannot be {what} on inputs {describe_shapes(x)} (the shapes inside a step)"
            raise ModelError(f"{cannot}: {type(error).__name__}: {text}{period}{hint}") from error

    def _hint(self, error: Exception, text: str, x: PyTree, train: bool) -> tuple[str, str]:
        """Returns the text to report for an error with the text `text`, and a hint about how to fix it."""
        hint = ""
        if type(error).__name__ == "InvalidRngError":
            hint = self._dropout_hint() if not train and is_dropout_error(error) else self.rng_hint
        elif type(error).__name__ == "ModifyScopeVariableError":
            hint = (
                " A collection that the module changes must be mutable. Add it to Trainer(mutable=...); by default, all collections except params are mutable."
            )
        elif not train and self.has_eval_model and type(error).__name__ in ("ScopeParamShapeError", "ScopeParamNotFoundError"):
            hint = " This is the eval_model, which uses the model's variables. Its parameters must have the same names and shapes."
        elif type(error).__name__ == "ScopeParamShapeError":
            hint = " Its parameters were initialized for inputs of another shape. The first axis is that of examples: pass a single example as x[:1]."
        elif '"deterministic"' in text or '"use_running_average"' in text:
            layer = "nn.Dropout(rate, deterministic=not train)" if '"deterministic"' in text else "nn.BatchNorm(use_running_average=not train)"
            hint = f" Add a keyword argument `train` to __call__, which the trainer sets, and use it: {layer}."
        elif isinstance(error, NameError) and "unbound axis name" in text:
            text = text.partition(". To fix this")[0]
            hint = (
                f"{_innermost_module(error)} Under parallel=Sharded(...), leave axis_name out, because a step sees the whole batch. "
                "Under DataParallel(axis_name=...), use that name, by default 'replica'."
            )
        elif _MISSING_AXIS in text:
            hint = f"{_innermost_module(error)} A constraint takes axes of the mesh. For other names, use nn.with_logical_constraint and rules."
        elif isinstance(x, list):
            hint = " The inputs are a list, which is one argument. Pass tuples: (x, y) for inputs and targets, ((x1, x2), y) for several inputs."
        elif isinstance(x, dict) and not self.keyword_inputs:
            hint = f" The inputs are a dict, which is one argument. To select entries of it, pass their keys: {_selection_of(list(x))}."
        elif isinstance(error, TypeError) and "argument" in text:
            hint = self.argument_hint
        if (not hint or type(error).__name__ == "ScopeParamShapeError") and any(map(_has_channels_first, jax.tree.leaves(x))):
            hint += " For images, Flax's layers take the channels last, but these inputs seem to have them first. Transpose them: x.transpose(0, 2, 3, 1)."
        return text, hint

    def _dropout_hint(self) -> str:
        """Returns how to fix dropout that lacks random streams in evaluation."""
        return self.rng_hint


def _selection_of(keys: list[Any]) -> str:
    """Returns the arguments of a trainer that select inputs and targets from dicts with these keys, or an example if it is unclear which are targets."""
    targets = [key for key in keys if key in _TARGET_NAMES]
    if len(targets) != 1 or len(keys) != 2:
        return "Trainer(inputs='image', targets='label')"
    return f"Trainer(inputs={next(key for key in keys if key not in targets)!r}, targets={targets[0]!r})"


def with_any_mesh(init: Callable[[], Any]) -> Any:
    """Returns the result of an initialization, outside the mesh if the module names axes that the mesh lacks.

    linen constrains the initial values of `nn.with_partitioning` by their axes, but their placement does not depend on these constraints.
    """
    try:
        return init()
    except ValueError as error:
        if _MISSING_AXIS not in str(error):
            raise
        try:
            with outside_mesh():
                return init()
        except Exception:  # noqa: BLE001 (a constraint in the module itself needs the mesh)
            raise error from None


def _has_channels_first(inputs: Any) -> bool:
    """Returns whether inputs have the shape of images with few channels in the second axis, `[batch, channels, height, width]`."""
    shape: tuple[int, ...] = getattr(inputs, "shape", ())
    return len(shape) == 4 and shape[1] in (1, 3, 4) and min(shape[2:]) > 4


def _innermost_module(error: Exception) -> str:
    """Returns a sentence that names the innermost module in which an error was raised."""
    modules = _modules_of(error)
    return f" The name is used in {'/'.join(modules[-1].path) or 'the outermost module'}, a {type(modules[-1]).__name__}." if modules else ""


def _modules_of(error: Exception) -> list[nn.Module]:
    """Returns the modules in the traceback of an error, outermost first."""
    modules = []
    frames = error.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module.scope is not None:
            modules.append(module)
        frames = frames.tb_next
    return modules


def is_dropout_error(error: Exception) -> bool:
    """Returns whether dropout uses a missing random stream, regardless of the stream's name."""
    return '"dropout"' in str(error) or any(isinstance(module, nn.Dropout) for module in _modules_of(error))


def call_arguments(x: PyTree, kwargs: Mapping[str, Any], keyword_inputs: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call on inputs, with other keyword arguments."""
    if keyword_inputs:
        return (), {**x, **kwargs}
    return x if type(x) is tuple else (x,), dict(kwargs)  # A NamedTuple is a single argument.


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers, booleans and strings among the fields of a module, without the mode."""
    return {name: value for name, value in fields.items() if isinstance(value, bool | int | float | str) and name not in MODE_KEYWORDS}


def without_names(variables: Mapping[str, Any]) -> dict[str, PyTree]:
    """Returns variables without their boxes, and without collections that hold only axis names."""
    return dict(nn.unbox({name: tree for name, tree in variables.items() if not is_axes_collection(name, tree)}))


def _as_arrays(variables: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns variables as arrays; a module may set one to a Python number."""
    return {name: jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), tree) for name, tree in variables.items()}


def mutable_filter(mutable: Any, transient: tuple[str, ...]) -> Any:
    """Returns a linen filter for the collections that a step may change: `mutable` and `transient`, but never the parameters."""
    return flax_scope.subtract_filters(flax_scope.union_filters(mutable, list(transient)), "params")


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; empty if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def mode_keywords(function: Any, *, train: bool) -> dict[str, bool]:
    """Returns the mode keywords of a function with their values; `**kwargs` does not count.

    >>> mode_keywords(lambda x, *, deterministic: x, train=False)
    {'deterministic': True}
    """
    parameters = parameters_of(function)
    return {key: value is train for key, value in MODE_KEYWORDS.items() if key in parameters}


def tabulated(make: Callable[[dict[str, Any]], Any]) -> str:
    """Returns the table of layers that `make(console_kwargs)` creates, as plain text wide enough to avoid wrapping."""
    table = str(make({"force_terminal": False, "force_jupyter": False, "no_color": True, "width": 160}))
    # Drop the total, which includes other collections than parameters and would contradict the summary's.
    return table[: table.rindex("Total Parameters")].rstrip()


def check_eval_model(name: str, eval_name: str, have: Mapping[str, Any], want: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises a `ModelError` if the parameters of the evaluation module do not match those of the model.

    Args:
        name: The model's name.
        eval_name: The name of the evaluation module.
        have: The parameters of the evaluation module, as arrays or shapes by path.
        want: The parameters of the model, in the same form.
        known: The paths that `have` may contain.
    """
    faults = {
        "missing": [path for path in want if path not in have],
        "unexpected": [path for path in have if path not in known],
        "wrong shape": [f"{path} {have[path].shape}, not {leaf.shape}" for path, leaf in want.items() if path in have and have[path].shape != leaf.shape],
    }
    if any(faults.values()):
        differences = "; ".join(f"{what}: {listed(paths)}" for what, paths in faults.items() if paths)
        raise ModelError(
            f"The eval_model {eval_name} must have the parameters of the model {name}, which it uses in evaluation ({differences}). "
            "Create it from the model and change only its mode."
        )


def evaluation_code(value: Any, name: str, keywords: Collection[str] = tuple(MODE_KEYWORDS)) -> str | None:
    """Returns code that creates a copy of a linen module or a configuration with all mode fields, nested ones included, set for evaluation.

    Returns `None` if they are set already. The code calls the value `name`, and `keywords` are the names of the mode fields.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     width: int = 8
    ...     deterministic: bool = False
    >>> class Net(nn.Module):
    ...     config: Config
    >>> evaluation_code(Net(Config()), "model")
    'model.clone(config=dataclasses.replace(model.config, deterministic=True))'
    >>> evaluation_code(Net(Config(deterministic=True)), "model") is None
    True
    """
    return _changed_code(value, name, keywords, (), {})


def _changed_code(value: Any, code: str, keywords: Collection[str], ancestors: tuple[int, ...], unchanged: dict[int, Any]) -> str | None:
    """Returns code for `value`, which `code` reads, with its mode fields set for evaluation; `None` if nothing changes.

    `ancestors` are the ids of the objects that contain it, and `unchanged` has the objects that were searched without result, by id.
    """
    if len(ancestors) == _MAX_DEPTH or id(value) in ancestors or id(value) in unchanged or len(unchanged) == _MAX_OBJECTS:
        return None
    members_and_template = _members_of(value)
    if members_and_template is None:
        return None
    members, template = members_and_template
    changes: dict[str, str] = {}
    for name, member in members.items():
        if name in keywords and isinstance(member, bool):
            if member is MODE_KEYWORDS[name]:
                changes[name] = repr(not member)
        else:
            read = f"{code}[{name!r}]" if isinstance(value, Mapping) else f"{code}.{name}"
            inner = _changed_code(member, read, keywords, (*ancestors, id(value)), unchanged)
            if inner is not None:
                changes[name] = inner
    if not changes:
        unchanged[id(value)] = value
        return None
    fields = ", ".join(f"{name}={change}" for name, change in changes.items())
    items = ", ".join(f"{name!r}: {change}" for name, change in changes.items())
    return template.format(code=code, fields=fields, items=items)


def _members_of(value: Any) -> tuple[Mapping[str, Any], str] | None:
    """Returns the members of a configuration, and a template of the code that changes them; `None` for other objects."""
    if isinstance(value, type | types.ModuleType):
        return None
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        if isinstance(value, nn.Module):
            return {name: member for name, member in fields.items() if name not in LINEN_FIELDS}, "{code}.clone({fields})"
        return fields, "dataclasses.replace({code}, {fields})"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict(), "{code}._replace({fields})"
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):  # Configurations of ml_collections are not a `Mapping`.
        items = {name: value[name] for name in value.keys() if isinstance(name, str)}  # noqa: SIM118
        return items, "{{**{code}, {items}}}" if isinstance(value, Mapping) else "type({code})({{**{code}, {items}}})"
    if callable(value) or not hasattr(value, "__dict__"):
        return None
    has_replace = callable(getattr(value, "replace", None))
    return vars(value), "{code}.replace({fields})" if has_replace else "type({code})(**{{**vars({code}), {items}}})"
