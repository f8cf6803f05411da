"""The user's configuration of a run: a dict, a dataclass or an object of a configuration library. Checkpoints save it and trackers log it."""

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fitflax.errors import ConfigError

__all__ = ["as_config", "flat"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def as_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dicts of JSON values; other values become strings.

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
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            found[f"{prefix}{name}"] = value
        else:
            found[f"{prefix}{name}"] = _text(value)
    return found
