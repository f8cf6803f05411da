"""Converts states of loaders to and from what checkpoints can hold: arrays, numbers, strings, lists and dicts.

Nothing is pickled. For a value that cannot be saved, such as an instance of a custom class, the error names its path and type.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.leaves import is_key

__all__ = ["UnstorableError", "decode", "encode"]

# A dict with this key encodes what msgpack would change: a tuple, a tensor, an integer of more than 64 bits.
_TAG = "__fitflax__"
# The second one is reserved by flax's msgpack format.
_RESERVED = {_TAG, "__msgpack_chunked_array__"}
# Checkpoints hold at most 100 levels; a tagged node takes two.
_MAX_DEPTH = 40


class UnstorableError(TypeError):
    """Raised for a state that a checkpoint cannot hold; the message says which value, and where."""


def encode(state: Any, path: str = "state") -> Any:
    """Returns a copy of `state` that a checkpoint can hold; `decode` reverses it. `path` names the state in errors.

    It may hold nested dicts, lists and tuples of NumPy, JAX and PyTorch arrays, numbers of any size, `str`, `bytes`, `bool` and `None`.

    >>> encode({"position": (3, None), "seed": 2**70})
    {'position': {'__fitflax__': 'tuple', 'value': [3, None]}, 'seed': {'__fitflax__': 'int', 'value': '1180591620717411303424'}}
    """
    return _encode(state, path, 0)


def _encode(node: Any, path: str, depth: int) -> Any:
    kind = type(node)  # Exact types only: a subclass, such as an enum, would lose what it adds.
    if depth > _MAX_DEPTH:
        raise UnstorableError(f"{path[:100]} is nested more than {_MAX_DEPTH} levels deep")
    if node is None or kind in (bool, float, bytes):
        return node
    if kind is int:
        return node if -(2**63) <= node < 2**63 else _tagged("int", str(node))
    if kind is str:
        # File names that are not UTF-8 contain lone surrogates, which strict UTF-8 cannot encode.
        return node if _is_unicode(node) else _tagged("str", node.encode("utf-8", "surrogatepass"))
    if kind in (list, tuple):
        items = [_encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node)]
        return items if kind is list else _tagged("tuple", items)
    if kind is dict:
        values = {key: _encode(value, f"{path}[{key!r}]", depth + 1) for key, value in node.items()}
        if all(type(key) is str and _is_unicode(key) for key in values) and not _RESERVED & set(values):
            return values
        return _tagged("dict", [[_encode(key, f"a key of {path}", depth + 1), value] for key, value in values.items()])
    array = _encode_array(node)
    if array is None:
        raise UnstorableError(f"{path} is a {kind.__module__}.{kind.__qualname__}")
    return array


def _encode_array(node: Any) -> Any:
    """Returns a copy of an array or NumPy number (loaders may overwrite theirs); `None` for anything else."""
    if type(node) is np.ndarray or isinstance(node, np.generic):
        return node.copy() if node.dtype.kind in "biufc" else None
    if isinstance(node, jax.Array):
        return None if is_key(node) or node.dtype.kind not in "biufc" else _tagged("jax", np.array(node))
    torch = sys.modules.get("torch")
    if torch is None or type(node) is not torch.Tensor:
        return None
    try:
        array = node.detach().cpu().numpy()
    except (TypeError, RuntimeError):
        return None
    return _tagged("torch", array.copy()) if array.dtype.kind in "biufc" else None


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, "value": value}


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def decode(saved: Any) -> Any:
    """Returns the state that `encode` was called with."""
    if isinstance(saved, list):
        return [decode(item) for item in saved]
    if not isinstance(saved, dict):
        # Copied, because a loader may write into its state.
        return saved.copy() if isinstance(saved, np.ndarray) else saved
    if _TAG not in saved:
        return {key: decode(value) for key, value in saved.items()}
    return _DECODERS[saved[_TAG]](saved["value"])


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(np.array(array))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "str": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "tuple": lambda items: tuple(decode(item) for item in items),
    "dict": lambda pairs: {decode(key): decode(value) for key, value in pairs},
    "jax": jnp.asarray,
    "torch": _tensor,
}
