"""Leaves of pytrees: names of paths, patterns of names, descriptions of shapes, and typed keys, which NumPy does not support; and nested configurations."""

import argparse
import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.errors import ConfigError, FitflaxError, did_you_mean

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a JAX key path.

    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"Dense_0": {"kernel": 1}, "x": (2, 3)})]
    ['Dense_0/kernel', 'x/0', 'x/1']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their path names.

    >>> named_leaves({"Dense_0": {"kernel": 1, "bias": 2}})
    [('Dense_0/bias', 2), ('Dense_0/kernel', 1)]
    """
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def listed(names: Collection[Any], separator: str = ", ", *, most: int = 5) -> str:
    """Returns the first path names, or other texts, as a list for a message, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b, and 2 more')
    """
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return separator.join([*map(str, itertools.islice(names, most)), *more])


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, an array or its shape, holds typed keys.

    >>> is_key(jax.random.key(0)), is_key(jax.random.PRNGKey(0)), is_key(1.5)
    (True, False, False)
    """
    # Check the cheap condition first: only JAX's extended dtypes are not NumPy dtypes.
    return hasattr(leaf, "dtype") and not isinstance(leaf.dtype, np.dtype) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# CPU devices use memory that begins at a multiple of this without a copy.
_ALIGNMENT = 64


def is_aligned(array: Any) -> bool:
    """Returns whether CPU devices use an array without a copy: if it is on a device, or in aligned memory.

    >>> is_aligned(aligned_memory(3)), is_aligned(aligned_memory(3, offset=16))
    (True, False)
    """
    return not isinstance(array, np.ndarray) or array.__array_interface__["data"][0] % _ALIGNMENT == 0


def aligned_memory(num_bytes: int, *, alignment: int = _ALIGNMENT, offset: int = 0) -> np.ndarray[Any, Any]:
    """Returns uninitialized bytes that begin `offset` bytes after a multiple of `alignment`.

    >>> aligned_memory(3).ctypes.data % 64, len(aligned_memory(3))
    (0, 3)
    """
    memory = np.empty(num_bytes + alignment + offset, np.uint8)
    begin = -memory.__array_interface__["data"][0] % alignment + offset
    return memory[begin : begin + num_bytes]


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns an uninitialized array in aligned memory, which CPU devices use without a copy.

    >>> aligned_empty((2, 3), np.float32).shape
    (2, 3)
    """
    array: np.ndarray[Any, Any] = aligned_memory(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
    return array


def aligned_copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """Returns a copy in aligned memory, which CPU devices use without another copy.

    XLA does not write into external memory: a step that donates the copy allocates its result elsewhere, and the copy is released.

    >>> aligned_copy(np.ones(3), np.int32)
    array([1, 1, 1], dtype=int32)
    """
    copy = aligned_empty(array.shape, array.dtype if dtype is None else dtype)
    copy[...] = array
    return copy


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Returns an array as NumPy, with an explicit transfer for `jax_transfer_guard`; unlike `jax.device_get`, it does not copy CPU arrays.

    >>> on_host(jnp.ones(2))
    array([1., 1.], dtype=float32)
    """
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(array)


def key_of(data: Any, impl: Any) -> Any:
    """Returns typed keys from key data on the host.

    >>> key_of(np.array([0, 7], np.uint32), "threefry2x32") == jax.random.key(7)
    Array(True, dtype=bool)
    """
    return jax.random.wrap_key_data(jax.device_put(data), impl=impl)  # An explicit transfer, for `jax_transfer_guard`.


def through_key_data(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `fn` extended to typed keys: it is applied to their key data.

    >>> jax.random.key_data(through_key_data(lambda data: data + 1)(jax.random.key(0))).tolist()
    [1, 1]
    """

    def apply(leaf: Any) -> Any:
        if not is_key(leaf):
            return fn(leaf)
        return jax.random.wrap_key_data(fn(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))

    return apply


def describe_shapes(tree: Any) -> str:
    """Returns the shapes and dtypes of a tree of arrays, in one line.

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


def as_patterns(patterns: str | Sequence[str], *, owner: str, error: type[FitflaxError]) -> tuple[str, ...]:
    """Returns one or more patterns as a tuple; `owner` is the name of the function that takes them, for errors.

    >>> as_patterns("**/bias", owner="freeze()", error=FitflaxError)
    ('**/bias',)
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Sequence) else ()
    if not wanted or not all(isinstance(pattern, str) and pattern for pattern in wanted):
        raise error(f"{owner}: `patterns` must be a pattern of paths, such as 'backbone' or '**/bias', or a sequence of them. Received: {patterns!r}.")
    return wanted


def matching(paths: Sequence[str], patterns: Sequence[str], *, owner: str, error: type[FitflaxError]) -> list[bool]:
    """Returns for each path whether a pattern matches the path or one of its parents.

    `*`, `?` and `[abc]` match within one name; a name `**` matches any number of names. A pattern that matches no path is an error.

    >>> matching(["encoder/kernel", "encoder/bias", "head/kernel"], ["encoder", "**/bias"], owner="freeze()", error=FitflaxError)
    [True, True, False]
    """
    for pattern in patterns:
        if not any(_matches(path.split("/"), pattern.split("/")) for path in paths):
            is_prefixed = pattern.startswith("params/") and not any(path.startswith("params/") for path in paths)
            hint = " Leave out 'params/'." if is_prefixed else did_you_mean(pattern, [*paths, *_parents(paths)])
            raise error(f"{owner}: {pattern!r} matches no parameter.{hint} Parameters: {listed(paths)}.")
    return [any(_matches(path.split("/"), pattern.split("/")) for pattern in patterns) for path in paths]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether the pattern matches the path or one of its parents, both split into names."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(path[start:], pattern[1:]) for start in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _parents(paths: Sequence[str]) -> list[str]:
    return sorted({"/".join(path.split("/")[:end]) for path in paths for end in range(1, path.count("/") + 1)})


def as_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dicts of JSON values; sets become sorted lists, and other values become strings.

    Args:
        config: A mapping, such as OmegaConf's `DictConfig`, a dataclass instance, an `argparse.Namespace`, or an object with a `to_dict` method, such as
            `ml_collections.ConfigDict`. `None` becomes an empty dict.

    >>> @dataclasses.dataclass
    ... class Data:
    ...     name: str = "digits"
    ...     sizes: tuple[int, ...] = (1, 2)
    >>> as_config({"seed": 0, "data": Data(), "sort": sorted})
    {'seed': 0, 'data': {'name': 'digits', 'sizes': [1, 2]}, 'sort': 'sorted'}
    """
    if config is None:
        return {}
    result = _plain(config)
    if not isinstance(result, dict):
        raise ConfigError(f"config must be a dict, a dataclass instance, or an object of a configuration library. Received: {config!r}.")
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        return _plain(vars(value))
    if isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    if isinstance(value, Set):  # Sorted, because the order of strings in a set is different in each process.
        return sorted(map(_plain, value), key=lambda item: (0, item, "") if isinstance(item, int | float) else (1, 0, repr(item)))
    if not isinstance(value, type) and callable(getattr(value, "to_dict", None)):
        return _plain(value.to_dict())
    return _text(value)


def _text(value: Any) -> str:
    """Returns a string that is the same in every process."""
    text = value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)
    return text if isinstance(value, str | PurePath) else _ADDRESS.sub("", text)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested dicts by path: numbers, booleans and strings; other values become strings.

    >>> flat({"seed": 0, "data": {"name": "digits", "sizes": [1, 2], "sort": sorted}})
    {'seed': 0, 'data/name': 'digits', 'data/sizes': '[1, 2]', 'data/sort': 'sorted'}
    """
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            values[f"{prefix}{name}"] = value
        else:
            values[f"{prefix}{name}"] = _text(value)
    return values


def as_json(value: Any) -> Any:
    """Returns nested values in a form that JSON can represent: NaN, infinities and objects of other types become strings, and arrays become lists.

    >>> as_json({"loss": float("nan"), "step": np.int32(3), "by_class": (0.5, -math.inf)})
    {'loss': 'nan', 'step': 3, 'by_class': [0.5, '-inf']}
    """
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if hasattr(value, "dtype"):
        return as_json(np.asarray(jax.device_get(value)).tolist())
    is_representable = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_representable else str(value)
