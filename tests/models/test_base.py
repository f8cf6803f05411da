"""`evaluation_code`: how a model with a configuration for training is created again for evaluation."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fitflax.models.base import evaluation_code
from tests.models.configs import Config


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Any
    train: Any = None


class Replaceable:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def replace(self, **changes: Any) -> "Replaceable":
        return Replaceable(**{**vars(self), **changes})


class ConfigDict:
    """Like that of ml_collections: it has keys and attributes, but is not a Mapping."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    def keys(self) -> Any:
        return self._fields.keys()

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_fields")[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Settings(NamedTuple):
    rate: float = 0.1
    training: bool = True


class Holder(nn.Module):
    config: Any = None
    other: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(x)


CODES = {
    "dataclass": (Config(), "dataclasses.replace(model.config, deterministic=True)"),
    "deeper": (Outer(Outer(Config())), "dataclasses.replace(model.config, inner=dataclasses.replace(model.config.inner, inner=dataclasses.replace("),
    "mapping": ({"train": True, "width": 3}, "{**model.config, 'train': False}"),
    "mapping in dataclass": (
        Outer({"dropout": {"training": True}}),
        "inner={**model.config.inner, 'dropout': {**model.config.inner['dropout'], 'training': False}}",
    ),
    "ml_collections": (ConfigDict({"deterministic": False, "width": 3}), "type(model.config)({**model.config, 'deterministic': True})"),
    "replace": (Replaceable(deterministic=False), "model.config.replace(deterministic=True)"),
    "namespace": (types.SimpleNamespace(train=True), "type(model.config)(**{**vars(model.config), 'train': False})"),
    "NamedTuple": (Settings(), "model.config._replace(training=False)"),
    "module": (Holder(Config()), "model.config.clone(config=dataclasses.replace(model.config.config, deterministic=True))"),
    "two": (
        Outer(Config(), Settings()),
        "inner=dataclasses.replace(model.config.inner, deterministic=True), train=model.config.train._replace(training=False)",
    ),
}


@pytest.mark.parametrize("name", list(CODES))
def test_the_mode_is_found_in_every_kind_of_configuration(name: str):
    config, part = CODES[name]
    model = Holder(config)
    code = evaluation_code(model, "model")
    assert code is not None and code.startswith("model.clone(config=") and part in code
    changed = eval(code, {"model": model, "dataclasses": dataclasses})
    assert evaluation_code(changed, "model") is None


def test_a_configuration_without_a_mode_or_in_evaluation_mode_has_no_code():
    loop = types.SimpleNamespace()
    loop.itself = loop
    for config in (
        None,
        Config(deterministic=True),
        {"train": {"steps": 3}},
        {"train": "all"},
        loop,
        jnp,
        jnp.float32,
        nn.relu,
        np.ones((48, 3)),
        Holder,
        [1],
        "x",
    ):
        assert evaluation_code(Holder(config), "model") is None


def test_only_part_of_a_large_object_is_searched():
    searched = []

    class Counted(dict[str, Any]):
        def keys(self) -> Any:
            searched.append(self)
            return super().keys()

    objects = {str(number): Counted() for number in range(5000)}
    assert evaluation_code(Holder(types.SimpleNamespace(again=types.SimpleNamespace(objects=objects), objects=objects)), "model") is None
    assert len(searched) <= 1000
