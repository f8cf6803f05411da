"""An NNX module as pure functions of its variables.

The module's graph is inspected once, when the trainer is created. Tracing a step merges it with the variables, calls it, and splits it again; compiled steps
never touch the module. Sown values are collected with `nnx.capture`.
"""

import functools
import inspect
import itertools
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import scope as flax_scope
from flax.errors import TraceContextError
from typing_extensions import override

from fitflax.errors import ConfigError, LossError, ModelError
from fitflax.leaves import describe_shapes, is_key, listed
from fitflax.models.base import (
    ARGUMENT_HINT,
    MODE_KEYWORDS,
    Draws,
    Losses,
    Model,
    call_arguments,
    check_eval_model,
    mode_keywords,
    parameters_of,
    plain_fields,
    tabulated,
)
from fitflax.models.nnx_graph import (
    FROZEN,
    PARAMS,
    Definition,
    Filter,
    ModuleVariables,
    Path,
    Slot,
    as_state,
    at,
    by_collection,
    collected,
    collection_of,
    in_mode,
    raw,
    split_module,
    view_code,
)
from fitflax.state import AxisNames, Batch, PyTree


class _Mode(NamedTuple):
    """A module in one of its modes.

    Attributes:
        takes_rngs: Whether its call accepts `rngs`, and whether it requires them. A module with its own streams gets them only if required.
        is_linen: Whether it is a bridged linen module, which gets `mutable` as a keyword argument.
        has_bridge: Whether it contains a bridged linen module.
        extra: Variables that only the module for evaluation has.
        written: The paths of parameters that the module itself updates when it is called.
    """

    definition: Definition
    kwargs: Mapping[str, Any]
    takes_rngs: tuple[bool, bool]
    is_linen: bool
    has_bridge: bool
    extra: Mapping[Path, Any]
    written: frozenset[Path]

    def call(self, module: Any, x: PyTree, *, keyword_inputs: bool, rngs: Mapping[str, jax.Array], mutable: Any) -> Any:
        """Returns the outputs of a module of this definition."""
        args, kwargs = call_arguments(x, self.kwargs, keyword_inputs)
        takes, must = self.takes_rngs
        if takes and (rngs or must):
            kwargs.setdefault("rngs", _rngs(rngs))
        if self.is_linen:
            kwargs.setdefault("mutable", mutable)
        return module(*args, **kwargs)


def _rngs(rngs: Mapping[str, jax.Array]) -> nnx.Rngs:
    """Returns random streams for the `rngs` argument of a call; a stream that is not named is derived from the first one."""
    if not rngs:
        return nnx.Rngs()
    # NNX does not fold the name into the key, so equal keys would give equal numbers.
    return nnx.Rngs({"default": jax.random.fold_in(next(iter(rngs.values())), zlib.crc32(b"default")), **rngs})


class NNXModel(Model):
    """An NNX module as pure functions; `module_variables` are those of the user's module, and `eval_model` is a separate module to evaluate."""

    loss_arguments = ("model", "batch")
    loss_keywords = ("train",)
    frozen = (FROZEN,)
    rng_hint = (
        " Pass random streams to the layers, nnx.Dropout(rate, rngs=rngs); or add an argument `rngs` to __call__, which the trainer sets, and name its "
        "streams: Trainer(rngs=('dropout', ...)) for training, or Trainer(rngs={'train': ..., 'eval': ...}) for evaluation as well."
    )
    argument_hint = ARGUMENT_HINT + "Trainer(model, train_kwargs={'decode': False}, eval_kwargs={'decode': False})."

    def __init__(
        self, filters: Filter, train: _Mode, evaluation: _Mode, module_variables: ModuleVariables, eval_model: nnx.Module | None, *, keyword_inputs: bool
    ) -> None:
        self._filters, self._modes, self._module_variables, self.keyword_inputs = filters, {True: train, False: evaluation}, module_variables, keyword_inputs
        self._eval_model = eval_model
        self._hyperparameters = plain_fields({name: value for name, value in vars(module_variables.model).items() if not name.startswith("_")})

    @property
    @override
    def name(self) -> str:
        return _name_of(self._module_variables.model)

    @property
    @override
    def _eval_name(self) -> str:
        return _name_of(self._module_variables.model if self._eval_model is None else self._eval_model)

    @property
    @override
    def has_eval_model(self) -> bool:  # type: ignore[override]
        return self._eval_model is not None

    @override
    def _evaluation_code(self, keywords: Collection[str] = tuple(MODE_KEYWORDS)) -> str | None:
        if self._eval_model is None:
            return view_code(self._module_variables.model, "model", keywords)
        return None if self._eval_model is self._module_variables.model else view_code(self._eval_model, "eval_model", keywords)

    @property
    @override
    def _has_eval_mode(self) -> bool:
        return self._eval_model is not None or bool(self._modes[False].kwargs)

    @functools.cached_property
    def _configured_hint(self) -> str | None:
        """The hint for random numbers in evaluation; `None` unless only a configuration sets the mode."""
        if not MODE_KEYWORDS.keys().isdisjoint(self._modes[False].kwargs):
            return None
        return self._configured_dropout("model" if self._eval_model is None else "eval_model")

    @property
    @override
    def hyperparameters(self) -> dict[str, Any]:
        return self._hyperparameters

    @override
    def init(self, rngs: dict[str, jax.Array], x: PyTree) -> tuple[dict[str, PyTree], AxisNames]:
        # Zeros, because only the shapes are used. JAX keeps the constants of a trace, so the values would stay in memory after the variables were replaced.
        return jax.tree.map(_zeros_like, self._module_variables.read()), self._module_variables.axes

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree, *, train: bool) -> Any:
        return self.init(rngs, x)[0]

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]:
        call = functools.partial(self._modes[train].call, x=x, keyword_inputs=self.keyword_inputs, rngs=draws.rngs, mutable=mutable)
        return self._run(call, variables, train=train, mutable=mutable, draws=draws, capture=True)

    @override
    def merge(self, variables: Mapping[str, PyTree], *, train: bool, salt: Callable[[], jax.Array] | None = None) -> Any:
        definition, extra = self._modes[train].definition, self._modes[train].extra
        slots = [slot for slot in definition.slots if slot.path not in extra]
        salted = _fold_salt(slots, variables, salt)
        state = nnx.merge_state(as_state(slots, salted), nnx.from_flat_state(list(extra.items()))) if extra else as_state(slots, salted)
        return nnx.merge(definition.graph, state, copy=bool(extra))  # The call may change variables that only the module for evaluation has.

    def _run(
        self, fn: Callable[[Any], Any], variables: dict[str, PyTree], *, train: bool, mutable: Any, draws: Draws, capture: bool
    ) -> tuple[Any, dict[str, PyTree]]:
        """Returns the result of `fn(module)` for a module with these variables, and the collections that may change, including sown values.

        Other arguments are as in `apply`. With `capture`, sown values are collected with `nnx.capture`; otherwise they stay in the module, where user code
        may pop them.
        """
        run = functools.partial(self._run_unchecked, fn, train=train, mutable=mutable, salt=draws.salt, capture=capture)
        if not train and not draws.rngs and self._configured_hint is not None:
            self._check_dropout(lambda variables: run(variables)[0], variables)
        return run(variables)

    def _check_dropout(self, run: Callable[[dict[str, PyTree]], Any], variables: dict[str, PyTree]) -> None:
        """Checks that an evaluation of a module that is configured for training draws no random numbers; only with jit, because it traces the module."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variables))
        # The counts of streams do not show it: they also change when streams are split or passed through a transformation.
        if is_traced and "random_bits" in str(jax.make_jaxpr(run)(variables)):
            intended = "pass eval_model=model" if self._eval_model is None else "name the streams: Trainer(rngs={'train': ..., 'eval': ('dropout',)})"
            raise ModelError(f"{self._eval_name} draws random numbers in evaluation.{self._configured_hint} If this is intended, {intended}.")

    def _run_unchecked(
        self, fn: Callable[[Any], Any], variables: dict[str, PyTree], *, train: bool, mutable: Any, salt: Callable[[], jax.Array] | None, capture: bool
    ) -> tuple[Any, dict[str, PyTree]]:
        module = self.merge(variables, train=train, salt=salt)
        captured: list[Any] = []
        if not capture or self._modes[train].has_bridge:  # A bridged module would treat what `nnx.capture` adds as a variable.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"\s*Using 'Module.sow\(\)' outside of 'nnx.capture\(\)'", DeprecationWarning)
                result = fn(module)
        else:
            kinds = [kind for kind in _subclasses(nnx.Variable) if self._filters.sows(kind)]
            result, *captured = nnx.capture(fn, *kinds)(module)
        sown = itertools.chain.from_iterable(map(nnx.to_flat_state, captured))
        changed = self._changed(module, variables, train) | by_collection((collection_of(type(leaf)), path, raw(leaf)) for path, leaf in sown)
        return result, {name: tree for name, tree in changed.items() if name == PARAMS or flax_scope.in_filter(mutable, name)}

    @override
    def split(self, module: Any) -> dict[str, PyTree]:
        variables = dict(split_module(module)[1])
        slots = {slot.path: slot for slot in self._modes[True].definition.slots}
        self._check_new({path: leaf for path, leaf in variables.items() if path not in slots})
        return collected(slots.values(), [raw(variables.get(path)) for path in slots])

    def _changed(self, module: Any, variables: Mapping[str, PyTree], train: bool) -> dict[str, PyTree]:
        """Returns the changed collections of a called module, including parameters that it updates itself and values that a bridged linen module has sown."""
        mode, after_call = self._modes[train], dict(split_module(module)[1])
        known_paths = {slot.path for slot in mode.definition.slots}
        new = {path: leaf for path, leaf in after_call.items() if path not in known_paths}
        self._check_new(new)
        entries = [(collection_of(type(leaf)), path, raw(leaf)) for path, leaf in new.items()]
        for slot in mode.definition.slots:
            is_changed = train and slot.path in mode.written if slot.collection == PARAMS else slot.path not in mode.extra
            if is_changed:  # Variables that the call has removed keep their values.
                value = raw(after_call[slot.path]) if slot.path in after_call else at(variables[slot.collection], slot.path)
                entries.append((slot.collection, slot.path, value))
        return by_collection(entries)

    def _check_new(self, new: Mapping[Path, Any]) -> None:
        added = [f"{'/'.join(map(str, path))} ({type(leaf).__name__})" for path, leaf in new.items() if not self._filters.is_sown(leaf)]
        if added:
            raise ModelError(
                f"{self.name} adds variables while it runs: {listed(added)}. Create all variables in __init__; for a linen module in nnx.bridge.ToNNX, call "
                "lazy_init(x) first. To record values, use self.sow(nnx.Intermediate, name, value)."
            )

    # -- custom losses --

    @override
    def call_loss(self, compute_loss: Callable[..., Any], variables: dict[str, PyTree], batch: Batch, *, train: bool, draws: Draws, mutable: Any) -> Any:
        keywords: dict[str, Any] = {"rngs": _rngs(draws.rngs)} if "rngs" in parameters_of(compute_loss) else {}

        def call(module: Any) -> Any:
            return compute_loss(module, batch, train=train, **keywords)

        result, changed = self._run(call, variables, train=train, mutable=mutable, draws=draws, capture=False)
        if not isinstance(result, tuple):
            return result, changed, {}
        if len(result) != 2 or not isinstance(result[1], Mapping):
            raise LossError(
                "compute_loss(model, batch, train=...) of an NNX module must return values, or (values, aux) where aux is a dict. "
                f"Received: {describe_shapes(result)}."
            )
        return result[0], changed, result[1]

    @override
    def default_loss(  # type: ignore[override]
        self, losses: Losses, mutable: Any, model: Any, batch: Batch, *, train: bool, rngs: nnx.Rngs | None = None
    ) -> Any:
        mode = self._modes[train]
        kwargs = {**mode.kwargs, **({} if rngs is None else {"rngs": rngs})}
        outputs = mode._replace(kwargs=kwargs).call(model, batch.x, keyword_inputs=self.keyword_inputs, rngs={}, mutable=mutable)
        values, aux = losses(outputs, batch.y)
        return values, aux

    # -- information about the model --

    @override
    def tabulate(self, rngs: dict[str, jax.Array], x: PyTree) -> str:
        mode = self._modes[True]
        module = self.merge(self._module_variables.read(), train=True)  # NNX requires that the module is created in the same trace.

        def make(console: dict[str, Any]) -> Any:
            table = functools.partial(nnx.tabulate, module, console_kwargs=console)
            return mode.call(table, x, keyword_inputs=self.keyword_inputs, rngs=rngs, mutable=True)

        with self._explain_errors(x, "tabulated", train=True):
            return tabulated(make)

    @override
    def _hint(self, error: Exception, text: str, x: PyTree, train: bool) -> tuple[str, str]:
        if isinstance(error, TraceContextError):
            return text, " A variable of the module is changed inside of a JAX transformation. Use the NNX version instead, such as nnx.jit or nnx.scan."
        if type(error).__name__ == "ScopeCollectionNotFound":
            return text, " Initialize a linen module in nnx.bridge.ToNNX with lazy_init(x) before you create the trainer."
        if "rngs" in text or "RngStream" in text:
            return text, self.rng_hint if train else self._dropout_hint()
        return super()._hint(error, text, x, train)

    @override
    def _dropout_hint(self) -> str:
        return self._configured_hint or self.rng_hint


def _name_of(module: nnx.Module) -> str:
    """Returns the name of a module's class or, for a bridged linen module, the name of the linen class."""
    return type(module.to_nnx__module if isinstance(module, nnx.bridge.ToNNX) else module).__name__


def _zeros_like(leaf: jax.Array) -> Any:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return jnp.zeros(leaf.shape, leaf.dtype)


def _fold_salt(slots: Sequence[Slot], variables: Mapping[str, PyTree], salt: Callable[[], jax.Array] | None) -> dict[str, PyTree]:
    """Returns variables with a number folded into the keys of random streams; 0 leaves the keys unchanged."""
    if salt is None or not any(slot.is_key for slot in slots):
        return dict(variables)
    number = salt()

    def fold(keys: jax.Array) -> jax.Array:
        folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1)).reshape(keys.shape)
        return jnp.where(number == 0, keys, folded)

    values = [at(variables[slot.collection], slot.path) for slot in slots]
    return {**variables, **collected(slots, [fold(value) if slot.is_key else value for slot, value in zip(slots, values, strict=True)])}


def _subclasses(kind: type[nnx.Variable[Any]]) -> list[type[nnx.Variable[Any]]]:
    below = [kind, *itertools.chain.from_iterable(map(_subclasses, kind.__subclasses__()))]
    return list(dict.fromkeys(below))


# -- adapting the user's module --


def adapt_nnx(
    model: nnx.Module,
    *,
    eval_model: nnx.Module | None = None,
    trainable: Any = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    keyword_inputs: bool = False,
    transient: Sequence[str],
) -> tuple[NNXModel, ModuleVariables]:
    """Returns an NNX module as pure functions, and the variables that it holds; arguments as in `adapt_model`."""
    _check_bridge("Trainer", model)
    _check_bridge("Trainer(eval_model=...)", eval_model)
    try:
        trained = nnx.filterlib.to_predicate(nnx.Param if trainable is None else trainable)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Trainer(trainable=...) takes an NNX filter, such as nnx.Param or nnx.LoRAParam. Received: {trainable!r}.") from error
    filters = Filter(trained, tuple(transient))
    module_variables = ModuleVariables(model, filters)
    if trainable is not None and not any(slot.collection == PARAMS for slot in module_variables.definition.slots):
        kinds = sorted({slot.collection for slot in module_variables.definition.slots})
        raise ConfigError(f"Trainer(trainable={trainable!r}) selects no variable of {type(model).__name__}, which has {', '.join(kinds) or 'none'}.")
    train = _create_mode(model, filters, train_kwargs, train=True)
    evaluated, known = (model, None) if eval_model is None else (eval_model, train.definition)
    evaluation = _create_mode(evaluated, filters, eval_kwargs, train=False, known=known)
    if eval_model is not None:
        _check_parameters(module_variables, ModuleVariables(eval_model, filters))
    return NNXModel(filters, train, evaluation, module_variables, eval_model, keyword_inputs=keyword_inputs), module_variables


def _check_bridge(owner: str, module: Any) -> None:
    """Checks that a bridge wraps an instance of a linen module."""
    if not isinstance(module, nnx.bridge.ToNNX):
        return
    inner = module.to_nnx__module
    if not isinstance(inner, nn.Module) or isinstance(inner, nnx.bridge.ToLinen):
        what = "the class " + inner.__name__ if isinstance(inner, type) else f"a {type(inner).__name__}"
        raise ConfigError(f"{owner}: nnx.bridge.ToNNX must wrap an instance of a linen module. Received: {what}. Pass such an instance, or an NNX module.")


def _create_mode(module: nnx.Module, filters: Filter, kwargs: Mapping[str, Any] | None, *, train: bool, known: Definition | None = None) -> _Mode:
    """Returns a module in one of its modes; `known` is the definition of the module to train, if this is a separate module to evaluate."""
    inner = module.to_nnx__module if isinstance(module, nnx.bridge.ToNNX) else None
    call = type(module if inner is None else inner).__call__
    named, rngs = mode_keywords(call, train=train), None if inner is not None else parameters_of(call).get("rngs")
    copy = in_mode(module, filters, train=train)
    nodes = [node for _, node in nnx.iter_graph(copy)]
    must = rngs is not None and rngs.default is inspect.Parameter.empty
    takes_rngs = must or (rngs is not None and not any(isinstance(node, nnx.RngStream) for node in nodes)), must
    definition, leaves = filters.define(copy)
    writers = [tuple(path) for path, node in nnx.iter_modules(copy) if isinstance(node, nnx.SpectralNorm | nnx.WeightNorm)]
    written = [slot.path for slot in definition.slots if slot.collection == PARAMS and any(slot.path[: len(path)] == path for path in writers)]
    paths = None if known is None else {slot.path for slot in known.slots}
    extra = {slot.path: leaf for slot, leaf in zip(definition.slots, leaves, strict=True) if paths is not None and slot.path not in paths}
    has_bridge = any(isinstance(node, nnx.bridge.ToNNX) for node in nodes)
    return _Mode(definition, {**named, **(kwargs or {})}, takes_rngs, inner is not None, has_bridge, extra, frozenset(written))


def _check_parameters(module_variables: ModuleVariables, other: ModuleVariables) -> None:
    """Checks that a module to evaluate has the parameters of the one to train."""
    have, want = other.shapes(), module_variables.shapes()
    params = {path: shape for path, shape in want.items() if path.startswith((f"{PARAMS}/", f"{FROZEN}/"))}
    known = want.keys() | {path for path in have if not path.startswith(f"{PARAMS}/")}
    check_eval_model(type(module_variables.model).__name__, type(other.model).__name__, have, params, known)
