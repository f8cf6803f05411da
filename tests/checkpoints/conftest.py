"""Fixtures for tests of checkpoints."""

import pytest

from fitflax.checkpoints.checkpoint_files import write_checkpoint
from fitflax.checkpoints.checkpoint_store import CheckpointStore
from tests.checkpoints.samples import METADATA, RUN, train_state


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "c").mkdir()
    write_checkpoint(tmp_path / "c", train=train_state(), run=RUN, metadata=METADATA)
    return tmp_path / "c"


@pytest.fixture(params=["msgpack", "orbax"])
def store(tmp_path, request):
    store = CheckpointStore(tmp_path / "runs" / "checkpoints", backend=request.param)
    store.claim("a", overwrite=False)
    return store
