"""What happens to data when several processes train. Tests that need several real processes are in tests/test_many_processes.py."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.data import adapt
from fitflax.errors import DataError
from fitflax.loops import session


def test_a_source_that_is_not_repeatable_is_an_error_if_all_processes_need_the_same_data(monkeypatch):
    failures: list[Any] = []
    monkeypatch.setattr(session, "agree_on_shards", lambda *arguments, **options: failures.append(options.get("failure")))
    source = adapt(np.ones(8), batch_size=4)
    adapter = session.DataAdapter(SimpleNamespace(part=(0, 2), num_processes=2), 0)
    adapter.adapt(source, call="fit")
    source.is_repeatable = False
    with pytest.raises(DataError, match=r"Pass each worker its shard, from ray.train.get_dataset_shard\(\)"):
        adapter.adapt(source, call="fit")
    assert failures[0] is None and isinstance(failures[1], DataError)  # The other processes are told about it.


def test_predict_leaves_the_targets_of_an_iterator_for_later_calls():
    def batches() -> Iterator[dict[str, Any]]:
        for number in range(4):
            yield {"a": np.full((2, 3), number, np.float32), "b": np.full((2, 1), number, np.float32), "text": ["p", "q"]}

    def losses(trainer: fitflax.Trainer, stream: Iterator[Any]) -> list[float]:
        return [trainer.evaluate(stream, steps=1, verbose=0)["loss"] for _ in range(2)]

    trainer = fitflax.Trainer(nn.Dense(1), inputs="a", targets="b")
    trainer.compile("sgd", "mse")
    trainer.build(next(batches()))
    stream = batches()
    next(trainer.predict_iter(stream))  # It pushes back the second batch.
    assert losses(trainer, stream) == losses(trainer, itertools.islice(batches(), 1, None))
    assert len(trainer.predict(stream, steps=1)) == 2
    for label in (np.zeros(()), np.zeros((1, 1), np.float32)):  # A placeholder is left out.
        assert len(trainer.predict(({**batch, "b": label} for batch in batches()), steps=2)) == 4
    text = fitflax.Trainer(nn.Dense(1), inputs="a", targets="text")
    text.compile("sgd", "mse")
    text.build({"a": np.ones((2, 3), np.float32), "text": np.ones((2, 1), np.float32)})
    assert len(text.predict(batches(), steps=1)) == 2  # Targets that are not numeric are left out.
