"""What happens to data when several processes train. Tests that need several real processes are in tests/test_many_processes.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
