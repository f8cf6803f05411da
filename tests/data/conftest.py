"""Fixtures for the tests of data sources."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache


@pytest.fixture(scope="module")
def compiled_once(compilation_cache: dict[str, str]) -> Iterator[None]:
    """Tests create every trainer from scratch and share only the compilation cache."""
    before = {name: getattr(jax.config, name.lower()) for name in compilation_cache}
    for name, value in compilation_cache.items():
        jax.config.update(name.lower(), int(value) if value.lstrip("-").isdigit() else value)
    jax_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name.lower(), value)
    jax_cache.reset_cache()
