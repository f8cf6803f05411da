"""A linen module, with its mode keywords detected and passed; it is cloned only to set a mode field."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen import summary as linen_summary
from typing_extensions import override

from fitflax.errors import ModelError
from fitflax.leaves import listed, named_leaves
from fitflax.models.base import RNG_HINT, Draws, Model, positional, with_any_mesh, without_names
from fitflax.models.modes import MODE_KEYWORDS, evaluation_code, mode_keywords, static_by_position
from fitflax.state import PyTree

__all__ = ["LinenModel", "adapt_linen"]


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A linen module with the keyword arguments of its two modes; `train_module` differs from the user's module only in a mode field."""

    train_module: nn.Module
    eval_module: nn.Module
    train_kwargs: Mapping[str, Any]
    eval_kwargs: Mapping[str, Any]
    keyword_inputs: bool = False
    is_eval_given: bool = False

    @property
    @override
    def name(self) -> str:
        return type(self.train_module).__name__

    @property
    @override
    def _eval_name(self) -> str:
        return type(self.eval_module).__name__

    @property
    @override
    def has_eval_model(self) -> bool:
        return self.is_eval_given

    def _arguments(self, x: PyTree, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module, mode = (self.train_module, self.train_kwargs) if train else (self.eval_module, self.eval_kwargs)
        args, kwargs = ((), {**x, **mode}) if self.keyword_inputs else (positional(x), mode)
        return static_by_position(type(module).__call__, args, kwargs)

    @override
    def _init(self, rngs: dict[str, jax.Array], x: PyTree) -> Any:
        args, kwargs = self._arguments(x, train=True)
        return self.train_module.init(rngs, *args, mutable=True, **kwargs)

    def init_for_evaluation(self, rngs: dict[str, jax.Array], x: PyTree) -> PyTree:
        """Returns the initial parameters of the module to evaluate."""
        args, kwargs = self._arguments(x, train=False)
        return with_any_mesh(lambda: without_names(self.eval_module.init(rngs, *args, mutable=True, **kwargs))).get("params", {})

    @property
    @override
    def mode_fault(self) -> str | None:
        is_told = self.is_eval_given or bool(self.eval_kwargs) or self.eval_module is not self.train_module
        # Dropout in evaluation raises, because it lacks its random stream. Batch statistics that are still updated go unnoticed.
        if is_told or evaluation_code(self.eval_module, "model", ("train", "training")) is None:
            return None
        code = evaluation_code(self.eval_module, "model")
        return (
            f"{self.name} is configured for training, but evaluation uses it unchanged. Pass a module for evaluation, Trainer(model, eval_model={code}), "
            "or pass eval_model=model if this is intended."
        )

    def check_eval_params(self, params: PyTree, own: PyTree) -> None:
        """Checks that the module to evaluate has the parameters of the one to train; `own` are the shapes of the result of `init_for_evaluation`."""
        have, want = dict(named_leaves(own)), dict(named_leaves(params))
        faults = {
            "missing": [f"params/{path}" for path in want if path not in have],
            "unexpected": [f"params/{path}" for path in have if path not in want],
            "wrong shape": [
                f"params/{path} {have[path].shape}, not {want[path].shape}" for path in want if path in have and have[path].shape != want[path].shape
            ],
        }
        if any(faults.values()):
            found = "; ".join(f"{what}: {listed(paths)}" for what, paths in faults.items() if paths)
            raise ModelError(
                f"The eval_model {self._eval_name} must have the parameters of the model {self.name}, which it uses in evaluation ({found}). "
                "Create it from the model and change only its mode: Trainer(model, eval_model=model.clone(...))."
            )

    @override
    def tabulate(self, rngs: dict[str, jax.Array], x: PyTree) -> str:
        args, kwargs = self._arguments(x, train=True)
        # Plain text, wide enough to avoid wrapping.
        console = {"force_terminal": False, "force_jupyter": False, "no_color": True, "width": 160}
        with self._explain_errors(x, "tabulated", train=True):
            table: str = with_any_mesh(lambda: linen_summary.tabulate(self.train_module, rngs, mutable=True, console_kwargs=console)(*args, **kwargs))
        # Drop the total, which includes other collections than parameters and would contradict ours.
        return table[: table.rindex("Total Parameters")].rstrip()

    @property
    @override
    def hyperparameters(self) -> dict[str, Any]:
        own = [field.name for field in dataclasses.fields(self.train_module) if field.name not in ("parent", "name", *MODE_KEYWORDS)]
        fields = {name: getattr(self.train_module, name, None) for name in own}
        return {name: value for name, value in fields.items() if isinstance(value, bool | int | float | str)}

    @override
    def _apply(self, variables: dict[str, PyTree], x: PyTree, *, train: bool, draws: Draws, mutable: Any) -> tuple[PyTree, Any]:
        args, kwargs = self._arguments(x, train)
        module = self.train_module if train else self.eval_module
        return module.apply(variables, *args, rngs=draws.rngs, mutable=mutable, **kwargs)

    @property
    @override
    def _rng_hint(self) -> str:
        return RNG_HINT

    @property
    @override
    def _dropout_hint(self) -> str:
        own = "eval_model" if self.is_eval_given else "model"
        code = evaluation_code(self.eval_module, own)
        if code is not None:
            return f" Dropout is on in evaluation, because the {own} is configured that way. Pass a module for evaluation: Trainer(model, eval_model={code})."
        named = next((name for name in MODE_KEYWORDS if name in self.eval_kwargs), None)
        if named is not None:
            off = named if named == "deterministic" else f"not {named}"
            return (
                f" Dropout is on in evaluation, although the trainer passes {named}={self.eval_kwargs[named]}. Use that argument: "
                f"nn.Dropout(rate, deterministic={off}). If it is off for another argument, pass Trainer(eval_kwargs={{...}})."
            )
        return (
            " Dropout is on in evaluation. Add an argument `train` or `deterministic` to __call__, which the trainer sets; or set another argument with "
            "Trainer(eval_kwargs={...}); or pass a module with the same parameters, Trainer(model, eval_model=model.clone(...))."
        )

    @property
    @override
    def _argument_hint(self) -> str:
        return (
            " Pass several inputs as a tuple, ((x1, x2), y), or as keys of dicts with Trainer(inputs=...). The trainer sets the keywords train, training and "
            "deterministic. Set others with Trainer(model, train_kwargs={'is_training': True}, eval_kwargs={'is_training': False})."
        )


def adapt_linen(
    model: nn.Module,
    *,
    eval_model: nn.Module | None = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    keyword_inputs: bool = False,
) -> LinenModel:
    """Returns `model` with its mode keywords; arguments as in `adapt_model`.

    A parameter of `__call__` named `train`, `training` or `deterministic` is passed (`**kwargs` does not count). If there is none, a field of the module
    with such a name is set on a clone.
    """
    train_module, train_mode = _in_mode(model, train=True)
    eval_module, eval_mode = _in_mode(model if eval_model is None else eval_model, train=False)
    return LinenModel(
        train_module,
        eval_module,
        {**train_mode, **(train_kwargs or {})},
        {**eval_mode, **(eval_kwargs or {})},
        keyword_inputs,
        is_eval_given=eval_model is not None,
    )


def _in_mode(model: nn.Module, *, train: bool) -> tuple[nn.Module, dict[str, bool]]:
    """Returns a module with its mode fields set, and the mode keywords of its `__call__`."""
    named = mode_keywords(type(model).__call__, train=train)
    fields = {} if named else {field.name: MODE_KEYWORDS[field.name] is train for field in dataclasses.fields(model) if field.name in MODE_KEYWORDS}
    clone: Any = model.clone
    return clone(**fields) if fields else model, named
