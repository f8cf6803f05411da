"""The configuration of a run: what is accepted, and where it is recorded."""

import argparse
import collections
import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import Callback, ModelCheckpoint, TensorBoard
from fitflax.errors import ConfigError
from fitflax.leaves import as_config, flat
from tests.integrations.memory import Memory, logger_of

X = np.ones((8, 2), np.float32)


@dataclasses.dataclass
class Optimizer:
    name: str = "adam"
    betas: tuple[float, float] = (0.9, 0.999)


@dataclasses.dataclass
class Config:
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    path: pathlib.Path = pathlib.Path("runs/a")


class Foreign:
    def to_dict(self):
        return {"depth": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), {"optimizer": {"name": "adam", "betas": [0.9, 0.999]}, "path": "runs/a"}),
        (argparse.Namespace(rate=0.1, data=Config(), none=None), {"rate": 0.1, "data": as_config(Config()), "none": None}),
        (collections.OrderedDict({1: {"a": [Foreign(), True]}}), {"1": {"a": [{"depth": 2}, True]}}),
        (Foreign(), {"depth": 2}),
        ({"rate": float("inf"), "type": np.float32, "one": np.float32(1), "bytes": b"a"}, {"rate": "inf", "type": "float32", "one": "1.0", "bytes": "b'a'"}),
        (
            {"layers": {"b", "a", "c"}, "mixed": frozenset({"1", 1, (2,)}), "sizes": {16, 8}},
            {"layers": ["a", "b", "c"], "mixed": [1, "1", [2]], "sizes": [8, 16]},
        ),
        (None, {}),
    ],
    ids=["dataclass", "namespace", "mapping", "to_dict", "texts", "sets", "none"],
)
def test_configurations_are_converted_to_json_types(config, expected):
    assert as_config(config) == expected and json.loads(json.dumps(as_config(config), allow_nan=False)) == expected


def test_memory_addresses_are_not_part_of_a_configuration():
    assert as_config({"object": object()}) == {"object": "<object object>"}


@pytest.mark.parametrize("config", [3, "runs/a.yaml", Config, [1]], ids=repr)
def test_an_invalid_configuration_is_an_error(config):
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="config must be a dict"):
        trainer.fit(X, X[:, :1], config=config, verbose=0)
    with pytest.raises(ConfigError, match="config must be a dict"):
        trainer.train_loop(X, X[:, :1], steps=1, config=config)


def test_a_configuration_is_in_checkpoints_and_hyperparameters(tmp_path):
    seen = {}

    class Look(Callback):
        def on_train_begin(self, logs):
            seen.update(self.params["hyperparameters"])

    trainer, tracker = fitflax.Trainer(nn.Dense(1)), Memory()
    trainer.compile("sgd", "mse")
    callbacks = [ModelCheckpoint(tmp_path / "checkpoints"), TensorBoard(tmp_path / "board"), logger_of(tracker), Look()]
    trainer.fit(X, X[:, :1], callbacks=callbacks, verbose=0, config=Config())
    (metadata,) = (tmp_path / "checkpoints").glob("*/metadata.json")
    assert json.loads(metadata.read_text())["config"] == as_config(Config())
    expected = {"optimizer/name": "adam", "optimizer/betas": "[0.9, 0.999]", "path": "runs/a"}
    ((_, _, config),) = tracker.starts
    assert seen.items() >= expected.items() <= config.items()


def test_a_train_loop_takes_a_configuration_too(tmp_path):
    trainer, tracker = fitflax.Trainer(nn.Dense(1)), Memory()
    trainer.compile("sgd", "mse")
    with trainer.train_loop(X, X[:, :1], steps=2, config={"a": {"b": 1}}) as loop:
        process = fitflax.serial(ModelCheckpoint(tmp_path), logger_of(tracker))
        for checkpoint in loop:
            process(checkpoint)
    metadata = next(iter(tmp_path.glob("*/metadata.json")))
    assert json.loads(metadata.read_text())["config"] == {"a": {"b": 1}}
    ((_, _, config),) = tracker.starts
    assert config["a/b"] == 1


def test_settings_are_the_same_in_each_process():
    def draw(x):
        return x

    class Thing:
        pass

    found = flat({"a": draw, "b": {"c": functools.partial(draw, 1)}, "d": [draw], "e": Thing(), "f": len, "g": float("nan")})
    assert found["a"] == "draw" and found["f"] == "len" and found["g"] == "nan"
    assert not any("0x" in str(value) for value in found.values()), found
