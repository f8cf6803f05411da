"""LoRA (Hu et al., 2021): trains low-rank updates of chosen kernels of any linen module instead of the kernels.

A kernel `W` becomes `W + alpha / rank * A @ B`. `B` is initialized to zero, so the outputs first equal those of the module. For NNX modules, use `nnx.LoRA`.
"""

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from fitflax.errors import ConfigError, integer_of
from fitflax.leaves import as_patterns, matching, named_leaves
from fitflax.state import PyTree

__all__ = ["lora", "merge"]

_NAME = "lora"


class _Settings(NamedTuple):
    patterns: tuple[str, ...]
    rank: int
    alpha: float


def lora(module: nn.Module, paths: str | Sequence[str], *, rank: int = 8, alpha: float = 16.0) -> nn.Module:
    """Returns a copy of `module` with LoRA adapters for some of its kernels.

    The parameters of `module` keep their paths, so either module can load the checkpoints and weights of the other. The adapters are below `lora`. Nothing is
    frozen: to train only the adapters, use `compile(optimizers.train_only(optimizer, "lora"))`. The returned module is an instance of a subclass of `module`'s
    class, with the same fields and arguments. Only its `__call__` uses the adapted kernels; other methods do not.

    A kernel with more than two axes is treated as a matrix. Its leading axes are the rows, such that the two sides are closest in size: one axis of
    `[width, heads, depth]`, two of `[heads, depth, width]`, and all but the last axis of a convolution kernel, unless it has many more outputs than inputs.

    Args:
        module: A linen module.
        paths: One or more patterns of parameter paths, as in `optimizers.freeze`: `"**/attention/*/kernel"`, or `"encoder"` for everything below it. Matched
            arrays with fewer than two axes, such as biases, are not adapted.
        rank: The inner size of the adapters.
        alpha: The numerator of the adapters' scale, `alpha / rank`.

    Raises:
        ConfigError: An argument is invalid. When the module is initialized: a pattern matches no parameter, or no array with at least two axes, or the
            module already has parameters called `lora`.

    >>> adapted = lora(nn.Dense(3), "kernel", rank=2)
    >>> jax.tree.map(jnp.shape, adapted.init(jax.random.key(0), jnp.ones((1, 4)))["params"])
    {'bias': (3,), 'kernel': (4, 3), 'lora': {'kernel': {'a': (4, 2), 'b': (2, 3)}}}
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"lora() takes a linen module. Received: {module!r}. For an NNX module, use nnx.LoRA and Trainer(trainable=nnx.LoRAParam).")
    if _settings_of(module) is not None:
        raise ConfigError(f"lora() takes a module without adapters. Received: {type(module).__name__}, which has adapters. Pass all paths in one call.")
    rank = integer_of("lora(rank=...)", rank, at_least=1)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise ConfigError(f"lora(alpha=...) takes a positive number. Received: {alpha!r}.")
    settings = _Settings(as_patterns(paths, owner="lora()", error=ConfigError), rank, float(alpha))
    kind: Any = _adapted_class(cast(Any, type(module)), settings)
    fields = {name: getattr(module, name) for name, field in type(module).__dataclass_fields__.items() if field.init and name != "parent"}
    return cast(nn.Module, kind(**fields))


def merge(module: nn.Module, params: PyTree) -> PyTree:
    """Returns parameters for the module without adapters that compute the same outputs.

    Args:
        module: A module that `lora` returned.
        params: Its parameters, such as `trainer.state.params`.

    Raises:
        ConfigError: The module or the parameters have no adapters.

    >>> adapted = lora(nn.Dense(3), "kernel", rank=2)
    >>> params = adapted.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    >>> sorted(merge(adapted, params))
    ['bias', 'kernel']
    """
    settings = _settings_of(module)
    if settings is None:
        raise ConfigError(f"merge() takes the module that lora() returned. Received: {type(module).__name__}.")
    if not isinstance(params, Mapping) or _NAME not in params:
        raise ConfigError(f"merge() takes the parameters of a module that lora() returned, which have the key {_NAME!r}.")
    return _merge_adapters(params, settings)


def _settings_of(module: nn.Module) -> _Settings | None:
    return getattr(type(module), "_lora_settings", None)


@functools.lru_cache(maxsize=256)
def _adapted_class(kind: type[nn.Module], settings: _Settings) -> type[nn.Module]:
    """Returns a subclass with adapters; cached, so that modules with the same settings are equal."""
    original: Any = kind.__call__

    @functools.wraps(original)  # Mode keywords are detected from the signature.
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_initializing() and not self.has_variable("params", _NAME):
            outputs = original(self, *args, **kwargs)
            if self.has_variable("params", _NAME):
                raise _name_conflict(kind)
            self.put_variable("params", _NAME, _init_adapters(dict(self.variables["params"]), settings, self.make_rng("params")))
            return outputs
        if not isinstance(self.variables.get("params", {}).get(_NAME, {}), Mapping):  # A parameter that was created in `setup`.
            raise _name_conflict(kind)
        # The module sees the merged parameters; the stored parameters do not change.
        mapped: Any = nn.map_variables(
            lambda module: original(module, *args, **kwargs),
            "params",
            lambda variables: {"params": _merge_adapters(variables["params"], settings)},
            mutable=False,
        )
        return mapped(self)

    namespace = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__, "_lora_settings": settings, "__annotations__": {}}
    return type(f"LoRA{kind.__name__}", (kind,), namespace)


def _name_conflict(kind: type[nn.Module]) -> ConfigError:
    return ConfigError(f"lora(): {kind.__name__} already has parameters called {_NAME!r}, the name of the adapters. Rename them in the module.")


def _init_adapters(params: PyTree, settings: _Settings, key: jax.Array) -> PyTree:
    """Returns the initial adapters of a module."""
    leaves = named_leaves(nn.unbox(params))
    are_chosen = matching([path for path, _ in leaves], settings.patterns, owner="lora()", error=ConfigError)
    chosen = {path: leaf for (path, leaf), is_chosen in zip(leaves, are_chosen, strict=True) if is_chosen and leaf.ndim >= 2}
    if not chosen:
        raise ConfigError(f"lora({list(settings.patterns)}) matches no array with at least two axes. Adapters need such an array; choose other paths.")
    tree: dict[str, Any] = {}
    for path, kernel in chosen.items():
        rows = math.prod(kernel.shape[: _num_row_axes(kernel.shape)])
        node = tree
        for name in path.split("/"):
            node = node.setdefault(name, {})
        a = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), (rows, settings.rank), kernel.dtype)
        node |= {"a": a / math.sqrt(rows), "b": jnp.zeros((settings.rank, kernel.size // rows), kernel.dtype)}
    return tree


def _num_row_axes(shape: tuple[int, ...]) -> int:
    """Returns the number of leading axes that form the rows of the matrix, chosen so that the numbers of rows and columns are closest."""
    return min(range(1, len(shape)), key=lambda cut: abs(math.log(math.prod(shape[:cut]) / math.prod(shape[cut:]))))


def _merge_adapters(params: Any, settings: _Settings) -> Any:
    adapters = params[_NAME]

    def add(node: Any, adapter: Any) -> Any:
        if adapter is None:
            return node
        if isinstance(node, Mapping):
            return {name: add(child, adapter.get(name)) for name, child in node.items()}
        if isinstance(node, nn.meta.AxisMetadata):
            return node.replace_boxed(add(node.unbox(), adapter))
        return node + (settings.alpha / settings.rank * (adapter["a"] @ adapter["b"])).reshape(node.shape).astype(node.dtype)

    return add({name: child for name, child in params.items() if name != _NAME}, adapters)
