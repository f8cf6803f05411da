"""Integrations with other tools, one module for each. Import the module that you need; the tools are optional dependencies."""

import importlib
from typing import Any

__all__: list[str] = []


def import_package(name: str, *, owner: str) -> Any:
    """Returns a module of an optional package, or raises an `ImportError` that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{owner} needs the package {package}: pip install 'fitflax[{package}]'.") from error
